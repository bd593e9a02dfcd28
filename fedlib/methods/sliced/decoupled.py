"""Decoupled federated averaging (the baseline of ScaleFL): one model for each level, which share nothing.

Client (level j): ScaleFL's sub-model of level j with its last exit alone; cross-entropy. Server: per level the plain
mean over the level's clients. Level j is evaluated with its own model.
Read next: ``scaling.ModelsApart``, ``feddf.py`` (models of unequal levels learn from each other).

Deviations: none known; the slides say no more than the first line.
"""

from dataclasses import dataclass

from ..scaling import ModelsApart


@dataclass(frozen=True)
class Decoupled(ModelsApart):
    """The levels are ScaleFL's."""

    label, color, marker = "Decoupled", "#7f5532", "<"
