"""What comes home is what was there, in one transfer."""

import torch

from fedlib.core.transfers import home
from tests.helpers.virtual_accelerator import accelerator

THERE = [torch.tensor([True, False, True]), torch.arange(4).view(2, 2), torch.tensor(0.5), torch.zeros(0, 3)]


def test_whatever_their_types_and_shapes():
    class Elsewhere(torch.Tensor):
        """A tensor that says that it lies on another device."""

        device = torch.device("meta")

    for found, there in zip(home([t.as_subclass(Elsewhere) for t in THERE]), THERE, strict=True):
        assert (
            found.dtype == there.dtype
            and found.shape == there.shape
            and torch.equal(found.as_subclass(torch.Tensor), there)
        )


def test_they_come_together_and_what_is_here_stays():
    assert all(a is b for a, b in zip(home(THERE), THERE, strict=True))
    with accelerator() as fetched, fetched.during("server"):
        found = home([t.to("meta") for t in THERE])
    assert [t.shape for t in found] == [t.shape for t in THERE] and fetched.most("server") == 1
