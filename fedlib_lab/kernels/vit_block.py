"""A block of a vision transformer with its backward written out: one step of autograd instead of some sixty.

On a CPU a cohort's blocks are many small operations, and what PyTorch does around each of them takes a fifth of the
time. Here a whole block, Eq. 1, is one operation: q, k and v are one product, sums go into what a product adds to, and
what no gradient needs is not kept. ``Block.forward`` says the same with modules, and runs wherever this does not: as it
is, or for a GPU :func:`compiled`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from fedlib.layers.attention import by_head
from fedlib.layers.linear import Linear
from fedlib.layers.norms import LayerNorm, norm, norm_backward
from fedlib.models.vit import MLP, Attention, Block

from .products import heads_multiplier, matmul
from .switch import is_on

Tensors = Sequence[torch.Tensor | None]


def may_stand_in(x: torch.Tensor, modules: Iterable[nn.Module]) -> bool:
    """Return whether the kernel can do these modules' work on ``x`` without calling them.

    In training, in float32 on a CPU, where autocast chooses no other precision, no hook waits for one of them to be
    called and nothing, such as a counter of FLOPs, listens to the operations. Without gradients modules let go of
    memory earlier and, where they are wide, are faster.
    """
    if not is_on("vit_block") or not torch.is_grad_enabled():
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
class LinearMap:
    """x W^T + b, several maps of one x side by side, with LoRA. Weights and biases are places of tensors."""

    weights: tuple[int, ...]
    biases: tuple[int, ...]  # none, or one each
    low_rank: tuple[LowRank, ...]

    def matrices(self) -> tuple[int, ...]:
        """Return the places of its weights, LoRA's included."""
        return *self.weights, *(place for a in self.low_rank for place in (a.down, a.up))

    def weight(self, t: Tensors) -> torch.Tensor:
        """Return W with LoRA's products added: (out, in) for all clients, or (K, out, in)."""
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
        """Map x (K, N, in) -> (K, N, out), added to a copy of ``to`` if given."""
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
    """Compute grad^T x: of each client (K, out, in), or summed over clients (out, in)."""
    if stacked:
        return matmul(grad.mT, x)
    return matmul(grad.reshape(1, -1, grad.shape[-1]).mT, x.reshape(-1, x.shape[-1])).squeeze(0)


def linear_map(layers: Sequence[nn.Module], tensors: list) -> LinearMap | None:
    """Combine ``layers`` on one input, their tensors appended to ``tensors``; None if they are of another kind."""
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
    return LinearMap(tuple(range(at, middle)), tuple(range(middle, middle + len(biases))), tuple(low_rank))


def cut_to_alive(tensors: Tensors, maps: Iterable[LinearMap], clients: int) -> list[torch.Tensor]:
    """Cut the tensors that are each client's own to the first ``clients``; return all."""
    matrices = {i for m in maps for i in m.matrices()}
    own = [x.dim() > (2 if i in matrices else 1) for i, x in enumerate(tensors)]
    return [x[:clients] if mine and x.shape[0] > clients else x for x, mine in zip(tensors, own, strict=True)]


# --- attention of short sequences, kept for the backward: PyTorch's fused kernel computes it again there --------------


def attend_short(
    heads: int, qkv: Sequence[torch.Tensor], scale: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run ``layers.attention.attend`` on contiguous tensors; return also the attention (K*B, heads, T, n), for later.

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


# --- the block --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Operation:
    """The maps of a block and how its attention and norms compute. Tensors 0-3 are the norms' weights and biases."""

    qkv: tuple[LinearMap, ...]  # q, k and v in one, or q apart
    proj: LinearMap
    fc1: LinearMap
    fc2: LinearMap
    heads: int
    eps: tuple[float, float]
    first: int | None  # how many tokens of a sequence come out; None: all

    def maps(self) -> tuple[LinearMap, ...]:
        return *self.qkv, self.proj, self.fc1, self.fc2


class WrittenBlock(Block):
    """A block that runs as one operation where it can."""

    def forward(self, z: torch.Tensor, first: int | None = None) -> torch.Tensor:
        if (out := run(self, z, first)) is not None:
            return out
        return (compiled() if is_on("compiled") and not is_in_torch_dispatch_mode() else Block.forward)(self, z, first)


@cache
def compiled() -> Callable[..., torch.Tensor]:
    """Compile ``Block.forward`` by PyTorch, each kind of call once: with gradients or not, of one client or several.

    Sizes of cohorts and batches are left open; so are, from now on, those of any module's tensors in this process.
    """
    config, torch._inductor.config.compile_threads = torch._dynamo.config, 1  # others would be waited for after a fork
    config.recompile_limit = max(64, config.recompile_limit)
    config.force_parameter_static_shapes = config.force_nn_module_property_static_shapes = False
    return torch.compile(Block.forward)


def run(block: Block, z: torch.Tensor, first: int | None = None) -> torch.Tensor | None:
    """Run ``block`` on z (K, B, T, d), for all or only its ``first`` tokens; None if it must run as modules.

    This is for plain layers with or without LoRA, with no adapter, LayerScale or scaler between them, on sequences
    short enough to keep their attention, where ``may_stand_in`` allows it.
    """
    plain = type(block.attn) is Attention and type(block.mlp) is MLP and block.attn.scale.is_off
    norms = all(type(n) is LayerNorm and n.weight.dim() == n.bias.dim() for n in (block.norm1, block.norm2))
    if not (plain and norms and type(block.ls1) is type(block.ls2) is nn.Identity):
        return None
    attn, mlp, tensors = block.attn, block.mlp, [p for n in (block.norm1, block.norm2) for p in (n.weight, n.bias)]
    qkv = ((attn.q, attn.k, attn.v),) if first is None else ((attn.q,), (attn.k, attn.v))
    groups = (*qkv, (attn.proj,), (mlp.fc1,), (mlp.fc2,))
    if not may_stand_in(z, (block.norm1, block.norm2, attn, mlp, *(m for group in groups for m in group))):
        return None
    maps = [linear_map(layers, tensors) for layers in groups]
    queries = first or z.shape[-2]  # the attention of many would fill the memory if it were kept for the backward
    if None in maps or queries > 2 * (tensors[maps[0].weights[0]].shape[-2] // attn.heads):
        return None
    *qkv, proj, fc1, fc2 = maps
    op = Operation(tuple(qkv), proj, fc1, fc2, attn.heads, (block.norm1.eps, block.norm2.eps), first)
    return _Block.apply(op, z, *cut_to_alive(tensors, maps, z.shape[0]))


def _first_tokens(x: torch.Tensor, sequences: torch.Size, first: int | None) -> torch.Tensor:
    """Return the first tokens of every sequence in x (K, N, d): (K, B, first, d), a view."""
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
