"""Cohort-shaped normalisation; see ``linear.py`` for what a stacked parameter is."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .linear import alive_rows, is_cast, per_client


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimension, whatever its size (sub-models may be narrower)."""

    def __init__(self, dim: int, eps: float = 1e-5, axis: str = "residual"):
        super().__init__(dim, eps=eps)
        self.axes = {"weight": (axis,), "bias": (axis,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = (alive_rows(p, x) if p.dim() == 2 else p for p in (self.weight, self.bias))
        if x.shape[0] == 1:
            weight, bias = (p.squeeze(0) if p.dim() == 2 else p for p in (weight, bias))
        if weight.dim() == bias.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        if weight.dim() == bias.dim() and not is_cast(x):
            return _StackedLayerNorm.apply(x.reshape(x.shape[0], -1, x.shape[-1]), weight, bias, self.eps).view(x.shape)
        y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(per_client(bias, x), y, per_client(weight, x))


class _StackedLayerNorm(torch.autograd.Function):
    """Layer normalisation of x (K, N, d) with each client's weight and bias (K, d)."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, *kept = norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, *kept = ctx.saved_tensors
        return *norm_backward(grad, x, kept, weight, ctx.needs_input_grad[:3]), None


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor | None, ...]:
    """Layer normalisation of x (K, N, d) by weight and bias (d,) or (K, d); and what ``norm_backward`` asks for."""
    if weight.dim() == 1:
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y, bias, mean, scale
    one, zero = x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1])  # without them a CPU takes twice as long
    plain, mean, scale = torch.native_layer_norm(x, x.shape[-1:], one, zero, eps)
    return torch.addcmul(bias.unsqueeze(1), plain, weight.unsqueeze(1)), plain, mean, scale


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, kept: Sequence[torch.Tensor], weight: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """The gradients of x, weight and bias, as far as they are ``needed``."""
    backward, size = torch.ops.aten.native_layer_norm_backward, x.shape[-1:]
    if weight.dim() == 1:
        bias, mean, scale = kept
        return tuple(backward(grad, x, size, mean, scale, weight, bias, list(needed)))
    plain, mean, scale = kept
    into = (grad * weight.unsqueeze(1), x, size, mean, scale, None, None, [True, False, False])
    return (
        backward(*into)[0] if needed[0] else None,
        (grad * plain).sum(1) if needed[1] else None,
        grad.sum(1) if needed[2] else None,
    )
