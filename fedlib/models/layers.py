"""Cohort-shaped layers: the same module runs one model or the models of many clients as one batched program.

A *stacked* parameter carries a leading client dimension: ``Linear.weight`` is ``(out, in)`` when all clients share
it (frozen, or a single model) and ``(K, out, in)`` when each of K clients has its own. Activations are
``(K, B, ..., d)``. A shared weight sees one merged batch; a stacked one becomes one batched matmul. Shapes are read
from the tensors themselves, so one skeleton serves every width and every cohort size.
"""

import torch
import torch.nn.functional as F
from torch import nn


def per_client(p: torch.Tensor, x: torch.Tensor, base_dims: int = 1) -> torch.Tensor:
    """Reshape ``p`` so that it broadcasts against ``x (K, ..., base shape)``; a shared ``p`` needs no reshaping."""
    if p.dim() == base_dims:
        return p
    p = _alive(p, x)
    return p.view(p.shape[0], *(1,) * (x.dim() - 1 - base_dims), *p.shape[1:])


def _alive(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return p if len(p) == len(x) else p[: len(x)]


class Linear(nn.Linear):
    """``y = x W^T + b``. ``axes`` names the axis each weight dimension lies on: (out, in)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True, axes=(None, None)):
        super().__init__(in_features, out_features, bias)
        self.axes = {"weight": tuple(axes), "bias": (axes[0],)}

    def reset_parameters(self) -> None:
        """Zero, not random: ``init_normal_`` or a checkpoint fills them, and no global generator is touched."""
        for p in (self.weight, self.bias):
            if p is not None:
                nn.init.zeros_(p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if weight.dim() == 3:
            weight = _alive(weight, x)
            bias = _alive(bias, x) if bias is not None and bias.dim() == 2 else bias
            if len(weight) == 1:  # a cohort of one is ordinary sequential training
                weight = weight.squeeze(0)  # unlike weight[0], its gradient is not written into zeros first
                bias = bias.squeeze(0) if bias is not None and bias.dim() == 2 else bias
        if weight.dim() == 2:
            if bias is None or bias.dim() == 1:
                return F.linear(x, weight, bias)
            return F.linear(x, weight) + per_client(bias, x)
        flat = x.reshape(len(weight), -1, x.shape[-1])  # (K, B*tokens, in)
        if bias is None:
            y = torch.bmm(flat, weight.mT)
        else:
            y = torch.baddbmm(bias.unsqueeze(1) if bias.dim() == 2 else bias, flat, weight.mT)
        return y.view(*x.shape[:-1], weight.shape[-2])


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimension, whatever its size (sub-models may be narrower)."""

    def __init__(self, dim: int, eps: float = 1e-5, axis: str = "residual"):
        super().__init__(dim, eps=eps)
        self.axes = {"weight": (axis,), "bias": (axis,)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.weight, self.bias
        if weight.dim() == 2 and len(x) == 1:
            weight, bias = _alive(weight, x).squeeze(0), _alive(bias, x).squeeze(0)
        if weight.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        y = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(per_client(bias, x), y, per_client(weight, x))


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, scale: float | None = None
) -> torch.Tensor:
    """``softmax(scale q k^T) v`` of (N, heads, tokens, width); ``scale`` is 1/sqrt(width) unless given.

    To train short sequences on a CPU, batched products that keep the attention are quicker than PyTorch's fused kernel,
    which computes it again in the backward: 1.1-1.8 times at 17 and 65 tokens (one thread, AMD EPYC).
    """
    n, heads, queries, width = q.shape
    short = q.device.type == "cpu" and queries <= 2 * width and torch.is_grad_enabled()  # more would fill the memory
    if mask is not None or not short:
        return F.scaled_dot_product_attention(q, k, v, mask, scale=scale)
    scale = width**-0.5 if scale is None else scale
    q, k, v = (x.reshape(n * heads, -1, width) for x in (q * scale, k, v))
    return torch.bmm(torch.bmm(q, k.mT).softmax(-1), v).view(n, heads, -1, width)


def init_normal_(module: nn.Module, generator: torch.Generator, std: float = 0.02) -> None:
    """ViT's initialisation, in place: every Linear weight N(0, std) with zero bias, every LayerNorm (1, 0)."""
    for m in module.modules():
        if isinstance(m, nn.Linear):
            with torch.no_grad():
                m.weight.normal_(0, std, generator=generator)
                if m.bias is not None:
                    m.bias.zero_()
        elif isinstance(m, nn.LayerNorm):
            nn.init.ones_(m.weight)
            nn.init.zeros_(m.bias)
