"""Figures of what clients spend: boxes, bars, heat maps, curves against traffic. Read next: ``report/style.py``."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from .style import axes_of, color_of, finish, named, styled

PALE = 0.6  # opacity of boxes, so that the points on them show


@styled
def plot_boxes(
    frame: pd.DataFrame, x: str, y: str, ylabel: str, title: str, lines: Mapping[str, float] | None = None, ax=None
):
    """Boxes of ``y`` for every ``x``, the clients as points; ``lines`` are full-size models, dashed, by name."""
    import seaborn

    ax, color = axes_of(ax), color_of("raffm")
    seaborn.boxplot(frame, x=x, y=y, ax=ax, color=color, width=0.5, fliersize=0, boxprops={"alpha": PALE})
    seaborn.stripplot(frame, x=x, y=y, ax=ax, color="black", size=2, alpha=0.4, jitter=0.15)
    for name, value in (lines or {}).items():
        ax.axhline(value, color=color_of("fedavg"), linestyle="--", linewidth=1, label=name)
    if lines:
        ax.legend()
    finish(ax, "", ylabel, title)
    return ax


@styled
def plot_bars(frame: pd.DataFrame, x: str, y: str, ylabel: str, title: str, ax=None):
    """A bar of ``y`` per ``x`` and method, in the methods' colours; ``frame`` has ``method`` and ``label``."""
    import seaborn

    ax, rows = axes_of(ax), named(frame)
    palette = {s: color_of(m) for s, m in zip(rows.series, rows.method, strict=True)}
    own = [s for s in dict.fromkeys(rows.series)]
    for k, name in enumerate(n for n in own if palette[n] == color_of("raffm")):  # variants of one method, paler
        white = 0.25 * min(k, 3)
        palette[name] = tuple((1 - white) * c + white for c in _rgb(palette[name]))
    seaborn.barplot(rows, x=x, y=y, hue="series", hue_order=own, palette=palette, ax=ax, errorbar=None)
    finish(ax, "", ylabel, title)
    return ax


def _rgb(color) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    return to_rgb(color)


@styled
def plot_client_map(values: Sequence[float], label: str, title: str, ax=None, low: float = 0.0, high: float = 1.0):
    """One square a client, ten or so in a row: how much of something each has."""
    import seaborn

    ax, values = axes_of(ax, (4.4, 3.6)), np.asarray(values, float)
    side = int(np.ceil(np.sqrt(len(values))))
    grid = np.full(side * int(np.ceil(len(values) / side)), np.nan)
    grid[: len(values)] = values
    seaborn.heatmap(
        grid.reshape(-1, side), ax=ax, vmin=low, vmax=high, cmap="viridis", square=True, linewidths=0.5,
        cbar_kws={"label": label}, xticklabels=False, yticklabels=False,
    )  # fmt: skip
    finish(ax, "", "", title)
    ax.grid(False)
    return ax


@styled
def plot_size_and_score(frame: pd.DataFrame, score: str, title: str, ax=None, bins: int = 8):
    """How many clients have which model size (share of the whole) and which ``score``; columns ``share``, ``score``."""
    import seaborn
    from matplotlib.ticker import MaxNLocator

    ax, bar = axes_of(ax), {"label": "clients", "ticks": MaxNLocator(integer=True)}
    seaborn.histplot(frame, x="share", y="score", bins=bins, cmap="viridis", cbar=True, cbar_kws=bar, ax=ax)
    finish(ax, "model size (share of the whole)", score, title)
    return ax


@styled
def plot_traffic(frame: pd.DataFrame, ylabel: str, title: str, ax=None):
    """Score against what was sent so far (columns ``gib``, ``accuracy``, ``label``, ``method``), a line a variant."""
    import seaborn

    ax, rows = axes_of(ax), named(frame)
    from .style import looks_of

    seaborn.lineplot(rows, x="gib", y="accuracy", ax=ax, errorbar=None, **looks_of(rows).settings())
    finish(ax, "traffic so far, all clients, down and up (GiB)", ylabel, title)
    return ax
