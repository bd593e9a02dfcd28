"""Figures of the engine benchmark: every system's seconds a round, what a population costs, where a run's time goes."""

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.engine_speed import OURS, OWN
from fedlib.report.style import axes_of, color_of, finish, panels, plain, styled

WORKLOADS = {"W1": "FedAvg", "W2": "LoRA", "W2'": "LoRA, last third", "W3": "ReeFL", "W4": "ResNet-20"}
BAR = 0.27  # inches


@styled
def plot_times(times: pd.DataFrame):
    """How many times longer than fedlib every system takes, ``times`` as from ``times_table``: a panel per workload.

    Bars are medians over turns, with their range; panels are as high as they have bars, so that every name is read.
    """
    import seaborn

    names = list(times.index.unique("workload"))
    bars = [len(times.loc[name]) for name in names]
    rows = [max(bars[i : i + 2]) for i in range(0, len(bars), 2)]
    rivals = times.drop(index=[OURS, *OWN], level="system", errors="ignore").ratio
    said = f"Other systems take {rivals.min():.1f} to {rivals.max():.1f} times fedlib's time" if len(rivals) else ""
    axes = panels([_title(n) for n in names], f"{said}\nmedian and range over turns, CPU", (4.2, 3.0), 2, False)
    axes[0].get_subplotspec().get_gridspec().set_height_ratios([0.9 + BAR * n for n in rows])
    axes[0].figure.set_figheight(0.5 + sum(0.9 + BAR * n for n in rows))
    for ax, name in zip(axes, names, strict=True):
        group = times.loc[name].reset_index()
        colors = {s: _color(s) for s in group.system}
        seaborn.barplot(group, x="ratio", y="system", hue="system", palette=colors, saturation=1, legend=False, ax=ax)
        error = [group.ratio - group.ratio_min, group.ratio_max - group.ratio]
        ax.errorbar(group.ratio, range(len(group)), xerr=error, fmt="none", ecolor="black", elinewidth=1, capsize=2)
        ax.axvline(1, color="black", linestyle="--", linewidth=1)
        ax.set_yticks(range(len(group)), [plain(s) for s in group.system], fontsize=8)
        ax.set_ylim(rows[names.index(name) // 2] - 0.5, -0.5)  # bars of one thickness
        ax.set_xlim(0, 1.05 * max(group.ratio_max.max(), 2))
        finish(ax, "times fedlib's seconds a round", "")
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
    ends = frame.sort_values("num_clients").iloc[[0, -1]] if len(frame) else frame
    told = " and ".join(f"{r.seconds:.2f} s at {r.num_clients:,.0f} clients" for r in ends.itertuples())
    axes = panels(["", ""], f"A round takes {told}" if told else "Not measured", (4.0, 2.8), 2, False)
    said = {"seconds": "seconds a round (median)", "peak_mib": "peak memory (MiB)"}
    for ax, (key, label) in zip(axes, said.items(), strict=True):
        seaborn.lineplot(frame, x="num_clients", y=key, marker="o", color=color_of("depthfl"), ax=ax)
        ax.set(xscale="log", ylim=(0, 1.15 * frame[key].max() if len(frame) else 1))
        ax.set_xticks(frame.num_clients, [f"{n:,.0f}" for n in frame.num_clients])
        ax.set_xticks([], minor=True)
        finish(ax, "clients in the population", label)
    return axes


@styled
def plot_phases(shares: pd.Series, ax=None):
    """Bars of the share of a run's time (percent) by phase."""
    import seaborn

    ax = axes_of(ax, (6.4, 0.9 + BAR * len(shares)))
    names, color = [plain(n) for n in shares.index], color_of("depthfl")
    seaborn.barplot(x=shares.to_numpy(), y=names, color=color, saturation=1, ax=ax)
    ax.bar_label(ax.containers[0], fmt="%.1f", padding=3, fontsize=8)
    ax.margins(x=0.12)
    compute = shares.filter(["forward", "backward"]).sum()
    finish(ax, "share of the time (%)", "", f"Forward and backward passes take {compute:.0f} % of a run's time")
    ax.grid(False, axis="y")
    return ax
