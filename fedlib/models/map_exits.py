"""Exits that read maps (K, B, C, H, W): pooled, then linear; the heads of convnets. See ``exits.py`` for tokens.

A shallow exit of DepthFL's sees large, narrow maps. Its tower takes them to the size and width of the last ones before
they are pooled, through separable convolutions of its own that cost little, and first weighs every value by what its
surroundings say (a gate).
"""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from ..core.validation import check_known
from ..layers.context import Scaler
from ..layers.conv import INITIALISATIONS, Conv2d, average_pool, fold_clients, split_clients
from ..layers.dropout import Dropout
from ..layers.linear import Linear
from ..layers.norms import BatchNorm2d
from .backbone import Spec
from .exits import Classifiers, Head, Pooler
from .maps import MapSpec

Shape = tuple[int, int, int]  # (C, H, W)


class Pooled(nn.Module):
    """Global average pooling, dropout, linear C -> classes (ResNets' own last layer; CAFEDistill)."""

    def __init__(self, axis: str, shape: Shape, num_classes: int, dropout: float = 0.0):
        super().__init__()
        self.linear, self.drop = Linear(shape[0], num_classes, axes=("classes", axis)), Dropout(dropout)

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, classes)
        return self.linear(self.drop(average_pool(z)))


class Normed(Pooled):
    """A norm first (m-FeDepth's heads), and ReLU (the last exit of pre-activation nets)."""

    def __init__(self, axis: str, shape: Shape, num_classes: int, relu: bool = False):
        super().__init__(axis, shape, num_classes)
        self.relu, self.scale, self.bn = relu, Scaler("norm"), BatchNorm2d(shape[0], axis)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = self.bn(self.scale(z))
        return super().forward(F.relu(z) if self.relu else z)


class Convolved(Pooled):
    """So many ``layers`` of 3x3 convolution, norm and ReLU first: ScaleFL's early exits, MSDNet's (of stride 2).

    They make ``width`` channels, by default 1 / ``reduction`` of the map's.
    """

    def __init__(
        self, axis: str, shape: Shape, num_classes: int, width: int = 0, reduction: int = 1, layers: int = 3,
        stride: int = 1,
    ):  # fmt: skip
        width, axes = width or shape[0] // reduction, [axis, *(f"/{i + 1}" for i in range(layers))]
        super().__init__(axes[-1], (width, *shape[1:]), num_classes)
        self.convs = nn.ModuleList(
            Conv2d(c, width, 3, stride, 1, axes=(after, before))
            for c, before, after in zip([shape[0], *[width] * (layers - 1)], axes[:-1], axes[1:], strict=True)
        )
        self.scales = nn.ModuleList(Scaler("conv", "norm") for _ in self.convs)
        self.bns = nn.ModuleList(BatchNorm2d(width, after) for after in axes[1:])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        for conv, scale, bn in zip(self.convs, self.scales, self.bns, strict=True):
            z = F.relu(bn(scale(conv(z))))
        return super().forward(z)


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
        weight = F.interpolate(fold_clients(seen), z.shape[-2:], mode="bilinear").sigmoid()
        return z * split_clients(weight, len(z))


class Towered(Pooled):
    """A gate, then one separable convolution of stride 2 to each of ``widths`` channels first (DepthFL's towers)."""

    def __init__(self, axis: str, shape: Shape, num_classes: int, widths: Sequence[int] = ()):
        axes, channels = [axis, *(f"/{i + 1}" for i in range(len(widths)))], [shape[0], *widths]
        super().__init__(axes[-1], (channels[-1], *shape[1:]), num_classes)
        self.gate = Gate(shape[0], axis)
        steps = zip(channels[:-1], widths, axes[:-1], axes[1:], strict=True)
        self.tower = nn.Sequential(*(Separable(c, width, after, before, after) for c, width, before, after in steps))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tower(self.gate(z)))


class Pointwise(Pooled):
    """A 1x1 convolution to ``width`` channels, norm and SiLU first (EfficientNet's own last layers)."""

    def __init__(self, axis: str, shape: Shape, num_classes: int, width: int, dropout: float = 0.0):
        super().__init__("/wide", (width, *shape[1:]), num_classes, dropout)
        self.conv, self.scale = Conv2d(shape[0], width, 1, axes=("/wide", axis)), Scaler("conv", "norm")
        self.bn = BatchNorm2d(width, "/wide")

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(F.silu(self.bn(self.scale(self.conv(z)))))


class Flattened(nn.Module):
    """Linear on all of the map (CAFEDistill's ConvNet), as a convolution by a kernel of the map's size."""

    def __init__(self, axis: str, shape: Shape, num_classes: int):
        super().__init__()
        self.linear = Conv2d(shape[0], num_classes, shape[1], bias=True, axes=("classes", axis))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(z).flatten(-3)


KINDS = {
    "linear": Pooled, "norm": Normed, "norm_relu": partial(Normed, relu=True), "convolutions": Convolved,
    "flatten": Flattened, "strided": partial(Convolved, width=128, layers=2, stride=2), "towers": Towered,
    "dropped": Pooled, "pointwise": Pointwise,
}  # fmt: skip


class PooledClassifiers(Head):
    """One classifier per exit on the map after the exit's unit; ``early`` and ``final`` name their kinds in ``KINDS``.

    ``final`` is that of the exit at the backbone's last unit. ``ValueError`` for an unknown kind.
    """

    def __init__(
        self, spec: MapSpec, num_classes: int, exit_units: Sequence[int], early: str = "linear", final: str = "linear"
    ):
        check_known((early, final), KINDS, "exit head {} is unknown")
        kinds = [final if unit == spec.depth - 1 else early for unit in exit_units]
        exits = (
            KINDS[kind](spec.stream(unit), spec.feature(unit), num_classes, **spec.exit_options(kind, unit))
            for kind, unit in zip(kinds, exit_units, strict=True)
        )
        super().__init__(exit_units, exits)
        self.init = spec.init

    def init_(self, generator: torch.Generator) -> "PooledClassifiers":
        """Initialise as the backbone's spec says, in place."""
        INITIALISATIONS[self.init](self, generator)
        return self


def classifiers(spec: Spec, num_classes: int, exit_units: Sequence[int]) -> Head:
    """Build one classifier per exit, of the kind that reads what the backbone's exits see: a token, or a map."""
    if len(spec.feature(0)) == 1:
        bare = spec.depth - 1 if spec.ends_normalised else None
        return Classifiers(spec.feature(0)[0], num_classes, exit_units, bare)
    return PooledClassifiers(spec, num_classes, exit_units, spec.exit_head or "linear", spec.final_exit)


def scaling_exits(spec: Spec, num_classes: int, exit_units: Sequence[int]) -> Head:
    """Build the exits that ScaleFL adds to a backbone of shape ``spec``, and its own last one."""
    if len(spec.feature(0)) == 3:
        return PooledClassifiers(spec, num_classes, exit_units, spec.exit_head or spec.early_exit, spec.final_exit)
    if spec.reads == "tokens":
        return Head(exit_units, (Pooler(spec.feature(0)[0], num_classes) for _ in exit_units))
    return Classifiers(spec.feature(0)[0], num_classes, exit_units)
