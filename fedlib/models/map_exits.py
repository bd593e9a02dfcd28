"""Exits that read maps (K, B, C, H, W): pooled, then linear; the heads of convnets. See ``exits.py`` for tokens."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..layers.context import Scaler
from ..layers.conv import INITIALISATIONS, Conv2d, average_pool
from ..layers.dropout import Dropout
from ..layers.linear import Linear
from ..layers.norms import BatchNorm2d
from .backbone import Spec
from .exits import Classifiers
from .maps import MapSpec
from .towers import Gate, Separable


class Pooled(nn.Module):
    """Global average pooling, linear C -> classes (ResNets' own last layer; CAFEDistill)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        self.linear = Linear(shape[0], num_classes, axes=("classes", axis))

    def forward(self, z: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, classes)
        return self.linear(average_pool(z))


class Normed(Pooled):
    """A norm first (m-FeDepth's heads)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int):
        super().__init__(axis, shape, num_classes)
        self.scale, self.bn = Scaler("norm"), BatchNorm2d(shape[0], axis)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(self.bn(self.scale(z)))


class Activated(Normed):
    """A norm and ReLU first (the last exit of pre-activation nets)."""

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(average_pool(F.relu(self.bn(self.scale(z)))))


class Stacked(Pooled):
    """So many ``layers`` of 3x3 convolution to ``width`` channels, norm and ReLU first."""

    def __init__(
        self, axis: str, shape: tuple[int, int, int], num_classes: int, width: int, layers: int, stride: int = 1
    ):
        axes, channels = [axis, *(f"/{i + 1}" for i in range(layers))], [shape[0], *[width] * (layers - 1)]
        super().__init__(axes[-1], (width, *shape[1:]), num_classes)
        self.convs = nn.ModuleList(
            Conv2d(c, width, 3, stride, 1, axes=(after, before))
            for c, before, after in zip(channels, axes[:-1], axes[1:], strict=True)
        )
        self.scales = nn.ModuleList(Scaler("conv", "norm") for _ in self.convs)
        self.bns = nn.ModuleList(BatchNorm2d(width, after) for after in axes[1:])

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        for conv, scale, bn in zip(self.convs, self.scales, self.bns, strict=True):
            z = F.relu(bn(scale(conv(z))))
        return super().forward(z)


class Convolved(Stacked):
    """Three convolutions at 1 / ``reduction`` of the map's width first (ScaleFL's early exits)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int, reduction: int = 1):
        super().__init__(axis, shape, num_classes, shape[0] // reduction, layers=3)


class Strided(Stacked):
    """Two convolutions of stride 2 first (MSDNet)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int, width: int = 128):
        super().__init__(axis, shape, num_classes, width, layers=2, stride=2)


class Towered(Pooled):
    """A gate, then one separable convolution of stride 2 to each of ``widths`` channels first (DepthFL's towers)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int, widths: Sequence[int] = ()):
        axes, channels = [axis, *(f"/{i + 1}" for i in range(len(widths)))], [shape[0], *widths]
        super().__init__(axes[-1], (channels[-1], *shape[1:]), num_classes)
        self.gate = Gate(shape[0], axis)
        self.tower = nn.Sequential(
            *(
                Separable(c, width, after, before, after)
                for c, width, before, after in zip(channels[:-1], widths, axes[:-1], axes[1:], strict=True)
            )
        )

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(self.tower(self.gate(z)))


class Dropped(Pooled):
    """Dropout after pooling."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int, dropout: float = 0.0):
        super().__init__(axis, shape, num_classes)
        self.drop = Dropout(dropout)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(self.drop(average_pool(z)))


class Pointwise(Dropped):
    """A 1x1 convolution to ``width`` channels, norm and SiLU first (EfficientNet's own last layers)."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int, width: int, dropout: float = 0.0):
        super().__init__("/wide", (width, *shape[1:]), num_classes, dropout)
        self.conv, self.scale = Conv2d(shape[0], width, 1, axes=("/wide", axis)), Scaler("conv", "norm")
        self.bn = BatchNorm2d(width, "/wide")

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return super().forward(F.silu(self.bn(self.scale(self.conv(z)))))


class Flattened(nn.Module):
    """Linear on all of the map (CAFEDistill's ConvNet), as a convolution by a kernel of the map's size."""

    def __init__(self, axis: str, shape: tuple[int, int, int], num_classes: int):
        super().__init__()
        self.linear = Conv2d(shape[0], num_classes, shape[1], bias=True, axes=("classes", axis))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return self.linear(z).flatten(-3)


def classifiers(spec: Spec, num_classes: int, exit_units: Sequence[int]) -> nn.Module:
    """One classifier per exit, of the kind that reads what the backbone's exits see: a token, or a map."""
    if len(spec.feature(0)) == 1:
        bare = spec.depth - 1 if spec.ends_normalised else None
        return Classifiers(spec.feature(0)[0], num_classes, tuple(exit_units), bare)
    return PooledClassifiers(spec, num_classes, exit_units, spec.exit_head or "linear", spec.final_exit)


KINDS = {
    "linear": Pooled, "norm": Normed, "norm_relu": Activated, "convolutions": Convolved, "flatten": Flattened,
    "strided": Strided, "towers": Towered, "dropped": Dropped, "pointwise": Pointwise,
}  # fmt: skip


class PooledClassifiers(nn.Module):
    """One classifier per exit on the map after the exit's unit; ``early`` and ``final`` name their kinds in ``KINDS``.

    ``final`` is that of the exit at the backbone's last unit. ``ValueError`` for an unknown kind.
    """

    per_exit = True
    first_hand_back = math.inf

    def __init__(
        self, spec: MapSpec, num_classes: int, exit_units: Sequence[int], early: str = "linear", final: str = "linear"
    ):
        super().__init__()
        for kind in (early, final):
            if kind not in KINDS:
                raise ValueError(f"exit head {kind!r} is unknown; allowed: {', '.join(KINDS)}")
        self.exit_units, self.init = tuple(exit_units), spec.init
        kinds = [final if unit == spec.depth - 1 else early for unit in self.exit_units]
        self.exits = nn.ModuleList(
            KINDS[kind](spec.stream(unit), spec.feature(unit), num_classes, **spec.exit_options(kind, unit))
            for kind, unit in zip(kinds, self.exit_units, strict=True)
        )

    def init_(self, generator: torch.Generator) -> "PooledClassifiers":
        """As the backbone's spec says, in place."""
        INITIALISATIONS[self.init](self, generator)
        return self

    def reads(self, unit: int) -> bool:
        return unit in self.exit_units

    def step(self, unit: int, feature: torch.Tensor, past: list) -> tuple[torch.Tensor | None, None]:
        """After ``unit``: (logits (K, B, classes) or None, nothing to hand back)."""
        if unit not in self.exit_units or not len(feature):
            return None, None
        return self.exits[self.exit_units.index(unit)](feature), None

    def place(self, path: list[str]) -> tuple[str, int, int]:
        """(kind, unit, exit) of the parameter at ``path`` inside this head."""
        j = int(path[1])
        return "head", self.exit_units[j], j
