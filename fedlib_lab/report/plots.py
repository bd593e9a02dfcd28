"""Figures for notebooks, drawn with seaborn; every function returns the Axes. Read next: ``report/titles.py``."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fedlib.core.validation import check_type
from fedlib.methods import METHODS

from . import style
from .data_plots import plot_clients_examples as plot_clients_examples
from .data_plots import plot_label_distribution as plot_label_distribution
from .style import Looks, axes_of, finish, looks_of, named, panels, plain, score_of, share_legend, styled, title_of
from .tables import label_of, output_file
from .titles import figure_title, leads

COSTS = style.NAMES["costs"]  # what an axis says, and its unit in units of the column
ACCURACY = "test accuracy (%)"
MOST = 6  # lines that a panel can hold
WIDE = 8.4  # inches, at most, so that words are read at 700 pixels
BARS = "; bars: ± SD over seeds"
OTHERS = "#d0d0d0"  # of methods that are not spoken of


def save_figure(axes, name: str):
    """Write the figure of ``axes`` to ``outputs/<folder>/figures/<stem>.png``, ``name`` being ``<folder>/<stem>``."""
    path = output_file(name, "figures", "png")
    np.ravel(axes)[0].figure.figure.savefig(path, dpi=150)  # the whole figure, also of a subfigure's Axes
    return path


def lines(frame: pd.DataFrame, x: str, y: str, ax, looks: Looks, **settings) -> str:
    """Draw seaborn's lines, one per ``series``, by rising ``x``; for several seeds, mean and SD.

    Return what the bars are of.
    """
    import seaborn

    shown = [name for name in looks.palette if name in set(frame.series)]
    looks = Looks(*({name: look[name] for name in shown} for look in vars(looks).values()))
    repeated = "seed" in frame and frame.groupby(["series", x]).seed.nunique().max() > 1
    how = {"estimator": None, "errorbar": None, "markersize": 6 if frame[x].nunique() < 12 else 4}
    if repeated:
        bars = {"capsize": 2, "elinewidth": 1}
        how |= {"estimator": "mean", "errorbar": "sd", "err_style": "bars", "err_kws": bars}
    if len(frame):
        seaborn.lineplot(frame, x=x, y=y, ax=ax, **looks.settings(), **{**how, **settings})
    return BARS if repeated else ""


@styled
def plot_series(frame: pd.DataFrame, x: str, y: str, xlabel: str, ylabel: str, title: str = "", ax=None,
                hero: str = "", names: str = "", log: bool = False, looks: Looks | None = None):  # fmt: skip
    """Draw a line per ``series`` (``style.named``) by rising ``x``, mean and SD where it has several seeds.

    Of more than ``MOST`` lines a panel each, against the method ``hero``'s; return the Axes. ``names``: a column that
    is written at the points. ``log``: of the x axis.
    """
    frame = (frame if "series" in frame else named(frame)).dropna(subset=[x, y])
    looks, own = looks or looks_of(frame), ax is None
    if own and frame.series.nunique() > MOST:
        return _against(frame, x, y, xlabel, ylabel, title, hero, looks)
    ax = axes_of(ax)
    bars = lines(frame, x, y, ax, looks)
    if log:
        style.log_axis(ax, frame[x])
    finish(ax, xlabel + bars, ylabel, title)
    if own:
        share_legend([ax], least=2)
    if names:
        ax.margins(0.1, 0.12)
        said = frame.groupby(["series", x])[names].agg(lambda n: "–".join(f"{v:g}" for v in sorted({n.min(), n.max()})))
        means = frame.groupby(["series", x])[y].mean()
        style.name_points(ax, [(at[1], mean, plain(said[at])) for at, mean in means.items()])
    return ax


def _against(frame: pd.DataFrame, x: str, y: str, xlabel: str, ylabel: str, title: str, hero: str, looks: Looks):
    """Draw a panel per series but the first of ``hero``, these two in their colours and all others grey."""
    means = frame.groupby(["series", "method", x], sort=False)[y].mean().reset_index()
    first = next(iter(means[means.method == hero].series), means.groupby("series")[y].max().idxmax())
    rivals = [name for name in looks.palette if name != first]
    axes = panels(rivals, title, (WIDE / 3, 2.1), columns=3)
    for ax, rival in zip(axes, rivals, strict=True):
        for name, part in means.groupby("series", sort=False):
            spoken = name in (first, rival)
            color, label = looks.palette[name] if spoken else OTHERS, name if name == first else None
            ax.plot(part[x], part[y], color=color, linewidth=1 + spoken, zorder=2 + spoken, label=label)
        finish(ax, xlabel if ax in axes[-3:] else "", ylabel if ax.get_subplotspec().is_first_col() else "")
    axes[0].legend()
    share_legend(axes)
    return axes


@styled
def plot_exit_accuracies(frame: pd.DataFrame, ax=None, title: str = "", looks: Looks | None = None, hero: str = ""):
    """Draw each exit's mean accuracy over seeds, with SD bars where there are several; ``frame`` as from ``collect``.

    A single exit is the deepest. Lines stand a little beside one another, so that bars do not hide bars; of more than
    ``MOST`` a row of dots each.
    """
    frame = named(frame).dropna(subset=["accuracy"])
    looks, most = looks or looks_of(frame), max(map(len, frame.exits), default=1)
    rows = frame.assign(exit=[range(most + 1 - len(e), most + 1) for e in frame.exits]).explode(["exit", "exits"])
    rows = rows.astype({"exits": float, "exit": float})
    if len(looks.palette) > MOST:
        return _exit_dots(frame, rows, ax, title, hero)
    ax = axes_of(ax)
    beside = dict(zip(looks.palette, np.linspace(-0.08, 0.08, len(looks.palette) + 2)[1:-1], strict=True))
    rows["at"] = rows.exit + rows.series.map(beside).astype(float)
    bars = lines(rows, "at", "exits", ax, looks)
    ax.set_xticks(range(1, most + 1))
    finish(ax, f"exit{bars}", _score(frame), title)
    return ax


def _exit_dots(frame: pd.DataFrame, rows: pd.DataFrame, ax, title: str, hero: str):
    """Draw a row per series, the best mean on top: a dot per exit, deeper ones darker, a bar at their mean."""
    import seaborn

    order = frame.groupby("series").accuracy.mean().sort_values()
    ax, means = axes_of(ax, (6.8, 1.5 + 0.25 * len(order))), rows.groupby(["series", "exit"]).exits.mean()
    for y, name in enumerate(order.index):
        method, exits = frame[frame.series == name].method.iloc[0], means[name]
        color = style.color_of(method) if hero in ("", method) else "#5c6166"
        ax.plot([exits.min(), exits.max()], [y, y], color=OTHERS, linewidth=1, zorder=1)
        shades = seaborn.light_palette(color, len(exits) + 1)[1:]
        ax.scatter(exits, [y] * len(exits), c=shades, s=42, edgecolors=color, linewidths=0.8, zorder=2)
        ax.plot(order[name], y, "|", color="black", markersize=12, zorder=3)
    ax.set_yticks(range(len(order)), order.index, fontsize=9)
    finish(ax, f"{_score(frame)}: a dot per exit, deeper ones darker; bar: their mean", "", title)
    return ax


@styled
def plot_modes(frame: pd.DataFrame, plot=plot_exit_accuracies, title: str = "", hero: str = "", **settings):
    """Draw a panel per data column and fine-tuning mode, a shared y axis, one legend; return the Axes of the panels.

    The figure's title is ``title`` (none: who leads) and the runs in words; of several data sets each panel has its
    own.
    """
    if frame.empty:
        raise ValueError("plot_modes: 0 rows; allowed: one or more, as from collect")
    looks = looks_of(named(frame))
    columns = [g for _, g in frame.groupby("column", sort=False)] if "column" in frame else [frame]
    groups = [group for part in columns for _, group in part.groupby("finetune", sort=False)]
    several, told = len(columns) > 1, set(frame.finetune) != {"full"}  # else there is nothing to tell apart
    modes = [label_of(group.finetune.iloc[0]) * told for group in groups]
    titles = [f"{_data(g)}\n{m}".strip() for g, m in zip(groups, modes, strict=True)] if several else modes
    title = figure_title(title or leads(frame, hero), frame)
    if plot is plot_exit_accuracies:
        settings["hero"] = hero
    if plot is plot_exit_accuracies and len(looks.palette) > MOST:  # rows have names of their own
        axes = panels(titles, title, (7.2, 0.9 + 0.25 * len(looks.palette)), columns=1, sharey=False)
    else:
        wide = min(frame.finetune.nunique(), 3) if several else min(len(groups), 3)
        axes = panels(titles, title, (min(6.4, WIDE / wide), 3.0), columns=wide)
    for ax, group in zip(axes, groups, strict=True):
        plot(group, ax, title=ax.get_title(), looks=looks, **settings)
        if not ax.get_subplotspec().is_first_col():
            ax.set_ylabel("")
    share_legend(axes)
    return axes


def _score(frame: pd.DataFrame) -> str:
    """Return what the accuracies of ``frame`` are called."""
    return score_of(frame.dataset.unique()) if "dataset" in frame else ACCURACY


def _data(group: pd.DataFrame) -> str:
    """Name in words the data of rows of one column."""
    ran = group.dataset.iloc[0] if "dataset" in group else None
    return title_of(str(group.column.iloc[0]), ran) if "column" in group else ""


@styled
def plot_costs(frame: pd.DataFrame, ax=None, x: str = "macs", y: str = "upload_mib", title: str = "", looks=None):
    """Draw cost ``y``, or accuracy, against cost ``x`` per exit; ``frame`` has method and the columns of both.

    The axis of memory is logarithmic: methods differ by an order of magnitude.
    """
    (xlabel, xunit), (ylabel, yunit) = COSTS[x], COSTS.get(y, (_score(frame), 1))
    rows = frame.assign(**{x: frame[x] * xunit, y: frame[y] * yunit})
    return plot_series(rows, x, y, xlabel, ylabel, title, axes_of(ax), log=x != "macs", looks=looks)


def curves_frame(curves: Mapping[str, Sequence[dict]], x: str, methods: Mapping[str, str] | None = None):
    """Return a row per record: its ``x`` and ``accuracy``, with the ``series`` and the ``method`` of its name.

    A name's method is what ``methods`` says, else the name itself or, up to a comma, its beginning.
    """
    methods, rows = {label_of(m): m for m in METHODS} | {**check_type(methods or {}, Mapping, "methods")}, []
    for name, records in check_type(curves, Mapping, "curves").items():
        method = methods.get(name, str(name).split(", ")[0])
        where = {"series": plain(style.spelled(str(name))), "method": methods.get(method, method), "name": name}
        records = check_type(records, Sequence, f"curves: {name!r}, as run.metrics")
        rows += [where | {x: r[x], "accuracy": r["accuracy"]} for r in records]
    return pd.DataFrame(rows, columns=["series", "method", "name", x, "accuracy"])


@styled
def plot_adaptive(curves: Mapping[str, Sequence[dict]], title: str = "", ax=None, hero: str = "", methods=None):
    """Draw accuracy against mean MACs as the confidence threshold moves; a label maps to a curve of ``clients``.

    ``methods``: of labels that do not begin with their method's name.
    Records of a single ``exit`` stand beside the line as rings of its colour: what all get who leave there.
    """
    policies = {name: [r for r in records if "exit" not in r] for name, records in curves.items()}
    frame = curves_frame(policies, "macs", methods).drop_duplicates(["series", "macs"], keep="last")
    looks, (label, unit) = looks_of(frame), COSTS["macs"]
    frame["macs"] *= unit
    ax = plot_series(frame, "macs", "accuracy", f"mean {label}", ACCURACY, title, ax, hero, looks=looks)
    for name, series in frame[["name", "series"]].drop_duplicates().values:
        if alone := [(r["macs"] * unit, r["accuracy"]) for r in curves[name] if "exit" in r]:
            ring = {"facecolors": "none", "edgecolors": looks.palette[series], "linewidths": 1.5}
            ax.scatter(*zip(*alone, strict=True), s=70, **ring)
    return ax


def saved_by_leaving(curves: Mapping[str, Sequence[dict]]) -> str:
    """Say in a sentence at which share of its MACs each curve comes within half a point of its end."""
    said = []
    for name, records in curves.items():
        *_, end = policy = [r for r in records if "exit" not in r]
        near = min(r["macs"] for r in policy if r["accuracy"] >= end["accuracy"] - 0.5)
        said.append(f"{plain(style.spelled(name))} at {100 * near / end['macs']:.0f} % of its MACs")
    return f"Within half a point of the last exit: {', '.join(said)}"


@styled
def plot_learning_curves(runs: Mapping[str, Sequence[dict]], methods: Mapping[str, str] | None = None, ax=None,
                         title: str = "", score: str = ACCURACY, hero: str = ""):  # fmt: skip
    """Draw accuracy against round; ``runs`` maps a label to its metrics records. Ticks stand at evaluated rounds.

    ``methods``: the method of a label that does not begin with its name, whose look the line gets. ``score``: what an
    accuracy is called (``style.score_of``).
    """
    frame = curves_frame(runs, "t", methods)
    drawn, rounds = plot_series(frame, "t", "accuracy", "round", score, title, ax, hero), np.unique(frame.t)
    for ax in np.ravel(drawn) if len(rounds) else ():
        step = -(-len(rounds) // (8 if drawn is ax else 4))
        ax.set_xticks(rounds[::-1][::step][::-1].astype(int))  # the last one always
    return drawn


@styled
def plot_tradeoff(frame: pd.DataFrame, x: str, label: str, title: str, ax=None, dashed: str | None = None,
                  line: str = "-"):  # fmt: skip
    """Draw accuracy against what it costs, column ``x`` on a log axis, per method; points are named by ``column``.

    ``frame`` has method, column, accuracy, ``x``; rows without ``x`` whose ``column`` is ``dashed`` are dashed lines.
    """
    ax, frame = axes_of(ax, (6.8, 4.4)), named(frame[["method", "column", "accuracy", x]])
    points, looks = frame.dropna(subset=[x, "accuracy"]).sort_values(x), looks_of(frame)
    lines(points, x, "accuracy", ax, looks, markersize=7, **({} if line else {"linewidth": 0}))
    for row in frame[frame[x].isna() & (frame.column == dashed)].itertuples():
        said = f"{row.series}, {plain(dashed)}"
        ax.axhline(row.accuracy, color=looks.palette[row.series], linestyle="--", label=said)
    style.log_axis(ax, points[x])
    ax.margins(x=0.12, y=0.12)  # room for the names
    finish(ax, label, ACCURACY, title)
    if points.column.nunique() == len(points) and points.method.nunique() > MOST:  # the names say all
        ax.get_legend().remove()
    elif ax.get_legend_handles_labels()[0]:
        ax.legend()
        share_legend([ax])
    colors = [looks.palette[name] for name in points.series]  # whose point it is, where points crowd
    style.name_points(ax, [(x, y, plain(name)) for x, y, name in points[[x, "accuracy", "column"]].values], colors)
    return ax
