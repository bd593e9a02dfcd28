"""A small training in stages, and what its memory was measured to be."""

import pytest

from fedlib import Experiment
from fedlib_lab.papers.fedepth.training_memory import memory_of_stages


@pytest.fixture(scope="module")
def small_net():
    return Experiment(
        method="fedepth", backbone="preresnet20", pretrained=False, finetune="full", num_exits=1, dataset="mnist",
        momentum=0.9, clip_value=None, options={"scenario": "own", "ratios": [1 / 6, 1.0]}, num_train=128,
        num_clients=2, clients_per_round=1, batch_size=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(small_net):
    return memory_of_stages(small_net)
