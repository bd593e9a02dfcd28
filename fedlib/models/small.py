"""Small convnets. ``convnet3``: CAFEDistill's network with three exits for CIFAR-10 (no norms, no padding)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.conv import Conv2d, max_pool
from .maps import MapBackbone
from .measure import kept_numbers


@dataclass(frozen=True)
class ConvNetSpec:
    """Shape of a plain convnet: channels of each unit; ``size`` in pixels."""

    widths: tuple[int, ...] = (128, 128, 128)
    size: int = 32
    channels: int = 3
    reads: ClassVar[str] = "images"
    own_modes: ClassVar[tuple[str, ...]] = ("full",)

    @property
    def depth(self) -> int:
        return len(self.widths)

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """One image."""
        return (self.channels, self.size, self.size)

    def axis(self, unit: int) -> str:
        """The axis of the channels after ``unit``."""
        return f"stage{unit + 1}"

    def feature(self, unit: int) -> tuple[int, int, int]:
        """The map (C, H, W) after ``unit``."""
        size = self.size
        for _ in range(unit + 1):
            size = (size - 2) // 2
        return (self.widths[unit], size, size)

    def state(self, unit: int) -> tuple[int, int, int]:
        """What goes on after ``unit``: the map."""
        return self.feature(unit)

    def numbers(self, examples: int) -> tuple[int, int]:
        """Numbers in the widest activation of ``examples`` examples, and in all that autograd keeps of them."""
        widest, kept = kept_numbers(self)
        return examples * widest, examples * kept

    def build(self) -> "ConvNet":
        """A backbone of this shape, without weights."""
        return ConvNet(self)


CONVNETS = {"convnet3": ConvNetSpec()}


class Unit(nn.Module):
    """A 3x3 convolution without padding, ReLU, 2x2 max-pool."""

    def __init__(self, spec: ConvNetSpec, unit: int):
        super().__init__()
        before, channels = (spec.axis(unit - 1), spec.widths[unit - 1]) if unit else (None, spec.channels)
        self.conv = Conv2d(channels, spec.widths[unit], 3, bias=True, axes=(spec.axis(unit), before))

    @property
    def width(self) -> int:
        """Channels of its output, perhaps cut."""
        return self.conv.weight.shape[-4]

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', (H-2)//2, (W-2)//2)
        return max_pool(F.relu(self.conv(z)), 2)


class ConvNet(MapBackbone):
    """Units on images, without a stem."""

    def __init__(self, spec: ConvNetSpec):
        super().__init__()
        self.spec = spec
        self.stem = nn.Identity()
        self.blocks = nn.ModuleList(Unit(spec, unit) for unit in range(spec.depth))
