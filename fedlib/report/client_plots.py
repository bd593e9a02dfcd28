"""Figures of personalised methods: sweeps of an option, thresholds of early leaving, students and teachers.

Every function returns the Axes. Read next: ``plots.py``, ``clients.py``.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .plots import ACCURACY, COSTS
from .style import axes_of, color_of, finish, panels, styled


@styled
def plot_sweep(frame: pd.DataFrame, x: str, xlabel: str, ax=None, title: str = "", method: str = "cafedistill"):
    """Accuracy of clients against an option ``x`` of one method: mean over runs, and SD where there are several."""
    import seaborn

    ax = axes_of(ax)
    bars = {"errorbar": "sd", "err_style": "bars"} if frame.duplicated([x]).any() else {"errorbar": None}
    seaborn.lineplot(frame, x=x, y="clients", marker="o", color=color_of(method), ax=ax, **bars)
    finish(ax, xlabel, ACCURACY, title)
    return ax


@styled
def plot_thresholds(records: Sequence[Mapping], ax=None, title: str = "", method: str = "cafedistill"):
    """Accuracy against mean MACs, a point per threshold of confidence; ``records`` from ``clients.leaving_curve``."""
    import seaborn

    ax, unit = axes_of(ax), COSTS["macs"][1]
    frame = pd.DataFrame(records).assign(macs=lambda rows: rows.macs * unit).drop_duplicates(["macs", "accuracy"])
    seaborn.lineplot(frame, x="macs", y="accuracy", marker="o", sort=False, color=color_of(method), ax=ax)
    for row in frame.itertuples():
        ax.annotate(f"{row.threshold:g}", (row.macs, row.accuracy), (4, -10), textcoords="offset points", fontsize=8)
    finish(ax, f"mean {COSTS['macs'][0]}", ACCURACY, title)
    return ax


@styled
def plot_spent(frame: pd.DataFrame, ax=None, title: str = ""):
    """Mean MACs per example by round, a line per threshold; ``frame`` has t, macs and threshold."""
    import seaborn

    ax, unit = axes_of(ax), COSTS["macs"][1]
    rows = frame.assign(macs=frame.macs * unit, threshold=frame.threshold.astype(str))
    seaborn.lineplot(rows, x="t", y="macs", hue="threshold", style="threshold", markers=True, palette="viridis", ax=ax)
    ax.set_xticks(sorted(set(frame.t)))
    finish(ax, "round", f"mean {COSTS['macs'][0]}", title)
    if (legend := ax.get_legend()) is not None:
        legend.set_title("threshold")
    return ax


@styled
def plot_students(shares: np.ndarray, ax=None, title: str = "Exits become students from the shallowest on"):
    """``shares`` (exits, rounds): of how many of a round's clients, in percent, each exit is a student."""
    import seaborn

    ax = axes_of(ax, (7.2, 2.6))
    exits, rounds = shares.shape
    frame = pd.DataFrame(shares, index=range(1, exits + 1), columns=range(1, rounds + 1))
    seaborn.heatmap(frame.iloc[::-1], vmin=0, vmax=100, cmap="Reds", ax=ax, xticklabels=max(1, rounds // 10),
                    cbar_kws={"label": "clients (%)"})  # fmt: skip
    finish(ax, "round", "exit", title)
    ax.tick_params(axis="both", rotation=0)
    ax.grid(False)
    return ax


@styled
def plot_shares(shares: np.ndarray, labels: Sequence[int], title: str = "Clients of like data teach one another"):
    """Who teaches whom: ``shares`` (students, teachers) in percent, clients in order of their main ``labels``.

    Two panels: with what a client teaches itself, and without. Ticks name the labels, lines part them.
    """
    import seaborn

    axes = panels(["all teachers", "without oneself"], title, (4.8, 4.0), columns=2, sharey=False)
    starts = [k for k in range(1, len(labels)) if labels[k] != labels[k - 1]]
    edges = [0, *starts, len(labels)]
    middles = [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]
    names = [labels[k] for k in edges[:-1]]
    for ax, own in zip(axes, (True, False), strict=True):
        shown = shares.copy()
        if not own:
            np.fill_diagonal(shown, 0)
        top = np.quantile(shown[shown > 0], 0.98) if shown.any() else 1  # not of a few pairs alone
        seaborn.heatmap(shown, cmap="mako_r", ax=ax, xticklabels=False, yticklabels=False, square=True, vmin=0,
                        vmax=top, cbar_kws={"label": "weight (%)", "extend": "max"})  # fmt: skip
        ax.hlines(starts, 0, len(labels), color="white", linewidth=0.6)
        ax.vlines(starts, 0, len(labels), color="white", linewidth=0.6)
        ax.set_xticks(middles, names, rotation=0)
        ax.set_yticks(middles, names, rotation=0)
        finish(ax, "teacher, by main label", "student, by main label" if own else "", ax.get_title())
        ax.grid(False)
    return axes
