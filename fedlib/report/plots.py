"""Figures for notebooks; every function returns the Axes. One colour per method everywhere."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

COLORS = {
    "exclusivefl": "#8c8c8c", "inclusivefl": "#e0a030", "scalefl": "#4c9f70", "depthfl": "#4878cf", "reefl": "#c44e52",
    "fedavg": "#333333",
}  # fmt: skip

COSTS = {  # what an axis says, and its unit in units of the column
    "macs": ("MACs per image (millions)", 1e-6),
    "upload_mib": ("upload per round (MiB)", 1),
    "training_memory_mib": ("training memory, batch 32 (MiB)", 1),
    "parameters": ("parameters (millions)", 1e-6),
}


def _axes(ax, size=(6.4, 3.8)):
    import matplotlib.pyplot as plt

    return ax if ax is not None else plt.subplots(figsize=size, layout="constrained")[1]


def save_figure(ax, name: str):
    """Write the figure of ``ax`` to ``outputs/<folder>/figures/<stem>.png``, ``name`` being ``<folder>/<stem>``."""
    from ..core.paths import outputs_dir

    folder, _, stem = name.rpartition("/")
    path = outputs_dir() / folder / "figures" / f"{stem}.png"
    path.parent.mkdir(parents=True, exist_ok=True)
    ax.figure.savefig(path, dpi=150)
    return path


def plot_label_distribution(counts: np.ndarray, classes: Sequence[str], ax=None, most: int = 40):
    """Stacked bars of training examples per client and class; ``counts`` is (clients, classes)."""
    from matplotlib import colormaps

    ax = _axes(ax, (8, 3.2))
    shown, bottom = counts[:most], np.zeros(len(counts[:most]))
    for c, name in enumerate(classes):
        color = colormaps["tab20"](c % 20)
        ax.bar(np.arange(len(shown)), shown[:, c], bottom=bottom, width=0.9, color=color, label=name)
        bottom += shown[:, c]
    more = f" (first {most} of {len(counts)})" if len(counts) > most else ""
    ax.set(xlabel=f"client{more}", ylabel="training examples", title="Which labels each client holds")
    ax.margins(x=0.01)
    if len(classes) <= 20:
        ax.legend(ncols=1 + len(classes) // 11, fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return ax


def plot_clients_examples(data, clients: Sequence[int], n: int = 6):
    """The first ``n`` training images of each of ``clients``, one row each, titled by class; returns the Axes.

    ``data`` is a ``FederatedData``. Spectrograms stand as the network sees them: time runs down, pitch to the right.
    """
    import matplotlib.pyplot as plt

    size = (1.1 * n + 0.8, 1.25 * len(clients))
    axes = plt.subplots(len(clients), n, figsize=size, squeeze=False, layout="constrained")[1]
    for row, i in zip(axes, clients, strict=True):
        rows = data.client(i)
        for ax, r in zip(row, rows[np.linspace(0, len(rows) - 1, n).astype(int)], strict=True):
            ax.imshow(data.images[r].permute(1, 2, 0).cpu().numpy().squeeze(), cmap="gray", vmin=0, vmax=255)
            ax.set_title(data.classes[int(data.labels[r])], fontsize=7)
            ax.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"client {i}", fontsize=8)
    return axes


def _lines(frame: pd.DataFrame):
    """Yield (rows, style) per variant (or method): one colour per method, one dash per variant of it."""
    from .tables import label_of

    dashes: dict[str, int] = {}
    by = "variant" if "variant" in frame else "method"
    for name, group in frame.groupby(by, sort=False):
        method = group.method.iloc[0]
        dashes[method] = dashes.get(method, -1) + 1
        label = label_of(group.label.iloc[0] if "label" in group else name)
        dash = ("-", "--", ":", "-.")[dashes[method] % 4]
        yield group, {"color": COLORS.get(method), "linestyle": dash, "label": label}


def plot_exit_accuracies(frame: pd.DataFrame, ax=None, title: str = "Accuracy of every exit"):
    """Mean over seeds of each exit's accuracy, with SD bars; ``frame`` as from ``tables.collect``."""
    ax = _axes(ax)
    for group, style in _lines(frame.dropna(subset=["accuracy"])):
        exits = np.array(group.exits.tolist())
        spread = exits.std(0, ddof=1) if len(exits) > 1 else np.zeros(exits.shape[1])
        ax.errorbar(range(1, exits.shape[1] + 1), exits.mean(0), spread, marker="o", markersize=4, capsize=3, **style)
    longest = max((len(x) for x in frame.exits.dropna()), default=1)
    ax.set(xlabel="exit", ylabel="test accuracy (%)", title=title, xticks=range(1, longest + 1))
    ax.grid(alpha=0.3)
    if ax.lines:
        ax.legend(frameon=False, fontsize=8)
    return ax


DATA = {"cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "femnist": "FEMNIST", "speech_commands": "Speech Commands",
        "mnist": "MNIST digits", "omniglot": "Omniglot", "fsdd": "Free Spoken Digits", "sst2": "SST-2"}  # fmt: skip


def title_of(column: str, stand_in: str | None = None) -> str:
    """A data column in a reader's words: ``CIFAR-10 standing in for CIFAR-100, Dirichlet 1``."""
    data, _, alpha = column.partition("_alpha")
    title = DATA.get(data, data) + (f", Dirichlet {alpha}" if alpha else "")
    return title if stand_in in (None, data) else f"{DATA.get(stand_in, stand_in)} standing in for {title}"


def plot_modes(frame: pd.DataFrame, plot=plot_exit_accuracies, title: str = "Accuracy of every exit", **settings):
    """One panel per fine-tuning mode, side by side with a shared y axis and one legend; returns the Axes."""
    import matplotlib.pyplot as plt

    from .tables import label_of

    modes = list(frame.finetune.unique())
    size = (1.8 + 4.2 * len(modes), 3.8)
    figure, axes = plt.subplots(1, len(modes), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for ax, mode in zip(axes[0], modes, strict=True):
        plot(frame[frame.finetune == mode], ax, title=label_of(mode), **settings)
    found = {}
    for ax in axes[0]:
        found |= {label: handle for handle, label in zip(*ax.get_legend_handles_labels(), strict=True)}
        if ax.get_legend() is not None:
            ax.get_legend().remove()
    figure.suptitle(f"{title}: {title_of(str(frame.column.iloc[0]), frame.dataset.iloc[0])}")
    figure.legend(found.values(), found, loc="outside right upper", frameon=False, fontsize=8, handlelength=3)
    return axes[0]


def plot_accuracy_costs(frame: pd.DataFrame, ax=None, x: str = "macs", title: str = "What accuracy costs"):
    """Accuracy against cost ``x``, one dot per exit; ``frame`` as from ``tables.exit_table``."""
    ax = _axes(ax)
    name, unit = COSTS[x]
    for group, style in _lines(frame):
        ax.plot(group[x] * unit, group.accuracy, marker="o", markersize=4, **style)
    ax.set(xlabel=name, ylabel="test accuracy (%)", title=title)
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    return ax


def gain_bars(frame: pd.DataFrame, ylabel: str = "ensemble – mean exit (points)",
              title: str = "The ensemble against the mean exit"):  # fmt: skip
    """Bars of ``gain``, a panel per data column, a group per fine-tuning mode, a bar per method: mean ± SD."""
    import matplotlib.pyplot as plt
    import seaborn

    from .tables import label_of

    groups = [group for _, group in frame.groupby("column", sort=False)]
    size = (1.2 + 2.6 * len(groups), 3.6)
    figure, axes = plt.subplots(1, len(groups), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for ax, group in zip(axes[0], groups, strict=True):
        rows = group.assign(mode=group.finetune.map(label_of), name=group.method.map(label_of))
        colors = {label_of(m): COLORS[m] for m in group.method.unique()}
        bar = "sd" if rows.duplicated(["mode", "name"]).any() else None
        seaborn.barplot(rows, x="mode", y="gain", hue="name", palette=colors, errorbar=bar, capsize=0.15, ax=ax)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(xlabel="", ylabel=ylabel, title=title_of(group.column.iloc[0], group.dataset.iloc[0]))
        ax.title.set_fontsize(8)
        ax.legend(frameon=False, fontsize=8)
    figure.suptitle(title)
    return axes[0]


def plot_adaptive(curves: Mapping[str, Sequence[dict]], colors: Mapping[str, str] | None = None, ax=None):
    """Accuracy against mean MACs as the confidence threshold moves; a label maps to ``adaptive.adaptive_curve``."""
    ax = _axes(ax)
    for label, rows in curves.items():
        macs, accuracy = ([r[k] for r in rows] for k in ("macs", "accuracy"))
        ax.plot(np.multiply(macs, COSTS["macs"][1]), accuracy, marker=".", label=label, color=(colors or {}).get(label))
    ax.set(xlabel=f"mean {COSTS['macs'][0]}", ylabel="test accuracy (%)", title="Leaving at the first confident exit")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def plot_teachers(counts: Mapping[str, np.ndarray], ax=None, title: str = "Which exit teaches"):
    """Bars of how often each exit is the teacher; ``counts`` maps an estimate's name to (E,)."""
    ax, width = _axes(ax), 0.8 / len(counts)
    for i, (label, count) in enumerate(counts.items()):
        at = np.arange(1, len(count) + 1) + (i - (len(counts) - 1) / 2) * width
        ax.bar(at, count, width, label=label, color=("#c44e52", "#8c8c8c", "#4878cf")[i % 3])
    ax.set(xlabel="exit", ylabel="mini-batches with this teacher", title=title, xticks=range(1, len(count) + 1))
    ax.legend(frameon=False)
    return ax


def plot_learning_curves(runs: Mapping[str, Sequence[dict]], colors: Mapping[str, str] | None = None, ax=None,
                         title: str = "Mean accuracy over exits"):  # fmt: skip
    """Accuracy against round; ``runs`` maps a label to its metrics records."""
    from matplotlib.ticker import MaxNLocator

    ax = _axes(ax)
    for label, metrics in runs.items():
        color = (colors or COLORS).get(label)
        ax.plot([m["t"] for m in metrics], [m["accuracy"] for m in metrics], marker=".", label=label, color=color)
    ax.set(xlabel="round", ylabel="test accuracy (%)", title=title)
    ax.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax


def plot_tradeoff(frame: pd.DataFrame, x: str, label: str, title: str, ax=None, levels: str | None = None,
                  line: str = "-"):  # fmt: skip
    """Accuracy against what it costs, column ``x`` on a log axis, per method; points are named by ``column``.

    ``frame`` has method, column, accuracy, ``x``; rows without ``x`` whose ``column`` is ``levels`` are dashed lines.
    """
    from matplotlib.ticker import LogLocator

    from .tables import LABELS

    ax = _axes(ax)
    for method, group in frame.groupby("method", sort=False):
        color, points = COLORS.get(method), group.dropna(subset=[x]).sort_values(x)
        ax.plot(points[x], points.accuracy, marker="o", linestyle=line, color=color, label=LABELS.get(method, method))
        for row in points.itertuples():
            ax.annotate(row.column, (getattr(row, x), row.accuracy), (4, 5), textcoords="offset points", fontsize=7)
        for level in group[group[x].isna() & (group.column == levels)].accuracy:
            ax.axhline(level, color=color, linestyle="--", label=f"{LABELS.get(method, method)}, {levels}")
    ax.set(xscale="log", xlabel=label, ylabel="test accuracy (%)", title=title)
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.xaxis.set_minor_formatter("")
    ax.margins(x=0.12, y=0.08)  # room for the names
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    return ax


def plot_costs(frame: pd.DataFrame, ax=None, x: str = "macs", y: str = "upload_mib"):
    """Cost ``y`` against cost ``x`` per exit; ``frame`` has method and the columns of ``costs.exit_costs``."""
    from .tables import LABELS

    ax = _axes(ax)
    for method, group in frame.groupby("method", sort=False):
        xs, ys = group[x] * COSTS[x][1], group[y] * COSTS[y][1]
        ax.plot(xs, ys, marker="o", color=COLORS.get(method), label=LABELS.get(method, method))
    ax.set(xlabel=COSTS[x][0], ylabel=COSTS[y][0], title="What each exit costs")
    ax.grid(alpha=0.3)
    ax.legend(frameon=False)
    return ax
