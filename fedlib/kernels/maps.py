"""What written-out backwards share: linear maps with LoRA, and when they may stand for modules.

Read next: ``vit_block.py``.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from ..layers.linear import Linear
from ..layers.norms import LayerNorm
from .products import matmul
from .switch import is_on

Tensors = Sequence[torch.Tensor | None]


def may_stand_in(kernel: str, x: torch.Tensor, modules: Iterable[nn.Module]) -> bool:
    """May ``kernel`` do these modules' work on ``x`` without calling them?

    In training, in float32 on a CPU, where autocast chooses no other precision, no hook waits for one of them to be
    called and nothing, such as a counter of FLOPs, listens to the operations. Without gradients modules let go of
    memory earlier and, where they are wide, are faster.
    """
    if not is_on(kernel) or not torch.is_grad_enabled():
        return False
    if x.device.type != "cpu" or x.dtype is not torch.float32 or not x.numel():
        return False
    if torch.is_autocast_enabled("cpu") or is_in_torch_dispatch_mode():
        return False
    return not any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules
    )


@dataclass(frozen=True)
class LowRank:
    """LoRA on outputs ``first`` to ``end``: W + scaling B A; ``down`` (A) and ``up`` (B) are places of tensors."""

    first: int
    end: int
    down: int
    up: int
    scaling: float

    def backward(self, t: Tensors, needed: Sequence[bool], x: torch.Tensor, grad: torch.Tensor, out: list) -> None:
        """Put the gradients of A and B into ``out``: through W's where that is cheaper, else through x A^T."""
        down, up, grad = t[self.down], t[self.up], grad[..., self.first : self.end]
        (rank, wide), high = down.shape[-2:], up.shape[-2]
        if wide * high < 2 * rank * (wide + high):
            by_weight = product_over_rows(grad, x, stacked=down.dim() == 3).mul_(self.scaling)
            by_up, by_down = by_weight @ down.mT, up.mT @ by_weight
        else:
            by_up = product_over_rows(grad, matmul(x, down.mT).mul_(self.scaling), stacked=up.dim() == 3)
            by_down = product_over_rows(matmul(grad, up).mul_(self.scaling), x, stacked=down.dim() == 3)
        out[self.up], out[self.down] = by_up if needed[self.up] else None, by_down if needed[self.down] else None


@dataclass(frozen=True)
class Map:
    """x W^T + b, several maps of one x side by side, with LoRA. Weights and biases are places of tensors."""

    weights: tuple[int, ...]
    biases: tuple[int, ...]  # none, or one each
    low_rank: tuple[LowRank, ...]

    def matrices(self) -> tuple[int, ...]:
        """The places of its weights, LoRA's included."""
        return *self.weights, *(place for a in self.low_rank for place in (a.down, a.up))

    def weight(self, t: Tensors) -> torch.Tensor:
        """W with LoRA's products added: (out, in) for all clients, or (K, out, in)."""
        weights = [t[i] for i in self.weights]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights, -2)
        if not self.low_rank:
            return weight
        products = [(t[a.up] * a.scaling) @ t[a.down] for a in self.low_rank]
        clients = max((p.shape[:-2] for p in products), key=len)
        weight = weight.expand(*clients, *weight.shape[-2:]).clone() if weight.dim() == 2 else weight.clone()
        for a, product in zip(self.low_rank, products, strict=True):
            weight[..., a.first : a.end, :] += product
        return weight

    def apply(self, t: Tensors, weight: torch.Tensor, x: torch.Tensor, to: torch.Tensor | None = None) -> torch.Tensor:
        """x (K, N, in) -> (K, N, out), added to a copy of ``to`` if given."""
        biases = [t[i] for i in self.biases]
        if to is None and not biases:
            return matmul(x, weight.mT)
        if not biases:
            return matmul(x, weight.mT, to.clone())
        bias = biases[0] if len(biases) == 1 else torch.cat(biases, -1)
        bias = bias.unsqueeze(1) if bias.dim() == 2 else bias
        if to is not None:
            return matmul(x, weight.mT, to + bias)
        return matmul(x, weight.mT, x.new_empty(*x.shape[:2], weight.shape[-2]).copy_(bias))

    def backward(
        self, t: Tensors, weight: torch.Tensor, needed: Sequence[bool], x: torch.Tensor, grad: torch.Tensor, out: list,
        reaches_x: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Put the gradients of its tensors into ``out``; returns that of x, if it ``reaches`` anything."""
        if any(needed[i] for i in self.weights):
            by_weight = product_over_rows(grad, x, stacked=t[self.weights[0]].dim() == 3)
            for i, part in zip(self.weights, by_weight.split([t[i].shape[-2] for i in self.weights], -2), strict=True):
                out[i] = part
        if any(needed[i] for i in self.biases):
            by_bias = grad.sum(1 if t[self.biases[0]].dim() == 2 else (0, 1))
            for i, part in zip(self.biases, by_bias.split([t[i].shape[-1] for i in self.biases], -1), strict=True):
                out[i] = part
        for a in self.low_rank:
            if needed[a.down] or needed[a.up]:
                a.backward(t, needed, x, grad, out)
        return matmul(grad, weight) if reaches_x else None


def product_over_rows(grad: torch.Tensor, x: torch.Tensor, stacked: bool) -> torch.Tensor:
    """grad^T x: of each client (K, out, in), or summed over clients (out, in)."""
    if stacked:
        return matmul(grad.mT, x)
    return matmul(grad.reshape(1, -1, grad.shape[-1]).mT, x.reshape(-1, x.shape[-1])).squeeze(0)


def norms_of(*layers: nn.Module) -> list[torch.Tensor] | None:
    """Weight and bias of each layer norm, one after the other; None if they are of another kind, or mixed."""
    if any(type(n) is not LayerNorm or n.weight.dim() != n.bias.dim() for n in layers):
        return None
    return [p for n in layers for p in (n.weight, n.bias)]


def map_of(layers: Sequence[nn.Module], tensors: list) -> Map | None:
    """``layers`` on one input as a map, its tensors appended to ``tensors``; None if they are of another kind."""
    bases, low_rank, first = [], [], 0
    for layer in layers:
        base = getattr(layer, "base_layer", layer)
        if type(base) is not Linear:
            return None
        end = first + base.weight.shape[-2]
        if base is not layer:
            if not hasattr(layer, "lora_A"):
                return None
            down, up, dropout = (getattr(layer, n)["default"] for n in ("lora_A", "lora_B", "lora_dropout"))
            if type(down) is not Linear or type(up) is not Linear or type(dropout) is not nn.Identity:
                return None  # as adapters.py leaves LoRA, and nothing else of peft's
            if down.bias is not None or up.bias is not None:
                return None
            low_rank.append(LowRank(first, end, len(tensors), len(tensors) + 1, layer.scaling["default"]))
            tensors += [down.weight, up.weight]
        bases.append(base)
        first = end
    weights, biases = [b.weight for b in bases], [b.bias for b in bases]
    if len({w.dim() for w in weights}) > 1 or len({None if b is None else b.dim() for b in biases}) > 1:
        return None
    biases = [b for b in biases if b is not None]
    at = len(tensors)
    tensors += [*weights, *biases]
    middle = at + len(weights)
    return Map(tuple(range(at, middle)), tuple(range(middle, middle + len(biases))), tuple(low_rank))


def alive(tensors: Tensors, maps: Iterable[Map], clients: int) -> list[torch.Tensor]:
    """``tensors``, those that are each client's own cut to the first ``clients``."""
    matrices = {i for m in maps for i in m.matrices()}
    own = [x.dim() > (2 if i in matrices else 1) for i, x in enumerate(tensors)]
    return [x[:clients] if mine and x.shape[0] > clients else x for x, mine in zip(tensors, own, strict=True)]
