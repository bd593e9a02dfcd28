"""Figures for notebooks, drawn with seaborn; every function returns the Axes. Read next: ``report/style.py``."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from ..core.paths import outputs_dir
from ..methods import METHODS
from .data_plots import plot_clients_examples, plot_label_distribution
from .style import (
    Looks,
    axes_of,
    clear_of_legend,
    color_of,
    finish,
    log_axis,
    looks_of,
    name_points,
    named,
    panels,
    plain,
    score_of,
    share_legend,
    spelled,
    styled,
    title_of,
)
from .tables import label_of

__all__ = [
    "gain_bars", "plot_accuracy_costs", "plot_adaptive", "plot_clients_examples", "plot_costs",
    "plot_exit_accuracies", "plot_label_distribution", "plot_learning_curves", "plot_modes",
    "plot_tradeoff", "save_figure", "score_of", "title_of",
]  # fmt: skip

COSTS = {  # what an axis says, and its unit in units of the column
    "macs": ("MACs per example (millions)", 1e-6),
    "upload_mib": ("upload per round (MiB)", 1),
    "training_memory_mib": ("training memory, batch 32 (MiB)", 1),
    "parameters": ("parameters (millions)", 1e-6),
}
ACCURACY = "test accuracy (%)"


def save_figure(ax, name: str):
    """Write the figure of ``ax`` to ``outputs/<folder>/figures/<stem>.png``, ``name`` being ``<folder>/<stem>``."""
    folder, _, stem = name.rpartition("/")
    path = outputs_dir() / folder / "figures" / f"{stem}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    ax.figure.figure.savefig(path, dpi=150)  # the whole figure, also of a subfigure's Axes
    return path


def lines(frame: pd.DataFrame, x: str, y: str, ax, looks: Looks, **settings):
    """seaborn's lines, one per ``series``, through the rows in their order unless an estimator is given."""
    import seaborn

    shown = [name for name in looks.palette if name in set(frame.series)]
    looks = Looks(*({name: look[name] for name in shown} for look in vars(looks).values()))
    settings = {"estimator": None, "sort": False, "errorbar": None, "markersize": 6, **looks.settings(), **settings}
    if len(frame):
        seaborn.lineplot(frame, x=x, y=y, ax=ax, **settings)


@styled
def plot_exit_accuracies(
    frame: pd.DataFrame, ax=None, title: str = "Accuracy of every exit", looks: Looks | None = None
):
    """Mean over seeds of each exit's accuracy, with SD bars where there are several; ``frame`` as from ``collect``.

    Lines stand a little beside one another, so that bars do not hide bars.
    """
    ax, frame = axes_of(ax), named(frame).dropna(subset=["accuracy"])
    looks = looks or looks_of(frame)
    rows = frame.assign(exit=[range(1, len(e) + 1) for e in frame.exits]).explode(["exit", "exits"])
    beside = dict(zip(looks.palette, np.linspace(-0.08, 0.08, len(looks.palette) + 2)[1:-1], strict=True))
    rows["at"] = rows.exit.astype(float) + rows.series.map(beside).astype(float)
    rows["exits"] = rows.exits.astype(float)
    repeated = rows.duplicated(["series", "exit"]).any()
    bars = {"errorbar": "sd", "err_style": "bars", "err_kws": {"capsize": 2, "elinewidth": 1}} if repeated else {}
    lines(rows, "at", "exits", ax, looks, estimator="mean", sort=True, **bars)
    ax.set_xticks(range(1, max(map(len, frame.exits), default=1) + 1))
    finish(ax, "exit", _score(frame), title)
    return ax


@styled
def plot_modes(frame: pd.DataFrame, plot=plot_exit_accuracies, title: str = "Accuracy of every exit", **settings):
    """A panel per data column and fine-tuning mode, a shared y axis, one legend; returns the Axes of the panels.

    The figure's title is ``title`` and the data in words; of several data sets each panel says its own.
    """
    looks = looks_of(named(frame))
    columns = [g for _, g in frame.groupby("column", sort=False)] if "column" in frame else [frame]
    groups = [group for part in columns for _, group in part.groupby("finetune", sort=False)]
    several, modes = len(columns) > 1, [label_of(group.finetune.iloc[0]) for group in groups]
    if set(frame.finetune) == {"full"}:  # nothing to tell apart
        modes = [""] * len(groups)
    titles = [f"{_data(g)}\n{m}".strip() for g, m in zip(groups, modes, strict=True)] if several else modes
    data = "" if several else _data(frame)
    wide = min(frame.finetune.nunique(), 3) if several else 3
    axes = panels(titles, f"{title}: {data}" if data else title, columns=wide)
    for ax, group in zip(axes, groups, strict=True):
        plot(group, ax, title=ax.get_title(), looks=looks, **settings)
        if not ax.get_subplotspec().is_first_col():
            ax.set_ylabel("")
    share_legend(axes)
    return axes


def _score(frame: pd.DataFrame) -> str:
    """What the accuracies of ``frame`` are called."""
    return score_of(frame.dataset.unique()) if "dataset" in frame else ACCURACY


def _data(group: pd.DataFrame) -> str:
    """The data of rows of one column, in words."""
    ran = group.dataset.iloc[0] if "dataset" in group else None
    return title_of(str(group.column.iloc[0]), ran) if "column" in group else ""


@styled
def plot_costs(
    frame: pd.DataFrame, ax=None, x: str = "macs", y: str = "upload_mib", title: str = "What each exit costs",
    looks: Looks | None = None,
):  # fmt: skip
    """Cost ``y`` against cost ``x`` per exit; ``frame`` has method and the columns of ``costs.exit_costs``."""
    ax, frame = axes_of(ax), named(frame)
    (xlabel, xunit), (ylabel, yunit) = COSTS[x], COSTS.get(y, (_score(frame), 1))
    rows = frame.assign(**{x: frame[x] * xunit, y: frame[y] * yunit})
    lines(rows, x, y, ax, looks or looks_of(frame))
    finish(ax, xlabel, ylabel, title)
    return ax


def plot_accuracy_costs(frame: pd.DataFrame, ax=None, x: str = "macs", title: str = "What accuracy costs", looks=None):
    """Accuracy against cost ``x``, one dot per exit; ``frame`` as from ``tables.exit_table``."""
    return plot_costs(frame, ax, x, "accuracy", title, looks)


def _curves(curves: Mapping[str, Sequence[dict]], x: str, ax, colors=None, methods=None) -> pd.DataFrame:
    """Draw ``accuracy`` against ``x`` of named records, with the looks of their methods.

    A name's method is what ``methods`` says, else the name itself or, up to a comma, its beginning.
    """
    methods = {label_of(m): m for m in METHODS} | dict(methods or {})
    rows = []
    for name, records in curves.items():
        method = methods.get(name, name.split(", ")[0])
        where = {"series": plain(spelled(name)), "method": methods.get(method, method), "name": name}
        rows += [where | {x: r[x], "accuracy": r["accuracy"]} for r in records]
    frame = pd.DataFrame(rows, columns=["series", "method", "name", x, "accuracy"])
    looks = looks_of(frame)
    given = {s: colors[n] for s, n in zip(frame.series, frame.name, strict=True) if colors and n in colors}
    lines(frame, x, "accuracy", ax, Looks({**looks.palette, **given}, looks.markers, looks.dashes))
    return frame


@styled
def plot_adaptive(curves: Mapping[str, Sequence[dict]], colors: Mapping[str, str] | None = None, ax=None,
                  title: str = "Leaving at the first confident exit"):  # fmt: skip
    """Accuracy against mean MACs as the confidence threshold moves; a label maps to ``early_leaving``'s curve.

    Records of a single ``exit`` stand beside the line as rings of its colour: what all get who leave there.
    """
    own, ax, unit = ax is None, axes_of(ax), COSTS["macs"][1]
    scaled = {name: [r | {"macs": r["macs"] * unit} for r in records] for name, records in curves.items()}
    policies = {name: [r for r in records if "exit" not in r] for name, records in scaled.items()}
    drawn = _curves(policies, "macs", ax, colors).drop_duplicates("name")
    palette = looks_of(drawn).palette
    for name, series in zip(drawn.name, drawn.series, strict=True):
        alone = [(r["macs"], r["accuracy"]) for r in scaled[name] if "exit" in r]
        if alone:
            color = (colors or {}).get(name, palette[series])
            ax.scatter(*zip(*alone, strict=True), s=70, facecolors="none", edgecolors=color, linewidths=1.5)
    finish(ax, f"mean {COSTS['macs'][0]}", ACCURACY, title)
    if own:
        clear_of_legend(ax)
    return ax


@styled
def plot_learning_curves(runs: Mapping[str, Sequence[dict]], methods: Mapping[str, str] | None = None, ax=None,
                         title: str = "Mean accuracy over exits", score: str = ACCURACY):  # fmt: skip
    """Accuracy against round; ``runs`` maps a label to its metrics records. Ticks stand at evaluated rounds.

    ``methods``: the method of a label that does not begin with its name, whose look the line gets. ``score``: what an
    accuracy is called (``style.score_of``).
    """
    own, ax = ax is None, axes_of(ax)
    rounds = np.unique(_curves(runs, "t", ax, methods=methods).t)
    if len(rounds):
        step = -(-len(rounds) // 8)
        ax.set_xticks(rounds[::-1][::step][::-1].astype(int))  # the last one always
    finish(ax, "round", score, title)
    if own:
        clear_of_legend(ax)
    return ax


@styled
def gain_bars(frame: pd.DataFrame, title: str = "The ensemble against the mean exit"):
    """Bars of ``gain``: a panel per data column, a group per fine-tuning mode, a bar per method.

    Bars are means, with SD where there are several seeds. Returns the panels' Axes.
    """
    import seaborn

    frame = frame.dropna(subset=["gain"])
    groups = [g for _, g in frame.groupby("column", sort=False)] or [frame]
    colors = {plain(label_of(m)): color_of(m) for m in frame.method.unique()}
    modes = list(dict.fromkeys(frame.finetune.map(label_of)))
    titles = [_data(g) for g in groups] if len(groups) > 1 else [""]
    axes = panels(titles, title, (1.4 + 0.5 * len(modes) * len(colors), 2.8))
    for ax, group in zip(axes, groups, strict=True):
        rows = group.assign(finetune=group.finetune.map(label_of), method=group.method.map(label_of).map(plain))
        bar = "sd" if rows.duplicated(["finetune", "method"]).any() else None
        seaborn.barplot(rows, x="finetune", y="gain", hue="method", palette=colors, order=modes, hue_order=list(colors),
                        errorbar=bar, capsize=0.15, err_kws={"linewidth": 1.2}, legend="full", saturation=1,
                        ax=ax)  # fmt: skip
        ax.axhline(0, color="black", linewidth=0.8)
        finish(ax, "", "ensemble − mean exit (points)" if ax.get_subplotspec().is_first_col() else "")
    share_legend(axes)
    return axes


@styled
def plot_tradeoff(frame: pd.DataFrame, x: str, label: str, title: str, ax=None, dashed: str | None = None,
                  line: str = "-"):  # fmt: skip
    """Accuracy against what it costs, column ``x`` on a log axis, per method; points are named by ``column``.

    ``frame`` has method, column, accuracy, ``x``; rows without ``x`` whose ``column`` is ``dashed`` are dashed lines.
    """
    ax, frame = axes_of(ax), named(frame[["method", "column", "accuracy", x]])
    points, looks = frame.dropna(subset=[x, "accuracy"]).sort_values(x), looks_of(frame)
    lines(points, x, "accuracy", ax, looks, markersize=7, **({} if line else {"linewidth": 0}))
    for row in frame[frame[x].isna() & (frame.column == dashed)].itertuples():
        said = f"{row.series}, {plain(dashed)}"
        ax.axhline(row.accuracy, color=looks.palette[row.series], linestyle="--", label=said)
    log_axis(ax, points[x])
    ax.margins(x=0.12, y=0.12)  # room for the names
    if ax.get_legend_handles_labels()[0]:
        ax.legend(loc="best")
    finish(ax, label, ACCURACY, title)
    name_points(ax, [(x, y, plain(name)) for x, y, name in points[[x, "accuracy", "column"]].values])
    return ax
