"""Attention of short sequences that is kept for the backward, with products that read heads where they lie.

To train short sequences on a CPU this is quicker than PyTorch's fused kernel, which computes the attention again in
the backward.
"""

from collections.abc import Sequence
from functools import cache

import torch
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..layers.attention import by_head
from ..layers.linear import is_cast
from .products import heads_multiplier
from .switch import is_on


def attend(
    heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float | None
) -> torch.Tensor | None:
    """``layers.attention.attend`` in training, of short sequences in float32 without a mask; else None."""
    plain = mask is None and q.device.type == "cpu" and q.dtype is torch.float32 and q.numel() and not is_cast(q)
    short = is_short(q.shape[-2], q.shape[-1] // heads)
    if not (plain and short and torch.is_grad_enabled() and is_on("attention")):
        return None
    return _ShortAttention.apply(heads, scale, q, k, v)


def is_short(queries: int, width: int) -> bool:
    """Is attention worth keeping for the backward? That of long sequences would fill the memory."""
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
    """:func:`attend` on contiguous tensors, and the attention (K*B, heads, T, n) for the backward (of narrow heads
    (K*B, 1, T*heads, n)).

    ``qkv`` are q, k and v, or q and a tensor (K, B, n, 2a) with the others side by side, or one (K, B, T, 3a) with all
    three. Heads are read and written where they lie among the features.
    """
    q, k, v = _parts(qkv)
    width = q.shape[-1] // heads
    scale = width**-0.5 if scale is None else scale
    if heads > 1 and width <= NARROW and not is_in_torch_dispatch_mode():
        out, attention = attend_short(1, (_spread(q, heads), k, v), scale)
        return _unspread(out, heads), attention
    q, k, v = (by_head(x, heads) for x in (q, k, v))
    multiply = heads_multiplier()
    attention = _softmax(multiply(q, k.mT, q.new_empty(*q.shape[:3], k.shape[2]), scale))
    out = q.new_empty(*qkv[0].shape[:-1], heads * width)
    multiply(attention, v, by_head(out, heads))
    return out, attention


def attend_short_backward(
    heads: int, qkv: Sequence[torch.Tensor], attention: torch.Tensor, grad: torch.Tensor, scale: float | None = None
) -> list[torch.Tensor]:
    """The gradients of ``qkv``, as it came."""
    grads = [torch.empty_like(x) for x in qkv]
    (q, k, v), (for_q, for_k, for_v) = (_parts(xs) for xs in (qkv, grads))
    scale = (q.shape[-1] // heads) ** -0.5 if scale is None else scale
    if attention.shape[1] < heads:  # the heads were spread
        wide = [_spread(x, heads) for x in (q, grad)]
        for_wide = torch.empty_like(wide[0])
        _attend_backward(1, (wide[0], k, v), (for_wide, for_k, for_v), attention, wide[1], scale)
        for_q.copy_(_unspread(for_wide, heads))
    else:
        _attend_backward(heads, (q, k, v), (for_q, for_k, for_v), attention, grad, scale)
    return grads


def _attend_backward(
    heads: int, qkv: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], attention: torch.Tensor,
    grad: torch.Tensor, scale: float,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v into ``grads``."""
    (q, k, v), (for_q, for_k, for_v) = ([by_head(x, heads) for x in xs] for xs in (qkv, grads))
    grad, multiply = by_head(grad, heads), heads_multiplier()
    multiply(attention.mT, grad, for_v)
    by_attention = multiply(grad, v.mT, torch.empty_like(attention))
    by_score = _softmax_backward(by_attention, attention)
    multiply(by_score, k, for_q, scale)
    multiply(by_score.mT, q, for_k, scale)


NARROW = 4  # features of a head that are not worth a product of their own
VECTOR = 16  # floats of the widest vectors; over fewer, PyTorch's softmax goes one by one


def _spread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Every head as a row of its own, zero at the other heads' features: (K, B, T, a) -> (K, B, T*heads, a).

    All heads of narrow ones then multiply at once, which is less work than a call for each.
    """
    return (x.unsqueeze(-2) * _own_features(heads, x.shape[-1])).flatten(-3, -2)


def _unspread(x: torch.Tensor, heads: int) -> torch.Tensor:
    """(K, B, T*heads, a) -> (K, B, T, a): of every row its head's features."""
    return (x.unflatten(-2, (-1, heads)) * _own_features(heads, x.shape[-1])).sum(-2)


@cache
def _own_features(heads: int, features: int) -> torch.Tensor:
    """(heads, features): which features are whose."""
    return torch.eye(heads).repeat_interleave(features // heads, 1)


def _softmax(x: torch.Tensor) -> torch.Tensor:
    """Over the last dimension; may write to ``x``."""
    if x.shape[-1] >= VECTOR:
        return x.softmax(-1)
    x.sub_(x.amax(-1, keepdim=True)).exp_()
    return x.div_(x.sum(-1, keepdim=True))


def _softmax_backward(grad: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The gradient of what y is the softmax of; may write to ``grad``."""
    if y.shape[-1] >= VECTOR:
        return torch._softmax_backward_data(grad, y, -1, y.dtype)
    grad.mul_(y)
    return grad.addcmul_(grad.sum(-1, keepdim=True), y, value=-1)


def _parts(qkv: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """q, k and v, be they apart or the last of them side by side."""
    *apart, together = qkv
    return *apart, *together.chunk(3 - len(apart), -1)
