"""Heat maps of attention over images: every block of one image, galleries, and an interactive browser (ipywidgets)."""

import io
from collections.abc import Sequence
from functools import lru_cache, partial

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
    import matplotlib.pyplot as plt

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


def plot_gallery(images: Sequence[np.ndarray], attention: Attention, labels: torch.Tensor, classes: Sequence[str]):
    """Plot Figure 11: per image (row) the maps of Eqs. 7-9 in the block of its earliest correct exit. Returns the Axes.

    An image that no exit gets right shows the last block and says so.
    """
    import matplotlib.pyplot as plt

    names, first = ("x", "m", "c"), attention.earliest_correct(labels).tolist()
    size = (1.7 * 4, 1.75 * len(images))
    _, axes = plt.subplots(len(images), 4, figsize=size, squeeze=False, layout="constrained")
    for i, (row, image) in enumerate(zip(axes, images, strict=True)):
        block = attention.exit_units[first[i]]
        where = f"exit {first[i] + 1}, block {block + 1}" if first[i] >= 0 else "no exit correct"
        overlay(image, None, row[0], f"{classes[labels[i]]}: {where}")
        for name, ax in zip(names, row[1:], strict=True):
            overlay(image, _mean(attention, name, i, block), ax, MAPS[name])
    return axes


SLIDE = {"x": "before Ree", "m": "modulated"}


def plot_slide(
    images: Sequence[np.ndarray], attention: Attention, labels: torch.Tensor, classes: Sequence[str],
    chosen: torch.Tensor, title: str = "What the class token looks at, in the block of the first exit that is right",
):  # fmt: skip
    """Plot a row per class, a triple per group of exits: image, map before Ree, modulated map.

    ``chosen`` (classes, groups) as from ``pick_by_exit``; maps are Eqs. 7 and 8 in the block of the image's earliest
    correct exit, mean over heads, each on its own scale. Returns the Axes (classes, groups, 3).
    """
    import matplotlib.pyplot as plt

    exits, (rows, groups) = len(attention.exit_units), chosen.shape
    first = attention.earliest_correct(labels).tolist()
    figure = plt.figure(figsize=(1.15 * 3 * groups + 0.9, 1.25 * rows + 0.9), layout="constrained")
    figure.suptitle(title, fontsize=12)
    axes = np.empty((rows, groups, 3), dtype=object)
    for g, part in enumerate(figure.subfigures(1, groups, wspace=0.03, squeeze=False)[0]):
        axes[:, g] = part.subplots(rows, 3, squeeze=False)
        own = [e + 1 for e in range(exits) if e * groups // exits == g]
        part.suptitle(_exits_text(own), fontsize=10)
        for ax, name in zip(axes[0, g], ("image", *SLIDE.values()), strict=True):
            ax.set_title(name, fontsize=8)
        for row, i in zip(axes[:, g], chosen[:, g].tolist(), strict=True):
            _triple(row, images[i] if i >= 0 else None, attention, i, first[i] if i >= 0 else -1)
    for row, line in zip(axes[:, 0, 0], chosen.tolist(), strict=True):
        found = next((i for i in line if i >= 0), None)
        row.set_ylabel(plain(classes[labels[found]]) if found is not None else "", fontsize=9)
    return axes


def _exits_text(exits: Sequence[int]) -> str:
    if len(exits) < 2:
        return f"first right at exit {exits[0]}" if exits else "no exit"
    return f"first right at exits {exits[0]}–{exits[-1]}"


def _triple(row, image: np.ndarray | None, attention: Attention, i: int, exit: int) -> None:
    """Plot an image and its two maps; empty frames where no image was found."""
    for ax, name in zip(row, (None, *SLIDE), strict=True):
        head = ax.get_title()
        if image is None:
            ax.set(xticks=[], yticks=[])
            continue
        weights = _mean(attention, name, i, attention.exit_units[exit]) if name else None
        overlay(image, weights, ax)
        ax.set_title(head, fontsize=8)
    if image is not None:
        row[0].set_xlabel(f"exit {exit + 1}", fontsize=7, labelpad=1)


def browse(images: Sequence[np.ndarray], attention: Attention, titles: Sequence[str]):
    """Build a widget to pick image, block and head: all four maps side by side. Returns the ipywidgets box."""
    import ipywidgets as widgets
    from IPython.display import Image, display

    _, blocks, heads = attention.maps["x"].shape[:3]
    of_heads = [("mean", None), *((str(h + 1), h) for h in range(heads))]
    choose = {
        "image": widgets.Dropdown(options=[(t, i) for i, t in enumerate(titles)], description="image"),
        "block": widgets.IntSlider(value=1, min=1, max=blocks, description="block"),
        "head": widgets.Dropdown(options=of_heads, description="head"),
    }
    picture = lru_cache(maxsize=1024)(partial(map_picture, images, attention))
    show = lambda image, block, head: display(Image(picture(image, block - 1, head)))  # noqa: E731
    return widgets.VBox([widgets.HBox(list(choose.values())), widgets.interactive_output(show, choose)])


def map_picture(images: Sequence[np.ndarray], attention: Attention, image: int, block: int, head: int | None) -> bytes:
    """Render the four maps of one image, block (0-based) and head (None: mean over heads) as a PNG."""
    from matplotlib.figure import Figure

    figure, out = Figure(figsize=(2.2 * len(attention.maps), 2.4), layout="constrained"), io.BytesIO()
    for ax, name in zip(figure.subplots(1, len(attention.maps)), attention.maps, strict=True):
        overlay(images[image], _mean(attention, name, image, block, head), ax, MAPS[name])
    figure.savefig(out, format="png", dpi=90)
    return out.getvalue()
