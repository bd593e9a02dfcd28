"""Exits that answer at every token: for spans and next tokens, where a class token would not do.

The backbone then hands all its tokens to the exits (``Backbone.reads_all``), and :class:`EveryToken` runs a method's
exits on each of them. Read next: ``exits.py``, ``data/tasks.py``.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class EveryToken(nn.Module):
    """The exits ``each`` on every token of a row of ``length``: features (K, B, T, d) -> outputs (K, B, length, C).

    Padding, the zero vector, answers ``blank``: minus infinity where tokens compete (spans), else zero. ``ValueError``
    for exits that hand a class token back.
    """

    def __init__(self, each: nn.Module, length: int, compete: bool):
        super().__init__()
        if each.first_hand_back != math.inf:
            name = type(each).__name__
            raise ValueError(f"experiment: exits that hand the class token back ({name}) cannot answer at every token")
        self.each, self.length, self.blank = each, length, -math.inf if compete else 0.0
        self.per_exit, self.first_hand_back = each.per_exit, math.inf

    def init_(self, generator: torch.Generator) -> "EveryToken":
        self.each.init_(generator)
        return self

    def reads(self, unit: int) -> bool:
        return self.each.reads(unit)

    def step(self, unit: int, feature: torch.Tensor, past: list) -> tuple[torch.Tensor | None, None]:
        """After ``unit``: (outputs (K, B, length, C) or None, no token)."""
        out, _ = self.each.step(unit, feature.flatten(1, 2), past)
        if out is None:
            return None, None
        padding = ~(feature != 0).any(-1, keepdim=True)
        out = out.unflatten(1, feature.shape[1:3]).masked_fill(padding, self.blank)
        return F.pad(out, (0, 0, 0, self.length - out.shape[2]), value=self.blank), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        """(kind, unit, exit) of the parameter at ``path`` inside this head."""
        return self.each.place(path[1:])
