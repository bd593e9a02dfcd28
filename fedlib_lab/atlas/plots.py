"""Figures of the atlas: the ranking as a dot plot, who wins against whom, what to choose where, what quality costs."""

from collections.abc import Sequence

import pandas as pd

from ..report.plots import plot_tradeoff
from ..report.style import axes_of, color_of, finish, styled, wrapped
from ..report.tables import label_of
from ..runs.params import Cell
from .scores import HIGH

FLOOR = -2.0  # of the scores that a ranking draws where they are
COSTS = {
    "macs": ("macs", 1e9, "training of a client's round (10⁹ MACs)"),
    "memory": ("peak MiB", 1, "peak of a client's training (MiB)"),
    "upload": ("upload MiB", 1, "upload of a client's round (MiB)"),
}  # of what is capped: the column of ``entries_frame``, its unit


@styled
def plot_ranking(table: pd.DataFrame, title: str, ax=None):
    """Plot ``atlas.ranking``'s rows, best on top: interquartile mean of scores, its interval; columns label, method.

    Beside the name of one that lacks a task stands how many it has: its score is of other tasks than its neighbours'.
    Dashed: 0, the smallest level for all, and 1, the whole model for all. A score below ``FLOOR`` is told at the edge.
    """
    ax = axes_of(ax, (6.8, 1.3 + 0.27 * len(table)))
    for y, row in enumerate(table.itertuples()):
        color = color_of(row.method)
        if row.score < FLOOR:  # it would press the others together
            ax.plot(FLOOR, y, "<", color=color)
            ax.annotate(f"{row.score:.1f}", (FLOOR, y), (6, 0), textcoords="offset points", va="center", color=color)
            continue
        ax.plot([max(row.low, FLOOR), row.high], [y, y], color=color, linewidth=2, alpha=0.6)
        ax.plot(row.score, y, "o", color=color)
    most, rows = table.tasks.max(), zip(table.label, table.tasks, strict=True)
    ax.set_yticks(range(len(table)), [f"{label} ({n} of {most} tasks)" if n < most else label for label, n in rows])
    ax.set_ylim(len(table) - 0.5, -0.5)
    for x in (0, 1):
        ax.axvline(x, color="black", linestyle="--", linewidth=1)
    finish(ax, "0: smallest level for all, 1: whole model for all\nbars: 95 % bootstrap", "")
    ax.figure.suptitle(wrapped(title, ax.figure.get_figwidth()))  # over the names too, which are wide
    return ax


@styled
def plot_wins(wins: pd.DataFrame, title: str, ax=None):
    """Plot ``atlas.wins``: how often the row's method is above the column's, in percent."""
    import seaborn

    order = wins.mean(axis=1).sort_values(ascending=False).index  # who wins most stands on top
    wins, ax = wins.loc[order, order], axes_of(ax, (2.4 + 0.42 * len(wins), 1.8 + 0.36 * len(wins)))
    if wins.empty:
        return ax
    seaborn.heatmap(100 * wins, ax=ax, vmin=0, vmax=100, cmap="RdBu", annot=True, fmt=".0f", annot_kws={"size": 8},
                    cbar_kws={"label": "runs won by the row's method (%)"})  # fmt: skip
    finish(ax, "", "", title)
    ax.grid(False)
    return ax


@styled
def plot_choice(table: pd.DataFrame, title: str, ax=None):
    """Plot what clients get, in percent: a row a method, a column a place; coloured from a column's worst to its best.

    On top the methods that are highest above the other rows' mean in the places that they have.
    """
    import seaborn

    shade = (table - table.min()) / (table.max() - table.min())
    order = shade.sub(shade.mean()).mean(axis=1).sort_values(ascending=False).index
    ax = axes_of(ax, (2.6 + 0.75 * len(table.columns), 1.9 + 0.3 * len(table)))
    seaborn.heatmap(shade.loc[order], ax=ax, cmap="YlGnBu", annot=table.loc[order], fmt=".1f", annot_kws={"size": 8},
                    cbar=False, linewidths=0.5)  # fmt: skip
    ax.set_xticklabels([name.replace(": ", ":\n") for name in table.columns], rotation=0)
    finish(ax, "", "", title)
    ax.grid(False)
    return ax


@styled
def plot_cost(frame: pd.DataFrame, cells: Sequence[Cell], title: str, ax=None):
    """Plot the scores of ``entries_frame``'s rows under one kind of caps, against what is capped: a point a method.

    Over ``title``, what is shown, stands who gives clients most of those that keep to the caps.
    """
    column, unit, label = COSTS[str(frame.caps.iloc[0]).removesuffix("_tuned")]
    points = frame.groupby(["method", "label"], sort=False)[["score", column]].mean().reset_index()
    methods = {c.variant: c.method for c in cells}
    best = points[points.method != HIGH].sort_values("score").iloc[-1]
    title = f"{label_of(best.label)} gives clients most under the caps, {best.score:.1f} %\n{title}"
    points = pd.DataFrame({
        "accuracy": points.score, "cost": points[column] / unit, "column": points.label.map(label_of),
        "method": points.method.map(methods),
    })  # fmt: skip
    return plot_tradeoff(points, "cost", label, title, ax=ax, line="")
