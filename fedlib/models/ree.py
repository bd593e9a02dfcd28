"""Ree, the recurrent early exit shared by all sub-models (ReeFL, Eqs. 2-4).

After block l it reads the meta token and the class tokens of blocks 1..l, returns an exploitation token m_0 for the
shared classifier (Eq. 3) and an exploration token m_l that replaces the class token (Eq. 4).

Deviations: by default the history holds the *modulated* tokens m_1..m_{l-1} and the raw token of block l, as the
released code computes and the published numbers were made; ``history="raw"`` is Eq. 2 as printed. Logits are scaled by
width**-0.5 (the bottleneck's, as released), not by the head width. At exits only (Table 5) the positional rows used
are the first E+1, which the paper leaves open.
"""

import math

import torch
from torch import nn

from ..slices import STEM
from .exits import Classifier
from .layers import LayerNorm, Linear, attend, init_normal_, per_client
from .vit import MLP


class BottleneckAttention(nn.Module):
    """Self-attention inside ``width`` features: one Linear d -> 3 width, and one width -> d.

    Only two rows of its output are ever used, so it is called for these queries with the keys and values of all rows.
    """

    def __init__(self, dim: int, width: int, heads: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = Linear(dim, 3 * width, axes=(None, "residual"))
        self.out = Linear(width, dim, axes=("residual", None))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q (K, B, 2, width), k and v (K, B, n, width) -> (K, B, 2, d); no mask."""

        return self.out(attend(self.heads, q, k, v, scale=self.width**-0.5))


class Ree(nn.Module):
    """The shared early-exit module with its classifier. Positions: one row per block plus the meta token."""

    per_exit = False

    def __init__(
        self, dim: int, depth: int, num_classes: int, exit_blocks: tuple[int, ...],
        width: int = 16, heads: int = 8, mlp_ratio: float = 1.35,
        modulate: bool = True, history: str = "modulated", only_at_exits: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.exit_blocks = tuple(exit_blocks)
        self.modulate, self.history, self.only_at_exits = modulate, history, only_at_exits
        self.first_hand_back = math.inf if not modulate else self.exit_blocks[0] if only_at_exits else 0
        self.meta_token = nn.Parameter(torch.zeros(1, dim))
        self.positions = nn.Parameter(torch.zeros(depth + 1, dim))
        self.norm1 = LayerNorm(dim)
        self.attn = BottleneckAttention(dim, width, heads)
        self.norm2 = LayerNorm(dim)
        self.mlp = MLP(dim, int(dim * mlp_ratio), axes=(None, "residual"))
        self.classifier = Classifier(dim, num_classes)
        self.axes = {"meta_token": (None, "residual"), "positions": (None, "residual")}

    def init_(self, generator: torch.Generator) -> "Ree":
        init_normal_(self, generator)
        with torch.no_grad():
            self.meta_token.normal_(0, 0.02, generator=generator)
            self.positions.normal_(0, 0.02, generator=generator)
        return self

    def step(self, block: int, token: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]):
        """After ``block``: (logits or None, token to hand back to the backbone or None). Extends ``past``.

        m^l = Ree([meta; history; token] + p[:l]) (Eq. 2), of which only m_0 and m_l are used: two queries a block.
        Rows of the history never change, so ``past`` keeps their keys and values, each (K, B, width). ``token`` is the
        raw class token (K, B, d). Clients leave from the end of the cohort: older entries are cut to those alive.
        """
        is_exit = block in self.exit_blocks
        if self.only_at_exits and not is_exit:
            return None, None
        past[:] = [(k[: len(token)], v[: len(token)]) for k, v in past]
        position = len(past) + 1
        if not (is_exit or self.modulate):
            past.append(self._row(token, position)[2:])
            return None, None
        m_0, m_l, kv_last = self.tokens(token, past)
        logits = self.classifier(m_0 + token) if is_exit else None  # Eq. 3
        modulated = self.modulate and block != self.exit_blocks[-1]  # nothing reads what follows the last exit
        if modulated and self.history == "modulated":
            past.append(self._row(m_l, position)[2:])
        else:
            past.append(kv_last)
        return logits, (m_l if modulated else None)  # Eq. 4

    def tokens(self, token: torch.Tensor, past: list[tuple[torch.Tensor, torch.Tensor]]):
        """Eq. 2: (m_0, m_l), each (K, B, d), and the key and value of the raw token's row. Changes nothing."""
        meta, q_meta, *kv_meta = self._row(self._meta(token), 0)
        last, q_last, *kv_last = self._row(token, len(past) + 1)
        keys, values = (torch.stack(rows, -2) for rows in zip(kv_meta, *past, kv_last, strict=True))
        m = torch.stack((meta, last), -2)  # (K, B, 2, d)
        m = m + self.attn(torch.stack((q_meta, q_last), -2), keys, values)
        return *(m + self.mlp(self.norm2(m))).unbind(-2), tuple(kv_last)

    def _meta(self, token: torch.Tensor) -> torch.Tensor:
        """The meta token of every example, (K, B, d)."""
        return per_client(self.meta_token, token.unsqueeze(-2), 2).squeeze(-2).expand(token.shape)

    def _row(self, token: torch.Tensor, position: int) -> tuple[torch.Tensor, ...]:
        """One row of the sequence: (token + p, query, key, value)."""
        x = token + per_client(self.positions[..., position, :], token)
        return x, *self.attn.qkv(self.norm1(x)).chunk(3, -1)

    def place(self, path: list[str]) -> tuple[str, int]:
        """(role, unit): every client holds the whole of Ree."""
        return "ree", STEM
