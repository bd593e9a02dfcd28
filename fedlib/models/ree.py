"""Ree, the recurrent early exit shared by all sub-models (ReeFL, Eqs. 2-4).

After block l it reads the meta token and the class tokens of blocks 1..l, returns an exploitation token m_0 for the
shared classifier (Eq. 3) and an exploration token m_l that replaces the class token (Eq. 4).

Deviations: by default the history holds the *modulated* tokens m_1..m_{l-1} and the raw token of block l, as the
released code computes and the published numbers were made; ``history="raw"`` is Eq. 2 as printed. Logits are scaled by
width**-0.5 (the bottleneck's, as released), not by the head width. At exits only (Table 5) the positional rows used
are the first E+1, which the paper leaves open.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from ..core.slices import STEM
from ..layers.attention import attend
from ..layers.linear import Linear, init_normal_, per_client
from ..layers.norms import LayerNorm
from .exits import Classifier, Head
from .vit import MLP


@dataclass(frozen=True)
class KeyValueCache:
    """What Ree remembers of a batch: keys and values of the rows so far, the first of them the meta token's."""

    kv: torch.Tensor  # (K, B, n, 2 width)
    meta: torch.Tensor  # the meta token at its position, (K, 1, d)
    query: torch.Tensor  # of the meta token, (K, 1, width)

    @property
    def count(self) -> int:
        return self.kv.shape[-2]

    def of(self, clients: int) -> "KeyValueCache":
        """Keep the first ``clients``."""
        if clients == self.kv.shape[0]:
            return self
        return KeyValueCache(self.kv[:clients], self.meta[:clients], self.query[:clients])

    def with_row(self, kv: torch.Tensor) -> "KeyValueCache":
        """Append one row (K, B, 2 width)."""
        return replace(self, kv=torch.cat((self.kv, kv.unsqueeze(-2)), -2))


class BottleneckAttention(nn.Module):
    """Self-attention inside ``width`` features: one Linear d -> 3 width, and one width -> d.

    Only one or two rows of its output are used, so it is called for these queries with keys and values of all rows.
    """

    def __init__(self, dim: int, width: int, heads: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = Linear(dim, 3 * width, axes=(None, "residual"))
        self.out = Linear(width, dim, axes=("residual", None))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Map q (K, B, 1 or 2, width), k and v (K, B, n, width) -> (K, B, 1 or 2, d); no mask."""
        return self.out(attend(self.heads, q, k, v, scale=self.width**-0.5))


class Ree(Head):
    """The shared early-exit module with its classifier. Positions: one row per block plus the meta token."""

    per_exit = False

    def __init__(
        self, dim: int, depth: int, num_classes: int, exit_units: tuple[int, ...],
        width: int = 16, heads: int = 8, mlp_ratio: float = 1.35,
        modulate: bool = True, history: str = "modulated", only_at_exits: bool = False,
    ):  # fmt: skip
        super().__init__(exit_units)
        self.modulate, self.history, self.only_at_exits = modulate, history, only_at_exits
        self.first_hand_back = math.inf if not modulate else self.exit_units[0] if only_at_exits else 0
        self.meta_token = nn.Parameter(torch.zeros(1, dim))
        self.positions = nn.Parameter(torch.zeros(depth + 1, dim))
        self.norm1 = LayerNorm(dim)
        self.attn = BottleneckAttention(dim, width, heads)
        self.norm2 = LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio), axes=(None, "residual"))
        self.classifier = Classifier(dim, num_classes)
        self.axes = {"meta_token": (None, "residual"), "positions": (None, "residual")}

    def init_(self, generator: torch.Generator) -> "Ree":
        init_normal_(self, generator, tables=(self.meta_token, self.positions))
        return self

    def reads(self, block: int) -> bool:
        """Return whether Ree reads the class token after ``block``."""
        return not self.only_at_exits or block in self.exit_units

    def step(self, block: int, token: torch.Tensor, past: list):
        """Run after ``block``; return (logits or None, token to hand back to the backbone or None). Extends ``past``.

        m^l = Ree([meta; history; token] + p[:l]) (Eq. 2), of which only m_0 (at exits) and m_l (where it modulates)
        are used, so only they are computed. Rows of the history never change, so ``past`` keeps their keys and values.
        ``token`` is the raw class token (K, B, d). Clients leave from the end of the cohort: older rows are cut to
        those alive.
        """
        is_exit = block in self.exit_units
        if not self.reads(block):
            return None, None
        rows = self._rows(token, past)
        modulated = self.modulate and block != self.exit_units[-1]  # nothing reads what follows the last exit
        if not (is_exit or modulated):
            past[:] = [rows.with_row(self._row(token, rows.count)[2])]
            return None, None
        m, rows = self._modulate(token, rows, is_exit, modulated, modulated and self.history == "modulated")
        past[:] = [rows]
        logits = self.classifier(m[..., 0, :] + token) if is_exit else None  # Eq. 3
        return logits, (m[..., -1, :] if modulated else None)  # Eq. 4

    def tokens(self, token: torch.Tensor, past: list) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute Eq. 2: (m_0, m_l), each (K, B, d), for the raw class token. Changes nothing."""
        m, _ = self._modulate(token, self._rows(token, past), True, True, False)
        return m[..., 0, :], m[..., 1, :]

    def _rows(self, token: torch.Tensor, past: list) -> KeyValueCache:
        """Return the rows before that of ``token``, of the clients alive: at first the meta token's alone."""
        if past:
            return past[0].of(token.shape[0])
        meta = per_client(self.meta_token, token.unsqueeze(-2), 2).squeeze(-2).expand(token.shape[0], 1, -1)
        x, q, kv = self._row(meta, 0)
        return KeyValueCache(kv.unsqueeze(-2).expand(-1, token.shape[1], -1, -1), x, q)

    def _modulate(
        self, token: torch.Tensor, rows: KeyValueCache, meta: bool, last: bool, remember_modulated: bool
    ) -> tuple[torch.Tensor, KeyValueCache]:
        """Return m_0 (``meta``) and m_l (``last``), (K, B, 1 or 2, d), and the rows with that of ``token``.

        With ``remember_modulated`` m_l's is added instead.
        """
        x, q, kv = self._row(token, rows.count)
        seen = rows.with_row(kv)
        asking = [(rows.meta.expand_as(x), rows.query.expand_as(q))] * meta + [(x, q)] * last
        x, q = (torch.stack(parts, -2) for parts in zip(*asking, strict=True))  # (K, B, 1 or 2, d), (..., width)
        m = x + self.attn(q, *seen.kv.chunk(2, -1))
        m = m + self.mlp(self.norm2(m))
        return m, rows.with_row(self._row(m[..., -1, :], rows.count)[2]) if remember_modulated else seen

    def _row(self, token: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
        """Compute one row of the sequence: (token + p, its query, its key and value side by side)."""
        x = token + per_client(self.positions[..., position, :], token)
        return x, *self.attn.qkv(self.norm1(x)).split((self.attn.width, 2 * self.attn.width), -1)

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        """Return (kind, unit, exit): every client holds the whole of Ree."""
        return "ree", STEM, None
