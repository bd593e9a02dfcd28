"""Figures of levels of sub-models (ScaleFL): where they lie, and what their clients get.

Every function returns the Axes. Read next: ``levels.py`` (the numbers), ``plots.py``.
"""

import pandas as pd

from .plots import COSTS, lines
from .style import axes_of, finish, log_axis, looks_of, named, styled


@styled
def plot_plane(
    frame: pd.DataFrame, ax=None, title: str = "Of the splits that cost what a level may, the most balanced"
):
    """The splits of ``levels.plane``: the feasible ones of each level as dots of its colour, the chosen ones ringed."""
    import seaborn

    ax = axes_of(ax, (6, 4.5))
    ax.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)
    seaborn.scatterplot(frame[frame.fits], x="s_w", y="s_d", hue="level", palette="viridis", s=45, ax=ax)
    chosen = frame[frame.chosen]
    ax.scatter(chosen.s_w, chosen.s_d, s=170, facecolors="none", edgecolors="#d55e00", linewidths=2, label="chosen")
    ax.set(xlim=(0, 1.05), ylim=(0, 1.05))
    ax.legend(loc="upper left")
    finish(ax, "width $s_w$", "depth $s_d$", title)
    ax.get_legend().set_title("fits level")
    return ax


@styled
def plot_levels(frame: pd.DataFrame, x: str = "parameters", ax=None, title: str = "What clients of each level get"):
    """Local accuracy of every level against what it costs (``x``: parameters or macs), a line for each method.

    ``frame`` is ``levels.level_accuracies``' of one column; a point is the mean over its runs, a bar their SD.
    """
    ax, (xlabel, unit) = axes_of(ax), COSTS[x]
    frame = named(frame.assign(**{x: frame[x] * unit}))
    bars = {"errorbar": "sd", "err_style": "bars"} if frame.duplicated(["series", x]).any() else {}
    lines(frame, x, "accuracy", ax, looks_of(frame), estimator="mean", **bars)
    log_axis(ax, frame[x])
    finish(ax, f"{xlabel} of the level", "local accuracy (%)", title)
    return ax
