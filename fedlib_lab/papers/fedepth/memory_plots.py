"""Figures of FeDepth's memory: how blocks are packed into stages, what stages take, how alike local networks are."""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn

from fedlib.methods.sliced.fedepth import pack

from ...report.style import axes_of, finish, panels, share_legend, styled


@styled
def plot_stages(needs: Sequence[float], budgets: Mapping[str, float], slack: float, net: str, unit: str = "MiB"):
    """Plot a panel per budget: each block a bar on top of those before it in its stage, under the budget's line.

    A stage has a colour; blocks that fit no stage are grey. The title says how many stages the least and the largest
    budget make of ``net``. Returns the panels' Axes.
    """
    least, most = (pack(needs, budget, slack) for budget in (min(budgets.values()), max(budgets.values())))
    left_out = len(needs) - sum(map(len, least))
    said = f"{net}: {min(budgets.values()):.3g} {unit} make {len(least)} stages"
    said += f" and leave {left_out} blocks untrained" if left_out else ""
    said += f", {max(budgets.values()):.3g} {unit} make {len(most)} stage{'s' * (len(most) > 1)}"
    axes = panels([f"{name}: {budget:.3g} {unit}" for name, budget in budgets.items()], said, (2.8, 2.4), columns=3)
    for ax, budget in zip(axes, budgets.values(), strict=True):
        stages = pack(needs, budget, slack)
        colors = seaborn.color_palette("colorblind", len(stages))
        for block in set(range(len(needs))).difference(*stages):
            ax.bar(block + 1, needs[block], color="#c9ced3", hatch="//", edgecolor="white", label="not trained")
        for k, (stage, color) in enumerate(zip(stages, colors, strict=True), 1):
            below = 0.0
            for block in stage:
                ax.bar(block + 1, needs[block], bottom=below, color=color, edgecolor="white", label=f"stage {k}")
                below += needs[block]
        ax.axhline(budget, color="black", linestyle="--", linewidth=1, label="budget")
        ax.set_xticks(range(1, len(needs) + 1))
        finish(ax, "block", f"memory of training ({unit})" if ax is axes[0] else "")
        ax.legend()
    share_legend(axes)
    return axes


@styled
def plot_memory(frame: pd.DataFrame, subject: str, ax=None):
    """Plot bars of a stage's estimated and measured memory, lines at r times the whole net's measured peak.

    ``frame`` as from ``training_memory.memory_of_stages``.
    """
    ax = axes_of(ax, (7.6, 0.42 * len(frame) + 1.8))
    rows = frame.assign(at=[f"{r.blocks}, r = {r.r}" if r.r != "all" else "all blocks" for r in frame.itertuples()])
    whole, share = frame[frame.r == "all"].measured_mib.max(), frame.r.iloc[0]
    most = frame[frame.r == share].measured_mib.max()
    title = f"r = {share}: no stage holds more than {100 * most / whole:.0f} % of the whole net's {whole:.0f} MiB"
    names = {"estimate_mib": "estimate", "measured_mib": "measured peak"}
    rows = rows.rename(columns=names).melt("at", list(names.values()), "what", "mib")
    seaborn.barplot(rows, y="at", x="mib", hue="what", palette=["#868a8e", "#6b006f"], saturation=1, ax=ax)
    ax.vlines(frame.budget_mib, np.arange(len(frame)) - 0.45, np.arange(len(frame)) + 0.45, "black", "--", linewidth=1,
              label="r × the whole net's peak")  # fmt: skip
    ax.legend()
    finish(ax, "memory of local training (MiB)", "blocks of a stage", f"{title}\n{subject}")
    share_legend([ax])
    return ax


@styled
def plot_similarities(tables: Mapping[str, np.ndarray], subject: str):
    """Plot a panel per measure: layer by layer of two local networks, brighter where they are more alike.

    The scale of each goes from its lowest to its highest value, and the title says the ends of the diagonals.
    """
    ends = [f"{name} {table[0, 0]:.2f} at the first, {table[-1, -1]:.2f} at the last" for name, table in tables.items()]
    axes = panels(list(tables), f"The same unit of two networks: {'; '.join(ends)}\n{subject}", (4.0, 3.4), columns=2)
    for ax, table in zip(axes, tables.values(), strict=True):
        drawn = ax.imshow(table, origin="lower", cmap="viridis")
        layers = range(0, len(table), max(1, len(table) // 7))
        ax.set_xticks(layers, [i + 1 for i in layers])
        ax.set_yticks(layers, [i + 1 for i in layers])
        finish(ax, "unit of one network", "unit of the other" if ax is axes[0] else "")
        ax.grid(False)
        ax.figure.colorbar(drawn, ax=ax, shrink=0.8, label=f"{ax.get_title()} (0 to 1)")
    return axes


@styled
def plot_parts(frame: pd.DataFrame, title: str, ax=None):
    """Plot what training holds: a stacked bar per ``net``, a part per other column, in percent, and its total."""
    ax, parts = axes_of(ax), frame.set_index("net")
    total, colors = parts.sum(axis=1), seaborn.color_palette("colorblind", parts.shape[1])
    how = {"stacked": True, "color": colors, "width": 0.8, "edgecolor": "white", "legend": False}
    parts.mul(100 / total, axis=0).plot.barh(ax=ax, **how)
    for y, mib in enumerate(total):
        ax.annotate(f"{mib:,.0f} MiB", (100, y), (6, 0), textcoords="offset points", va="center", fontsize=8)
    ax.set_xlim(0, 118)
    ax.invert_yaxis()
    ax.figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=parts.shape[1])
    finish(ax, "share of the memory of training (%)", "", title)
    ax.grid(False, axis="y")
    return ax
