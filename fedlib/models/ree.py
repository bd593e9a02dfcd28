"""Ree, the recurrent early exit shared by all sub-models (ReeFL, Eqs. 2-4).

After block l it reads the meta token and the class tokens of blocks 1..l, returns an exploitation token m_0 for the
shared classifier (Eq. 3) and an exploration token m_l that replaces the class token (Eq. 4).

Deviations: by default the history holds the *modulated* tokens m_1..m_{l-1} and the raw token of block l, as the
released code computes and the published numbers were made; ``history="raw"`` is Eq. 2 as printed. Logits are scaled by
width**-0.5 (the bottleneck's, as released), not by the head width. At exits only (Table 5) the positional rows used
are the first E+1, which the paper leaves open.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..slices import STEM
from .exits import Classifier
from .layers import LayerNorm, Linear, init_normal_, per_client
from .vit import MLP


class BottleneckAttention(nn.Module):
    """Full (non-causal) self-attention inside ``width`` features: one Linear d -> 3 width, and one width -> d."""

    def __init__(self, dim: int, width: int, heads: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.qkv = Linear(dim, 3 * width, axes=(None, "residual"))
        self.out = Linear(width, dim, axes=("residual", None))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, n, d)
        lead, n = x.shape[:-2], x.shape[-2]
        qkv = self.qkv(x).view(-1, n, 3, self.heads, self.width // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(*qkv.unbind(0), scale=self.width**-0.5)
        return self.out(out.transpose(1, 2).reshape(*lead, n, self.width))


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

    def transform(self, tokens: list[torch.Tensor]) -> torch.Tensor:
        """m^l = Ree([meta; tokens] + p[:l]) (Eq. 2): tokens are l tensors (K, B, d); returns (K, B, l+1, d)."""
        first = tokens[-1]
        meta = per_client(self.meta_token, first.unsqueeze(-2), 2).expand(*first.shape[:-1], 1, -1)
        x = torch.cat((meta, torch.stack(tokens, -2)), -2)
        positions = self.positions[..., : x.shape[-2], :]  # of (rows, d) or (K, rows, d)
        x = x + per_client(positions, x, 2)
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def step(self, block: int, token: torch.Tensor, past: list[torch.Tensor]):
        """After ``block``: (logits or None, token to hand back to the backbone or None). Extends ``past``.

        ``token`` is the raw class token (K, B, d). Clients leave from the end of the cohort, so older entries of
        ``past`` are cut to the K clients still alive.
        """
        is_exit = block in self.exit_blocks
        if self.only_at_exits and not is_exit:
            return None, None
        past[:] = [p[: len(token)] for p in past]
        past.append(token)
        if not (is_exit or self.modulate):
            return None, None
        m = self.transform(past)
        logits = self.classifier(m[..., 0, :] + token) if is_exit else None  # Eq. 3
        if not self.modulate:
            return logits, None
        if self.history == "modulated":
            past[-1] = m[..., -1, :]
        return logits, m[..., -1, :]  # Eq. 4

    def place(self, path: list[str]) -> tuple[str, int]:
        """(role, unit): every client holds the whole of Ree."""
        return "ree", STEM
