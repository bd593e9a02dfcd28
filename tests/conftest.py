"""Shared fixtures: small experiments, and the real data where they are at hand."""

from pathlib import Path

import pytest
import torch

from fedlib import Experiment

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def tiny():
    """A few clients of unequal size on real digits: seconds, and every path is taken."""
    return Experiment(
        pretrained=False, partition="class_dirichlet", dirichlet_alpha=0.5, num_train=400, num_test=50,
        num_clients=15, clients_per_round=6, rounds=2, finetune_options={"r": 4, "lora_alpha": 8},
    )  # fmt: skip


@pytest.fixture
def shared_data():
    """The folder of real data sets; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("real data sets are not at hand")
    return SHARED


@pytest.fixture
def repeatable_convolutions():
    """Compute on one thread, as tests of convolutions ask: on several, oneDNN's backward does not repeat its numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
