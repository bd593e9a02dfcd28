"""EfficientNet (Tan and Le, ICML 2019), whose units are inverted residual blocks, for a client or a cohort.

By default a spec has the shape of timm's ``efficientnet_b4``, which is had from timm with its weights.
``efficientnet_b4_scalefl`` is what ScaleFL's release trains: a stem of 32 channels, other repeats and strides,
no last 1x1 convolution, dropout of 0.4 before the classifier and stochastic depth of up to 0.2. ``efficientnet_slim``
is for 32 x 32 pixels on a CPU, and large enough that pooled exits for 200 classes are a tenth of it; exits of three
convolutions keep the map's channels, of which a sixth would be 4. A stage's blocks share one axis; a block's widened
channels and those of its squeeze-and-excitation are its own.
Read next: ``maps.py``, ``layers/dropout.py``.
"""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import nn

from fedlib.layers.context import Scaler
from fedlib.layers.conv import Conv2d, average_pool
from fedlib.layers.dropout import Dropout
from fedlib.layers.linear import Linear
from fedlib.layers.norms import BatchNorm2d
from fedlib.models.backbone import shapes
from fedlib.models.maps import ConvNorm, MapBackbone, MapSpec

SQUEEZE = 0.25  # channels inside a squeeze-and-excitation, as a share of the block's input


@dataclass(frozen=True, kw_only=True)
class EfficientNetSpec(MapSpec):
    """Shape of an EfficientNet: blocks, channels, kernel, stride and expansion of each stage."""

    size: int = 224
    stem: int = 48
    stem_stride: int = 2
    repeats: tuple[int, ...] = (2, 4, 4, 6, 6, 8, 2)
    widths: tuple[int, ...] = (24, 32, 56, 112, 160, 272, 448)
    kernels: tuple[int, ...] = (3, 3, 5, 3, 5, 5, 3)
    strides: tuple[int, ...] = (1, 2, 2, 2, 1, 2, 1)
    expansions: tuple[int, ...] = (1, 6, 6, 6, 6, 6, 6)
    head_width: int = 1792  # channels of the last 1x1 convolution; 0: there is none
    dropout: float = 0.0  # before the last classifier
    drop_connect: float = 0.0  # of the last block; earlier ones in proportion to their depth
    exit_reduction: int = 6  # the map's channels for one inside ScaleFL's early exits

    @property
    def depth(self) -> int:
        return sum(self.repeats)

    def stage(self, unit: int) -> int:
        """Return the stage of block ``unit``, from 0; -1: the stem."""
        return sum(unit >= end for end in accumulate(self.repeats)) if unit >= 0 else -1

    def stream(self, unit: int) -> str:
        """Return the axis of the channels after ``unit``."""
        return f"stage{self.stage(unit) + 1}"

    def feature(self, unit: int) -> tuple[int, int, int]:
        """Return the shape of the map (C, H, W) after ``unit``."""
        stage, size = self.stage(unit), -(-self.size // self.stem_stride)
        for stride in self.strides[: stage + 1]:
            size = -(-size // stride)
        return (self.widths[stage] if stage >= 0 else self.stem, size, size)

    @property
    def final_exit(self) -> str:
        """The last exit's kind."""
        return "pointwise" if self.head_width else "dropped"

    def exit_options(self, kind: str, unit: int) -> dict[str, object]:
        dropped, convolutions = {"dropout": self.dropout}, {"reduction": self.exit_reduction}
        of = {"convolutions": convolutions, "pointwise": {"width": self.head_width} | dropped, "dropped": dropped}
        return of.get(kind) or super().exit_options(kind, unit)

    def build(self) -> MapBackbone:
        """Build a stem and inverted residual blocks, without weights."""
        stem = ConvNorm(self.channels, self.stem, 3, self.stem_stride, (self.stream(-1), None), F.silu)
        return MapBackbone(self, stem, (Inverted(self, unit) for unit in range(self.depth)))


EFFICIENTNETS = shapes(EfficientNetSpec)


class Excitation(nn.Module):
    """Squeeze and excitation: channels weighed by what their means say."""

    def __init__(self, width: int, squeezed: int, axis: str):
        super().__init__()
        self.reduce = Linear(width, squeezed, axes=("/squeezed", axis))
        self.expand = Linear(squeezed, width, axes=(axis, "/squeezed"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W)
        return x * self.expand(F.silu(self.reduce(average_pool(x)))).sigmoid()[..., None, None]


class Inverted(nn.Module):
    """Widen by a 1x1 convolution, depthwise convolution, excitation, 1x1 convolution; and what goes past it."""

    def __init__(self, spec: EfficientNetSpec, unit: int):
        super().__init__()
        stage, before, after = spec.stage(unit), spec.stream(unit - 1), spec.stream(unit)
        channels, width = spec.feature(unit - 1)[0], spec.widths[stage]
        first = before != after
        stride, kernel = spec.strides[stage] if first else 1, spec.kernels[stage]
        mid, widens = channels * spec.expansions[stage], spec.expansions[stage] > 1
        inner = "/mid" if widens else before
        self.widen = Conv2d(channels, mid, 1, axes=(inner, before)) if widens else None
        if widens:
            self.widen_scale, self.widen_bn = Scaler("conv", "norm"), BatchNorm2d(mid, inner)
        self.depthwise = Conv2d(mid, mid, kernel, stride, kernel // 2, groups=mid, axes=(inner, None))
        self.scale, self.bn = Scaler("conv", "norm"), BatchNorm2d(mid, inner)
        self.excite = Excitation(mid, round(SQUEEZE * channels), inner)
        self.project = Conv2d(mid, width, 1, axes=(after, inner))
        self.project_scale, self.project_bn = Scaler("conv", "norm"), BatchNorm2d(width, after)
        self.adds = stride == 1 and not first
        self.drop = Dropout(spec.drop_connect * unit / spec.depth, whole=True)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', H', W')
        y = z if self.widen is None else F.silu(self.widen_bn(self.widen_scale(self.widen(z))))
        y = self.excite(F.silu(self.bn(self.scale(self.depthwise(y)))))
        y = self.project_bn(self.project_scale(self.project(y)))
        return self.drop(y) + z if self.adds else y
