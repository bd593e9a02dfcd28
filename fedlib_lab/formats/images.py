"""Pictures of a `datasets` table, or of a list of Pillow's, as one uint8 array.

A set whose images all have one size of at most ``LARGEST`` pixels a side is kept as it is. Of any other set every image
is brought to the network's input while it is read, with anti-aliasing: ``transforms.render`` would shrink it to that
before anything else, so nothing is lost but memory (one photograph of 2500 x 2500 pixels takes 18 MiB).

Grey images of 16 bits or of floats are scaled to 8 bits, all of a set alike: white is what the fewest bits that hold
the set's brightest pixel can say, of floats 1 or 255. A set whose pixels leave these ranges is refused, and so are
colours of 16 bits. Pictures with a palette have its colours, and what is transparent is laid on white.
"""

import io
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext

import numpy as np

LARGEST = 128  # pixels a side
DEEP = ("I;16", "I;16L", "I;16B", "I;16N", "I", "F")  # Pillow's modes of more than 8 bits a pixel
SCALED = {"deep": "scaled"}  # in the key of what is kept: deep images were clipped before

Cell = Mapping[str, object]  # {"bytes": ..., "path": ...}, as `datasets` keeps an image; or an image of Pillow's


def image_column(table) -> str | None:
    """Return the name of the first column of images."""
    from datasets import Image

    return next((name for name, feature in table.features.items() if isinstance(feature, Image)), None)


def decode_images(tables: Mapping[str, object], column: str | None, size: int | None, layout) -> tuple[dict, bool]:
    """Decode every table, by name, to (N, C, H, W), and say whether images were resized to ``size`` x ``size``.

    Without a ``column`` tables are lists of Pillow's images, of one size that they keep. Images are grey only if all
    are. ``ValueError`` names file and row of an image that cannot be read.
    """
    shapes, modes, brightest, clear, stacks = set(), set(), {}, 0, 0
    for name, table in tables.items():
        for row, cell in encoded_images(table, column):
            with open_image(cell, layout, name, row) as image:
                shapes.add(image.size)
                modes.add("L" if image.mode in ("1", "L", *DEEP) else "RGB")
                check_depth(image, place(cell, layout, name, row))
                with readable(cell, layout, name, row):
                    deep = np.asarray(image) if image.mode in DEEP else None
                    clear += image.has_transparency_data and image.convert("RGBA").getextrema()[3][0] < 255
                    stacks += getattr(image, "is_animated", False)
            if deep is not None:
                high = highest_pixel(deep, kind := image.mode[0], place(cell, layout, name, row))  # F or I
                brightest[kind] = max(brightest.get(kind, 0.0), high)
    pages = "images have several pages, of which the first is read"
    for n, told in ((clear, "transparent images are laid on white"), (stacks, pages)):
        if n:
            warnings.warn(f"{layout.where}: {n} {told}", stacklevel=2)
    whites = {kind: white_level(kind, high, layout) for kind, high in brightest.items()}
    if says := " and ".join(f"{white:g}" for white in whites.values() if white != 255):
        warnings.warn(f"{layout.where}: images are scaled to 8 bits, {says} being white", stacklevel=2)
    mode, (width, height) = ("RGB" if "RGB" in modes else "L"), max(shapes, key=max)
    if column is None and len(shapes) > 1:
        raise ValueError(f"{layout.where}: images of several sizes; as a datasets.Dataset they are brought to one")
    resized = column is not None and (len(shapes) > 1 or max(width, height) > LARGEST)
    if resized:
        size = size or LARGEST
        why = f"{layout.where}: images of {len(shapes)} size{'s'[: len(shapes) > 1]},"
        warnings.warn(f"{why} up to {width} x {height} pixels, are decoded to {size} x {size}", stacklevel=2)
        width = height = size
    shape, sides = (3 if mode == "RGB" else 1, height, width), (width, height)
    arrays = {name: np.empty((len(table), *shape), np.uint8) for name, table in tables.items()}
    for name, row, cell in ((n, *item) for n, table in tables.items() for item in encoded_images(table, column)):
        pixels = decode_pixels(cell, mode, sides, whites, layout, name, row)
        arrays[name][row] = np.atleast_3d(pixels).transpose(2, 0, 1)
    return arrays, resized


def encoded_images(table, column: str | None) -> Iterator[tuple[int, Cell | None]]:
    """Iterate over the rows of the table's images, still encoded; of a list its items."""
    from datasets import Image

    encoded = table if column is None else table.select_columns([column]).cast_column(column, Image(decode=False))
    return enumerate(encoded if column is None else (row[column] for row in encoded))


def open_image(cell: Cell | None, layout, split: str, row: int):
    """Open an image: its header is read, its pixels not yet.

    ``ValueError`` for a cell that names none, one outside of a local set's folder, or no file.
    """
    from PIL import Image

    if cell is None or isinstance(cell, Mapping) and cell["bytes"] is cell["path"]:  # both None
        raise ValueError(f"{layout.row(split, row)} holds no image")
    if isinstance(cell, Image.Image):
        return nullcontext(cell)
    if cell["bytes"] is None:
        path, folder = str(cell["path"]), os.path.abspath(layout.where)
        outside = os.path.exists(folder) and not os.path.abspath(path).startswith(folder + os.sep)
        if outside or not os.path.isfile(path):  # a pipe is no file
            which = "not in the set's own folder" if outside else "no file"
            raise ValueError(f"{layout.row(split, row)} names the picture {path!r}, which is {which}")
    with readable(cell, layout, split, row):
        return Image.open(io.BytesIO(cell["bytes"]) if cell["bytes"] is not None else cell["path"])


def check_depth(image, where: str) -> None:
    """Raise ``ValueError`` for what Pillow reads wrong and says nothing.

    It would keep the upper 8 bits of colours of 16 and of all that SGI writes, and it passes over a file's own zero and
    sign (FITS) and white (TIFF).
    """
    packed, deep, tags = str(getattr(image, "tile", "")), image.mode in DEEP, getattr(image, "tag_v2", {})
    if not deep and image.mode != "L" and re.search(r";16|SGI16|'RGB', \d{4}", packed):
        raise ValueError(f"{where} holds colours or transparency of 16 bits; allowed: 8 bits, or 16 of grey alone")
    if "SGI16" in packed or image.mode[0] == "I" and image.format == "FITS" or deep and tags.get(262) == 0:
        why = "holds grey of more than 8 bits as SGI, FITS, or TIFF in which 0 is white, which would be read wrong"
        raise ValueError(f"{where} {why}; allowed: PNG, or TIFF in which 0 is black")


def place(cell: Cell, layout, split: str, row: int) -> str:
    """Return the file of a picture of its own, or else the row."""
    return str((isinstance(cell, Mapping) and cell["bytes"] is None and cell["path"]) or layout.row(split, row))


def highest_pixel(pixels: np.ndarray, kind: str, where: str) -> float:
    """Return the brightest pixel of a deep image of floats (F) or integers (I).

    ``ValueError`` where one cannot be scaled.
    """
    low, high = float(pixels.min()), float(pixels.max())
    if not (low >= 0 and high <= (255 if kind == "F" else 65_535)):  # NaN too
        allowed = "floats from 0 to 1 or from 0 to 255, and integers of at most 16 bits"
        raise ValueError(f"{where} holds an image with pixels from {low:g} to {high:g}; allowed: {allowed}")
    return high


def white_level(kind: str, brightest: float, layout) -> int:
    """Return the value of white in a set with this brightest pixel of floats (F) or integers (I).

    ``ValueError`` for floats that would be nearly black on both scales.
    """
    if kind == "F" and 1 < brightest < 128:
        why = f"{layout.where}: its brightest pixel of floats is {brightest:g}, which says of no scale"
        raise ValueError(f"{why} that it is the right one; allowed: at most 1, or from 128 to 255")
    return 1 if kind == "F" and brightest <= 1 else 2 ** max(8, int(brightest).bit_length()) - 1


def decode_pixels(
    cell: Cell, mode: str, size: tuple[int, int], whites: Mapping[str, int], layout, split: str, row: int
) -> np.ndarray:
    """Decode an image of (width, height) ``size`` to (H, W) or (H, W, 3); ``whites`` are white of deep ones."""
    from datasets import Image as Feature
    from PIL import Image

    with readable(cell, layout, split, row):
        image = cell if isinstance(cell, Image.Image) else Feature().decode_example(cell)  # turned as its camera says
        if image.mode in DEEP:
            share = np.asarray(image, np.float64) / whites["F" if image.mode == "F" else "I"]
            image = Image.fromarray((255 * share).round().astype(np.uint8))
        elif image.has_transparency_data:
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
        image = image.convert(mode)
    return np.asarray(image if image.size == size else image.resize(size, Image.Resampling.BILINEAR))


@contextmanager
def readable(cell: Cell, layout, split: str, row: int) -> Iterator[None]:
    """Raise ``ValueError`` with the image's place if Pillow cannot read it inside the block."""
    from PIL import Image

    try:
        yield
    except Exception as error:  # Pillow raises many classes
        large = f"too large: {error}" if isinstance(error, Image.DecompressionBombError) else ""
        why = f"holds an image that is {large or 'damaged or of an unknown format'}"
        raise ValueError(f"{place(cell, layout, split, row)} {why}") from error
