"""Figures of the atlas: the ranking as a dot plot, and who wins against whom."""

import pandas as pd

from .style import axes_of, color_of, finish, styled, wrapped


@styled
def plot_ranking(table: pd.DataFrame, title: str, ax=None):
    """``atlas.ranking``'s rows, best on top: interquartile mean of the scores with its interval; columns label, method.

    Beside the name of one that lacks a task stands how many it has: its score is of other tasks than its neighbours'.
    Dashed: 0, the smallest level for all, and 1, the whole model for all.
    """
    ax = axes_of(ax, (6.8, 1.3 + 0.27 * len(table)))
    for y, row in enumerate(table.itertuples()):
        ax.plot([row.low, row.high], [y, y], color=color_of(row.method), linewidth=2, alpha=0.6)
        ax.plot(row.score, y, "o", color=color_of(row.method))
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
    """``atlas.wins``: how often the row's method is above the column's, in percent."""
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
