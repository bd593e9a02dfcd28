"""What comes home is what was there, in one transfer; what is sent to a GPU is sent from pinned memory."""

import torch

from fedlib.core.transfers import home, sent
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


def test_to_a_gpu_it_is_copied_from_pinned_memory_while_the_host_goes_on(monkeypatch):
    asked, x, gpu = [], torch.ones(2), torch.device("cuda", 1)
    assert sent(x, torch.device("cpu")) is x
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *where, **how: asked.append((where, how)) or x)
    sent(x, gpu)
    assert asked == ["pinned", ((gpu,), {"non_blocking": True})]
