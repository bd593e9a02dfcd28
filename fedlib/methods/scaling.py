"""Levels of sub-models as options: one level for each exit, cut in width and depth, given or solved (ScaleFL).

A method that has levels derives from :class:`Levels`. Read next: ``sliced/scalefl.py``.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Annotated, Literal

import numpy as np
import torch

from ..core.annotations import Count, NotNegative, Positive, Share, When
from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.slices import Axis, Slice
from ..models.backbone import Spec
from ..models.exits import Head
from ..models.map_exits import scaling_exits
from .base import Measured, Method
from .values import Round, Server, Setting
from .widths import check_cuttable

SOLVED: dict[tuple, tuple["Level", ...]] = {}  # by what was asked of which shapes, in this process
WHOLE = 1.1  # what the whole with all exits may cost before it is said, in terms of the net with its last exit alone


@dataclass(frozen=True)
class Level:
    """A split: every width times ``width``, and the first ``depth`` units, whose exit is the level's own."""

    width: float
    depth: int


Cost = Callable[[float, int, tuple[Level, ...]], float]  # width, depth, the smaller levels (whose exits count too)


@dataclass(frozen=True)
class Levels(Method):
    """Level j of L holds the units up to its exit, exits 1..j, and the leading share of every hidden width.

    None for ``widths`` and ``depths``: solved, so that level j costs ``ratios[j]`` of the whole. Given depths alone,
    the widths are solved for these; given widths alone, the exits stand where the experiment says, or evenly.
    """

    widths: tuple[Share, ...] | None = None  # s_w
    depths: tuple[Share, ...] | None = None  # s_d
    ratios: Annotated[tuple[Share, ...] | None, When(resources=None)] = None  # r; None: 1, 1/2, 1/4, …
    cost: Literal["parameters", "macs", "memory", "upload"] = "parameters"
    cut: Literal["both", "width", "depth"] = "both"  # the ablations cut one of the two alone
    grid: Share = 0.05  # of widths
    depth_steps: Count = 9  # an exit may stand after each of so many parts; cut = depth: after each unit
    eps: NotNegative = 0.08
    resources: tuple[Positive, ...] | None = None  # what each client has: levels and who has which by clustering
    scaler: bool = True
    weighting: Literal["examples", "clients"] = "clients"

    def check_options(self) -> None:
        super().check_options()
        for key in ("widths", "depths", "ratios"):
            values = getattr(self, key)
            if values is not None and (not values or values[-1] != 1):
                self.refuse(f"{key} = {list(values)} must end with 1, the whole model")
        if self.ratios is not None:
            check_ratios(self.ratios)

    # --- what is built -------------------------------------------------------------------------------------------

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """Place an exit after N s_d units; without ``depths`` evenly spaced."""
        shares = self.depths or [(j + 1) / num_exits for j in range(num_exits)]
        units = tuple(max(1, round(share * depth)) - 1 for share in shares)
        if len(units) != num_exits or list(units) != sorted(set(units)):
            why = f"depths = {list(shares)} of {depth} units give exits after {[u + 1 for u in units]}"
            raise ValueError(f"experiment: num_exits = {num_exits}: {why}; allowed: {num_exits} that increase")
        return units

    def place_exits(self, spec: Spec, num_exits: int, measured: Measured) -> tuple[int, ...]:
        """Solve the exits where they are free: of the units at every ``depth_steps``-th of the depth."""
        if self.depths is not None or self.widths is not None or self.cut == "width":
            return self.exit_units(spec.depth, num_exits)
        return tuple(x.depth - 1 for x in solve(self, measured(self.places(spec.depth)), num_exits))

    def places(self, depth: int) -> tuple[int, ...]:
        """List the units after which an exit may stand where levels are solved."""
        steps = depth if self.cut == "depth" else min(self.depth_steps, depth)
        return tuple(sorted({round(depth * (k + 1) / steps) - 1 for k in range(steps)}))

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> Head:
        return scaling_exits(spec, num_classes, exit_units)

    def check(self, setting: Setting, e: Experiment) -> None:
        check_cuttable(setting, e)
        if self.widths is not None and len(self.widths) != setting.num_exits:
            raise ValueError(f"{e.method}: widths = {list(self.widths)} must be {setting.num_exits} numbers in (0, 1]")
        if self.resources is not None and len(self.resources) != setting.num_clients:
            allowed = f"{setting.num_clients}, one a client"
            raise ValueError(f"{e.method}: {len(self.resources)} resources; allowed: {allowed}")
        if setting.measure is not None:
            whole, own = [self.part(j, setting) for j in range(setting.num_exits)][-1], self.levels(setting)
            matters = e.budgets == "uniform"  # else everybody holds the whole
            for text in distortions(own, whole, setting) if matters else ():
                warnings.warn(f"{e.method}: {text}", stacklevel=2)

    def client_budgets(self, num_clients: int, num_exits: int) -> np.ndarray | None:
        """Return the levels that the clients' resources say."""
        return None if self.resources is None else np.array(cluster_levels(self.resources, num_exits)[1])

    def at_caps(self, caps: Sequence[float], of: str, slack: float) -> dict[str, object]:
        """Its levels are solved for caps."""
        return {"num_exits": len(caps), "options": {"ratios": tuple(caps), "cost": of, "eps": slack, "grid": 0.025}}

    # --- levels --------------------------------------------------------------------------------------------------

    def levels(self, setting: Setting) -> tuple[Level, ...]:
        """Return width and depth of each level, smallest first, at the depths of the exits: given, or solved."""
        depths = [u + 1 if self.cut != "width" else setting.exit_units[-1] + 1 for u in setting.exit_units]
        given = tuple(Level(w, d) for w, d in zip(self.widths or (), depths, strict=False))
        return given or solve(self, setting, setting.num_exits)

    def part(self, level: int, setting: Setting) -> Slice:
        """Cut what a client of ``level`` holds."""
        own = self.levels(setting)[level]
        exits = [j for j, unit in enumerate(setting.exit_units) if unit < own.depth]
        return split(setting.axes, setting.spec, own, exits, self.scaler)

    def ratios_of(self, levels: int) -> tuple[float, ...]:
        """Return the cost of each level as a share of the whole."""
        if self.resources is not None:
            return cluster_levels(self.resources, levels)[0]
        ratios = self.ratios or tuple(2.0 ** (j + 1 - levels) for j in range(levels))
        if len(ratios) != levels:
            raise ValueError(f"levels: {len(ratios)} ratios for num_exits = {levels}; allowed: as many")
        return ratios

    # --- who trains what -----------------------------------------------------------------------------------------

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.part(client.budget, r.setting)


def split(axes: Mapping[str, Axis], spec: Spec, level: Level, exits: Sequence[int], scaler: bool = False) -> Slice:
    """Cut the first ``level.depth`` units with ``exits``, and the first floor(s_w n) of every n on each hidden axis.

    A transformer's residual stream and FFN are cut as its heads are: the leading part of each of so many chunks.
    """
    heads, index = max(1, spec.heads), {}
    for name, axis in axes.items():
        if axis.permutable and level.width < 1:
            chunked = len(axis.segments) == 1 and axis.size % heads == 0
            axis = Axis(name, (axis.size // heads,) * heads) if chunked else axis
            index[name] = axis.leading(lambda n: int(level.width * n + 1e-9))
    return Slice.prefix(level.depth, exits, index=index, scale=level.width if scaler else 1.0)


@dataclass(frozen=True)
class ModelsApart(Levels):
    """Every level has a model of its own, with its last exit alone: what is shared by none stands beside the model."""

    def part(self, level: int, setting: Setting) -> Slice:
        part = super().part(level, setting)
        alone = replace(part, exits=part.exits[-1:])
        return replace(alone, aliases={n: f"level{level}/{n}" for n, i in setting.infos.items() if alone.holds(i)})

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """Copy the tensors of each level whole: entries beyond its cut are never touched."""
        aliases = [self.part(j, setting).aliases for j in range(setting.num_exits)]
        copies = {alias: params[n].clone() for own in aliases for n, alias in own.items() if n in params}
        return Server(0, params | copies, {})

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        return self.part(r.setting.at_hand(exit), r.setting)


def distortions(levels: tuple[Level, ...], largest: Slice, setting: Setting) -> list[str]:
    """List warnings on solved ``levels``, such as exits as heavy as the net; ``largest`` is the last level's part."""
    found = [
        f"level {j + 1} is narrower ({own.width:g}) than level {j} ({below.width:g})"
        for j, (below, own) in enumerate(pairwise(levels), 1)
        if own.width < below.width
    ]
    whole, net = map(setting.measure.parameters, (largest, replace(largest, exits=largest.exits[-1:])))
    if whole > WHOLE * net:
        costs = f"{whole / net:.2f} times the net with its last one alone, of which ratios are shares"
        found.append(
            f"the whole with its {len(largest.exits)} exits costs {costs}; lighter exits: exit_head = 'linear'"
        )
    return found


def priced(price: Callable[[Slice], float], setting: Setting, every: bool = False) -> tuple[Callable, float]:
    """Price a split with the exits that its client holds: the function, and the whole net's with its last exit alone.

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
    """Solve the levels among the exits of ``setting``; the same again where these are the solved ones.

    A process solves them once for all experiments whose models have these shapes: it takes seconds.
    """
    if (asked := (options, num_levels, setting.exit_units, setting.measure.shapes)) not in SOLVED:
        cost, full = priced(partial(setting.measure.cost, options.cost), setting, options.cut == "width")
        depths, ratios = [u + 1 for u in setting.exit_units], options.ratios_of(num_levels)
        SOLVED[asked] = solve_levels(cost, ratios, depths, full, options.grid, options.eps, options.cut)
    return SOLVED[asked]


def solve_levels(
    cost: Cost, ratios: Sequence[float], depths: Sequence[int], full: float, grid: float = 0.05, eps: float = 0.08,
    cut: Literal["both", "width", "depth"] = "both",
) -> tuple[Level, ...]:  # fmt: skip
    """Find per level the most balanced split: min |width - depth share| with |cost / (ratio full) - 1| <= eps.

    Smallest ratio first; each level is deeper than the one before, so that it has an exit of its own. Widths are
    multiples of ``grid``; ``depths`` are where an exit may stand, the last being the whole. A ratio of 1 is the whole
    model. Of equally balanced splits the one of the nearest cost wins, then the deeper. Grid and depths are a part of
    the definition: finer ones move the optimum. Where ``cut`` is depth alone, every width is 1; where it is width
    alone, every level has the whole depth, and the nearest cost wins.

    Splits are priced from the most balanced on, as a price may be a measurement: a less balanced one is not asked for.
    Raises ``ValueError`` for ratios that do not increase within 0..1, and, naming the nearest split, where none fits.
    """
    check_ratios(ratios)
    if list(depths) != sorted(set(depths)) or not depths or depths[0] < 1:
        raise ValueError(f"levels: depths = {list(depths)} must increase from 1 or more")
    if not 0 < grid <= 1 or eps < 0:
        raise ValueError(f"levels: grid = {grid} must be in (0, 1] and eps = {eps} not negative")
    widths = [1.0] if cut == "depth" else [round(i * grid, 10) for i in range(1, int(1 / grid + 1e-9) + 1)]

    def imbalance(s: Level) -> float:
        return 0.0 if cut == "width" else round(abs(s.width - s.depth / depths[-1]), 9)

    levels: tuple[Level, ...] = ()
    for left, ratio in zip(range(len(ratios))[::-1], ratios, strict=True):
        if ratio == 1:
            return (*levels, Level(1.0, depths[-1]))
        deeper = [d for d in depths[: len(depths) - left] if not levels or d > levels[-1].depth]
        deeper = depths[-1:] if cut == "width" else deeper
        if not deeper:
            raise ValueError(f"levels: depths = {list(depths)} leave none for ratio {ratio:g} after {_shown(levels)}")
        errors: dict[Level, float] = {}
        for _, equals in groupby(sorted((Level(w, d) for w in widths for d in deeper), key=imbalance), key=imbalance):
            tried = {s: abs(cost(s.width, s.depth, levels) / (ratio * full) - 1) for s in equals}
            best = min(tried, key=lambda s, off=tried: (off[s], -s.depth))
            errors |= tried
            if tried[best] <= eps:
                levels += (best,)
                break
        else:
            near = min(errors, key=lambda s, off=errors: (off[s], s.width))
            found = f"the nearest is {_shown([near])}, {errors[near]:.1%} off"
            raise ValueError(f"levels: no width and depth costs within {eps:.0%} of {ratio:g} of the whole; {found}")
    return levels


def cluster_levels(resources: Sequence[float], levels: int, seed: int = 0) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Cluster what the clients have by k-means to ratios of ``levels`` levels, and each client's level.

    A level's ratio is what its poorest client has as a share of the richest level's, so that no client is asked for
    more than it has. Raises ``ValueError`` for resources that are not positive, or of too few distinct values.
    """
    from sklearn.cluster import KMeans

    have = np.asarray(resources, dtype=float)
    if not len(have) or not np.isfinite(have).all() or have.min() <= 0:
        raise ValueError("levels: resources must be positive numbers, one for each client")
    if len(np.unique(have)) < levels:
        raise ValueError(f"levels: resources have {len(np.unique(have))} distinct values, too few for {levels} levels")
    found = KMeans(levels, random_state=seed).set_params(n_init=10).fit(have[:, None])
    rank = found.cluster_centers_[:, 0].argsort().argsort()[found.labels_]  # poorest first
    least = [have[rank == j].min() for j in range(levels)]
    return tuple(float(x / least[-1]) for x in least), tuple(rank.tolist())


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise ``ValueError`` for ratios that do not increase within 0..1."""
    if list(ratios) != sorted(set(ratios)) or not ratios or ratios[0] <= 0 or ratios[-1] > 1:
        raise ValueError(f"levels: ratios = {list(ratios)} must increase within (0, 1]")


def _shown(levels: Sequence[Level]) -> str:
    return ", ".join(f"width {s.width:g} of {s.depth} units" for s in levels)
