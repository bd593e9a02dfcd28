"""Multi-scale dense networks (Huang et al., ICLR 2018) for small images: every layer adds maps at three scales.

``msdnet24`` is ScaleFL's: 24 layers, scales of 32, 16 and 8 pixels, 16 channels and a growth of 6 at the finest, twice
and four times as many at the next. The finest scale is dropped after a third and after two thirds of the layers (the
release's "max" pruning), where a 1x1 transition halves the channels: of the finest scale's growth, times a scale's
factor. Exits read the coarsest scale.
Every input is a concatenation of what all earlier layers made: its axis has a segment for each of them, so that a cut
keeps the leading part of each. Read next: ``maps.py``, ``map_exits.py`` (``strided`` exits).

Deviations: of a cut net every axis keeps floor(s n); the release cuts the growth rate first and multiplies then. Maps
of unequal scales are scaled alike (``Scaler``); the release has no scaler here, and behind a norm it does nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import nn

from fedlib.core.slices import Axis
from fedlib.layers.conv import sample_and_pad
from fedlib.models.backbone import shapes
from fedlib.models.maps import ConvNorm, MapBackbone, MapSpec


@dataclass(frozen=True, kw_only=True)
class MSDNetSpec(MapSpec):
    """Shape of a multi-scale dense network; ``factors`` times ``base`` and ``growth`` are a scale's channels."""

    layers: int = 24
    base: int = 16
    growth: int = 6
    factors: tuple[int, ...] = (1, 2, 4)  # of each scale, finest first
    bottlenecks: tuple[int, ...] = (1, 2, 4)  # channels between the two convolutions, in terms of those that they add
    reduction: float = 0.5  # of the channels, where a scale is dropped
    exit_width: int = 128

    early_exit = final_exit = "strided"
    one_state = False

    @property
    def depth(self) -> int:
        return self.layers

    def first_scale(self, unit: int) -> int:
        """Return the finest scale that is live after ``unit`` (-1: the stem), from 0."""
        return max(unit, 0) // -(-self.layers // len(self.factors))

    @cached_property
    def segments(self) -> dict[str, tuple[int, ...]]:
        """Of every stream's axis the channels of each part, in order; ``raw``: before the transition."""
        out, live = {}, {}
        for s, factor in enumerate(self.factors):
            live[s] = (self.base * factor,)
            out[self.axis_of(s, -1)] = live[s]
        for unit in range(self.layers):
            first, drops = self.first_scale(unit), self.drops(unit)
            for s in range(first, len(self.factors)):
                added = self.growth * self.factors[s]
                live[s] += (added,) if s == first and not drops else (added // 2, added // 2)
                if drops:
                    out[self.axis_of(s, unit) + "/raw"] = live[s]
                    finest = sum(live[s]) // self.factors[s]  # channels in terms of the finest scale's growth
                    live[s] = (int(self.reduction * finest) * self.factors[s],)
                out[self.axis_of(s, unit)] = live[s]
        return out

    def drops(self, unit: int) -> bool:
        """Return whether the finest scale before ``unit`` is gone after it."""
        return self.first_scale(unit) > self.first_scale(unit - 1)

    @staticmethod
    def axis_of(scale: int, unit: int) -> str:
        """Return the axis of the channels of ``scale`` after ``unit``."""
        return f"scale{scale}.{unit + 1}"

    def stream(self, unit: int) -> str:
        """Return the axis of the coarsest scale, which exits read."""
        return self.axis_of(len(self.factors) - 1, unit)

    def feature(self, unit: int) -> tuple[int, int, int]:
        """Return the shape of the coarsest scale's map (C, H, W) after ``unit``."""
        size = -(-self.size // 2 ** (len(self.factors) - 1))
        return (sum(self.segments[self.stream(unit)]), size, size)

    def exit_options(self, kind: str, unit: int) -> dict[str, object]:
        return {"width": self.exit_width} if kind == "strided" else super().exit_options(kind, unit)

    def build(self) -> "MSDNet":
        """Build a backbone of this shape, without weights."""
        return MSDNet(self)


MSDNETS = shapes(MSDNetSpec)


class Scales:
    """Maps (K, B, C, H, W) of the live scales, finest first; what a layer takes and gives."""

    def __init__(self, maps: Sequence[torch.Tensor]):
        self.maps = tuple(maps)

    @property
    def shape(self) -> torch.Size:
        return self.maps[-1].shape

    def __len__(self) -> int:
        return len(self.maps[-1])

    def __getitem__(self, clients) -> "Scales":
        return Scales([m[clients] for m in self.maps])


class Bottleneck(nn.Sequential):
    """A 1x1 and a 3x3 convolution, each with norm and ReLU; ``name`` is the axis of what it adds."""

    def __init__(self, channels: int, width: int, factor: int, stride: int, source: str, name: str):
        inner = min(channels, factor * width)
        narrow = ConvNorm(channels, inner, 1, 1, (f"{name}/inner", source))
        super().__init__(narrow, ConvNorm(inner, width, 3, stride, (name, f"{name}/inner")))

    @property
    def width(self) -> int:
        """Channels that it adds, perhaps cut."""
        return self[1].conv.weight.shape[-4]


class Grow(nn.Module):
    """One scale of a layer: what it had, then maps from the finer scale (if any), then maps from its own."""

    def __init__(self, spec: MSDNetSpec, unit: int, scale: int, from_finer: bool):
        super().__init__()
        own, added = spec.axis_of(scale, unit - 1), spec.growth * spec.factors[scale]
        added = added // 2 if from_finer else added
        channels, name, factors = sum(spec.segments[own]), f"/scale{scale}", spec.bottlenecks
        self.finer = None
        if from_finer:
            source = spec.axis_of(scale - 1, unit - 1)
            self.finer = Bottleneck(sum(spec.segments[source]), added, factors[scale - 1], 2, source, f"{name}/finer")
        self.own = Bottleneck(channels, added, factors[scale], 1, own, f"{name}/own")

    def forward(self, own: torch.Tensor, finer: torch.Tensor | None) -> torch.Tensor:
        return torch.cat([own, self.own(own)] if self.finer is None else [own, self.finer(finer), self.own(own)], 2)


class Layer(nn.Module):
    """Unit ``unit``: every live scale grows; where the finest is dropped, 1x1 transitions follow."""

    def __init__(self, spec: MSDNetSpec, unit: int):
        super().__init__()
        self.drops, first, last = spec.drops(unit), spec.first_scale(unit), len(spec.factors)
        self.grow = nn.ModuleList(Grow(spec, unit, s, s > first or self.drops) for s in range(first, last))
        self.transitions = nn.ModuleList()
        for s in range(first, last) if self.drops else ():
            axis = spec.axis_of(s, unit)
            wide, narrow = sum(spec.segments[f"{axis}/raw"]), sum(spec.segments[axis])
            self.transitions.append(ConvNorm(wide, narrow, 1, 1, (axis, f"{axis}/raw")))

    def forward(self, z: Scales) -> Scales:
        finer = [*z.maps[:-1]] if self.drops else [None, *z.maps[:-1]]
        own = z.maps[1:] if self.drops else z.maps
        grown = [grow(o, f) for grow, o, f in zip(self.grow, own, finer, strict=True)]
        if self.drops:
            grown = [transition(x) for transition, x in zip(self.transitions, grown, strict=True)]
        return Scales(grown)


class Stem(nn.Module):
    """A 3x3 convolution at the finest scale, and one of stride 2 from each scale to the next."""

    def __init__(self, spec: MSDNetSpec):
        super().__init__()
        before, axis, convs = spec.channels, None, []
        for s, factor in enumerate(spec.factors):
            own = spec.axis_of(s, -1)
            convs.append(ConvNorm(before, spec.base * factor, 3, 2 if s else 1, (own, axis)))
            before, axis = spec.base * factor, own
        self.convs = nn.ModuleList(convs)

    def forward(self, x: torch.Tensor) -> Scales:  # (K, B, 3, H, W)
        return Scales([*accumulate(self.convs, lambda finer, conv: conv(finer), initial=x)][1:])


class MSDNet(MapBackbone):
    """A stem and layers."""

    def __init__(self, spec: MSDNetSpec):
        super().__init__(spec, Stem(spec), (Layer(spec, unit) for unit in range(spec.depth)))

    def advance(self, z: Scales, unit: int, on: int) -> tuple[torch.Tensor, Scales]:
        """Run ``unit``: the coarsest map after it, of all clients, and all scales of the first ``on``."""
        z = self.blocks[unit](z)
        return z.maps[-1], z if on == len(z) else z[:on]

    def axis(self, name: str, size: int) -> Axis:
        return Axis(name, self.spec.segments.get(name, (size,)), tied=name in self.spec.segments)

    def settled(self, z: Scales) -> torch.Tensor:
        raise TypeError("an MSDNet's state is several maps: it cannot be kept as one")

    def bridge(self, feature: torch.Tensor, unit: int) -> torch.Tensor:
        """Bring the coarsest map after ``unit`` to the last one's channels, zero around it (FeDepth)."""
        last = self.blocks[-1].grow[-1]
        width = last.own[0].conv.weight.shape[-3] + last.own.width + (last.finer.width if last.finer else 0)
        return sample_and_pad(feature, (width, *self.spec.feature(self.spec.depth - 1)[1:]))
