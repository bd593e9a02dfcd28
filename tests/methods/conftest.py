"""What the tests of methods share."""

import pytest

from fedlib import Experiment
from fedlib.models import registry
from tests.helpers.plain_levels import TOY, WIDTHS


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="scalefl", options={"widths": WIDTHS}, backbone="toy", pretrained=False, finetune="full",
        num_exits=3, augment="none", momentum=0.9, weight_decay=1e-3, clip_value=None, lr=0.02, num_train=90,
        num_test=60, num_clients=3, clients_per_round=3, rounds=1, batch_size=16, partition="class_dirichlet",
        dirichlet_alpha=1.0, test_split="like_train",
    )  # fmt: skip
