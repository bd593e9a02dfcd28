"""Pictures of a `datasets` table as one uint8 array.

A set whose images all have one size of at most ``LARGEST`` pixels a side is kept as it is. Of any other set every image
is brought to the network's input while it is read, with anti-aliasing: ``transforms.render`` would shrink it to that
before anything else, so nothing is lost but memory (one photograph of 2500 x 2500 pixels takes 18 MiB).
"""

import io
import warnings
from collections.abc import Iterator, Mapping

import numpy as np

LARGEST = 128  # pixels a side

Cell = Mapping[str, object]  # {"bytes": ..., "path": ...}, as `datasets` keeps an image


def image_column(table) -> str | None:
    """The name of the first column of images."""
    from datasets import Image

    return next((name for name, feature in table.features.items() if isinstance(feature, Image)), None)


def decode_images(tables: Mapping[str, object], column: str, size: int | None, layout) -> tuple[dict, bool]:
    """Arrays (N, C, H, W) of every table by name, and whether their images were resized to ``size`` x ``size``.

    Images are grey only if all are. ``ValueError`` names file and row of an image that cannot be read.
    """
    shapes, modes = set(), set()
    for name, table in tables.items():
        for row, cell in cells(table, column):
            with opened(cell, layout, name, row) as image:
                shapes.add(image.size)
                modes.add("L" if image.mode in ("1", "L") else "RGB")
    mode, (width, height) = ("RGB" if "RGB" in modes else "L"), max(shapes, key=max)
    resized = len(shapes) > 1 or max(width, height) > LARGEST
    if resized:
        size = size or LARGEST
        warnings.warn(
            f"{layout.where}: images of {len(shapes)} size{'s'[: len(shapes) > 1]}, up to {width} x {height} pixels, "
            f"are decoded to {size} x {size}",
            stacklevel=2,
        )
        width = height = size
    arrays = {}
    for name, table in tables.items():
        out = np.empty((len(table), 3 if mode == "RGB" else 1, height, width), np.uint8)
        for row, cell in cells(table, column):
            pixels = decoded(cell, mode, (width, height), layout, name, row)
            out[row] = pixels if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
        arrays[name] = out
    return arrays, resized


def cells(table, column: str) -> Iterator[tuple[int, Cell | None]]:
    """Rows of the table's images, still encoded."""
    from datasets import Image

    encoded = table.select_columns([column]).cast_column(column, Image(decode=False))
    yield from ((i, row[column]) for i, row in enumerate(encoded))


def opened(cell: Cell | None, layout, split: str, row: int):
    """The image with its header read and its pixels not yet."""
    from PIL import Image

    if cell is None:
        raise ValueError(f"{layout.row(split, row)} holds no image")
    try:
        return Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])
    except Exception as error:  # Pillow raises many classes
        raise _damaged(cell, layout, split, row) from error


def decoded(cell: Cell, mode: str, size: tuple[int, int], layout, split: str, row: int) -> np.ndarray:
    """Pixels (H, W) or (H, W, 3) of an image of (width, height) ``size``."""
    from datasets import Image as Feature
    from PIL import Image

    try:
        image = Feature().decode_example(cell).convert(mode)  # turned as its camera says
    except Exception as error:  # Pillow raises many classes
        raise _damaged(cell, layout, split, row) from error
    return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))


def _damaged(cell: Cell, layout, split: str, row: int) -> ValueError:
    where = cell["path"] if cell["bytes"] is None else layout.row(split, row)
    return ValueError(f"{where} holds an image that is damaged or of an unknown format")
