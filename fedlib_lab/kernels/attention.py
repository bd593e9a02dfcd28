"""Attention of short sequences that is kept for the backward, with products that read heads where they lie.

To train short sequences on a CPU this is quicker than PyTorch's fused kernel, which computes the attention again in
the backward.
"""

from collections.abc import Sequence

import torch
from torch.autograd.function import once_differentiable

from fedlib.layers.attention import by_head
from fedlib.layers.linear import uses_autocast

from .products import heads_multiplier
from .switch import is_on


def attend_if_short(
    heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor | None:
    """Run ``layers.attention.attend`` in training of short sequences in float32 without a mask; else return None."""
    plain = mask is None and q.device.type == "cpu" and q.dtype is torch.float32 and q.numel() and not uses_autocast(q)
    short = is_short(q.shape[-2], q.shape[-1] // heads)
    if not (plain and short and torch.is_grad_enabled() and is_on("attention")):
        return None
    return _ShortAttention.apply(heads, scale, q, k, v)


def is_short(queries: int, width: int) -> bool:
    """Return whether attention is worth keeping for the backward: that of long sequences would fill the memory."""
    return queries <= 2 * width


class _ShortAttention(torch.autograd.Function):
    """Attention that is kept for the backward."""

    @staticmethod
    def forward(ctx, heads, scale, *qkv):
        qkv = tuple(x.contiguous() for x in qkv)
        out, attention = attend_short(heads, qkv, scale)
        ctx.save_for_backward(attention, *qkv)
        ctx.options = heads, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (attention, *qkv), (heads, scale) = ctx.saved_tensors, ctx.options
        return None, None, *attend_short_backward(heads, qkv, attention, grad.contiguous(), scale)


def attend_short(
    heads: int, qkv: Sequence[torch.Tensor], scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run :func:`attend_if_short` on contiguous tensors; return also the attention (K*B, heads, T, n) for the backward.

    ``qkv`` are q, k and v, or q and a tensor (K, B, n, 2a) with the others side by side, or one (K, B, T, 3a) with all
    three. Heads are read and written where they lie among the features.
    """
    q, k, v = (by_head(x, heads) for x in _parts(qkv))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    multiply = heads_multiplier()
    attention = multiply(q, k.mT, q.new_empty(*q.shape[:3], k.shape[2]), scale).softmax(-1)
    out = q.new_empty(*qkv[0].shape[:-1], heads * q.shape[-1])
    multiply(attention, v, by_head(out, heads))
    return out, attention


def attend_short_backward(
    heads: int, qkv: Sequence[torch.Tensor], attention: torch.Tensor, grad: torch.Tensor, scale: float | None = None
) -> list[torch.Tensor]:
    """Return the gradients of ``qkv``, as it came."""
    grads, multiply = [torch.empty_like(x) for x in qkv], heads_multiplier()
    (q, k, v), (for_q, for_k, for_v) = ([by_head(x, heads) for x in _parts(xs)] for xs in (qkv, grads))
    scale, grad = q.shape[-1] ** -0.5 if scale is None else scale, by_head(grad, heads)
    multiply(attention.mT, grad, for_v)
    by_attention = multiply(grad, v.mT, torch.empty_like(attention))
    by_score = torch._softmax_backward_data(by_attention, attention, -1, attention.dtype)
    multiply(by_score, k, for_q, scale)
    multiply(by_score.mT, q, for_k, scale)
    return grads


def _parts(qkv: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Return q, k and v, be they apart or the last of them side by side."""
    *apart, together = qkv
    return *apart, *together.chunk(3 - len(apart), -1)
