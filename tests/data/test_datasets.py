"""Data sets, partitions and batched transforms."""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.data import datasets
from fedlib.data.datasets import load_dataset
from fedlib.data.federated import load_federated
from fedlib.data.partition import dirichlet_partition, partition_examples
from fedlib.data.speech import filter_banks, mel_filters
from fedlib.data.transforms import AUGMENTATIONS, render, sample_views

ZERO, ONE = torch.zeros(3), torch.ones(3)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))


# --- data sets ---------------------------------------------------------------------------------------------------


def test_mnist_is_real_balanced_and_split_once():
    data = load_dataset("mnist")
    assert data.train_images.shape == (4000, 1, 32, 32) and data.test_labels.bincount().tolist() == [100] * 10
    assert data.train_images.dtype == torch.uint8 and data.train_images.max() > 250
    assert not data.train_images[:, :, :2].any()  # padding
    assert torch.equal(data.test_images, load_dataset("mnist").test_images)


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
    assert data.classes == ("cat", "dog", "eel") and data.train_images.shape == (12, 3, 8, 8)
    np.testing.assert_array_equal(data.test_images[-1].permute(1, 2, 0), np.asarray(last[-1]))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    assert torch.equal(load_dataset("cifar10").train_images, data.train_images)
    assert datasets.is_available("cifar10") and not datasets.is_available("cifar100")


def test_local_imagefolder(tmp_path):
    from PIL import Image

    for split in ("train", "test"):
        for c, label in enumerate(("ant", "bee")):
            (tmp_path / "set" / split / label).mkdir(parents=True)
            for i in range(3):
                Image.new("L", (8, 8), 40 * c + i).save(tmp_path / "set" / split / label / f"{i}.png")
    data = load_dataset(str(tmp_path / "set"))
    assert data.classes == ("ant", "bee") and data.train_images.shape == (6, 1, 8, 8)
    assert sorted(data.train_images[:, 0, 0, 0].tolist()) == [0, 1, 2, 40, 41, 42]


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
    assert torch.equal(load_dataset("femnist").train_images, data.train_images)  # cached


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
    with pytest.raises(ValueError, match="'mnits' is unknown: use one of mnist, cifar10"):
        load_dataset("mnits")


def test_real_cifar10_by_path(shared_data):
    data = load_dataset(str(shared_data / "cifar10"))
    assert data.train_images.shape == (50000, 3, 32, 32) and data.train_labels.bincount().tolist() == [5000] * 10


def test_real_speech_and_writers(shared_data):
    speech = load_dataset(str(shared_data / "fsdd"))
    assert speech.train_images.shape == (2400, 1, 128, 128) and len(speech.owners.unique()) == 6
    writers = load_dataset(str(shared_data / "omniglot"))
    assert writers.num_classes == 242 and len(writers.owners.unique()) == 160


# --- speech features ---------------------------------------------------------------------------------------------


def test_filter_banks_find_a_tone():
    rate, f = 16_000, 1000.0
    tone = 0.5 * torch.sin(2 * torch.pi * f * torch.arange(rate) / rate)
    features = filter_banks(tone, rate)
    assert features.shape == (128, 128) and not features[98:].any()  # 98 windows fit in one second, then padding
    centres = 700 * (np.exp(np.linspace(1127 * np.log1p(20 / 700), 1127 * np.log1p(8000 / 700), 130)[1:-1] / 1127) - 1)
    assert abs(centres[features[50].argmax()] - f) < 30


def test_filter_banks_equal_kaldis():
    """Values of torchaudio 2.11's Kaldi-compatible fbank (hanning, htk_compat, no dither) on the same signal."""
    t = torch.arange(16_000) / 16_000
    signal = 0.5 * torch.sin(2 * torch.pi * 1000 * t) + 0.1 * torch.sin(2 * torch.pi * 3300 * t * t)
    features = filter_banks(signal, 16_000)
    reference = {(0, 0): -3.879, (0, 45): 4.295, (50, 20): -13.269, (50, 45): 4.295, (50, 90): 3.278, (97, 127): -9.581}
    for at, value in reference.items():
        assert features[at].item() == pytest.approx(value, abs=2e-3)


def test_mel_filters_are_triangles():
    filters = mel_filters(40, 512, 16_000)
    assert filters.shape == (40, 257) and filters.min() == 0 and filters.max() <= 1
    assert ((filters > 0).sum(0) <= 2).all()  # neighbours overlap, no others


# --- partitions --------------------------------------------------------------------------------------------------

labels_strategy = st.integers(2, 6).flatmap(lambda c: st.lists(st.integers(0, c - 1), min_size=20, max_size=120))


@settings(deadline=None, max_examples=40)
@given(labels_strategy, st.integers(1, 15), st.sampled_from([0.05, 1.0, 1000.0]), st.integers(0, 5))
def test_dirichlet_is_balanced_and_disjoint(labels, clients, alpha, seed):
    labels = np.array(labels)
    parts = dirichlet_partition(labels, clients, alpha, seed)
    assert [len(p) for p in parts] == [len(labels) // clients] * clients
    rows = np.concatenate(parts)
    assert len(set(rows.tolist())) == len(rows)
    again = dirichlet_partition(labels, clients, alpha, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_dirichlet_alpha_controls_heterogeneity_as_in_the_release():
    """CIFAR-100 sizes; classes per client, mean of the first ten: 99.2, 82.1, 31.6 at alpha 1000, 1, 0.1 (facts 7.1)."""
    labels = np.repeat(np.arange(100), 500)
    for alpha, expected in ((1000.0, 99.2), (1.0, 82.1), (0.1, 31.6)):
        parts = dirichlet_partition(labels, 100, alpha, seed=1)
        assert {len(p) for p in parts} == {500}
        found = np.mean([len(np.unique(labels[p])) for p in parts[:10]])
        assert found == pytest.approx(expected, rel=0.08)


@pytest.mark.parametrize("kind", ["iid", "class_dirichlet", "pathological"])
def test_flwr_partitions_use_every_example_once(kind):
    labels = np.repeat(np.arange(10), 60)
    parts = partition_examples(kind, labels, 10, seed=3, dirichlet_alpha=0.5, classes_per_client=2)
    rows = np.concatenate(parts)
    assert len(parts) == 10 and len(rows) == len(set(rows.tolist())) and all(len(p) for p in parts)
    if kind == "pathological":
        assert all(len(np.unique(labels[p])) <= 2 for p in parts)
    else:
        assert len(rows) == 600
    again = partition_examples(kind, labels, 10, seed=3, dirichlet_alpha=0.5, classes_per_client=2)
    other = partition_examples(kind, labels, 10, seed=4, dirichlet_alpha=0.5, classes_per_client=2)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


@pytest.mark.parametrize("kind", ["iid", "class_dirichlet", "pathological"])
def test_a_partition_is_divided_once_and_kept(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "kept"))
    labels = np.repeat(np.arange(4), 25)
    made = partition_examples(kind, labels, 5, 3, 0.5, 2)
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "elsewhere"))
    assert [p.tolist() for p in partition_examples(kind, labels, 5, 3, 0.5, 2)] == [p.tolist() for p in made]
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr("fedlib.data.partition._divide", lambda *_: pytest.fail("divided again"))
    assert [p.tolist() for p in partition_examples(kind, labels, 5, 3, 0.5, 2)] == [p.tolist() for p in made]
    for other in [(labels[::-1], 5, 3, 0.5, 2), (labels, 4, 3, 0.5, 2), (labels, 5, 4, 0.5, 2), (labels, 5, 3, 1, 2)]:
        with pytest.raises(pytest.fail.Exception, match="divided again"):
            partition_examples(kind, *other)


def test_a_federation_of_kept_data_loads_nothing_that_decodes_or_divides(tmp_path):
    code = """
        import sys
        from fedlib import Experiment, build_federation
        build_federation(Experiment(pretrained=False, partition="iid", finetune="full"))
        print(sorted({"datasets", "flwr_datasets", "matplotlib", "mlxtend", "pandas", "scipy"} & set(sys.modules)))
    """
    for loaded in (True, False):
        environment = os.environ | {"FEDLIB_CACHE": str(tmp_path)}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert ("datasets" in done.stdout) == loaded and (done.stdout.strip() == "[]") != loaded


def test_data_that_cannot_be_kept_are_read_with_a_warning(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="file/.* could not be kept .*: set FEDLIB_CACHE"):
        assert len(load_dataset("mnist").train_images) == 4000


def test_natural_partition_keeps_owners_together():
    owners = np.array([2, 0, 0, 1, 2, 2])
    parts = partition_examples("natural", np.zeros(6, int), 2, seed=0, owners=owners)
    assert [p.tolist() for p in parts] == [[1, 2], [0, 4, 5]]  # the two largest


@pytest.mark.parametrize(
    "values, message",
    [
        ({"partition": "natural"}, "partition = 'natural' but the dataset names no owner"),
        ({"num_train": 50}, "num_clients = 100 exceeds the 50 training examples"),
        ({"num_train": 5000}, "num_train = 5000 exceeds the 4000 train examples"),
        ({"partition": "pathological", "classes_per_client": 11}, "classes_per_client = 11 exceeds the 10 classes"),
    ],
)
def test_impossible_partitions_are_refused(values, message):
    with pytest.raises(ValueError) as error:
        load_federated(Experiment(**values))
    assert message in str(error.value)


def test_subset_is_balanced_and_the_same_for_every_seed():
    a, b = (load_federated(Experiment(num_train=500, num_clients=5, clients_per_round=2, seed=s)) for s in (1, 2))
    rows = set(a.holdings.indices.tolist())
    assert rows == set(b.holdings.indices.tolist()) and len(rows) == 500
    assert a.labels[a.holdings.indices].bincount().tolist() == [50] * 10
    assert a.label_counts().sum(1).tolist() == [100] * 5
    assert a.images is b.images  # the examples are shared by all experiments


def test_a_drawn_population_keeps_nothing_per_client_and_is_a_function_of_seed_and_client():
    e = Experiment(partition="drawn", num_clients=1_000_000, examples_per_client=20, dirichlet_alpha=0.1, num_train=500)
    data = load_federated(e)
    assert data.num_clients == 1_000_000 and data.num_examples[-1] == 20
    mine = data.client(999_999)
    assert mine.tolist() == load_federated(e.replace(num_clients=1_000_001)).client(999_999).tolist()
    assert mine.tolist() != data.client(999_998).tolist() and len(mine) == 20
    assert mine.tolist() != load_federated(e.replace(seed=2)).client(999_999).tolist()
    held = load_federated(e.replace(num_clients=300)).label_counts()
    assert (held.sum(1) == 20).all() and (held.sum(0) > 300).all()  # classes are equally likely over clients
    # Dir(0.1 x 10 classes): E[sum p^2] = (1 + 0.1) / (1 + 10 * 0.1) = 0.55, and two of 20 examples agree that often
    agree = (held * (held - 1)).sum(1) / (20 * 19)
    assert agree.mean() == pytest.approx(0.55, abs=0.06)


# --- transforms --------------------------------------------------------------------------------------------------


def test_identity_view_reproduces_the_image():
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = sample_views("none", 4, 8, torch.Generator().manual_seed(0))
    torch.testing.assert_close(render(images, views, 8, ZERO, ONE), images.float() / 255, rtol=0, atol=1e-6)
    torch.testing.assert_close(render(images, None, 8, ZERO, ONE), images.float() / 255)


def test_views_shift_flip_and_crop_exactly():
    x = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    see = lambda *view: (render(x, torch.tensor([view]), 4, ZERO, ONE)[0, 0] * 255).round().int()  # noqa: E731
    assert torch.equal(see(0.0, 0.0, 1.0, 1.0, 1.0), x[0, 0].flip(1).int())
    shifted = torch.zeros(4, 4, dtype=torch.int)
    shifted[:3, 1:] = x[0, 0, 1:, :3].int()
    assert torch.equal(see(0.25, -0.25, 1.0, 1.0, 0.0), shifted)  # one pixel down and left, black outside


def test_crop_equals_interpolation_of_the_cropped_pixels():
    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    ours = render(x, torch.tensor([[0.25, 0.5, 0.5, 0.5, 0.0]]), 8, ZERO, ONE)
    crop = torch.nn.functional.interpolate(x[:, :, 2:6, 4:8].float() / 255, (8, 8), mode="bilinear")
    torch.testing.assert_close(ours[..., 1:-1, 1:-1], crop[..., 1:-1, 1:-1], rtol=0, atol=1e-5)  # borders differ


@pytest.mark.parametrize("augment", AUGMENTATIONS)
def test_views_are_within_bounds_and_reproducible(augment):
    views = sample_views(augment, 2000, 32, torch.Generator().manual_seed(7), pad=4, min_scale=0.08)
    assert torch.equal(views, sample_views(augment, 2000, 32, torch.Generator().manual_seed(7), pad=4, min_scale=0.08))
    top, left, height, width, flip = views.unbind(1)
    assert flip.mean() == pytest.approx(0.5, abs=0.05) if augment.endswith("flip") else not flip.any()
    if augment.startswith("rrc"):
        area = height * width
        assert area.max() <= 1 and area.min() >= 0.05 and (top + height).max() <= 1 + 1e-6 and top.min() >= 0
        assert area.mean() == pytest.approx(0.54, abs=0.06)
    elif augment.startswith("crop"):
        assert set((top * 32).round().int().tolist()) == set(range(-4, 5))


def test_grey_images_become_three_normalised_channels():
    x = torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)
    out = render(x, None, 8, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.1, 0.2]))
    assert out.shape == (2, 3, 8, 8)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.0, 0.0, -0.5]), rtol=0, atol=1e-6)
