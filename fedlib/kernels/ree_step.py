"""A step of Ree with its backward written out, as ``vit_block.py`` does for a block, and for the same reasons.

Ree runs after every block on one token per image: operations so small that most of their time is PyTorch's work around
them. ``Ree._modulate`` says the same with modules, and runs wherever this does not.
"""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..layers.linear import per_client
from ..layers.norms import norm, norm_backward
from ..models.ree import Ree, Rows
from .attention import attend_short, attend_short_backward
from .maps import Map, alive, map_of, may_stand_in, norms_of
from .products import matmul


@dataclass(frozen=True)
class Operation:
    """The maps of Ree, who asks, and what is remembered. Tensors 0-3 are the norms' weights and biases."""

    qkv: Map
    out: Map
    fc1: Map
    fc2: Map
    width: int
    heads: int
    eps: tuple[float, float]
    meta: bool  # is m_0 asked for?
    last: bool  # is m_l?
    remember_modulated: bool  # is m_l's row added to the history, or the raw token's?

    def maps(self) -> tuple[Map, ...]:
        return self.qkv, self.out, self.fc1, self.fc2


class WrittenRee(Ree):
    """Ree whose steps run as one operation where they can."""

    def _modulate(
        self, token: torch.Tensor, rows: Rows, meta: bool, last: bool, remember_modulated: bool
    ) -> tuple[torch.Tensor, Rows]:
        done = run(self, token, rows, meta, last, remember_modulated)
        return super()._modulate(token, rows, meta, last, remember_modulated) if done is None else done


ORIGINAL, REPLACEMENT = Ree, WrittenRee


def run(
    ree: Ree, token: torch.Tensor, rows: Rows, asks_meta: bool, asks_last: bool, remember_modulated: bool
) -> tuple[torch.Tensor, Rows] | None:
    """``Ree._modulate`` on token (K, B, d): m (K, B, 1 or 2, d) and the rows with one more. None: run the modules."""
    attn, mlp = ree.attn, ree.mlp
    layers = (attn.qkv, attn.out, mlp.fc1, mlp.fc2)
    if not may_stand_in("ree_step", token, (ree.norm1, ree.norm2, attn, mlp, *layers)):
        return None
    tensors = norms_of(ree.norm1, ree.norm2)
    if tensors is None:
        return None
    maps = [map_of((layer,), tensors) for layer in layers]
    if None in maps or maps[0].low_rank:
        return None
    op = Operation(
        *maps, attn.width, attn.heads, (ree.norm1.eps, ree.norm2.eps), asks_meta, asks_last, remember_modulated
    )  # fmt: skip
    position = per_client(ree.positions[..., rows.count, :], token)
    tensors = alive(tensors, maps, token.shape[0])
    m, kv = _Step.apply(op, token, position, rows.kv, rows.meta, rows.query, *tensors)
    return m, replace(rows, kv=kv)


class _Step(torch.autograd.Function):
    """Eq. 2 for the rows that are asked for. All of Ree is trained, so all gradients are computed."""

    @staticmethod
    def forward(ctx, op, token, position, kv, meta, query, *t):
        weights = [m.weight(t) for m in op.maps()]
        w_qkv, w_out, w_fc1, w_fc2 = weights
        x = token + position
        h1, *norm1 = norm(x, t[0], t[1], op.eps[0])
        row = op.qkv.apply(t, w_qkv, h1)
        q, new = row[..., : op.width], row[..., op.width :]
        seen = torch.cat((kv, new.unsqueeze(2)), 2)
        asking = [(meta.expand_as(x), query.expand_as(q))] * op.meta + [(x, q)] * op.last
        start, q = (torch.stack(parts, 2) for parts in zip(*asking, strict=True))
        o, attention = attend_short(op.heads, (q, seen), op.width**-0.5)
        y = op.out.apply(t, w_out, o.flatten(1, 2), to=start.flatten(1, 2))
        h2, *norm2 = norm(y, t[2], t[3], op.eps[1])
        u = op.fc1.apply(t, w_fc1, h2)
        a = F.gelu(u)
        m = op.fc2.apply(t, w_fc2, a, to=y).view(start.shape)
        remembered, again = seen, (None,) * 5
        if op.remember_modulated:
            x3 = m[:, :, -1] + position
            h3, *norm3 = norm(x3, t[0], t[1], op.eps[0])
            row = op.qkv.apply(t, w_qkv, h3)
            remembered = torch.cat((kv, row[..., op.width :].unsqueeze(2)), 2)
            again = x3, h3, *norm3
        ctx.save_for_backward(
            x, h1, *norm1, q, seen, attention, o, y, h2, *norm2, u, a, *again, position, *weights, *t
        )  # fmt: skip
        ctx.op = op
        ctx.set_materialize_grads(False)
        return m, remembered

    @staticmethod
    @once_differentiable
    def backward(ctx, by_m, by_remembered):
        op = ctx.op
        x, h1, *rest = ctx.saved_tensors
        norm1, (q, seen, attention, o, y, h2), norm2, (u, a) = rest[:3], rest[3:9], rest[9:12], rest[12:14]
        (x3, h3, *norm3), position = rest[14:19], rest[19]
        w_qkv, w_out, w_fc1, w_fc2, *t = rest[20:]
        width, out, needed = op.width, [None] * len(t), [True] * len(t)

        by_m = q.new_zeros(*q.shape[:-1], x.shape[-1]) if by_m is None else by_m.clone()
        by_rows, inputs = [], [h1]  # gradients of qkv's outputs, and the inputs that they belong to
        by_position = 0
        if op.remember_modulated and by_remembered is not None:
            by_row = F.pad(by_remembered[:, :, -1], (width, 0))
            by_x3, out[0], out[1] = norm_backward(matmul(by_row, w_qkv), x3, norm3, t[0], (True, True, True))
            by_m[:, :, -1] += by_x3
            by_position = by_x3
            by_rows, inputs = [by_row], [h1, h3]
        by_m = by_m.flatten(1, 2)
        by_a = op.fc2.backward(t, w_fc2, needed, a, by_m, out)
        by_u = torch.ops.aten.gelu_backward.grad_input(by_a, u, grad_input=by_a)
        by_h2 = op.fc1.backward(t, w_fc1, needed, h2, by_u, out)
        by_y, out[2], out[3] = norm_backward(by_h2, y, norm2, t[2], (True, True, True))
        by_y += by_m
        by_o = op.out.backward(t, w_out, needed, o.flatten(1, 2), by_y, out)
        by_q, by_seen = attend_short_backward(op.heads, (q, seen), attention, by_o.view_as(o), width**-0.5)
        by_start = by_y.view(*q.shape[:-1], -1)
        by_kv = by_seen[:, :, :-1]
        if by_remembered is not None:
            by_kv = by_kv + by_remembered[:, :, :-1]
            if not op.remember_modulated:
                by_seen[:, :, -1] += by_remembered[:, :, -1]

        by_meta = by_start[:, :, 0].sum(1, keepdim=True) if op.meta else None
        by_query = by_q[:, :, 0].sum(1, keepdim=True) if op.meta else None
        by_new = by_seen[:, :, -1]
        by_row = torch.cat((by_q[:, :, -1], by_new), -1) if op.last else F.pad(by_new, (width, 0))
        by_rows.insert(0, by_row)
        by_x, by_weight, by_bias = norm_backward(matmul(by_row, w_qkv), x, norm1, t[0], (True, True, True))
        out[0], out[1] = (b if a is None else a + b for a, b in ((out[0], by_weight), (out[1], by_bias)))
        if op.last:
            by_x += by_start[:, :, -1]
        by_rows, inputs = (x[0] if len(x) == 1 else torch.cat(x, 1) for x in (by_rows, inputs))
        op.qkv.backward(t, w_qkv, needed, inputs, by_rows, out, reaches_x=False)
        by_position = (by_x + by_position).sum_to_size(position.shape)
        return None, by_x, by_position, by_kv, by_meta, by_query, *out
