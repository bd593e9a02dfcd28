"""Figures of the engine benchmark: every system's ratio to fedlib, what a population costs, where a run's time goes."""

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.engine_speed import OWN
from fedlib_lab.report.style import axes_of, color_of, finish, panels, plain, styled

WORKLOADS = {
    "W1": "FedAvg, ViT",
    "W2": "LoRA",
    "W2'": "LoRA, last third",
    "W3": "ReeFL",
    "W4": "FedAvg, ResNet-8",
    "W5": "convnet",
}
BAR = 0.27  # inches


@styled
def plot_ratios(times: pd.DataFrame, ax=None):
    """How many times longer than fedlib every other system takes, ``times`` as from ``times_table``: a row a workload.

    Points are medians over turns, lines their range; left of the dashed line fedlib is slower.
    """
    import seaborn

    frame = times.drop(index=list(OWN), level="system", errors="ignore").reset_index()
    names, systems = list(frame.workload.unique()), list(frame.system.unique())
    of = frame.groupby("workload").system
    frame["place"] = frame.workload.map(names.index).astype(float) + 0.09 * (
        of.cumcount() - (of.transform("size") - 1) / 2
    )
    bright = iter(seaborn.color_palette("colorblind"))
    colors = {s: "#9a9a9a" if s.startswith(("bare", "two")) else next(bright) for s in systems}
    ax = axes_of(ax, (7.0, 1.8 + BAR * len(names)))
    ax.hlines(frame.place, frame.ratio_min, frame.ratio_max, color="#c8c8c8", linewidth=1, zorder=1)
    seaborn.scatterplot(frame, x="ratio", y="place", hue="system", style="system", palette=colors, s=38, ax=ax)
    ax.axvline(1, color=color_of("reefl"), linestyle="--", linewidth=1)
    ax.set_xscale("log")
    low, high = 0.9 * min([1, *frame.ratio_min]), 1.1 * max([2, *frame.ratio_max])
    ax.set_xlim(low, high)
    shown = [x for x in (0.5, 1, 1.5, 2, 3, 4, 6, 8, 12) if low < x < high]
    ax.set_xticks(shown, [f"{x:g}×" for x in shown])
    ax.set_xticks([], minor=True)
    ax.set_yticks(range(len(names)), [plain(_title(n)) for n in names], fontsize=8)
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(False, axis="y")
    said = f"Other systems take {frame.ratio.min():.1f} to {frame.ratio.max():.1f} times fedlib's time"
    finish(ax, "seconds a round, times fedlib's (median and range over turns, CPU)", "", said)
    ax.get_legend().remove()
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return ax


def _title(name: str) -> str:
    kind, *rest = name.split(", ")
    return f"{kind}: {', '.join([WORKLOADS.get(kind, kind), *rest])}"


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
