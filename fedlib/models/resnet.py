"""Residual networks for small images, whose units are residual blocks, run one at a time for a client or a cohort.

``resnet20`` to ``resnet110`` (He et al., CVPR 2016, section 4.2): three stages of 16, 32 and 64 channels, with option
B's projections (1x1 convolution and norm) where the width changes. ``resnet18_cifar``: four stages of 64 to 512 behind
a 3x3 stem, no max-pool (``resnet18`` is timm's, for larger images). ``preresnet20``: pre-activation blocks (He et al.,
ECCV 2016) as FeDepth's release has them.
Read next: ``map_exits.py``.

Deviations of ``form="fedepth"``: as released, a block's identity shortcut starts after its first norm and ReLU, and a
norm follows the stem; ``form="pre"`` is the paper's block.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.context import Scaler
from ..layers.conv import Conv2d
from ..layers.norms import BatchNorm2d
from .backbone import shapes
from .maps import ConvNorm, MapBackbone, MapSpec


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(MapSpec):
    """Shape of a residual network: residual blocks and channels of each stage."""

    blocks: tuple[int, ...] = (3, 3, 3)
    widths: tuple[int, ...] = (16, 32, 64)
    form: Literal["post", "pre", "fedepth"] = "post"  # where the activations stand

    @property
    def depth(self) -> int:
        return sum(self.blocks)

    def stage(self, unit: int) -> int:
        """Return the stage of block ``unit``, from 0."""
        return sum(unit >= end for end in accumulate(self.blocks))

    def stream(self, unit: int) -> str:
        """Return the axis of the channels after ``unit``; -1 is the stem. A stage's residual stream is one axis."""
        return f"stage{self.stage(max(unit, 0)) + 1}"

    def feature(self, unit: int) -> tuple[int, int, int]:
        """Return the shape of the map (C, H, W) after ``unit``."""
        stage = self.stage(max(unit, 0))
        size = -(-self.size // 2**stage)
        return (self.widths[stage], size, size)

    @property
    def final_exit(self) -> str:
        """The last exit's kind: pre-activation nets end in a norm and ReLU."""
        return "linear" if self.form == "post" else "norm_relu"

    def build(self) -> MapBackbone:
        """Build a stem and residual blocks, without weights."""
        block, activates = (PostBlock, F.relu) if self.form == "post" else (PreBlock, nn.Identity())
        stem = ConvNorm(self.channels, self.feature(-1)[0], 3, 1, (self.stream(-1), None), activates)
        if self.form == "pre":
            stem.scale, stem.bn = Scaler("conv"), nn.Identity()
        return MapBackbone(self, stem, (block(self, unit) for unit in range(self.depth)))


RESNETS = shapes(ResNetSpec)


class Block(nn.Module):
    """Two 3x3 convolutions of block ``unit`` and what goes past them; ``/mid`` is the axis between the two."""

    def __init__(self, spec: ResNetSpec, unit: int):
        super().__init__()
        (channels, size, _), (width, out_size, _) = spec.feature(unit - 1), spec.feature(unit)
        before, after, stride = spec.stream(unit - 1), spec.stream(unit), (1 if size == out_size else 2)
        self.conv1 = Conv2d(channels, width, 3, stride, 1, axes=("/mid", before))
        self.conv2 = Conv2d(width, width, 3, 1, 1, axes=(after, "/mid"))
        self.projection = Conv2d(channels, width, 1, stride, axes=(after, before)) if before != after else None


class PostBlock(Block):
    """relu(bn2(conv2(relu(bn1(conv1(z))))) + shortcut(z)), where a projection has a norm of its own."""

    def __init__(self, spec: ResNetSpec, unit: int):
        super().__init__(spec, unit)
        width, axis = self.conv2.out_channels, spec.stream(unit)
        self.bn1, self.bn2 = BatchNorm2d(width, "/mid"), BatchNorm2d(width, axis)
        self.scale1, self.scale2 = Scaler("conv", "norm"), Scaler("conv", "norm")
        if self.projection is not None:
            self.projection_scale, self.projection_bn = Scaler("shortcut", "norm"), BatchNorm2d(width, axis)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', H', W')
        y = F.relu(self.bn1(self.scale1(self.conv1(z))))
        y = self.bn2(self.scale2(self.conv2(y)))
        if self.projection is not None:
            z = self.projection_bn(self.projection_scale(self.projection(z)))
        return F.relu(y + z)


class PreBlock(Block):
    """conv2(relu(bn2(conv1(a)))) + shortcut, a = relu(bn1(z)); a projection reads a, the identity z (FeDepth: a)."""

    def __init__(self, spec: ResNetSpec, unit: int):
        super().__init__(spec, unit)
        self.late = spec.form == "fedepth"
        self.bn1 = BatchNorm2d(self.conv1.in_channels, spec.stream(unit - 1))
        self.bn2 = BatchNorm2d(self.conv1.out_channels, "/mid")
        self.norm_scale, self.mid_scale = Scaler("norm"), Scaler("conv", "norm")
        self.scale, self.shortcut_scale = Scaler("conv"), Scaler("shortcut")

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', H', W')
        a = F.relu(self.bn1(self.norm_scale(z)))
        y = F.relu(self.bn2(self.mid_scale(self.conv1(a))))
        if self.projection is not None:
            shortcut = self.shortcut_scale(self.projection(a))
        else:
            shortcut = self.shortcut_scale(a) if self.late else z  # a comes out of a norm, z out of scaled layers
        return self.scale(self.conv2(y)) + shortcut
