"""Levels of two-dimensional sub-models: which width and depth cost a share of the whole model (ScaleFL)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True)
class Level:
    """A split: every width times ``width``, and the first ``depth`` units, whose exit is the level's own."""

    width: float
    depth: int


Cost = Callable[[float, int, tuple[Level, ...]], float]  # width, depth, the smaller levels (whose exits count too)


def solve_levels(
    cost: Cost, ratios: Sequence[float], depths: Sequence[int], full: float, grid: float = 0.05, eps: float = 0.08,
    widths: Sequence[float] | None = None,
) -> tuple[Level, ...]:  # fmt: skip
    """Per level the most balanced split: min |width - depth share| with |cost / (ratio full) - 1| <= eps.

    Smallest ratio first; each level is deeper than the one before, so that it has an exit of its own. Widths are
    multiples of ``grid``, or the given ``widths``; ``depths`` are where an exit may stand, the last being the whole. A
    ratio of 1 is the whole model. Of equally balanced splits the one of the nearest cost wins, then the deeper. Grid
    and depths are a part of the definition: finer ones move the optimum.

    Raises ``ValueError`` for ratios that do not increase within 0..1, and, naming the nearest split, where none fits.
    """
    check_ratios(ratios)
    if list(depths) != sorted(set(depths)) or not depths or depths[0] < 1:
        raise ValueError(f"levels: depths = {list(depths)} must increase from 1 or more")
    if not 0 < grid <= 1 or eps < 0:
        raise ValueError(f"levels: grid = {grid} must be in (0, 1] and eps = {eps} not negative")
    widths = widths or multiples(grid)
    levels: tuple[Level, ...] = ()
    for left, ratio in zip(range(len(ratios))[::-1], ratios, strict=True):
        if ratio == 1:
            return (*levels, Level(1.0, depths[-1]))
        deeper = [d for d in depths[: len(depths) - left] if not levels or d > levels[-1].depth]
        if not deeper:
            raise ValueError(f"levels: depths = {list(depths)} leave none for ratio {ratio:g} after {_shown(levels)}")
        levels += (_split(cost, ratio, full, widths, deeper, levels, depths[-1], eps),)
    return levels


def solve_widths(
    cost: Cost, ratios: Sequence[float], depth: int, full: float, grid: float = 0.05, eps: float = 0.08
) -> tuple[Level, ...]:
    """Per level the width of the whole depth that costs nearest to ``ratio``, within ``eps`` (width alone is cut).

    Raises ``ValueError`` as :func:`solve_levels` does.
    """
    check_ratios(ratios)
    return tuple(
        Level(1.0, depth)
        if ratio == 1
        else _split(cost, ratio, full, multiples(grid), [depth], (), 1, eps, nearest=True)
        for ratio in ratios
    )


def cluster_levels(resources: Sequence[float], levels: int, seed: int = 0) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Ratios of ``levels`` levels, and each client's level, by k-means clustering of what the clients have.

    A level's ratio is what its poorest client has as a share of the richest level's, so that no client is asked for
    more than it has. Raises ``ValueError`` for resources that are not positive, or of too few distinct values.
    """
    import numpy as np
    from sklearn.cluster import KMeans

    have = np.asarray(resources, dtype=float)
    if not len(have) or not np.isfinite(have).all() or have.min() <= 0:
        raise ValueError("levels: resources must be positive numbers, one for each client")
    if len(np.unique(have)) < levels:
        raise ValueError(f"levels: resources have {len(np.unique(have))} distinct values, too few for {levels} levels")
    found = KMeans(levels, n_init=10, random_state=seed).fit(have[:, None])
    rank = found.cluster_centers_[:, 0].argsort().argsort()[found.labels_]  # poorest first
    least = [have[rank == j].min() for j in range(levels)]
    return tuple(float(x / least[-1]) for x in least), tuple(rank.tolist())


def check_ratios(ratios: Sequence[float]) -> None:
    """Raise ``ValueError`` for ratios that do not increase within 0..1."""
    if list(ratios) != sorted(set(ratios)) or not ratios or ratios[0] <= 0 or ratios[-1] > 1:
        raise ValueError(f"levels: ratios = {list(ratios)} must increase within (0, 1]")


def multiples(grid: float) -> list[float]:
    """The widths ``grid``, 2 ``grid``, … up to 1."""
    return [round(i * grid, 10) for i in range(1, int(1 / grid + 1e-9) + 1)]


def _split(cost: Cost, ratio, full, widths, depths, below, units: int, eps: float, nearest: bool = False) -> Level:
    """One level of a net of ``units``, given those ``below``: the most balanced, or the ``nearest`` in cost.

    Splits are priced from the most balanced on, as a price may be a measurement: a less balanced one is not asked for.
    """

    def imbalance(s: Level) -> float:
        return 0.0 if nearest else round(abs(s.width - s.depth / units), 9)

    errors: dict[Level, float] = {}
    splits = sorted((Level(w, d) for w in widths for d in depths), key=imbalance)
    for _, equals in groupby(splits, key=imbalance):
        tried = {s: abs(cost(s.width, s.depth, below) / (ratio * full) - 1) for s in equals}
        best = min(tried, key=lambda s: (tried[s], -s.depth))
        if tried[best] <= eps:
            return best
        errors |= tried
    near = min(errors, key=lambda s: (errors[s], s.width))
    raise ValueError(
        f"levels: no width and depth costs within {eps:.0%} of {ratio:g} of the whole; the nearest is "
        f"{_shown([near])}, {errors[near]:.1%} off"
    )


def _shown(levels: Sequence[Level]) -> str:
    return ", ".join(f"width {s.width:g} of {s.depth} units" for s in levels)
