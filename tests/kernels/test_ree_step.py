"""A step of Ree with its backward written out against the same step as modules under PyTorch's autograd."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlib.kernels import ree_step, swap_in_
from fedlib.kernels.switch import VARIABLE
from fedlib.models.ree import Ree


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def make_ree(clients=None, own="", **options) -> Ree:
    """Ree with random weights on 4 blocks; each of ``clients`` has its own of the parameters named in ``own``."""
    ree = swap_in_(Ree(12, 4, 3, (1, 3), width=8, heads=4, **options))
    for path, module in ree.named_modules():
        for leaf, p in list(module._parameters.items()):
            name = f"{path}.{leaf}"
            shape = p.shape if clients is None or not any(n in name for n in own.split()) else (clients, *p.shape)
            value = torch.randn(shape, generator=generator(len(name) + p.numel())) / 3
            module._parameters[leaf] = torch.nn.Parameter(value) if shape == p.shape else value.requires_grad_()
    return ree


def results(ree, tokens, weights):
    """Everything that Ree says of the class tokens of 4 blocks, and the gradients of all that trains it."""
    past, said = [], []
    for block, (token, alive) in enumerate(zip(tokens, ALIVE, strict=True)):
        logits, m = ree.step(block, token[:alive], past)
        said += [x for x in (logits, m) if x is not None]
    leaves = [*tokens, *(p for m in ree.modules() for p in m._parameters.values() if p is not None)]
    loss = sum((x * w[: x.shape[0], :, : x.shape[2]]).sum() for x, w in zip(said, weights, strict=False))
    return said, torch.autograd.grad(loss, leaves, materialize_grads=True)


ALIVE = (3, 3, 2, 1)  # clients leave


@pytest.mark.parametrize("own", [".", "", "norm", "qkv.weight fc1 positions", "meta_token out.weight"])
@pytest.mark.parametrize(
    "options", [{}, {"history": "raw"}, {"modulate": False, "history": "raw"}, {"only_at_exits": True}]
)
def test_written_out_equals_modules(options, own, monkeypatch):
    ree = make_ree(3, own, **options)
    tokens = [torch.randn(3, 5, 12, generator=generator(i)).requires_grad_() for i in range(4)]
    weights = [torch.randn(3, 5, 12, generator=generator(9 + i)) for i in range(8)]
    called = []
    apply = ree_step._Step.apply
    monkeypatch.setattr(ree_step._Step, "apply", lambda *a: called.append(1) or apply(*a))
    said, grads = results(ree, tokens, weights)
    assert called
    monkeypatch.setenv(VARIABLE, "0")
    expected, wanted = results(ree, tokens, weights)
    assert len(said) == len(expected) >= 2
    for a, b in zip((*said, *grads), (*expected, *wanted), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1, b.abs().max().item()))


def test_what_is_not_asked_for_has_no_part_in_it():
    """At the last exit only m_0 is read, and nothing reads what is remembered."""
    ree = make_ree()
    tokens = [torch.randn(1, 2, 12, generator=generator(i)).requires_grad_() for i in range(4)]
    past = []
    for block, token in enumerate(tokens):
        logits, m = ree.step(block, token, past)
        assert (logits is None, m is None) == ((True, False), (False, False), (True, False), (False, True))[block]
    # through the history alone: what the blocks between would pass on is left out
    grads = torch.autograd.grad(logits.sum(), tokens, materialize_grads=True)
    assert all(g.abs().max() > 0 for g in grads)


@pytest.mark.parametrize("case", ["autocast", "no gradient", "a counter", "a hook"])
def test_anything_else_runs_as_modules(case, monkeypatch):
    monkeypatch.setattr(ree_step._Step, "apply", lambda *_: pytest.fail("written out"))
    ree, token = make_ree(), torch.randn(1, 2, 12, generator=generator())
    if case == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            ree.step(0, token, [])
    elif case == "no gradient":
        with torch.no_grad():
            ree.step(0, token, [])
    elif case == "a counter":
        with FlopCounterMode(display=False) as counter:
            ree.step(0, token, [])
        assert counter.get_total_flops() > 0
    else:
        seen = []
        ree.mlp.fc1.register_forward_hook(lambda *_: seen.append(1))
        ree.step(0, token, [])
        assert seen
