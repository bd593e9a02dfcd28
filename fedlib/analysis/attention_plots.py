"""Heat maps of attention over images: every block of one image, a gallery, and an interactive browser (ipywidgets)."""

from collections.abc import Sequence

import numpy as np
import torch

from ..core.words import plain
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
    """uint8 (C, H, W) -> (H, W, 3)."""
    return pixels.cpu().expand(3, -1, -1).permute(1, 2, 0).numpy()


def _mean(attention: Attention, name: str, i: int, block: int, head: int | None = None) -> np.ndarray:
    """One map (side, side) of image ``i``: the mean over heads (the paper's), or one head's."""
    heads = attention.maps[name][i, block]
    return (heads.mean(0) if head is None else heads[head]).cpu().numpy()


def plot_blocks(image: np.ndarray, attention: Attention, i: int = 0, names: Sequence[str] = ("x", "read")):
    """Figure 1b: the maps ``names`` (rows) of image ``i`` in every block (columns), mean over heads."""
    import matplotlib.pyplot as plt

    blocks = attention.maps["x"].shape[1]
    size = (1.1 * blocks, 1.35 * len(names))
    _, axes = plt.subplots(len(names), blocks, figsize=size, squeeze=False, layout="constrained")
    for line, (row, name) in enumerate(zip(axes, names, strict=True)):
        for block, ax in enumerate(row):
            overlay(image, _mean(attention, name, i, block), ax, "" if line else f"block {block + 1}")
        row[0].set_ylabel(MAPS[name].replace(", ", "\n"), fontsize=7)
    return axes


def plot_gallery(images: Sequence[np.ndarray], attention: Attention, labels: torch.Tensor, classes: Sequence[str]):
    """Figure 11: per image (row) the maps of Eqs. 7-9 in the block of its earliest correct exit; returns the Axes.

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


def browse(images: Sequence[np.ndarray], attention: Attention, titles: Sequence[str]):
    """A widget to pick image, block and head: all four maps side by side. Returns the ipywidgets box."""
    import ipywidgets as widgets
    import matplotlib.pyplot as plt

    _, blocks, heads = attention.maps["x"].shape[:3]
    choose = {
        "image": widgets.Dropdown(options=[(t, i) for i, t in enumerate(titles)], description="image"),
        "block": widgets.IntSlider(value=1, min=1, max=blocks, description="block"),
        "head": widgets.Dropdown(
            options=[("mean", None), *((str(h + 1), h) for h in range(heads))], description="head"
        ),
    }

    def show(image: int, block: int, head: int | None) -> None:
        draw_choice(images[image], attention, image, block - 1, head)
        plt.show()

    view = widgets.interactive_output(show, choose)
    return widgets.VBox([widgets.HBox(list(choose.values())), view])


def draw_choice(image: np.ndarray, attention: Attention, i: int, block: int, head: int | None = None):
    """The four maps of one image, block (0-based) and head (None: mean over heads); returns the Axes."""
    import matplotlib.pyplot as plt

    _, axes = plt.subplots(1, len(attention.maps), figsize=(2.2 * len(attention.maps), 2.4), layout="constrained")
    for ax, name in zip(axes, attention.maps, strict=True):
        overlay(image, _mean(attention, name, i, block, head), ax, MAPS[name])
    return axes
