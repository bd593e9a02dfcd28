"""Figures of what clients hold: their labels, and some of their examples. Read next: ``report/style.py``."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from .style import axes_of, finish, plain, styled

NAMED = 20  # more classes than this make a heat map: so many colours cannot be told apart


@styled
def plot_label_distribution(counts: np.ndarray, classes: Sequence[str], title: str = "Which labels each client holds"):
    """Draw ``counts`` (clients, classes) of training examples as stacked bars, or as a heat map if classes are many.

    Of more than 40 clients so many are shown, evenly spread from the first to the last.
    """
    ax = axes_of(None, (8, 3.6))
    shown = np.unique(np.linspace(0, len(counts) - 1, min(40, len(counts))).astype(int))
    some = f" ({len(shown)} of {len(counts)}, evenly spread)" if len(shown) < len(counts) else ""
    (_heat_map if len(classes) > NAMED else _stacked_bars)(counts, shown, classes, ax)
    place = np.unique(np.linspace(0, len(shown) - 1, min(9, len(shown))).astype(int))
    ax.set_xticks(place + (0.5 if len(classes) > NAMED else 0), [str(shown[i]) for i in place], rotation=0)
    finish(ax, f"client{some}", "class" if len(classes) > NAMED else "training examples", title)
    ax.grid(False)
    return ax


def _stacked_bars(counts: np.ndarray, shown: np.ndarray, classes: Sequence[str], ax) -> None:
    import seaborn

    names = [plain(c) for c in classes]
    colors = seaborn.color_palette("colorblind" if len(names) <= 10 else "tab20", len(names))
    pd.DataFrame(counts[shown], columns=names).plot.bar(stacked=True, width=0.9, color=colors, linewidth=0, ax=ax)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), ncols=1 + len(names) // 11, handlelength=1.2)
    ax.set(ylim=(0, 1.06 * max(counts[shown].sum(1).max(), 1)), xlim=(-0.7, len(shown) - 0.3))


def _heat_map(counts: np.ndarray, shown: np.ndarray, classes: Sequence[str], ax) -> None:
    import seaborn

    seaborn.heatmap(counts[shown].T, cmap="rocket_r", ax=ax, cbar_kws={"label": "training examples"}, rasterized=True)
    ticks = np.unique(np.linspace(0, len(classes) - 1, 6).astype(int))
    ax.set_yticks(ticks + 0.5, [plain(classes[i]) for i in ticks], rotation=0)


@styled
def plot_clients_examples(data, clients: Sequence[int], n: int = 6):
    """Draw ``n`` training images of each of ``clients``, first to last, a row each, titled by class; return the Axes.

    ``data`` is a ``FederatedData``. Spectrograms stand as the network sees them: time runs down, pitch to the right.
    A client of fewer images shows all it has.
    """
    import matplotlib.pyplot as plt

    size = (1.15 * n + 0.9, 1.35 * len(clients) + 0.2)
    axes = plt.subplots(len(clients), n, figsize=size, squeeze=False, layout="constrained")[1]
    for row, i in zip(axes, clients, strict=True):
        rows = data.client(i)
        rows = rows[np.linspace(0, len(rows) - 1, min(n, len(rows))).astype(int)] if len(rows) else rows
        for ax in row:
            ax.set(xticks=[], yticks=[], frame_on=False)
        for ax, r in zip(row, rows, strict=False):
            ax.set_frame_on(True)
            ax.imshow(data.inputs[r].permute(1, 2, 0).cpu().numpy().squeeze(), cmap="gray", vmin=0, vmax=255)
            ax.set_title(plain(data.classes[int(data.labels[r])]), fontsize=8)
            ax.grid(False)
            ax.spines[["top", "right"]].set_visible(True)
        row[0].set_ylabel(f"client {i}", fontsize=9)
    return axes
