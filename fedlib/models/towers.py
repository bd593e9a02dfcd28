"""What stands in an exit tower: separable convolutions of stride 2, and a gate (DepthFL's shallow exits).

A shallow exit sees large, narrow maps. A tower takes them to the size and width of the last ones before they are
pooled, through convolutions of its own that cost little, and first weighs every value by what its surroundings say.
Read next: ``map_exits.Towered``.
"""

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.context import Scaler
from ..layers.conv import Conv2d, apart, side_by_side
from ..layers.norms import BatchNorm2d


class Separable(nn.Module):
    """Depthwise 3x3 and 1x1 convolution, norm, ReLU, twice: the first at ``stride``, the second to ``width`` channels.

    ``name`` tells the axes of several in one exit apart; the axis of the output is ``after``.
    """

    def __init__(self, channels: int, width: int, name: str, before: str, after: str, stride: int = 2):
        super().__init__()
        inner = f"{name}/inner"
        self.depthwise1 = Conv2d(channels, channels, 3, stride, 1, groups=channels, axes=(before, None))
        self.pointwise1 = Conv2d(channels, channels, 1, axes=(inner, before))
        self.depthwise2 = Conv2d(channels, channels, 3, 1, 1, groups=channels, axes=(inner, None))
        self.pointwise2 = Conv2d(channels, width, 1, axes=(after, inner))
        self.scale1, self.scale2 = Scaler("conv", "norm"), Scaler("conv", "norm")
        self.bn1, self.bn2 = BatchNorm2d(channels, inner), BatchNorm2d(width, after)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, width, H/2, W/2)
        z = F.relu(self.bn1(self.scale1(self.pointwise1(self.depthwise1(z)))))
        return F.relu(self.bn2(self.scale2(self.pointwise2(self.depthwise2(z)))))


class Gate(nn.Module):
    """z times a weight in [0.5, 1) for each of its values: sigmoid(upsample(relu(norm(separable(z)))))."""

    def __init__(self, channels: int, axis: str):
        super().__init__()
        self.separable, self.bn = Separable(channels, channels, "/gate", axis, axis), BatchNorm2d(channels, axis)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        seen = F.relu(self.bn(self.separable(z)))
        weight = F.interpolate(side_by_side(seen), z.shape[-2:], mode="bilinear").sigmoid()
        return z * apart(weight, len(z))
