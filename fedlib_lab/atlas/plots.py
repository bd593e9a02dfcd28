"""Figures of the atlas: what clients get by task, what they get in all places, what quality costs."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..report.plots import plot_tradeoff
from ..report.style import axes_of, color_of, finish, panels, styled, title_of, wrapped
from ..report.tables import label_of
from ..report.verdicts import not_ranked
from ..runs.params import Cell

INK = "0.35"  # of what is no method
COSTS = {
    "macs": ("macs", 1e9, "training of a client's round (10⁹ MACs)"),
    "memory": ("peak MiB", 1, "peak of a client's training (MiB)"),
    "upload": ("upload MiB", 1, "upload of a client's round (MiB)"),
}  # of what is capped: the column of ``entries_frame``, its unit


@styled
def plot_standings(table: pd.DataFrame, methods: Mapping[str, str], title: str):
    """Plot ``scores.standings``, a panel a task; rows in the table's order, which is no ranking. ``methods`` of rows.

    A dot is the mean over seeds on clients' own shares of labels, hollow where they are too few to rank, a bar one SD,
    x what the net gets where all classes are alike, + what clients would get with their own shares of labels added to
    its answers, and the dashed line the clients' own majority class.
    """
    rows, groups = list(dict.fromkeys(table.label)), list(table.groupby("task", sort=False))
    size = 2.6 if groups[1:] else 6.0, 1.0 + 0.2 * len(rows)
    axes = panels([title_of(task) for task, _ in groups], title, size, len(groups))
    for ax, (_, group) in zip(axes, groups, strict=True):
        for row in group.to_dict("records"):
            y, color = rows.index(row["label"]), color_of(methods.get(row["method"], row["method"]))
            ax.errorbar(row["own labels"], y, xerr=np.nan_to_num(row["sd"]), fmt="o", color=color,
                        markerfacecolor="white" if not_ranked([row["seeds"]]) else color)  # fmt: skip
            ax.plot(row["all alike"], y, "x", row["prior"], y, "+", color=INK, markersize=5)
        if group.majority.notna().any():
            ax.axvline(group.majority.mean(), color="black", linestyle="--", linewidth=1)
        ax.set(yticks=range(len(rows)), yticklabels=rows, ylim=(len(rows) - 0.5, -0.5))
        ax.grid(alpha=0.3)
    said = "○ fewer than three seeds: not ranked   ● three or more   × all classes alike   + own shares of labels added"
    said, figure = f"accuracy (%), bars: SD over seeds, dashed: own majority class\n{said}", axes[0].figure
    figure.supxlabel(wrapped(said, figure.get_figwidth()), fontsize=9)
    return axes[0]


@styled
def plot_choice(table: pd.DataFrame, majority: pd.Series, title: str, ax=None):
    """Plot what clients get, in percent: a row a method, a column a place; coloured by the points above ``majority``.

    That is what always answering one's own most frequent label gives in a column; without it nothing is coloured. Rows
    keep the table's order. A dash is a method that is absent there, or has no run yet.
    """
    import seaborn

    above = table.sub(majority.reindex(table.columns)).fillna(0)  # in the table's order
    words = table.map(lambda x: "–" if pd.isna(x) else f"{x:.1f}")
    ax = axes_of(ax, (3.4 + 0.75 * len(table.columns), 2.2 + 0.3 * len(table)))
    far = max(1, np.abs(above.to_numpy()).max())
    bar = {"label": "points above always answering one's own majority class", "shrink": 0.6}
    seaborn.heatmap(above, ax=ax, cmap="RdBu", vmin=-far, vmax=far, annot=words, fmt="", annot_kws={"size": 8},
                    linewidths=0.5, cbar_kws=bar)  # fmt: skip
    ax.set_xticklabels([name.replace(": ", ":\n") for name in table.columns], rotation=0)
    finish(ax, "–: absent there (params/atlas says why), or not run yet", "")
    ax.figure.suptitle(wrapped(title, ax.figure.get_figwidth()))  # over the names too, which are wide
    ax.grid(False)
    return ax


@styled
def plot_cost(frame: pd.DataFrame, cells: Sequence[Cell], title: str, ax=None):
    """Plot the scores of ``entries_frame``'s rows under one kind of caps, against what is capped: a point a method.

    The dashed line is what always answering one's own majority class gives.
    """
    import seaborn

    column, unit, label = COSTS[str(frame.caps.iloc[0]).removesuffix("_tuned")]
    methods = {c.variant: c.method for c in cells}
    points = frame.groupby(["method", "label"], sort=False)[["score", column]].mean().reset_index()
    points = pd.DataFrame({
        "accuracy": points.score, "cost": points[column] / unit, "column": points.label.map(label_of),
        "method": points.method.map(methods),
    })  # fmt: skip
    ax = axes_of(ax, (6.8, 4.4))
    if frame.majority.notna().any():
        ax.axhline(frame.majority.mean(), color="black", linestyle="--", linewidth=1)
        label += "; dashed: own majority class"
    plot_tradeoff(points, "cost", label, title, ax=ax, line="")
    for text in ax.texts:  # in the method's hue, dark enough for small words (WCAG 2, AAA)
        text.set_color(seaborn.set_hls_values(text.get_color(), l=0.2))
    ax.set_ylabel("accuracy on clients' own tests (%)")
    return ax
