"""Backbones whose state is one map (K, B, C, H, W), which is also what their exits see."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..core.profiling import saved_for_backward
from ..layers.context import Scaler
from ..layers.conv import INITIALISATIONS, Conv2d, sample_and_pad
from ..layers.norms import BatchNorm2d
from .backbone import Backbone, Spec


@dataclass(frozen=True, kw_only=True)
class MapSpec(Spec):
    """Shape of a convnet for images of ``size`` x ``size`` pixels."""

    size: int = 32
    channels: int = 3
    exit_head: str | None = None  # the kind of exits before the last, where an experiment names one
    init: str = "he"  # how it and its exits are drawn: a name of ``layers.conv.INITIALISATIONS``
    own_modes: ClassVar[tuple[str, ...]] = ("full",)
    early_exit: ClassVar[str] = "convolutions"  # the kind of ScaleFL's exits before the last
    final_exit: ClassVar[str] = "linear"  # the kind (``map_exits.KINDS``) of the exit after the last unit

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """One image."""
        return (self.channels, self.size, self.size)

    def stream(self, unit: int) -> str:
        """Return the axis of the channels after ``unit``."""

    def exit_options(self, kind: str, unit: int) -> dict[str, object]:
        """Return what an exit of ``kind`` (``map_exits.KINDS``) after ``unit`` takes from this backbone, as options."""
        return {"widths": self.narrowing(unit)} if kind == "towers" else {}

    def narrowing(self, unit: int) -> tuple[int, ...]:
        """Return the channels of the later, ever smaller maps; for maps of one size, the last's."""
        widths, (*_, size) = {}, self.feature(unit)
        for later in range(unit + 1, self.depth):
            channels, *_, now = self.feature(later)
            if now < size:
                widths[now] = channels
        return tuple(widths.values())

    def state(self, unit: int) -> tuple[int, int, int]:
        """Return the shape of the map: nothing else goes on."""
        return self.feature(unit)

    def numbers(self, examples: int) -> tuple[int, int]:
        """Count the numbers in the widest activation of ``examples`` examples, and in all that autograd keeps."""
        widest, kept = _kept_numbers(self)
        return examples * widest, examples * kept


@cache
def _kept_numbers(spec: MapSpec) -> tuple[int, int]:
    """Count the numbers of one example in the widest activation, and in all that autograd keeps of it."""
    backbone = spec.build()
    one, two = (_kept_sizes(backbone, examples) for examples in (1, 2))
    return max(one), sum(two) - sum(one)  # the rest, such as a norm's means, is as large for any number of examples


def _kept_sizes(backbone: nn.Module, examples: int) -> list[int]:
    """Return the size of every tensor that autograd keeps beside the parameters, where all of them are trained."""
    for p in backbone.parameters():
        p.requires_grad_(p.is_floating_point())
    with saved_for_backward(backbone.parameters()) as kept:
        device = next(backbone.parameters()).device
        z = backbone.stem(torch.zeros(1, examples, *backbone.spec.input_shape, device=device))
        for unit in range(backbone.spec.depth):
            _, z = backbone.advance(z, unit, 1)
    return [x.numel() for x in kept.values()]


class ConvNorm(nn.Module):
    """Convolution, norm and what ``activates``; ``axes`` of its output and input channels."""

    def __init__(
        self, channels: int, width: int, kernel: int, stride: int, axes: tuple[str, str | None],
        activates: Callable[[torch.Tensor], torch.Tensor] = F.relu,
    ):  # fmt: skip
        super().__init__()
        self.conv = Conv2d(channels, width, kernel, stride, kernel // 2, axes=axes)
        self.scale, self.bn, self.activates = Scaler("conv", "norm"), BatchNorm2d(width, axes[0]), activates

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, C', H', W')
        return self.activates(self.bn(self.scale(self.conv(x))))


class MapBackbone(Backbone):
    """A stem and blocks on maps."""

    def init_(self, generator: torch.Generator) -> "MapBackbone":
        """Initialise as the spec says, in place."""
        INITIALISATIONS[self.spec.init](self, generator)
        return self

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Run ``unit``: the map after it, of all clients, and of the first ``on``."""
        z = self.blocks[unit](z)
        return z, z if on == len(z) else z[:on]

    def bridge(self, feature: torch.Tensor, unit: int) -> torch.Tensor:
        """Bring the map after ``unit`` to the last unit's shape: sub-sampled, zero channels around it (FeDepth)."""
        last = self.spec.depth - 1
        convs = (m for m in self.blocks[last].modules() if isinstance(m, Conv2d))
        width = next(m.weight.shape[-4] for m in convs if m.axes["weight"][0] == self.spec.stream(last))  # perhaps cut
        return sample_and_pad(feature, (width, *self.spec.feature(last)[1:]))
