"""The selective scan of Mamba (Gu & Dao, 2023): a linear recurrence whose coefficients depend on the input.

h_t = exp(delta_t A) h_{t-1} + delta_t u_t B_t and y_t = <C_t, h_t> + D u_t, for every channel with N states.
``fedlib::selective_scan`` is a loop over time on whole chunks that keeps one state per chunk and computes the others
once more in the backward pass, so what it stores grows as T / CHUNK. It takes parameters stacked per client.
Read next: ``vim.py``.
"""

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from fedlib.layers.linear import per_client
from fedlib.layers.overrides import FLOPS

CHUNK = 16  # time steps between two stored states
SLAB = 2**16  # numbers in the states of the examples that a CPU takes through time together, so that they stay in cache


def selective_scan(
    u: torch.Tensor, delta: torch.Tensor, A: torch.Tensor, B: torch.Tensor, C: torch.Tensor, D: torch.Tensor
) -> torch.Tensor:
    """Return y (K, B, T, d) of inputs ``u`` and raw steps ``delta`` (before softplus), B and C (K, B, T, N).

    ``A`` is (d, N), negative, and ``D`` is (d,); each may be stacked per client. Here states are float32 always.
    """
    u, delta, B, C = (x.float() if x.dtype is torch.bfloat16 else x for x in (u, delta, B, C))  # autocast made them
    delta, a = F.softplus(delta), per_client(A, u, 2).mT.contiguous()  # (N, d) or (K, 1, N, d)
    keep = torch.is_grad_enabled() and any(x.requires_grad for x in (u, delta, a, B, C))
    return torch.addcmul(scan_op(u, delta, a, B, C, keep)[0], u, per_client(D, u))


def causal_conv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Convolve x (K, B, T, d) over time by channel, taps ``weight`` (W, d), the last one now; then SiLU.

    Written as W shifted products: as fast as torch's depthwise convolution at T = 197 and two to three times as fast
    at T = 17, and stacked weights need no other layout.
    """
    taps, tokens = weight.shape[-2], x.shape[-2]
    padded, y = F.pad(x, (0, 0, taps - 1, 0)), per_client(bias, x)
    for j in range(taps):
        y = torch.addcmul(y, padded[..., j : j + tokens, :], per_client(weight[..., j, :], x))
    return F.silu(y)


def _slabs(u: torch.Tensor, a: torch.Tensor, num_states: int) -> list[tuple]:
    """Divide the batch into parts: (index into (K, B), index into ``a``). On a GPU it is one part."""
    if u.is_cuda:
        return [((slice(None), slice(None)), ...)]
    size = max(1, SLAB // (num_states * u.shape[-1]))
    parts = [(k, slice(b, b + size)) for k in range(len(u)) for b in range(0, u.shape[1], size)]
    return [(part, part[0] if a.dim() == 4 else ...) for part in parts]


def _chunk(v, delta, a, B, first):
    """Compute decays exp(delta A) and the states after every step, each (c, ..., N, d), from the state ``first``."""
    decay, states = (delta.unsqueeze(-2) * a).exp_(), v.unsqueeze(-2) * B.unsqueeze(-1)
    for i in range(len(states)):
        first = states[i].addcmul_(decay[i], first)
    return decay, states


def _time_first(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.movedim(2, 0).contiguous() for x in tensors]


@torch.library.custom_op("fedlib::selective_scan", mutates_args=())
def scan_op(
    u: torch.Tensor, delta: torch.Tensor, a: torch.Tensor, B: torch.Tensor, C: torch.Tensor, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute <C_t, h_t> (K, B, T, d), and if kept the states before every chunk (T/CHUNK, K, B, N, d)."""
    v, dt, b, c = _time_first(delta * u, delta, B, C)
    starts, y, size = range(0, len(v), CHUNK), torch.empty_like(v), (B.shape[-1], u.shape[-1])
    kept = u.new_empty(len(starts) if keep else 0, *u.shape[:2], *size)
    for at, own in _slabs(u, a, B.shape[-1]):
        h = u.new_zeros(*v[0][at].shape[:-1], *size)  # (..., N, d)
        for i, s in enumerate(starts):
            if keep:
                kept[i][at] = h
            part = (slice(s, s + CHUNK), *at)
            states = _chunk(v[part], dt[part], a[own], b[part], h)[1]
            h = states[-1]
            y[part] = (c[part].unsqueeze(-2) @ states).squeeze(-2)
    return y.movedim(0, 2), kept


@scan_op.register_fake
def _(u, delta, a, B, C, keep):
    chunks = -(-u.shape[2] // CHUNK) if keep else 0
    y = u.new_empty(u.shape[2], *u.shape[:2], u.shape[-1]).movedim(0, 2)
    return y, u.new_empty(chunks, *u.shape[:2], B.shape[-1], u.shape[-1])


def _setup(ctx, inputs, output):
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:-1], output[1])


@once_differentiable
def _backward(ctx, grad, _):
    """Compute the gradient of state t, g_t = C_t dy_t + exp(delta_{t+1} A) g_{t+1}; chunks are taken last to first."""
    if grad is None:  # nothing depends on y
        return (None,) * 6
    u, delta, a, B, C, kept = ctx.saved_tensors
    v, dt, b, c, gy = _time_first(delta * u, delta, B, C, grad)
    gv, gdt, gb, gc = (torch.empty_like(x) for x in (v, dt, b, c))
    ga = torch.zeros_like(a) if ctx.needs_input_grad[2] else None
    for at, own in _slabs(u, a, B.shape[-1]):
        carry = 0.0
        for i in reversed(range(len(kept))):
            part, before = (slice(i * CHUNK, (i + 1) * CHUNK), *at), kept[i][at]
            decay, states = _chunk(v[part], dt[part], a[own], b[part], before)
            g = c[part].unsqueeze(-1) * gy[part].unsqueeze(-2)
            g[-1] += carry
            for t in reversed(range(len(g) - 1)):
                g[t].addcmul_(decay[t + 1], g[t + 1])
            carry = decay[0] * g[0]
            gc[part] = (states @ gy[part].unsqueeze(-1)).squeeze(-1)
            gb[part] = (g @ v[part].unsqueeze(-1)).squeeze(-1)
            gv[part] = (b[part].unsqueeze(-2) @ g).squeeze(-2)
            e = decay.mul_(g)  # of delta_t A: g_t exp(delta_t A) h_{t-1}
            e[1:] *= states[:-1]
            e[0] *= before
            gdt[part] = (e * a[own]).sum(-2)
            if ga is not None:
                ga[own] += (e * dt[part].unsqueeze(-2)).sum_to_size(a[own].shape)
    gv, gdt, gb, gc = (x.movedim(0, 2) for x in (gv, gdt, gb, gc))
    return gv * delta, gdt + gv * u, ga, gb, gc, None


scan_op.register_autograd(_backward, setup_context=_setup)


# four products per token, channel and state, delta A, exp(.) h, (delta u) B and C h; no exponentials
FLOPS[torch.ops.fedlib.selective_scan] = lambda u, delta, a, *_, **more: 2 * 4 * u.numel() * a.shape[-2]
