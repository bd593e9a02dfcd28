"""Small convnets. ``convnet3``: CAFEDistill's network with three exits for CIFAR-10 (no norms, no padding)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.conv import Conv2d, max_pool
from .backbone import shapes
from .maps import MapBackbone, MapSpec


@dataclass(frozen=True, kw_only=True)
class ConvNetSpec(MapSpec):
    """Shape of a plain convnet: channels of each unit."""

    widths: tuple[int, ...] = (128, 128, 128)
    init: str = "uniform"  # PyTorch's own: by He's, 2.45 times as large, it diverges at CAFEDistill's rate
    final_exit: ClassVar[str] = "flatten"

    @property
    def depth(self) -> int:
        return len(self.widths)

    def stream(self, unit: int) -> str:
        """Return the axis of the channels after ``unit``."""
        return f"stage{unit + 1}"

    def feature(self, unit: int) -> tuple[int, int, int]:
        """Return the shape of the map (C, H, W) after ``unit``."""
        size = self.size
        for _ in range(unit + 1):
            size = (size - 2) // 2
        return (self.widths[unit], size, size)

    def build(self) -> MapBackbone:
        """Build units on images, without a stem and without weights."""
        return MapBackbone(self, nn.Identity(), (Unit(self, unit) for unit in range(self.depth)))


CONVNETS = shapes(ConvNetSpec)


class Unit(nn.Module):
    """A 3x3 convolution without padding, ReLU, 2x2 max-pool."""

    def __init__(self, spec: ConvNetSpec, unit: int):
        super().__init__()
        before, channels = (spec.stream(unit - 1), spec.widths[unit - 1]) if unit else (None, spec.channels)
        self.conv = Conv2d(channels, spec.widths[unit], 3, bias=True, axes=(spec.stream(unit), before))

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', (H-2)//2, (W-2)//2)
        return max_pool(F.relu(self.conv(z)), 2)
