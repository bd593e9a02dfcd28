"""Decoupled federated averaging (the baseline of ScaleFL): one model for each level, which share nothing.

Client (level j): ScaleFL's sub-model of level j with its last exit alone; cross-entropy. Server: per level the plain
mean over the level's clients. Level j is evaluated with its own model.
Read next: ``feddf.py`` (models of unequal levels learn from each other).

Deviations: none known; the slides say no more than the first line.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.slices import Slice
from ..base import Method
from ..jobs import Round, Server, Setting
from ..scaling import Levels, apart, with_copies


@dataclass(frozen=True)
class Decoupled(Levels, Method):
    """The levels are ScaleFL's."""

    label, color, marker = "Decoupled", "#7f5532", "<"

    weighting: Literal["examples", "clients"] = "clients"

    def part(self, level: int, setting: Setting) -> Slice:
        return apart(super().part(level, setting), level, setting)

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        return Server(0, with_copies(params, [self.part(j, setting) for j in range(setting.num_exits)]), {})

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        return self.part(exit, r.setting)
