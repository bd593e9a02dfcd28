"""Figures of the engine benchmark: every system's seconds a round, what a population costs, where a run's time goes."""

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.engine_speed import OURS, OWN
from fedlib.report.style import axes_of, color_of, finish, panels, plain, styled

WORKLOADS = {"W1": "FedAvg", "W2": "LoRA", "W2'": "LoRA, last third", "W3": "ReeFL"}  # what the names stand for
BAR = 0.27  # inches


@styled
def plot_times(times: pd.DataFrame):
    """Median seconds a round with quartiles, ``times`` as from ``times_table``: a panel per workload, a bar per system.

    Panels are as high as they have bars, so that every name is read.
    """
    import seaborn

    names = list(times.index.unique("workload"))
    bars = [len(times.loc[name]) for name in names]
    rows = [max(bars[i : i + 2]) for i in range(0, len(bars), 2)]
    axes = panels([_title(n) for n in names], "Seconds a round: median and quartiles", (5.2, 3.0), 2, False)
    axes[0].get_subplotspec().get_gridspec().set_height_ratios([0.9 + BAR * n for n in rows])
    axes[0].figure.set_figheight(0.4 + sum(0.9 + BAR * n for n in rows))
    for ax, name in zip(axes, names, strict=True):
        group = times.loc[name].reset_index()
        colors = {s: _color(s) for s in group.system}
        seaborn.barplot(group, x="seconds", y="system", hue="system", palette=colors, saturation=1, legend=False, ax=ax)
        error = [group.seconds - group.seconds_q25, group.seconds_q75 - group.seconds]
        ax.errorbar(group.seconds, range(len(group)), xerr=error, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        ax.set_yticks(range(len(group)), [plain(s) for s in group.system], fontsize=8)
        ax.set_ylim(rows[names.index(name) // 2] - 0.5, -0.5)  # bars of one thickness
        ax.set_xlim(0, 1.05 * group.seconds_q75.max())
        finish(ax, "seconds a round", "")
        ax.grid(False, axis="y")
    return axes


def _title(name: str) -> str:
    kind, *rest = name.split(", ")
    return f"{', '.join([WORKLOADS.get(kind, kind), *rest])} ({kind})"


def _color(system: str) -> str:
    return color_of("reefl") if system == OURS else "#f0b48a" if system in OWN else color_of("exclusivefl")


@styled
def plot_population(rows: Sequence[Mapping]):
    """Seconds a round and peak memory (MiB) against the number of clients, ``rows`` as ``scale`` measures them."""
    import seaborn

    frame = pd.DataFrame(rows, columns=["num_clients", "seconds", "peak_mib"]).astype(float)
    axes = panels(["", ""], "The population costs nothing", (4.0, 2.8), 2, False)
    said = {"seconds": "seconds a round (median)", "peak_mib": "peak memory (MiB)"}
    for ax, (key, label) in zip(axes, said.items(), strict=True):
        seaborn.lineplot(frame, x="num_clients", y=key, marker="o", color=color_of("depthfl"), ax=ax)
        ax.set(xscale="log", ylim=(0, 1.15 * frame[key].max() if len(frame) else 1))
        ax.set_xticks(frame.num_clients, [f"{n:,.0f}" for n in frame.num_clients])
        ax.set_xticks([], minor=True)
        finish(ax, "clients in the population", label)
    return axes


@styled
def plot_phases(shares: pd.Series, ax=None, title: str = "Forward and backward passes take the time of a run"):
    """Bars of the share of a run's time (percent) by phase."""
    import seaborn

    ax = axes_of(ax, (6.4, 0.9 + BAR * len(shares)))
    names, color = [plain(n) for n in shares.index], color_of("depthfl")
    seaborn.barplot(x=shares.to_numpy(), y=names, color=color, saturation=1, ax=ax)
    ax.bar_label(ax.containers[0], fmt="%.1f", padding=3, fontsize=8)
    ax.margins(x=0.12)
    finish(ax, "share of the time (%)", "", title)
    ax.grid(False, axis="y")
    return ax
