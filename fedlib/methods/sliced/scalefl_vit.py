"""ScaleFL as re-implemented for ReeFL, on a ViT: cut in depth and in width, the last exit teaches the earlier ones.

Client (budget r): blocks and exits up to exit r, every tensor cut to its leading indices at one width; sum of
cross-entropies + 0.05 * KL from the last exit at temperature 3. Server: coordinate-wise mean over the holders.
Each exit is evaluated with its own sub-model. Source: ReeFL's Appendix A and release; the paper's own method (Ilhan et
al., CVPR 2023) is ``scalefl`` (``scalefl.py``).

Deviations: the mean is unweighted, as released (the paper weights by examples: ``weighting="examples"``). Pre-trained
head boundaries are not respected by the cut, as released; frozen parts are cut too. The original's exit-weighted loss
and late start of distillation are not used here, as in ReeFL's comparison.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal, cast

import torch

from ...core.annotations import NotNegative, Positive, Share, When
from ...models.vit import ViTSpec
from ..base import Batch, Client, Experiment, Slice, Spec, cross_entropies, kl_to_teacher, last_exit
from ..server import ServerStep
from ..values import Round, Server, Setting
from ..widths import check_axes, uncut

TAUGHT = When(distill="last")
BLOCKS = {4: (3, 5, 8, 11), 12: tuple(range(12))}
WIDTHS = {4: (0.4, 0.55, 0.75, 1.0),
          12: (0.25, 0.3, 0.35, 0.4, 0.48, 0.55, 0.61, 0.69, 0.75, 0.84, 0.92, 1.0)}  # fmt: skip


@dataclass(frozen=True)
class ScaleFLViT(ServerStep):
    """Widths and exit placement default to the paper's for 4 and 12 exits."""

    label, color, marker = "ScaleFL", "#37ad70", "^"

    distill: Literal["last", "none"] = "last"
    kd_weight: Annotated[NotNegative, TAUGHT] = 0.05  # eta, constant
    temperature: Annotated[Positive, TAUGHT] = 3.0  # tau
    weighting: Literal["examples", "clients"] = "clients"
    widths: tuple[Share, ...] | None = None  # one per exit, increasing to 1

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return BLOCKS[num_exits] if depth == 12 and num_exits in BLOCKS else super().exit_units(depth, num_exits)

    def check_backbone(self, spec: Spec, e: Experiment) -> None:
        if not isinstance(spec, ViTSpec):
            kind, instead = type(spec).__name__.removesuffix("Spec"), "" if uncut(spec) else "; use 'scalefl'"
            raise ValueError(f"scalefl_vit: backbone: a {kind} is not what it cuts, which is a ViT{instead}")

    def check(self, setting: Setting, e: Experiment) -> None:
        check_axes(e)
        widths, spec = self._widths(setting), cast(ViTSpec, setting.spec)  # ``check_backbone`` has seen to it
        if len(widths) != setting.num_exits:
            raise ValueError(f"scalefl_vit: widths = {list(widths)} must be {setting.num_exits} numbers in (0, 1]")
        for width in widths:
            for axis, kept in width_index(spec, width).items():
                if not kept:
                    least = math.ceil(1000 / min(spec.dim, spec.ffn_dim)) / 1000
                    raise ValueError(f"scalefl_vit: widths: {width} leaves axis {axis!r} empty; allowed: {least}..1")

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return sum_e CE_e + eta * tau^2 sum_e KL(p_last || p_e), (M,)."""
        ce = cross_entropies(batch).sum(0)
        if self.distill == "none":
            return ce
        return ce + self.kd_weight * kl_to_teacher(batch, last_exit(batch), self.temperature)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        index = width_index(cast(ViTSpec, r.setting.spec), self._widths(r.setting)[client.budget])
        return Slice.prefix(r.setting.exit_units[client.budget] + 1, range(client.budget + 1), index=index)

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Return the depth and width of budget e for exit e, or of the largest that a client has."""
        return self.slice_for(Client(-1, min(exit, r.setting.at_hand(r.setting.num_exits - 1)), 0), server, r)

    def _widths(self, setting: Setting) -> tuple[float, ...]:
        if self.widths is None and setting.num_exits not in WIDTHS:
            raise ValueError(f"scalefl_vit: set options.widths for {setting.num_exits} exits; known for {list(WIDTHS)}")
        return self.widths if self.widths is not None else WIDTHS[setting.num_exits]


def width_index(config: ViTSpec, width: float) -> dict[str, range]:
    """Cut each axis to its first indices: dim = int(d w), FFN in proportion, q/k/v up to a multiple of the heads."""
    dim = int(config.dim * width)
    heads, ffn = math.ceil(dim / config.heads) * config.heads, config.ffn_dim * dim // config.dim
    units = {
        f"{u}/{axis}": range(n) for u in range(config.depth) for axis, n in (("ffn", ffn), ("qk", heads), ("vo", heads))
    }
    return {"residual": range(dim)} | units
