"""A block of a vision transformer with its backward written out: one step of autograd instead of some sixty.

On a CPU a cohort's blocks are many small operations, and what PyTorch does around each of them takes a fifth of the
time. Here a whole block, Eq. 1, is one operation: q, k and v are one product, sums go into what a product adds to, and
what no gradient needs is not kept. ``Block.forward`` says the same with modules, and runs wherever this does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .layers import LayerNorm, Linear, attend_short, attend_short_backward, is_short, norm, norm_backward

Tensors = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class LowRank:
    """LoRA on outputs ``first`` to ``end``: scaling x A^T B^T; ``down`` (A) and ``up`` (B) are places of tensors."""

    first: int
    end: int
    down: int
    up: int
    scaling: float


@dataclass(frozen=True)
class Map:
    """x W^T + b, several maps of one x side by side, with LoRA. Weights and biases are places of tensors."""

    weights: tuple[int, ...]
    biases: tuple[int, ...]  # none, or one each
    low_rank: tuple[LowRank, ...]

    def tensors(self, t: Tensors) -> tuple[torch.Tensor, torch.Tensor | None]:
        """W (out, in) or (K, out, in), and b (out,), (K, 1, out) or None."""
        weights, biases = [t[i] for i in self.weights], [t[i] for i in self.biases]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights, -2)
        bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases, -1)
        return weight, bias.unsqueeze(1) if bias is not None and bias.dim() == 2 else bias

    def matrices(self) -> tuple[int, ...]:
        """The places of its weights, LoRA's included."""
        return *self.weights, *(place for a in self.low_rank for place in (a.down, a.up))

    def apply(self, t: Tensors, x: torch.Tensor, to: torch.Tensor | None = None):
        """x (K, N, in) -> (K, N, out), added to ``to`` if given; and for each LoRA scaling x A^T."""
        weight, bias = self.tensors(t)
        if to is None and bias is None:
            y = _product(x, weight.mT)
        else:
            shape = (*x.shape[:2], weight.shape[-2])
            y = bias.expand(shape).contiguous() if to is None else to.clone() if bias is None else to + bias
            _add_product_(y, x, weight.mT)
        reduced = [_product(x, t[a.down].mT).mul_(a.scaling) for a in self.low_rank]
        for a, h in zip(self.low_rank, reduced, strict=True):
            _add_product_(y[..., a.first : a.end], h, t[a.up].mT)
        return y, reduced

    def backward(
        self, t: Tensors, needed: Sequence[bool], x: torch.Tensor, reduced: Tensors, grad: torch.Tensor, out: list,
        reaches_x: bool = True,
    ) -> torch.Tensor | None:  # fmt: skip
        """Put the gradients of its tensors into ``out``; returns that of x, if it ``reaches`` anything."""
        weight, _ = self.tensors(t)
        if any(needed[i] for i in self.weights):
            by_weight = _product_over_rows(grad, x, stacked=weight.dim() == 3)
            for i, part in zip(self.weights, by_weight.split([t[i].shape[-2] for i in self.weights], -2), strict=True):
                out[i] = part
        if any(needed[i] for i in self.biases):
            by_bias = grad.sum(1 if t[self.biases[0]].dim() == 2 else (0, 1))
            for i, part in zip(self.biases, by_bias.split([t[i].shape[-1] for i in self.biases], -1), strict=True):
                out[i] = part
        by_x = _product(grad, weight) if reaches_x else None
        for a, h in zip(self.low_rank, reduced, strict=True):
            part = grad[..., a.first : a.end]
            if needed[a.up]:
                out[a.up] = _product_over_rows(part, h, stacked=t[a.up].dim() == 3)
            by_h = _product(part, t[a.up]).mul_(a.scaling)
            if needed[a.down]:
                out[a.down] = _product_over_rows(by_h, x, stacked=t[a.down].dim() == 3)
            if by_x is not None:
                _add_product_(by_x, by_h, t[a.down])
        return by_x


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x (K, N, m) w, of all clients (m, n) or of each (K, m, n): (K, N, n)."""
    return torch.bmm(x, w) if w.dim() == 3 else torch.mm(x.flatten(0, 1), w).view(*x.shape[:2], -1)


def _add_product_(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> None:
    """y += x w."""
    if w.dim() == 3:
        y.baddbmm_(x, w)
    else:
        y.flatten(0, 1).addmm_(x.flatten(0, 1), w)


def _product_over_rows(grad: torch.Tensor, x: torch.Tensor, stacked: bool) -> torch.Tensor:
    """grad^T x: of each client (K, out, in), or summed over clients (out, in)."""
    return torch.bmm(grad.mT, x) if stacked else torch.mm(grad.flatten(0, 1).t(), x.flatten(0, 1))


@dataclass(frozen=True)
class Plan:
    """The maps of a block and how its attention and norms compute. Tensors 0-3 are the norms' weights and biases."""

    qkv: Map
    proj: Map
    fc1: Map
    fc2: Map
    heads: int
    eps: tuple[float, float]


def run_written_out(block: nn.Module, z: torch.Tensor) -> torch.Tensor | None:
    """z (K, B, T, d) after ``block``; None if it must run as modules.

    Written out are the blocks of a cohort in training: float32 on a CPU, sequences short enough to keep their
    attention, plain layers with or without LoRA. Modules run under a counter of operations and where a hook waits for
    one of them.
    """
    if not torch.is_grad_enabled() or z.device.type != "cpu" or z.dtype is not torch.float32 or not z.numel():
        return None
    if torch.is_autocast_enabled("cpu") or is_in_torch_dispatch_mode():
        return None
    if not block.is_plain or type(block.norm1) is not LayerNorm or type(block.norm2) is not LayerNorm:
        return None
    tensors = [block.norm1.weight, block.norm1.bias, block.norm2.weight, block.norm2.bias]
    if tensors[0].dim() != tensors[1].dim() or tensors[2].dim() != tensors[3].dim():
        return None
    attn, mlp = block.attn, block.mlp
    groups = ((attn.q, attn.k, attn.v), (attn.proj,), (mlp.fc1,), (mlp.fc2,))
    if any(_is_watched(m) for m in (block.norm1, block.norm2, attn, mlp, *(m for group in groups for m in group))):
        return None
    maps = [_map(layers, tensors) for layers in groups]
    if None in maps or not is_short(z.shape[-2], tensors[maps[0].weights[0]].shape[-2] // attn.heads):
        return None
    matrices = {i for m in maps for i in m.matrices()}
    stacked = [x.dim() > (2 if i in matrices else 1) for i, x in enumerate(tensors)]
    alive = [x[: len(z)] if own and len(x) > len(z) else x for x, own in zip(tensors, stacked, strict=True)]
    return _Block.apply(Plan(*maps, attn.heads, (block.norm1.eps, block.norm2.eps)), z, *alive)


def _is_watched(module: nn.Module) -> bool:
    """Does a hook wait for ``module`` to be called?"""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def _map(layers: Sequence[nn.Module], tensors: list) -> Map | None:
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


class _Block(torch.autograd.Function):
    """z + MSA(LN1(z)), then z + MLP(LN2(z)). Activations inside are (K, N, features), N = B*T."""

    @staticmethod
    def forward(ctx, plan, z, *t):
        shape = z.shape
        z = z.reshape(len(z), -1, shape[-1])
        h1, *norm1 = norm(z, t[0], t[1], plan.eps[0])
        qkv, reduced_qkv = plan.qkv.apply(t, h1)
        o, attention = attend_short(plan.heads, (qkv.view(*shape[:-1], -1),))
        o = o.view(*z.shape[:2], -1)
        y, reduced_proj = plan.proj.apply(t, o, to=z)
        h2, *norm2 = norm(y, t[2], t[3], plan.eps[1])
        u, reduced_fc1 = plan.fc1.apply(t, h2)
        a = F.gelu(u)
        out, reduced_fc2 = plan.fc2.apply(t, a, to=y)

        needed = ctx.needs_input_grad[2:]
        inputs = ((plan.qkv, h1), (plan.proj, o), (plan.fc1, h2), (plan.fc2, a))
        kept = [x if any(needed[i] for i in m.matrices()) else None for m, x in inputs]
        ctx.save_for_backward(
            z, *norm1, qkv, attention, y, *norm2, u, *kept, *reduced_qkv, *reduced_proj, *reduced_fc1, *reduced_fc2, *t
        )
        ctx.plan = plan
        return out.view(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        plan, shape, (_, for_z, *needed) = ctx.plan, grad.shape, ctx.needs_input_grad
        z, *saved = ctx.saved_tensors
        norm1, qkv, attention, y, norm2, u = saved[:3], saved[3], saved[4], saved[5], saved[6:9], saved[9]
        h1, o, h2, a, *rest = saved[10:]
        t = rest[len(rest) - len(needed) :]
        reduced = iter(rest)
        reduced = [[next(reduced) for _ in m.low_rank] for m in (plan.qkv, plan.proj, plan.fc1, plan.fc2)]
        out = [None] * len(needed)

        grad = grad.reshape(z.shape)
        by_a = plan.fc2.backward(t, needed, a, reduced[3], grad, out)
        by_u = torch.ops.aten.gelu_backward.grad_input(by_a, u, grad_input=by_a)
        by_h2 = plan.fc1.backward(t, needed, h2, reduced[2], by_u, out)
        by_y, out[2], out[3] = norm_backward(by_h2, y, norm2, t[2], (True, needed[2], needed[3]))
        by_y += grad
        by_o = plan.proj.backward(t, needed, o, reduced[1], by_y, out)
        (by_qkv,) = attend_short_backward(
            plan.heads, (qkv.view(*shape[:-1], -1),), attention, by_o.view(*shape[:-1], -1)
        )
        before = for_z or needed[0] or needed[1]
        by_h1 = plan.qkv.backward(t, needed, h1, reduced[0], by_qkv.view(*z.shape[:2], -1), out, before)
        if not before:
            return None, None, *out
        by_z, out[0], out[1] = norm_backward(by_h1, z, norm1, t[0], (for_z, needed[0], needed[1]))
        return None, by_z.add_(by_y).view(shape) if for_z else None, *out
