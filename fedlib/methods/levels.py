"""Levels of two-dimensional sub-models: which width and depth cost a share of the whole model (ScaleFL)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Level:
    """A split: every width times ``width``, and the first ``depth`` units, whose exit is the level's own."""

    width: float
    depth: int


Cost = Callable[[float, int, tuple[Level, ...]], float]  # width, depth, the smaller levels (whose exits count too)


def solve_levels(
    cost: Cost, ratios: Sequence[float], depths: Sequence[int], full: float, grid: float = 0.05, eps: float = 0.08
) -> tuple[Level, ...]:
    """Per level the most balanced split: min |width - depth share| with |cost / (ratio full) - 1| <= eps.

    Smallest ratio first; each level is deeper than the one before, so that it has an exit of its own. Widths are
    multiples of ``grid``; ``depths`` are where an exit may stand, the last being the whole. A ratio of 1 is the whole
    model. Of equally balanced splits the one of the nearest cost wins, then the deeper. Grid and depths are a part of
    the definition: finer ones move the optimum.

    Raises ``ValueError`` for ratios that do not increase within 0..1, and, naming the nearest split, where none fits.
    """
    if list(ratios) != sorted(set(ratios)) or not ratios or ratios[0] <= 0 or ratios[-1] > 1:
        raise ValueError(f"levels: ratios = {list(ratios)} must increase within (0, 1]")
    if list(depths) != sorted(set(depths)) or not depths or depths[0] < 1:
        raise ValueError(f"levels: depths = {list(depths)} must increase from 1 or more")
    if not 0 < grid <= 1 or eps < 0:
        raise ValueError(f"levels: grid = {grid} must be in (0, 1] and eps = {eps} not negative")
    widths = [round(i * grid, 10) for i in range(1, int(1 / grid + 1e-9) + 1)]
    levels: tuple[Level, ...] = ()
    for left, ratio in zip(range(len(ratios))[::-1], ratios, strict=True):
        if ratio == 1:
            return (*levels, Level(1.0, depths[-1]))
        deeper = [d for d in depths[: len(depths) - left] if not levels or d > levels[-1].depth]
        if not deeper:
            raise ValueError(f"levels: depths = {list(depths)} leave none for ratio {ratio:g} after {_shown(levels)}")
        levels += (_split(cost, ratio, full, widths, deeper, levels, depths[-1], eps),)
    return levels


def _split(cost: Cost, ratio: float, full: float, widths, depths, below, units: int, eps: float) -> Level:
    """One level of a net of ``units``, given those ``below``."""
    errors = {Level(w, d): abs(cost(w, d, below) / (ratio * full) - 1) for w in widths for d in depths}
    fitting = [s for s, error in errors.items() if error <= eps]
    if not fitting:
        near = min(errors, key=errors.get)
        raise ValueError(
            f"levels: no width and depth costs within {eps:.0%} of {ratio:g} of the whole; the nearest is "
            f"{_shown([near])}, {errors[near]:.1%} off"
        )
    return min(fitting, key=lambda s: (round(abs(s.width - s.depth / units), 9), errors[s], -s.depth))


def _shown(levels: Sequence[Level]) -> str:
    return ", ".join(f"width {s.width:g} of {s.depth} units" for s in levels)
