"""Heat maps of attention over images: every block and head of one image, a row per class, a browser (ipywidgets)."""

import io
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

import matplotlib.pyplot as plt
import numpy as np
import torch

from ...report.figure_text import plain
from .attention_maps import MAPS, Attention


def overlay(image: np.ndarray, weights: np.ndarray | None, ax, title: str = "") -> None:
    """Draw ``weights`` (side, side) over ``image`` (H, W, 3) on the map's own scale; a dash for a NaN map."""
    height, width = image.shape[:2]
    ax.imshow(image, extent=(0, width, height, 0), interpolation="bilinear")
    if weights is not None and np.isfinite(weights).all():
        ax.imshow(weights, extent=(0, width, height, 0), cmap="inferno", alpha=0.6, interpolation="bilinear")
    elif weights is not None:
        ax.text(width / 2, height / 2, "–", ha="center", va="center")
    ax.set(xticks=[], yticks=[])
    ax.set_title(plain(title), fontsize=8)


def as_image(pixels: torch.Tensor) -> np.ndarray:
    """Convert uint8 (C, H, W) -> (H, W, 3)."""
    return pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).numpy()


def _mean(attention: Attention, name: str, i: int, block: int, head: int | None = None) -> np.ndarray:
    """Return one map (side, side) of image ``i``: the mean over heads (the paper's), or one head's."""
    heads = attention.maps[name][i, block]
    return (heads.mean(0) if head is None else heads[head]).cpu().numpy()


def plot_blocks(image: np.ndarray, attention: Attention, i: int = 0, subject: str = "", wide: int = 6):
    """Plot Figure 1b: image ``i``, and of every block its map before Ree, the modulated one, and the difference.

    Means over heads, differences on one scale; so many blocks stand side by side (``wide``). The title says how much of
    the attention modulation moves (total variation). Returns the Axes; the first column is the image's.
    """
    blocks, names = attention.maps["x"].shape[1], ("x", "read")
    wide = min(wide, blocks)
    maps = {name: np.array([_mean(attention, name, i, block) for block in range(blocks)]) for name in names}
    moved, rows = maps["read"] - maps["x"], -(-blocks // wide)
    _, axes = plt.subplots(3 * rows, wide + 1, figsize=(8.4, 3.75 * rows + 0.6), squeeze=False, layout="constrained")
    for ax in axes.flat:
        ax.set(xticks=[], yticks=[])
        ax.set_frame_on(False)
    overlay(image, None, axes[0, 0], "image")
    labels = [*(MAPS[name].replace(", ", "\n") for name in names), "difference\n(red: more)"]
    for ax, label in zip(axes[:, 0], labels * rows, strict=True):
        ax.set_ylabel(label, fontsize=8)
    for block in range(blocks):
        of_map, read, change = axes[3 * (block // wide) : 3 * (block // wide) + 3, 1 + block % wide]
        overlay(image, maps["x"][block], of_map, f"block {block + 1}")
        overlay(image, maps["read"][block], read)
        overlay(image, None, change)
        change.images[0].set_alpha(0.35)
        where = change.images[0].get_extent()
        drawn = change.imshow(moved[block], extent=where, cmap="RdBu_r", alpha=0.75, interpolation="bilinear")
        drawn.set_clim(*(np.nanmax(np.abs(moved)) or 1.0) * np.array([-1, 1]))
    bar = axes[0, 0].figure.colorbar(drawn, ax=axes[:, -1].tolist(), aspect=40, label="difference of the attention")
    bar.ax.tick_params(labelsize=8)
    share = 50 * np.abs(moved).sum((-1, -2))
    most = f"at most {np.nanmax(share):.0f} % (block {np.nanargmax(share) + 1})" if np.isfinite(share).any() else "–"
    axes[0, 0].figure.suptitle(plain(f"Modulation moves {most} of the class token's attention\n{subject}"))
    return axes


def plot_heads(image: np.ndarray, attention: Attention, i: int = 0, subject: str = "", name: str = "read"):
    """Plot a grid of one kind of maps of image ``i``: a column a block, a row a head, the mean over heads on top.

    Each map is on its own scale. Returns the Axes (heads + 1, blocks).
    """
    blocks, heads = attention.maps[name].shape[1:3]
    size = (max(8.4, 0.7 * blocks + 0.4), 0.74 * (heads + 1) + 0.7)
    figure, axes = plt.subplots(heads + 1, blocks, figsize=size, squeeze=False, layout="constrained")
    for (row, block), ax in np.ndenumerate(axes):
        one = _mean(attention, name, i, block, row - 1 if row else None)
        overlay(image, one, ax, "" if row else f"block {block + 1}")
    for row, ax in enumerate(axes[:, 0]):
        ax.set_ylabel(f"head {row}" if row else "mean", fontsize=9)
    figure.suptitle(plain(f"Every head of every block: {MAPS[name]}\n{subject}"), fontsize=11)
    return axes


SLIDE = {"x": "before Ree", "m": "modulated"}
EQUATIONS = {"x": "before Ree, Eq. 7", "m": "exploration, Eq. 8", "c": "exploitation, Eq. 9"}


def plot_slide(
    images: Sequence[np.ndarray], attention: Attention, labels: torch.Tensor, classes: Sequence[str],
    chosen: torch.Tensor, subject: str = "", maps: Mapping[str, str] = SLIDE,
):  # fmt: skip
    """Plot a row per class, per group of exits an image and its ``maps``; one group and ``EQUATIONS`` are Figure 11.

    ``chosen`` (classes, groups) as from ``pick_by_exit``; maps are those of the block of the image's earliest correct
    exit, mean over heads, each on its own scale. Returns the Axes (classes, groups, 1 + maps).
    """
    exits, (rows, groups) = len(attention.exit_units), chosen.shape
    first = attention.earliest_correct(labels).tolist()
    wide, each = 1 + len(maps), 0.95 if groups > 1 else 1.3  # inches
    figure = plt.figure(figsize=(each * wide * groups + 0.5, each * 1.15 * rows + 1.1), layout="constrained")
    said = "What the class token looks at, in the block of the first exit that is right"
    figure.suptitle(plain(f"{said}\n{subject}".strip()), fontsize=11)
    axes = np.empty((rows, groups, wide), dtype=object)
    for g, part in enumerate(figure.subfigures(1, groups, wspace=0.03, squeeze=False)[0]):
        axes[:, g] = part.subplots(rows, wide, squeeze=False)
        own = [e + 1 for e in range(exits) if e * groups // exits == g]
        said = f"first right at exit{'s' * (len(own) > 1)} {'–'.join(map(str, sorted({*own[:1], *own[-1:]})))}"
        part.suptitle((said if own else "no exit") if groups > 1 else "", fontsize=10)
        for row, i in zip(axes[:, g], chosen[:, g].tolist(), strict=True):
            for ax, name in zip(row, (None, *maps), strict=True):
                ax.set(xticks=[], yticks=[])
                if i >= 0:
                    overlay(images[i], _mean(attention, name, i, attention.exit_units[first[i]]) if name else None, ax)
            row[0].set_xlabel(f"exit {first[i] + 1}" if i >= 0 else "", fontsize=8, labelpad=1)
        for ax, name in zip(axes[0, g], ("image", *maps.values()), strict=True):
            ax.set_title(name, fontsize=8)
    for row, line in zip(axes[:, 0, 0], chosen.tolist(), strict=True):
        found = next((i for i in line if i >= 0), None)
        row.set_ylabel(plain(classes[labels[found]]) if found is not None else "", fontsize=9)
    return axes


def browse(images: Sequence[np.ndarray], attention: Attention, titles: Sequence[str]):
    """Build a widget with sliders over blocks and heads: an image's four maps. Returns the ipywidgets box."""
    import ipywidgets as widgets
    from IPython.display import Image, display

    _, blocks, heads = attention.maps["x"].shape[:3]
    of_heads = [("mean", -1), *((str(h + 1), h) for h in range(heads))]
    choose = {
        "image": widgets.Dropdown(options=[(t, i) for i, t in enumerate(titles)], description="image"),
        "block": widgets.IntSlider(value=1, min=1, max=blocks, description="block"),
        "head": widgets.SelectionSlider(options=of_heads, description="head"),
    }
    picture = lru_cache(maxsize=1024)(partial(map_picture, images, attention))
    show = lambda image, block, head: display(Image(picture(image, block - 1, head if head >= 0 else None)))  # noqa: E731
    return widgets.VBox([widgets.HBox(list(choose.values())), widgets.interactive_output(show, choose)])


def map_picture(images: Sequence[np.ndarray], attention: Attention, image: int, block: int, head: int | None) -> bytes:
    """Render the four maps of one image, block (0-based) and head (None: mean over heads) as a PNG."""
    from matplotlib.figure import Figure

    figure, out = Figure(figsize=(2.2 * len(attention.maps), 2.4), layout="constrained"), io.BytesIO()
    for ax, name in zip(figure.subplots(1, len(attention.maps)), attention.maps, strict=True):
        overlay(images[image], _mean(attention, name, image, block, head), ax, MAPS[name])
    figure.savefig(out, format="png", dpi=90)
    return out.getvalue()
