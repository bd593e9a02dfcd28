"""Levels of sub-models as options: one level for each exit, cut in width and depth, given or solved (ScaleFL).

A method that has levels names :class:`Levels` before ``Method``. Read next: ``levels.py`` (the solver),
``sliced/scalefl_original.py``.
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
import torch
from torch import nn

from ..core.clients import Client
from ..core.slices import Axis, Slice
from ..core.validation import AtLeast, AtMost, Count, Positive
from ..models.backbone import Spec
from ..models.poolers import scaling_exits
from .jobs import Member, Round, Server, Serving, Setting
from .levels import Level, check_ratios, cluster_levels, solve_levels, solve_widths
from .widths import check_cuttable

Share = Annotated[Positive, AtMost(1)]
WHOLE = 1.1  # what the whole with all exits may cost before it is said, in terms of the net with its last exit alone


@dataclass(frozen=True)
class Levels:
    """Level j of L holds the units up to its exit, exits 1..j, and the leading share of every hidden width.

    None for ``widths`` and ``depths``: solved, so that level j costs ``ratios[j]`` of the whole. Given depths alone,
    the widths are solved for these; given widths alone, the exits stand where the experiment says, or evenly.
    """

    widths: tuple[Share, ...] | None = None  # s_w
    depths: tuple[Share, ...] | None = None  # s_d
    ratios: tuple[Share, ...] | None = None  # r; None: 1, 1/2, 1/4, …
    cost: Literal["parameters", "macs", "memory", "upload"] = "parameters"
    cut: Literal["both", "width", "depth"] = "both"  # the ablations cut one of the two alone
    grid: Share = 0.05  # of widths
    depth_steps: Count = 9  # where an exit may stand: after every so manieth of the units; cut = depth: after each
    eps: Annotated[float, AtLeast(0)] = 0.08
    resources: tuple[Positive, ...] | None = None  # what each client has: levels and who has which by clustering
    scaler: bool = True

    def check_options(self) -> None:
        super().check_options()
        name = f"options of {type(self).__name__.lower()}"
        for key in ("widths", "depths", "ratios"):
            values = getattr(self, key)
            if values is not None and (not values or values[-1] != 1):
                raise ValueError(f"{name}: {key} = {list(values)} must end with 1, the whole model")
        if self.ratios is not None:
            check_ratios(self.ratios)
        if self.ratios is not None and self.resources is not None:
            raise ValueError(f"{name}: ratios = {list(self.ratios)} has no effect with resources: they are clustered")

    # --- what is built -------------------------------------------------------------------------------------------

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """After N s_d units; without ``depths`` evenly spaced."""
        shares = self.depths or [(j + 1) / num_exits for j in range(num_exits)]
        units = tuple(max(1, round(share * depth)) - 1 for share in shares)
        if len(units) != num_exits or list(units) != sorted(set(units)):
            raise ValueError(
                f"experiment: num_exits = {num_exits}: depths = {list(shares)} of {depth} units give exits after "
                f"{[u + 1 for u in units]}; allowed: {num_exits} that increase"
            )
        return units

    def place_exits(
        self, spec: Spec, num_exits: int, measured: Callable[[tuple[int, ...]], Setting]
    ) -> tuple[int, ...]:
        """Solved where they are free: of the units at every ``depth_steps``-th of the depth."""
        if self.depths is not None or self.widths is not None or self.cut == "width":
            return self.exit_units(spec.depth, num_exits)
        return tuple(x.depth - 1 for x in solve(self, measured(self.places(spec.depth)), num_exits))

    def places(self, depth: int) -> tuple[int, ...]:
        """The units after which an exit may stand where levels are solved."""
        steps = depth if self.cut == "depth" else min(self.depth_steps, depth)
        return tuple(sorted({round(depth * (k + 1) / steps) - 1 for k in range(steps)}))

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> nn.Module:
        return scaling_exits(spec, num_classes, exit_units)

    def check(self, setting: Setting, e) -> None:
        name = type(self).__name__.lower()
        check_cuttable(name, setting, e)
        if self.widths is not None and len(self.widths) != setting.num_exits:
            raise ValueError(f"{name}: widths = {list(self.widths)} must be {setting.num_exits} numbers in (0, 1]")
        if self.resources is not None and len(self.resources) != setting.num_clients:
            raise ValueError(f"{name}: {len(self.resources)} resources; allowed: {setting.num_clients}, one a client")
        if setting.measure is not None:
            parts = [self.part(j, setting) for j in range(setting.num_exits)]
            matters = e.budgets == "uniform"  # else everybody holds the whole
            for text in distortions(self.levels(setting), parts[-1], setting) if matters else ():
                warnings.warn(f"{name}: {text}", stacklevel=2)

    def client_budgets(self, num_clients: int, num_exits: int) -> np.ndarray | None:
        """The levels that the clients' resources say."""
        return None if self.resources is None else np.array(self._clustered(num_exits)[1])

    # --- levels --------------------------------------------------------------------------------------------------

    def levels(self, setting: Setting) -> tuple[Level, ...]:
        """Width and depth of each level, smallest first; solved once for a setting, at the depths of its exits."""
        if self not in setting.solved:
            setting.solved[self] = (
                solve(self, setting, setting.num_exits) if self.widths is None else self._given(setting)
            )
        return setting.solved[self]

    def _given(self, setting: Setting) -> tuple[Level, ...]:
        whole = setting.exit_units[-1] + 1
        depths = [whole if self.cut == "width" else u + 1 for u in setting.exit_units]
        return tuple(Level(w, d) for w, d in zip(self.widths, depths, strict=True))

    def part(self, level: int, setting: Setting) -> Slice:
        """What a client of ``level`` holds."""
        own = self.levels(setting)[level]
        exits = [j for j, unit in enumerate(setting.exit_units) if unit < own.depth]
        return split(setting.axes, setting.spec, own, exits, self.scaler)

    def ratios_of(self, levels: int) -> tuple[float, ...]:
        """The cost of each level as a share of the whole."""
        if self.resources is not None:
            return self._clustered(levels)[0]
        ratios = self.ratios or tuple(2.0 ** (j + 1 - levels) for j in range(levels))
        if len(ratios) != levels:
            raise ValueError(f"levels: {len(ratios)} ratios for num_exits = {levels}; allowed: as many")
        return ratios

    def _clustered(self, levels: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        return cluster_levels(self.resources, levels)

    # --- who trains what -----------------------------------------------------------------------------------------

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.part(client.budget, r.setting)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """A client answers with its own level's model."""
        return Serving((Member(client, self.slice_for(client, server, r)),))


def split(axes: Mapping[str, Axis], spec: Spec, level: Level, exits, scaler: bool = False) -> Slice:
    """The first ``level.depth`` units with ``exits``, and the first floor(s_w n) of every n on each hidden axis.

    A transformer's residual stream and FFN are cut as its heads are: the leading part of each of so many chunks.
    """
    heads = max(1, spec.heads)
    index = {}
    for name, axis in axes.items():
        if axis.permutable and level.width < 1:
            chunked = len(axis.segments) == 1 and axis.size % heads == 0
            axis = Axis(name, (axis.size // heads,) * heads) if chunked else axis
            index[name] = axis.leading(lambda n: int(level.width * n + 1e-9))
    return Slice.prefix(level.depth, exits, index=index, scale=level.width if scaler else 1.0)


def apart(part: Slice, level: int, setting: Setting) -> Slice:
    """``part`` with its last exit alone, under names of its own on the server."""
    alone = replace(part, exits=part.exits[-1:])
    return replace(alone, aliases={n: f"level{level}/{n}" for n, i in setting.infos.items() if alone.holds(i)})


def with_copies(params: dict[str, torch.Tensor], parts: list[Slice]) -> dict[str, torch.Tensor]:
    """``params`` and each part's own copy of what it holds, whole: entries beyond its cut are never touched."""
    copies = {alias: params[n].clone() for part in parts for n, alias in part.aliases.items() if n in params}
    return params | copies


def distortions(levels: tuple[Level, ...], largest: Slice, setting: Setting) -> list[str]:
    """What exits that weigh as much as the net do to ``levels``, of which ``largest`` is the last one's part: said."""
    found = [
        f"level {j + 1} is narrower ({own.width:g}) than level {j} ({below.width:g})"
        for j, (below, own) in enumerate(pairwise(levels), 1)
        if own.width < below.width
    ]
    whole, net = map(setting.measure.parameters, (largest, replace(largest, exits=largest.exits[-1:])))
    if whole > WHOLE * net:
        found.append(
            f"the whole with its {len(largest.exits)} exits costs {whole / net:.2f} times the net with its last one "
            "alone, of which ratios are shares; lighter exits: exit_head = 'linear'"
        )
    return found


def priced(price: Callable[[Slice], float], setting: Setting, every: bool = False) -> tuple[Callable, float]:
    """The cost of a split with the exits that its client holds, and that of the whole net with its last exit alone.

    The client holds the exits of the levels below and its own; where width alone is cut, ``every`` one.
    """
    units = setting.exit_units

    def cost(width: float, depth: int, below: tuple[Level, ...]) -> float:
        ends = {depth, *(x.depth for x in below)}
        exits = [j for j, u in enumerate(units) if every or u + 1 in ends]
        try:
            return price(split(setting.axes, setting.spec, Level(width, depth), exits))
        except ValueError:  # an axis would be empty
            return float("inf")

    return cost, price(Slice.prefix(units[-1] + 1, [len(units) - 1]))


def solve(options: Levels, setting: Setting, num_levels: int) -> tuple[Level, ...]:
    """The levels among the exits of ``setting``; the same again where these are the solved ones."""
    cost, full = priced(partial(setting.measure.cost, options.cost), setting, options.cut == "width")
    depths, ratios = [u + 1 for u in setting.exit_units], options.ratios_of(num_levels)
    if options.cut == "width":
        return solve_widths(cost, ratios, depths[-1], full, options.grid, options.eps)
    widths = [1.0] if options.cut == "depth" else None
    return solve_levels(cost, ratios, depths, full, options.grid, options.eps, widths)
