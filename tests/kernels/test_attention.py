"""Cohort-shaped layers against loops over clients, PyTorch's own kernels and values worked out by hand."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlib.layers.attention import attend
from fedlib.layers.overrides import OVERRIDES
from fedlib_lab.kernels import attention as kernel
from fedlib_lab.kernels.attention import attend_short, attend_short_backward


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def attending(monkeypatch):
    """Attention is the kernel's, whatever this machine would choose."""
    monkeypatch.setitem(OVERRIDES, "attend", kernel.attend_if_short)


@pytest.mark.parametrize(
    ("queries", "tokens", "heads", "scale"),
    [
        (7, 7, 3, None),
        (1, 7, 3, None),
        (2, 5, 2, 0.3),
        (3, 1, 2, 0),
        (1, 1, 1, None),
        (2, 4, 24, 0.5),
        (40, 40, 3, None),
        (16, 16, 3, None),
        (3, 20, 12, 0.5),
        (1, 13, 12, None),
    ],
)
def test_attention_written_out_equals_the_fused_kernel(queries, tokens, heads, scale, multiplying):
    """One query or as many as tokens, one key, narrow heads; 40 queries go to the kernel itself."""
    shapes = [(2, 3, queries, 24), (2, 3, tokens, 24), (2, 3, tokens, 24)]
    ours, fused = (
        [torch.randn(s, generator=generator(i)).requires_grad_() for i, s in enumerate(shapes)] for _ in "ab"
    )
    weights = torch.randn(shapes[0], generator=generator(9))
    by_head = [x.view(6, -1, heads, 24 // heads).transpose(1, 2) for x in fused]
    expected = (
        torch.nn.functional.scaled_dot_product_attention(*by_head, scale=scale).transpose(1, 2).reshape(shapes[0])
    )
    out = attend(heads, *ours, scale=scale)
    torch.testing.assert_close(out, expected)
    wanted = torch.autograd.grad(expected, fused, weights)
    for a, b in zip(torch.autograd.grad(out, ours, weights), wanted, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("heads", [1, 2, 8])
def test_attention_of_one_tensor_equals_that_of_three(heads, multiplying):
    qkv, grad = torch.randn(2, 3, 5, 24, generator=generator(0)), torch.randn(2, 3, 5, 8, generator=generator(1))
    parts = [x.contiguous() for x in qkv.chunk(3, -1)]
    (together, attention), (apart, _) = attend_short(heads, (qkv,)), attend_short(heads, parts)
    torch.testing.assert_close(together, apart)
    (one,), three = (attend_short_backward(heads, x, attention, grad) for x in ((qkv,), parts))
    torch.testing.assert_close(one, torch.cat(three, -1))


@pytest.mark.parametrize("tokens", [5, 20])
def test_attention_to_one_of_many_does_not_overflow(tokens, multiplying):
    """Scores of up to 4e6: each query attends to the key that points its way, and no gradient is left."""
    q = 1000 * torch.eye(4).view(1, 1, 4, 4)
    k = torch.cat((4 * q, torch.zeros(1, 1, tokens - 4, 4)), 2)
    v = torch.randn(1, 1, tokens, 4, generator=generator())
    q, k = q.requires_grad_(), k.requires_grad_()
    out = attend(1, q, k, v, scale=1.0)
    torch.testing.assert_close(out, v[:, :, :4])
    assert not any(g.any() for g in torch.autograd.grad(out.sum(), (q, k)))


@pytest.mark.parametrize("queries", [5, 40])
def test_attention_under_autocast_is_that_of_rounded_inputs_in_float32(queries, multiplying):
    shapes = [(2, 3, queries, 24), (2, 3, 20, 24), (2, 3, 20, 24)]
    rounded = [torch.randn(s, generator=generator(i)).bfloat16() for i, s in enumerate(shapes)]
    ours, exact = ([x.to(dtype).requires_grad_() for x in rounded] for dtype in (torch.bfloat16, torch.float32))
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(3, *ours)
    expected = attend(3, *exact)
    assert out.dtype is torch.bfloat16 and torch.equal(out, expected.bfloat16())
    grad = torch.randn(shapes[0], generator=generator(9)).bfloat16()
    wanted = torch.autograd.grad(expected, exact, grad.float())
    for a, b in zip(torch.autograd.grad(out, ours, grad), wanted, strict=True):
        assert torch.equal(a, b.bfloat16())


def test_attention_by_hand(multiplying):
    """Two tokens, one head of width 1, q = (1, 0), k = (ln 3, 0), v = (8, 4), scale 1.

    Scores of the first query (ln 3, 0): weights 3/4 and 1/4, output 7. Of the second (0, 0): 1/2 each, output 6.
    d out_1 / d q_1 = sum_j a_j (v_j - out_1) k_j = 3/4 * (8 - 7) * ln 3; d (out_1 + out_2) / d v = (5/4, 3/4).
    """
    q, k, v = (torch.tensor(x).view(1, 1, 2, 1).requires_grad_() for x in ([1.0, 0], [math.log(3), 0], [8.0, 4]))
    out = attend(1, q, k, v)
    assert out.flatten().tolist() == pytest.approx([7, 6])
    by_q, by_v = torch.autograd.grad(out.sum(), (q, v))
    assert by_q.flatten()[0].item() == pytest.approx(0.75 * math.log(3))
    assert by_v.flatten().tolist() == pytest.approx([1.25, 0.75])


def test_attention_is_counted_by_who_counts(multiplying):
    """Two products of 2 * 5 * 5 * 4 FLOPs for each of 6 examples and 2 heads, twice that backwards."""
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator(i)).requires_grad_() for i in range(3))
    with FlopCounterMode(display=False) as counter:
        attend(2, q, k, v).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * (2 * 5 * 5 * 4) * 6 * 2
