"""Exits as classifiers on the class token: one per exit (every method but ReeFL), or one shared by all.

A *head* has ``per_exit`` (does each exit own its parameters?), ``first_hand_back`` (after which block it first hands a
token back), ``reads(block)`` (does it look at the class token after that block?), ``step(block, token, past)`` and
``place(path)``.
"""

import math

import torch
from torch import nn

from ..core.slices import STEM
from ..layers.linear import Linear, init_normal_
from ..layers.norms import LayerNorm


class Classifier(nn.Module):
    """LN (eps 1e-5), then Linear d -> C. The backbone's own final norm is not used; if it is, there is no LN."""

    def __init__(self, dim: int, num_classes: int, norm: bool = True):
        super().__init__()
        self.norm = LayerNorm(dim) if norm else nn.Identity()
        self.linear = Linear(dim, num_classes, axes=("classes", "residual"))

    def forward(self, token: torch.Tensor) -> torch.Tensor:  # (K, B, d) -> (K, B, C)
        return self.linear(self.norm(token))


class Classifiers(nn.Module):
    """One classifier per exit on the raw class token of the exit's block; nothing is handed back to the backbone.

    The exit after unit ``bare`` reads what is normalised already.
    """

    per_exit = True
    first_hand_back = math.inf

    def __init__(self, dim: int, num_classes: int, exit_units: tuple[int, ...], bare: int | None = None):
        super().__init__()
        self.exit_units = tuple(exit_units)
        self.exits = nn.ModuleList(Classifier(dim, num_classes, unit != bare) for unit in exit_units)

    def init_(self, generator: torch.Generator) -> "Classifiers":
        init_normal_(self, generator)
        return self

    def reads(self, block: int) -> bool:
        return block in self.exit_units

    def step(self, block: int, token: torch.Tensor, past: list):
        """After ``block``: (logits (K, B, C) or None, no token)."""
        if block not in self.exit_units or not len(token):
            return None, None
        return self.exits[self.exit_units.index(block)](token), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        """(kind, unit, exit) of the parameter at ``path`` inside this head."""
        j = int(path[1])
        return "head", self.exit_units[j], j


class SharedClassifier(nn.Module):
    """One classifier shared by all exits, without Ree (the decomposition of ReeFL's Appendix G)."""

    per_exit = False
    first_hand_back = math.inf

    def __init__(self, dim: int, num_classes: int, exit_units: tuple[int, ...]):
        super().__init__()
        self.exit_units = tuple(exit_units)
        self.classifier = Classifier(dim, num_classes)

    def init_(self, generator: torch.Generator) -> "SharedClassifier":
        init_normal_(self, generator)
        return self

    def reads(self, block: int) -> bool:
        return block in self.exit_units

    def step(self, block: int, token: torch.Tensor, past: list):
        return (self.classifier(token) if block in self.exit_units else None), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        return "head", STEM, None
