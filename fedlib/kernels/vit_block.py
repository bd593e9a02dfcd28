"""A block of a vision transformer with its backward written out: one step of autograd instead of some sixty.

On a CPU a cohort's blocks are many small operations, and what PyTorch does around each of them takes a fifth of the
time. Here a whole block, Eq. 1, is one operation: q, k and v are one product, sums go into what a product adds to, and
what no gradient needs is not kept. ``Block.forward`` says the same with modules, and runs wherever this does not.
"""

from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from ..layers.norms import norm, norm_backward
from ..models.vit import MLP, Attention, Block
from .attention import attend_short, attend_short_backward, is_short
from .maps import Map, alive, map_of, may_stand_in, norms_of


@dataclass(frozen=True)
class Operation:
    """The maps of a block and how its attention and norms compute. Tensors 0-3 are the norms' weights and biases."""

    qkv: tuple[Map, ...]  # q, k and v in one, or q apart
    proj: Map
    fc1: Map
    fc2: Map
    heads: int
    eps: tuple[float, float]
    first: int | None  # how many tokens of a sequence come out; None: all

    def maps(self) -> tuple[Map, ...]:
        return *self.qkv, self.proj, self.fc1, self.fc2


class WrittenBlock(Block):
    """A block that runs as one operation where it can."""

    def forward(self, z: torch.Tensor, first: int | None = None) -> torch.Tensor:
        out = run(self, z, first)
        return super().forward(z, first) if out is None else out


def is_plain(block: Block) -> bool:
    """Is there nothing between its layers, such as an adapter, LayerScale or a scaler that is on?"""
    plain = type(block.attn) is Attention and type(block.mlp) is MLP and block.attn.scale.is_off
    return plain and type(block.ls1) is type(block.ls2) is nn.Identity


def run(block: Block, z: torch.Tensor, first: int | None = None) -> torch.Tensor | None:
    """z (K, B, T, d) after ``block``, or only its ``first`` tokens; None if it must run as modules.

    This is for plain layers with or without LoRA, on sequences short enough to keep their attention, where
    ``may_stand_in`` allows it.
    """
    tensors = norms_of(block.norm1, block.norm2) if is_plain(block) else None
    if tensors is None:
        return None
    attn, mlp = block.attn, block.mlp
    qkv = ((attn.q, attn.k, attn.v),) if first is None else ((attn.q,), (attn.k, attn.v))
    groups = (*qkv, (attn.proj,), (mlp.fc1,), (mlp.fc2,))
    if not may_stand_in("vit_block", z, (block.norm1, block.norm2, attn, mlp, *(m for group in groups for m in group))):
        return None
    maps = [map_of(layers, tensors) for layers in groups]
    if None in maps or not is_short(first or z.shape[-2], tensors[maps[0].weights[0]].shape[-2] // attn.heads):
        return None
    *qkv, proj, fc1, fc2 = maps
    op = Operation(tuple(qkv), proj, fc1, fc2, attn.heads, (block.norm1.eps, block.norm2.eps), first)
    return _Block.apply(op, z, *alive(tensors, maps, z.shape[0]))


def _first_tokens(x: torch.Tensor, sequences: torch.Size, first: int | None) -> torch.Tensor:
    """The first tokens of every sequence in x (K, N, d): (K, B, first, d), a view."""
    return x.view(*sequences, -1, x.shape[-1])[..., :first, :]


class _Block(torch.autograd.Function):
    """z + MSA(LN1(z)), then z + MLP(LN2(z)). Activations inside are (K, N, features), N = B*T."""

    @staticmethod
    def forward(ctx, op, z, *t):
        sequences, dim = z.shape[:2], z.shape[-1]
        z = z.reshape(z.shape[0], -1, dim)
        weights = [m.weight(t) for m in op.maps()]
        *w_qkv, w_proj, w_fc1, w_fc2 = weights

        h1, *norm1 = norm(z, t[0], t[1], op.eps[0])
        sources = (_first_tokens(h1, sequences, op.first).flatten(1, 2), h1)[-len(op.qkv) :]
        qkv = [m.apply(t, w, x) for m, w, x in zip(op.qkv, w_qkv, sources, strict=True)]
        o, attention = attend_short(op.heads, [x.view(*sequences, -1, x.shape[-1]) for x in qkv])
        o = o.flatten(1, 2)
        y = op.proj.apply(t, w_proj, o, to=_first_tokens(z, sequences, op.first).flatten(1, 2))
        h2, *norm2 = norm(y, t[2], t[3], op.eps[1])
        u = op.fc1.apply(t, w_fc1, h2)
        a = F.gelu(u)
        out = op.fc2.apply(t, w_fc2, a, to=y)

        needed = ctx.needs_input_grad[2:]
        inputs = zip(op.maps(), (*sources, o, h2, a), strict=True)
        kept = [x if any(needed[i] for i in m.matrices()) else None for m, x in inputs]
        ctx.save_for_backward(z, *norm1, attention, y, *norm2, u, *qkv, *kept, *weights, *t)
        ctx.op, ctx.sequences = op, sequences
        return out.view(*sequences, -1, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        op, sequences, (_, for_z, *needed) = ctx.op, ctx.sequences, ctx.needs_input_grad
        saved = iter(ctx.saved_tensors)

        def take(n: int) -> list[torch.Tensor]:
            return list(islice(saved, n))

        z, *norm1, attention, y = take(6)
        *norm2, u = take(4)
        qkv = take(len(op.qkv))
        *sources, o, h2, a = take(len(op.maps()))
        *w_qkv, w_proj, w_fc1, w_fc2 = take(len(op.maps()))
        t, out = take(len(needed)), [None] * len(needed)

        grad = grad.reshape(y.shape)
        by_a = op.fc2.backward(t, w_fc2, needed, a, grad, out)
        by_u = torch.ops.aten.gelu_backward.grad_input(by_a, u, grad_input=by_a)
        by_h2 = op.fc1.backward(t, w_fc1, needed, h2, by_u, out)
        by_y, out[2], out[3] = norm_backward(by_h2, y, norm2, t[2], (True, needed[2], needed[3]))
        by_y += grad
        by_o = op.proj.backward(t, w_proj, needed, o, by_y, out)
        qkv, (by_o,) = ([x.view(*sequences, -1, x.shape[-1]) for x in xs] for xs in (qkv, (by_o,)))
        by_qkv = attend_short_backward(op.heads, qkv, attention, by_o)
        before = for_z or needed[0] or needed[1]
        by_sources = [
            m.backward(t, w, needed, x, g.flatten(1, 2), out, before)
            for m, w, x, g in zip(op.qkv, w_qkv, sources, by_qkv, strict=True)
        ]
        if not before:
            return None, None, *out
        *by_queries, by_h1 = by_sources
        for part in by_queries:  # read from the first tokens alone
            to = _first_tokens(by_h1, sequences, op.first)
            to += part.view_as(to)
        by_z, out[0], out[1] = norm_backward(by_h1, z, norm1, t[0], (for_z, needed[0], needed[1]))
        if not for_z:
            return None, None, *out
        to = _first_tokens(by_z, sequences, op.first)
        to += by_y.view_as(to)
        return None, by_z.view(*sequences, -1, by_z.shape[-1]), *out
