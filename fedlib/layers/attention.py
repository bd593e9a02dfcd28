"""Multi-head attention of a cohort."""

import torch
import torch.nn.functional as F

from .linear import uses_autocast


def attend(
    heads: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    mask: torch.Tensor | None = None, scale: float | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute ``softmax(scale q k^T) v`` of every head, q (K, B, T, a), k and v (K, B, n, a) -> (K, B, T, a).

    The a features are the heads', one after the other; ``scale`` is 1/sqrt(a/heads) unless given. Where autocast asks
    for bfloat16 on a CPU, attention is trained in float32: the fused kernel's backward takes five times as long in
    bfloat16.
    """
    if mask is None and q.device.type == "cpu" and uses_autocast(q) and torch.is_grad_enabled():
        with torch.autocast("cpu", enabled=False):
            return attend(heads, q.float(), k.float(), v.float(), None, scale).to(q.dtype)
    out = F.scaled_dot_product_attention(*(by_head(x, heads) for x in (q, k, v)), mask, scale=scale)
    return out.transpose(1, 2).reshape(q.shape)


def by_head(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Split features by head, (K, B, T, a) -> (K*B, heads, T, a/heads), a view where ``x`` allows it."""
    return x.reshape(-1, x.shape[-2], heads, x.shape[-1] // heads).transpose(1, 2)
