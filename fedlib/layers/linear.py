"""Cohort-shaped layers: the same module runs one model or the models of many clients as one batched program.

A *stacked* parameter carries a leading client dimension: ``Linear.weight`` is ``(out, in)`` when all clients share
it (frozen, or a single model) and ``(K, out, in)`` when each of K clients has its own. Activations are
``(K, B, ..., d)``. A shared weight sees one merged batch; a stacked one becomes one batched matmul. Shapes are read
from the tensors themselves, so one skeleton serves every width and every cohort size.
"""

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .overrides import OVERRIDES


def per_client(p: torch.Tensor, x: torch.Tensor, base_dims: int = 1) -> torch.Tensor:
    """Reshape ``p`` so that it broadcasts against ``x (K, ..., base shape)``; a shared ``p`` needs no reshaping."""
    if p.dim() == base_dims:
        return p
    p = alive_rows(p, x)
    return p.view(p.shape[0], *(1,) * (x.dim() - 1 - base_dims), *p.shape[1:])


def alive_rows(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return p if p.shape[0] == x.shape[0] else p[: x.shape[0]]


def own_rows(p: torch.Tensor | None, x: torch.Tensor, base_dims: int) -> torch.Tensor | None:
    """Return a stacked ``p``'s rows for the clients of ``x``; a shared ``p``, or a single client's, in ``base_dims``.

    So a cohort of one is ordinary sequential training.
    """
    if p is None or p.dim() == base_dims:
        return p
    p = alive_rows(p, x)
    return p.squeeze(0) if len(p) == 1 else p  # unlike p[0], its gradient is not written into zeros first


def zero_(layer: nn.Module) -> None:
    """Fill with zeros in ``reset_parameters``: an initialisation from a generator or a checkpoint follows."""
    for p in layer.parameters(recurse=False):
        nn.init.zeros_(p)


def uses_autocast(x: torch.Tensor) -> bool:
    """Return whether autocast chooses the precision of operations on ``x``."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


class Linear(nn.Linear):
    """``y = x W^T + b``. ``axes`` names the axis each weight dimension lies on: (out, in)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, axes=(None, None)):
        super().__init__(in_features, out_features, bias)
        self.axes = {"weight": tuple(axes), "bias": (axes[0],)}

    reset_parameters = zero_

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if weight.dim() == 3:
            weight, bias = own_rows(weight, x, 2), own_rows(bias, x, 1)
        if weight.dim() == 2:
            if bias is None or bias.dim() == 1:
                return F.linear(x, weight, bias)
            return F.linear(x, weight) + per_client(bias, x)
        flat = x.reshape(weight.shape[0], -1, x.shape[-1])  # (K, B*tokens, in)
        bias = bias.unsqueeze(1) if bias is not None and bias.dim() == 2 else bias
        if uses_autocast(x):
            y = torch.bmm(flat, weight.mT) if bias is None else torch.baddbmm(bias, flat, weight.mT)
        else:
            y = _StackedLinear.apply(flat, weight, bias)
        return y.view(*x.shape[:-1], weight.shape[-2])


def matmul(x: torch.Tensor, y: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply x (K, N, d) by y (K, d, n) -> (K, N, n), added to ``to`` in place if given. Not for autograd."""
    if (override := OVERRIDES.get("matmul")) is not None:
        return override(x, y, to)
    return torch.bmm(x, y) if to is None else to.baddbmm_(x, y)


class _StackedLinear(torch.autograd.Function):
    """``x W^T + b``, x (K, N, in), W (K, out, in), b (K, 1, out), (out,) or None: (K, N, out).

    W's gradient lies in memory as W does. PyTorch's own comes transposed, and SGD along it takes 5-6 times as long.
    """

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        ctx.bias_shape = None if bias is None else bias.shape
        return matmul(x, weight.mT, None if bias is None else x.new_empty(*x.shape[:2], weight.shape[-2]).copy_(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        (x, weight), (for_x, for_weight, for_bias) = ctx.saved_tensors, ctx.needs_input_grad
        return (
            matmul(grad, weight) if for_x else None,
            matmul(grad.mT, x) if for_weight else None,
            grad.sum_to_size(ctx.bias_shape) if for_bias else None,
        )


@torch.no_grad()
def init_normal_(
    module: nn.Module, generator: torch.Generator, std: float | None = 0.02, tables: Iterable[torch.Tensor] = ()
) -> None:
    """Initialise as ViT does, in place: every Linear weight N(0, std) with zero bias, every LayerNorm (1, 0).

    Without ``std`` a weight's is 1/sqrt(inputs), which keeps a signal's size (LeCun et al., Efficient BackProp, 1998).
    ``tables`` are drawn last, N(0, 0.02).
    """
    for m in module.modules():
        if isinstance(m, nn.Linear):
            m.weight.normal_(0, m.in_features**-0.5 if std is None else std, generator=generator)
            if m.bias is not None:
                m.bias.zero_()
        elif isinstance(m, nn.LayerNorm):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)
    for p in tables:
        p.normal_(0, 0.02, generator=generator)
