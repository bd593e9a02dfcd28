"""Backbones whose state is one map (K, B, C, H, W), which is also what their exits see."""

import torch
from torch import nn

from ..layers.conv import init_kaiming_, sample_and_pad
from .backbone import Backbone


class MapBackbone(Backbone):
    """A ``stem`` and ``blocks``, of which the last has a ``width``: its channels, perhaps cut."""

    blocks: nn.ModuleList

    def init_(self, generator: torch.Generator) -> "MapBackbone":
        """He initialisation, in place."""
        init_kaiming_(self, generator)
        return self

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``unit``: the map after it, of all clients, and of the first ``on``."""
        z = self.blocks[unit](z)
        return z, z if on == len(z) else z[:on]

    def bridge(self, feature: torch.Tensor, unit: int) -> torch.Tensor:
        """The map after ``unit`` in the shape of the last unit's: sub-sampled, zero channels around it (FeDepth)."""
        return sample_and_pad(feature, (self.blocks[-1].width, *self.spec.feature(self.spec.depth - 1)[1:]))
