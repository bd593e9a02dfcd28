"""The selective scan against a slow loop, and by hand."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedlib_lab.zoo import selective_scan as scan


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, **kwargs):
    return torch.randn(*shape, generator=generator(seed), **kwargs)


# --- the scan --------------------------------------------------------------------------------------------------------


def slow_scan(u, delta, A, B, C, D):
    """One example, one channel, one state and one token at a time: u, delta (T, d), A (d, N), B, C (T, N), D (d)."""
    y = torch.zeros_like(u)
    for d in range(u.shape[1]):
        for n in range(A.shape[1]):
            h = u.new_zeros(())
            for t in range(len(u)):
                step = torch.log1p(torch.exp(delta[t, d]))  # softplus
                h = torch.exp(step * A[d, n]) * h + step * u[t, d] * B[t, n]
                y[t, d] += C[t, n] * h
    return y + D * u


def scan_inputs(K, batch, T, d, N, stacked, seed=0):
    sizes = [(K, batch, T, d)] * 2 + [(d, N), (K, batch, T, N), (K, batch, T, N), (d,)]
    out = [normal(*s, seed=seed + i, dtype=torch.float64) for i, s in enumerate(sizes)]
    out[2] = -out[2].exp()
    if stacked:
        out[2], out[5] = (p * torch.arange(1, K + 1).view(K, *(1,) * p.dim()) for p in (out[2], out[5]))
    return out


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("tokens", [1, 3, 4, 9])
def test_scan_equals_a_slow_loop(monkeypatch, tokens, stacked):
    monkeypatch.setattr(scan, "CHUNK", 4)  # fewer tokens than a chunk, a chunk, and two chunks and a rest
    monkeypatch.setattr(scan, "SLAB", 2 * 6)  # examples have 3 x 2 states: a slab of two, and a rest
    u, delta, A, B, C, D = scan_inputs(2, 3, tokens, 3, 2, stacked)
    y = scan.selective_scan(u, delta, A, B, C, D)
    for k in range(2):
        for b in range(3):
            a, skip = (A[k], D[k]) if stacked else (A, D)
            torch.testing.assert_close(y[k, b], slow_scan(u[k, b], delta[k, b], a, B[k, b], C[k, b], skip))


def test_scan_by_hand():
    # One channel, one state, A = -1, steps of ln 2: decay 1/2 a step. u = 1, 0, 1; B = 1, 1, 2; C = 1, 1, 1; D = 10.
    # h = ln2 * 1, then half of it, then ln2 / 4 + ln2 * 2: y = ln2 + 10, ln2 / 2, 9 ln2 / 4 + 10.
    ln2 = math.log(2)
    u, b = torch.tensor([1.0, 0.0, 1.0]), torch.tensor([1.0, 1.0, 2.0])
    raw = torch.full((3,), math.log(math.expm1(ln2)))
    column = lambda x: x.view(1, 1, 3, 1)  # noqa: E731
    y = scan.selective_scan(
        column(u), column(raw), -torch.ones(1, 1), column(b), column(torch.ones(3)), torch.tensor([10.0])
    )
    torch.testing.assert_close(y.flatten(), torch.tensor([ln2 + 10, ln2 / 2, 9 * ln2 / 4 + 10]))


@pytest.mark.parametrize("stacked", [False, True])
def test_scan_gradients(monkeypatch, stacked):
    monkeypatch.setattr(scan, "CHUNK", 3)
    monkeypatch.setattr(scan, "SLAB", 2 * 4)
    inputs = [x.requires_grad_() for x in scan_inputs(2, 3, 7, 2, 2, stacked)]
    assert torch.autograd.gradcheck(scan.selective_scan, inputs)
    frozen = [x.detach().requires_grad_(i in (0, 1)) for i, x in enumerate(inputs)]  # a frozen backbone under Ree
    grads = [torch.autograd.grad(scan.selective_scan(*x).square().sum(), x[:2]) for x in (inputs, frozen)]
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=0)


def test_scan_in_one_part_as_on_a_gpu(monkeypatch):
    inputs = [x.requires_grad_() for x in scan_inputs(2, 3, 20, 3, 2, True)]

    def outputs():
        y = scan.selective_scan(*inputs)
        return y, *torch.autograd.grad(y.square().sum(), inputs)

    monkeypatch.setattr(scan, "SLAB", 6)
    parts = outputs()
    monkeypatch.setattr(scan, "_slabs", lambda *a: [((slice(None), slice(None)), ...)])
    torch.testing.assert_close(outputs(), parts)


def test_scan_keeps_no_state_without_gradients_and_one_per_chunk_with():
    u, delta, A, B, C, _ = scan_inputs(1, 2, 33, 3, 2, False)
    assert scan.scan_op(u, delta, A.mT, B, C, False)[1].numel() == 0
    assert scan.scan_op(u, delta, A.mT, B, C, True)[1].shape == (3, 1, 2, 2, 3)  # tokens 0, 16, 32


def test_scan_survives_long_steps():
    """exp(delta A) underflows to 0 here; a scan by cumulated logarithms would divide 0 by 0."""
    u, _, A, B, C, D = (x.float() for x in scan_inputs(1, 1, 20, 3, 2, False))
    delta = torch.linspace(-20, 60, 20).view(1, 1, 20, 1).expand(1, 1, 20, 3)
    y = scan.selective_scan(u, delta, 16 * A, B, C, D)
    expected = slow_scan(u[0, 0].double(), delta[0, 0].double(), 16 * A.double(), B[0, 0].double(), C[0, 0].double(), D)
    torch.testing.assert_close(y[0, 0].double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("stacked", [False, True])
def test_convolution_equals_torchs_depthwise_one(stacked):
    x, weight, bias = normal(3, 2, 7, 5), normal(3, 4, 5, seed=1), normal(3, 5, seed=2)
    y = scan.causal_conv(x, *((weight, bias) if stacked else (weight[0], bias[0])))
    for k in range(3):
        i = k if stacked else 0
        conv = F.conv1d(x[k].mT, weight[i].mT.unsqueeze(1), bias[i], padding=3, groups=5)[..., :7]
        torch.testing.assert_close(y[k], F.silu(conv).mT)
