"""ScaleFL's levels of sub-models: what each costs, how well each serves, where they lie, and figures of that.

Read next: ``methods/scaling.py`` (the solver), ``report/tables.py``.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.slices import Slice
from fedlib.methods.scaling import priced, solve_levels

from ..report.plots import COSTS, plot_series
from ..report.style import axes_of, finish, named, styled
from ..report.titles import leads
from ..runs.costs import Shapes, load_shapes, seconds_of
from ..runs.params import Cell
from ..runs.store import shown_run

PAPER = "scalefl"
KEYS = ("variant", "method", "label", "column", "seed")  # of a run


def level_costs(e: Experiment, classes: int | None = None) -> pd.DataFrame:
    """Return ``s_w``, ``s_d``, parameters and MACs of each level of ``e``'s method, also as shares of the largest's."""
    shapes = load_shapes(e, classes)
    measure, rows = shapes.setting.measure, []
    for level, part in enumerate(shapes.slices):
        widths = {len(i) / shapes.setting.axes[a].size for a, i in part.index.items()}
        s_w, s_d = _share(shapes, level, widths), round(part.depth / shapes.setting.spec.depth, 3)
        rows.append([level + 1, s_w, s_d, part.depth, measure.parameters(part), measure.macs(part)])
    frame = pd.DataFrame(rows, columns=["level", "s_w", "s_d", "units", "parameters", "macs"])
    return frame.assign(**{f"share_of_{k}": (frame[k] / frame[k].iloc[-1]).round(3) for k in ("parameters", "macs")})


def _share(shapes: Shapes, level: int, widths: set[float]) -> float:
    """Return the level's width as the method says it, else the mean of what its axes keep."""
    if hasattr(shapes.method, "levels"):
        own = shapes.method.levels(shapes.setting)
        return own[min(level, len(own) - 1)].width
    return round(sum(widths) / len(widths), 3) if widths else 1.0


def plane(e: Experiment, classes: int | None = None) -> pd.DataFrame:
    """Return every split (s_w, s_d) of ``e``'s solver: cost as a ``ratio`` of the whole's, the level it ``fits``, and
    whether it was ``chosen`` (level 0: none). Costs count the exits of the chosen levels below.
    """
    chosen_shapes = load_shapes(e, classes)
    method, setting = chosen_shapes.method, chosen_shapes.setting
    levels, depth = method.levels(setting), setting.spec.depth
    shapes = load_shapes(e, classes, tuple(sorted({*method.places(depth), *setting.exit_units})))
    cost, full = priced(partial(shapes.setting.measure.cost, method.cost), shapes.setting, method.cut == "width")
    ratios, rows = method.ratios_of(len(levels)), []
    for level, (target, own) in enumerate(zip(ratios, levels, strict=True)):
        for unit in shapes.setting.exit_units:
            for width in (round(i * method.grid, 10) for i in range(1, int(1 / method.grid + 1e-9) + 1)):
                ratio = cost(width, unit + 1, levels[:level]) / full
                fits, chosen = abs(ratio / target - 1) <= method.eps, (own.width, own.depth) == (width, unit + 1)
                rows.append([level + 1, width, (unit + 1) / depth, ratio, fits, chosen])
    return pd.DataFrame(rows, columns=["level", "s_w", "s_d", "ratio", "fits", "chosen"])


def levels_by_latency(
    e: Experiment, classes: int, seconds: Callable[[Shapes, Slice], float] = seconds_of
) -> dict[str, tuple[float, ...]]:
    """Solve ``widths`` and ``depths`` of ``e``'s levels by their share (``ratios``) of the whole model's latency.

    Solved once on the machine that shall answer, and written into the experiment, whose ``cost`` only counts.

    ``ValueError`` as :func:`solve_levels`, with the nearest split where none fits.
    """
    e = e.replace(pretrained=False)
    shapes = load_shapes(e, classes)
    method, depth = shapes.method, shapes.setting.spec.depth
    units = method.places(depth)
    shapes = load_shapes(e, classes, units, device="cpu")
    cost, full = priced(cache(partial(seconds, shapes)), shapes.setting)
    levels = solve_levels(cost, method.ratios_of(e.num_exits), [u + 1 for u in units], full, method.grid, method.eps)
    return {"widths": tuple(x.width for x in levels), "depths": tuple(round(x.depth / depth, 4) for x in levels)}


def level_accuracies(cells: Sequence[Cell], folder: Path | None = None) -> pd.DataFrame:
    """Return per run and level the mean accuracy on its clients' own test examples, parameters and MACs.

    Where all clients hold the same model, every level has its number. Cells that are not stored are left out.
    """
    rows = []
    for cell in cells:
        if (found := shown_run(cell.experiment, folder)) is None or "personal" not in found.summary:
            continue
        own, costs = found.summary["personal"], level_costs(cell.experiment)
        for row in costs.itertuples():
            accuracy = own.get("by_budget", {}).get(str(row.level - 1), own)["last"]
            rows.append([*(getattr(cell, k) for k in KEYS), row.level, accuracy, row.parameters, row.macs])
    return pd.DataFrame(rows, columns=[*KEYS, "level", "accuracy", "parameters", "macs"])


@styled
def plot_plane(frame: pd.DataFrame, ax=None, title: str = ""):
    """Plot the splits of :func:`plane`: feasible ones as dots in their level's colour, chosen ones ringed."""
    import seaborn

    ax, chosen = axes_of(ax, (6, 4.5)), frame[frame.chosen]
    ax.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)
    seaborn.scatterplot(frame[frame.fits], x="s_w", y="s_d", hue="level", palette="viridis", s=45, ax=ax)
    ax.scatter(chosen.s_w, chosen.s_d, s=170, facecolors="none", edgecolors="#d55e00", linewidths=2, label="chosen")
    ax.set(xlim=(0, 1.05), ylim=(0, 1.05))
    ax.legend(loc="upper left")
    fits = frame[frame.fits].groupby("level").size()
    said = f"Of {fits.min()}–{fits.max()} splits that cost what a level may, the most balanced is chosen"
    finish(ax, "width $s_w$", "depth $s_d$", title or said)
    ax.get_legend().set_title("fits level")
    return ax


def plot_levels(frame: pd.DataFrame, x: str, subject: str):
    """Plot local accuracy of every level, named beside it, against its cost (``x``: parameters or macs).

    ``frame`` is :func:`level_accuracies`' of one column; a point is the mean over its runs, a bar their SD.
    """
    xlabel, unit = COSTS[x]
    rows, where = named(frame.assign(**{x: frame[x] * unit})), "column method variant label seed series accuracy"
    ends = rows[rows.level.isin([rows.level.min(), rows.level.max()])]
    title = leads(ends.assign(column="level " + ends.level.astype(str))[where.split()], PAPER)
    return plot_series(rows, x, "accuracy", f"{xlabel} of the level", "local accuracy (%)", f"{title}\n{subject}",
                       hero=PAPER, names="level", log=True)  # fmt: skip
