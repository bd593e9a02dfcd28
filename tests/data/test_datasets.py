"""Data sets: shipped, local, and of the hub."""

import numpy as np
import pytest
import torch

from fedlib.data import datasets
from fedlib.data.datasets import TEXTS, is_available, load_dataset
from fedlib.data.tasks import IGNORED
from fedlib_lab.formats.readers import HUB

pytestmark = pytest.mark.usefixtures("cache")


def test_mnist_is_real_balanced_and_split_once():
    data = load_dataset("mnist")
    assert data.train_inputs.shape == (4000, 1, 32, 32) and data.test_labels.bincount().tolist() == [100] * 10
    assert data.train_inputs.dtype == torch.uint8 and data.train_inputs.max() > 250
    assert not data.train_inputs[:, :, :2].any()  # padding
    assert torch.equal(data.test_inputs, load_dataset("mnist").test_inputs)


def write_parquet(folder, n=(12, 6), size=8, mode="RGB"):
    from datasets import ClassLabel, Dataset, Features, Image
    from PIL import Image as PIL

    rng = np.random.default_rng(0)
    for split, count in zip(("train", "test"), n, strict=True):
        shape = (size, size, 3) if mode == "RGB" else (size, size)
        images = [PIL.fromarray(rng.integers(0, 256, shape, dtype=np.uint8)) for _ in range(count)]
        features = Features({"img": Image(), "label": ClassLabel(names=["cat", "dog", "eel"])})
        table = Dataset.from_dict({"img": images, "label": [i % 3 for i in range(count)]}, features=features)
        folder.mkdir(parents=True, exist_ok=True)
        table.to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return images


def test_local_parquet_by_path_and_by_name(tmp_path, monkeypatch):
    last = write_parquet(tmp_path / "cifar10")
    data = load_dataset(str(tmp_path / "cifar10"))
    assert data.classes == ("cat", "dog", "eel") and data.train_inputs.shape == (12, 3, 8, 8)
    np.testing.assert_array_equal(data.test_inputs[-1].permute(1, 2, 0), np.asarray(last[-1]))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    assert torch.equal(load_dataset("cifar10").train_inputs, data.train_inputs)
    assert datasets.is_available("cifar10") and not datasets.is_available("cifar100")


def test_local_imagefolder(tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for c, label in enumerate(("ant", "bee")):
            (tmp_path / "set" / split / label).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (8, 8), 40 * c + i).save(tmp_path / "set" / split / label / f"{i}.png")
    data = load_dataset(str(tmp_path / "set"))
    assert data.classes == ("ant", "bee") and data.train_inputs.shape == (6, 1, 8, 8)
    assert sorted(data.train_inputs[:, 0, 0, 0].tolist()) == [0, 1, 2, 40, 41, 42]


def test_hub_sets_are_read_through_datasets(monkeypatch, tmp_path):
    """The real path of FEMNIST, with a stand-in of the same columns: owners, and a held-out tenth of each."""
    import datasets as hf
    from PIL import Image

    def stand_in(path, *args, **kwargs):
        assert path == "flwrlabs/femnist"
        n = 60
        features = hf.Features(
            {"image": hf.Image(), "writer_id": hf.Value("string"), "character": hf.ClassLabel(names=["a", "b"])}
        )
        rows = {"image": [Image.new("L", (28, 28), i) for i in range(n)], "writer_id": [f"f{i % 3}" for i in range(n)],
                "character": [i % 2 for i in range(n)]}  # fmt: skip
        return hf.DatasetDict({"train": hf.Dataset.from_dict(rows, features=features)})

    monkeypatch.setattr(hf, "load_dataset", stand_in)
    data = load_dataset("femnist")
    assert data.owners.bincount().tolist() == [18, 18, 18] and len(data.test_labels) == 6
    monkeypatch.setattr(hf, "load_dataset", lambda *a, **k: pytest.fail("decoded twice"))
    assert torch.equal(load_dataset("femnist").train_inputs, data.train_inputs)  # cached


@pytest.mark.parametrize("name", ["cifar100", "femnist", "speech_commands"])
def test_offline_gives_one_clear_sentence(name, monkeypatch):
    import datasets as hf

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.delenv("FEDLIB_DATA", raising=False)
    monkeypatch.setattr(hf, "load_dataset", offline)
    with pytest.raises(ConnectionError, match=f"dataset '{name}'.* is not cached and could not be downloaded"):
        load_dataset(name)


def test_unknown_dataset_names_the_known_ones():
    with pytest.raises(ValueError, match="'mnits' is unknown; did you mean 'mnist'. allowed: ag_news, cifar10"):
        load_dataset("mnits")


def test_real_cifar10_by_path(shared_data):
    data = load_dataset(str(shared_data / "cifar10"))
    assert data.train_inputs.shape == (50000, 3, 32, 32) and data.train_labels.bincount().tolist() == [5000] * 10


def test_real_speech_and_writers(shared_data):
    speech = load_dataset(str(shared_data / "fsdd"))
    assert speech.train_inputs.shape == (2400, 1, 128, 128) and len(speech.owners.unique()) == 6
    writers = load_dataset(str(shared_data / "omniglot"))
    assert writers.num_classes == 242 and len(writers.owners.unique()) == 160


def test_femnist_by_name_has_mnists_statistics(fake):
    fake()
    assert [round(float(s[0]), 4) for s in load_dataset("femnist").mean_std()] == [0.1307, 0.3081]
    assert load_dataset("another").stats is None


CLS, SEP = 101, 102


@pytest.mark.parametrize("name, path, config", [
    ("cola", "nyu-mll/glue", "cola"), ("mrpc", "nyu-mll/glue", "mrpc"), ("stsb", "nyu-mll/glue", "stsb"),
    ("squad", "rajpurkar/squad", None), ("xquad_en", "google/xquad", "xquad.en"), ("svamp", "ChilleD/SVAMP", None),
])  # fmt: skip
def test_hub_sets_are_read_through_datasets_and_offline_is_one_sentence(name, path, config, monkeypatch):
    """The real path, with a stand-in of the same columns."""
    import datasets as hf

    n, source = 40, HUB[name]
    answers = {"text": ["b"], "answer_start": [2]}
    value = {"label": 1.5 if name == "stsb" else 1, "answers": answers, "Equation": "( 8.0 - 3.0 )"}[source.label]
    rows = {c: [f"a b {i}" for i in range(n)] for c in source.reads} | {source.label: [value] * n}
    asked = []

    def stand_in(*args, **kwargs):
        asked.append(args)
        splits = [s for s in (source.train, source.test) if s]
        return hf.DatasetDict({s: hf.Dataset.from_dict(rows) for s in splits})

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(hf, "load_dataset", offline)
    assert name in TEXTS and not is_available(name)
    with pytest.raises(ConnectionError, match=f"dataset '{name}' .* is not cached and could not be downloaded"):
        load_dataset(name)
    monkeypatch.setattr(hf, "load_dataset", stand_in)
    data = load_dataset(name, size=32)
    assert asked == [(path, config) if config else (path,)] and is_available(name)
    target = {"stsb": "number", "squad": "span", "xquad_en": "span", "svamp": "tokens"}.get(name, "class")
    assert data.target == target and data.test_inputs.shape == (
        4 if name == "xquad_en" else n,
        64 if name == "cola" else 32,
    )


def test_real_sets(shared_data, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    found = {}
    for name in ("cola", "mrpc", "stsb", "xquad_en", "svamp"):
        data = load_dataset(name)
        found[name] = data.target, len(data.train_labels), len(data.test_labels)
        assert is_available(name) and (data.train_inputs[:, 0] == CLS).all()
        if name == "stsb":
            assert data.train_labels.min() == 0 and data.train_labels.max() == 5
        if name == "xquad_en":
            cut = (data.train_labels[:, :2] == IGNORED).all(1)
            assert cut.sum() < 15 and not (data.test_labels == IGNORED).any()
            assert (data.train_labels[~cut, 0] <= data.train_labels[~cut, 1]).all()
        if name == "svamp":
            assert ((data.train_labels == SEP).sum(1) == 1).all()
    assert found == {
        "cola": ("class", 8551, 1043), "mrpc": ("class", 4076, 1725), "stsb": ("number", 5749, 1500),
        "xquad_en": ("span", 925, 265), "svamp": ("tokens", 3138, 1000),
    }  # fmt: skip
