"""Owners divided among clients, stand-ins of the paper's columns, grouped labels, and the release's normalisation."""

import io
import wave

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.data import datasets
from fedlib.data.datasets import ImageData, load_dataset
from fedlib.data.federated import load_federated
from fedlib.data.partition import natural_split, partition_examples
from fedlib.data.speech import HIGH, LOW, MEAN, SD, STATS, decode_speech, filter_banks, to_image
from fedlib.data.transforms import render
from fedlib.report.tables import load_cells
from fedlib.runs.params import load_grid


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("FEDLIB_DATA", raising=False)


# --- natural_split -----------------------------------------------------------------------------------------------

owners_strategy = st.lists(st.integers(0, 7), min_size=1, max_size=80)


@settings(deadline=None, max_examples=80)
@given(owners_strategy, st.data(), st.integers(0, 3))
def test_owners_are_divided_completely_and_never_mixed(owners, data, seed):
    owners = np.array(owners)
    ids, sizes = np.unique(owners, return_counts=True)
    clients = data.draw(st.integers(len(ids), len(owners)))
    parts = natural_split(owners, clients, seed)
    rows = np.concatenate(parts)
    assert len(parts) == clients and sorted(rows.tolist()) == list(range(len(owners)))  # each example exactly once
    assert all(len(p) and len(set(owners[p])) == 1 for p in parts)
    held = np.array([owners[p[0]] for p in parts])
    for o in ids:
        mine = [len(p) for p, h in zip(parts, held, strict=True) if h == o]
        assert max(mine) - min(mine) <= 1
    # Adams: taking a client from one owner for another would not make the largest share smaller
    shares = np.array([(held == o).sum() for o in ids])
    assert (sizes[shares > 1] / (shares[shares > 1] - 1)).min(initial=np.inf) >= (sizes / shares).max() - 1e-9
    again, other = natural_split(owners, clients, seed), natural_split(owners, clients, seed + 1)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert [len(p) for p in parts] == [len(p) for p in other]  # the seed shuffles, sizes do not depend on it


def test_shares_by_hand_and_the_seed_shuffles():
    # sizes 60, 30, 10; from (1, 1, 1) the next goes to 60, then to 30 (a tie of 30 with 60 / 2: the first owner), ...
    owners = np.repeat([0, 1, 2], [60, 30, 10])
    sizes = [len(p) for p in natural_split(owners, 5, 1)]
    assert sizes == [20, 20, 20, 30, 10]  # 60/1, then 60/2 = 30/1 and the lower id wins
    assert [len(p) for p in natural_split(owners, 10, 1)] == [10] * 6 + [10] * 3 + [10]
    a, b = natural_split(owners, 5, 1), natural_split(owners, 5, 2)
    assert a[0].tolist() != b[0].tolist() and a[3].tolist() == b[3].tolist() == list(range(60, 90))


@pytest.mark.parametrize(
    "kind, owners, clients, message",
    [
        ("natural_split", None, 2, "partition = 'natural_split' but the dataset names no owner"),
        ("natural_split", [0, 1, 2, 2], 2, "needs one for each of the 3 owners"),
        ("natural_split", [0, 1, 2, 2], 5, "num_clients = 5 exceeds the 4 training examples"),
        ("natural", [0, 1, 2, 2], 4, "3 natural clients; partition = 'natural_split' divides"),
    ],
)
def test_impossible_natural_partitions_are_refused(kind, owners, clients, message):
    owners = np.array(owners) if owners is not None else None
    with pytest.raises(ValueError) as error:
        partition_examples(kind, np.zeros(4, int), clients, 0, owners=owners)
    assert message in str(error.value)


def fake(monkeypatch, classes=("a/1", "a/2", "b/1"), owners=True):
    """Thirty training images of three owners and twelve of the test set, of owners 0, 1, 2 and a stranger."""
    n, m = 30, 12
    data = ImageData(
        "fake", torch.zeros(n, 1, 8, 8, dtype=torch.uint8), torch.arange(n) % 3,
        torch.zeros(m, 1, 8, 8, dtype=torch.uint8), torch.arange(m) % 3, classes,
        torch.arange(n) // 10 if owners else None, torch.tensor([0, 1, 2, -1] * 3) if owners else None,
    )  # fmt: skip
    monkeypatch.setattr(datasets, "_load", lambda name, size, tokenizer: data)
    from fedlib.data.federated import _on_device

    _on_device.cache_clear()
    return Experiment(dataset="fake", num_clients=6, clients_per_round=2, partition="natural_split", pretrained=False)


@pytest.fixture(autouse=True)
def forget():
    """The fake data are not left behind for other tests."""
    yield
    from fedlib.data.federated import _on_device

    _on_device.cache_clear()


def test_clients_know_their_owner(monkeypatch):
    e = fake(monkeypatch)
    data = load_federated(e)
    assert data.client_owners().tolist() == [0, 0, 1, 1, 2, 2] and data.num_examples.tolist() == [5] * 6
    assert load_federated(e.replace(partition="iid")).client_owners() is None
    assert load_federated(e.replace(num_test=6)).test_owners.shape == (6,)


def test_labels_of_groups(monkeypatch):
    e = fake(monkeypatch)
    data = load_federated(e.replace(label_groups=True))
    assert data.classes == ("a", "b")
    assert data.labels.tolist() == [0, 0, 1] * 10 and data.test_labels.tolist() == [0, 0, 1] * 4
    assert load_federated(e).classes == ("a/1", "a/2", "b/1")
    from fedlib.runs.prices import num_classes

    assert [num_classes(e.replace(label_groups=g)) for g in (False, True)] == [3, 2]
    fake(monkeypatch, classes=("1", "2", "3"))
    with pytest.raises(ValueError, match="label_groups = True, but the classes of 'fake' are not named group/class"):
        load_federated(e.replace(label_groups=True))


# --- stand-ins ---------------------------------------------------------------------------------------------------


def test_a_stand_in_counts_at_its_profile_only():
    of = {p: {c.column: c.experiment for c in load_grid("reefl", "table1", p, {"columns": ["femnist", "speech_commands"]})}
          for p in ("paper", "small", "smoke", "demo")}  # fmt: skip
    assert {p: (x["femnist"].dataset, x["speech_commands"].dataset) for p, x in of.items()} == {
        "paper": ("femnist", "speech_commands"), "small": ("omniglot", "fsdd"), "smoke": ("omniglot", "fsdd"),
        "demo": ("mnist", "mnist"),
    }  # fmt: skip
    e = of["small"]["speech_commands"]
    assert (e.partition, e.num_clients, e.num_train, e.rounds, e.augment) == ("natural_split", 60, None, 100, "none")
    assert of["paper"]["femnist"].partition == "natural" and of["paper"]["femnist"].num_clients == 381
    # whoever names a data set gets the profile's partition of it, not the stand-in's
    own = load_grid("reefl", "table1", "small", {"columns": ["femnist"], "dataset": "mnist", "num_train": 4000})
    assert {(c.experiment.partition, c.experiment.num_clients) for c in own} == {("dirichlet", 100)}


@pytest.mark.parametrize("profile", ["smoke", "small"])
def test_without_the_data_digits_stand_in_and_load(profile, tmp_path):
    cells = load_cells("reefl", "table1", profile, {"columns": ["femnist", "speech_commands"], "seeds": [1]}, tmp_path)
    assert {c.experiment.dataset for c in cells} == {"mnist"} and not any(c.experiment.label_groups for c in cells)
    for e in {c.column: c.experiment for c in cells}.values():
        assert load_federated(e).num_clients == e.num_clients == ({"smoke": 16, "small": e.num_clients}[profile])
    if profile == "small":  # still two different experiments
        assert {c.experiment.num_clients for c in cells} == {60, 160}


def test_only_the_lacking_data_set_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "fsdd").mkdir()
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    cells = load_cells("reefl", "table1", "small", {"seeds": [1], "rounds": 7}, tmp_path / "runs")
    found = {c.column: (c.experiment.dataset, c.experiment.rounds) for c in cells}
    assert found == {
        "cifar100_alpha1000": ("mnist", 7), "cifar100_alpha1": ("mnist", 7), "cifar100_alpha0.1": ("mnist", 7),
        "femnist": ("mnist", 7), "speech_commands": ("fsdd", 7), "cifar10_alpha1": ("cifar10", 7),
        "cifar10_alpha0.1": ("cifar10", 7),
    }  # fmt: skip
    kept = load_cells("reefl", "table1", "small", {"columns": ["femnist"], "num_train": 2000}, tmp_path / "runs")
    assert {c.experiment.num_train for c in kept} == {2000}  # overrides win over the fallback


def test_tables_name_the_data_that_were_used():
    from fedlib.report.tables import beside_reported

    row = {"finetune": "lora", "column": "femnist", "dataset": "omniglot", "variant": "reefl", "label": "reefl"}
    frame = pd.DataFrame([row | {"accuracy": a, "seed": s} for s, a in enumerate((30.0, 32.0))])
    reported = pd.DataFrame([{"finetune": "lora", "column": "femnist", "variant": "reefl", "mean": 84.69, "sd": 0.03}])
    table = beside_reported(frame, reported)
    assert table.iloc[0].tolist() == ["LoRA", "femnist", "omniglot", "ReeFL", "31.00 ± 1.41", 2, "84.69 ± 0.03"]


def test_real_stand_ins(shared_data, monkeypatch):
    """Ten digits by six speakers in sixty clients; 160 writers of eight alphabets, each of one."""
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    grid = load_grid("reefl", "table1", "small", {"columns": ["femnist", "speech_commands"]})
    of = {c.column: c.experiment for c in grid}
    speech, writers = load_federated(of["speech_commands"]), load_federated(of["femnist"])
    assert speech.num_examples.tolist() == [40] * 60 and np.bincount(speech.client_owners()).tolist() == [10] * 6
    assert np.bincount(speech.test_owners).tolist() == [100] * 6
    assert len(writers.classes) == 8 and sorted(writers.client_owners().tolist()) == list(range(160))
    assert ((writers.label_counts() > 0).sum(1) == 1).all() and set(writers.test_owners.tolist()) == set(range(160))


# --- speech against an independent implementation ----------------------------------------------------------------


def kaldi_fbank(x, rate, bins=128):
    """Kaldi's log-mel filter banks in numpy, frame by frame and bin by bin (facts 7.3: Hann, no dither, no energy)."""
    length, shift, size = rate * 25 // 1000, rate * 10 // 1000, 1
    while size < length:
        size *= 2
    mel = lambda f: 1127.0 * np.log(1 + f / 700.0)  # noqa: E731
    step = (mel(rate / 2) - mel(20.0)) / (bins + 1)
    weights = np.zeros((bins, size // 2 + 1))
    for b in range(bins):
        left, centre, right = (mel(20.0) + (b + k) * step for k in range(3))
        for k in range(size // 2):
            m = mel(k * rate / size)
            if left < m < right:
                weights[b, k] = (m - left) / (centre - left) if m <= centre else (right - m) / (right - centre)
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / (length - 1))
    frames = []
    for start in range(0, len(x) - length + 1, shift):
        frame = x[start : start + length].astype(np.float64)
        frame = frame - frame.mean()
        frame = np.concatenate(([frame[0] * (1 - 0.97)], frame[1:] - 0.97 * frame[:-1])) * hann
        power = np.abs(np.fft.fft(frame, size)[: size // 2 + 1]) ** 2
        frames.append(np.log(np.maximum(weights @ power, 1.1920929e-07)))
    return np.array(frames)


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_filter_banks_equal_an_independent_implementation(rate):
    rng = np.random.default_rng(rate)
    t = np.arange(rate * 3 // 5) / rate
    x = (0.3 * np.sin(2 * np.pi * (200 + 900 * t) * t) + 0.05 * rng.standard_normal(len(t))).astype(np.float32)
    ours, theirs = filter_banks(torch.from_numpy(x), rate).numpy(), kaldi_fbank(x, rate)
    assert len(theirs) == 58 and not ours[58:].any()  # (600 - 25) / 10 + 1 = 58 whole windows, then zeros
    np.testing.assert_allclose(ours[:58], theirs, atol=2e-3)
    long = np.tile(x, 4)  # 2.4 s are 238 windows, cut to 128
    np.testing.assert_allclose(
        filter_banks(torch.from_numpy(long), rate).numpy(), kaldi_fbank(long, rate)[:128], atol=5e-3
    )


def test_the_network_sees_the_releases_features():
    """(x + 4.2677393) / (2 x 4.5689974), nothing else, bilinearly enlarged to 224 x 224 with time as height."""
    features = torch.linspace(-15.9, 11.9, 128 * 128).view(128, 128)
    data = ImageData(
        "speech", torch.from_numpy(to_image(features))[None], torch.zeros(1), torch.empty(0), torch.empty(0), ("a",),
        stats=STATS,
    )  # fmt: skip
    expected = (features + 4.2677393) / (2 * 4.5689974)
    seen = render(data.train_images, None, 128, *data.mean_std())[0]
    assert seen.shape == (3, 128, 128) and (seen - expected).abs().max() <= 0.5 * (HIGH - LOW) / 255 + 1e-6
    assert 2 * SD * 0.5 * (HIGH - LOW) / 255 < 0.06 and (MEAN, SD) == (-4.2677393, 4.5689974)
    big = render(data.train_images, None, 224, *data.mean_std())[0, 0]
    # output row 0 lies at (0 + 0.5) * 128 / 224 - 0.5 = -0.21: the edge; row 1 at 0.357 between rows 0 and 1
    column = expected[:, 0]
    assert big[0, 0].item() == pytest.approx(column[0].item(), abs=0.01)
    assert big[1, 0].item() == pytest.approx((0.643 * column[0] + 0.357 * column[1]).item(), abs=0.01)


def wav(seconds, tone, rate=16_000):
    t = np.arange(int(seconds * rate)) / rate
    out = io.BytesIO()
    with wave.open(out, "wb") as f:
        f.setnchannels(1), f.setsampwidth(2), f.setframerate(rate)
        f.writeframes((8000 * np.sin(2 * np.pi * tone * t)).astype("<i2").tobytes())
    return out.getvalue()


def test_speech_commands_keeps_the_busiest_speakers_and_no_noise():
    """Columns as on the hub, where background noise has no speaker: top speakers by clips, split per class."""
    from datasets import Audio, ClassLabel, Dataset, Features, Value

    clips = [("yes", "ann")] * 6 + [("no", "ann")] * 1 + [("yes", "bob")] * 5 + [("_silence_", None)] * 9
    clips += [("no", "cy")] * 2
    names = ["yes", "no", "_silence_"]
    stored = {"bytes": Value("binary"), "path": Value("string")}
    features = Features({"audio": stored, "label": ClassLabel(names=names), "speaker_id": Value("string")})
    table = Dataset.from_dict(
        {
            "audio": [{"bytes": wav(0.1, 300), "path": None}] * len(clips),
            "label": [names.index(word) for word, _ in clips], "speaker_id": [who for _, who in clips],
        },
        features=features,
    ).cast_column("audio", Audio())  # fmt: skip
    tensors, classes = decode_speech(table, "label", "speaker_id", speakers=2)
    assert classes == ["no", "yes"]  # sorted by name
    # ann: int(0.8 * 6) = 4 of yes train, int(0.8 * 1) = 0 of no; bob: int(0.8 * 5) = 4; cy has the fewest clips
    assert tensors["owners"].tolist() == [0] * 4 + [1] * 4 and tensors["train_labels"].tolist() == [1] * 8
    assert tensors["test_owners"].tolist() == [0, 0, 0, 1] and sorted(tensors["test_labels"].tolist()) == [0, 1, 1, 1]
    assert torch.equal(tensors["stats"], STATS) and tensors["train_images"].shape == (8, 1, 128, 128)


def test_femnist_by_name_has_mnists_statistics(monkeypatch):
    fake(monkeypatch)
    assert [round(float(s[0]), 4) for s in load_dataset("femnist").mean_std()] == [0.1307, 0.3081]
    assert load_dataset("another").stats is None


def test_large_images_are_shrunk_with_anti_aliasing():
    """One white pixel in nine: a plain bilinear sample of a third of the size would see all of it or nothing."""
    x = torch.zeros(1, 1, 96, 96, dtype=torch.uint8)
    x[..., 1::3, 1::3] = 255
    for views in (None, torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]])):
        seen = render(x, views, 32, torch.zeros(3), torch.ones(3))
        assert seen[..., 2:-2, 2:-2].sub(1 / 9).abs().max() < 0.07
    same = render(x, None, 96, torch.zeros(3), torch.ones(3))
    assert torch.equal(same[0, 0], x[0, 0].float() / 255)


# --- per budget, per client --------------------------------------------------------------------------------------


def test_accuracies_per_budget_by_hand():
    from fedlib.report.statistics import budget_accuracies
    from fedlib.report.tables import mean_sd

    row = {"finetune": "lora", "column": "a", "variant": "reefl", "label": "ReeFL"}
    exits = [[10.0, 20.0, 60.0], [20.0, 40.0, 60.0]]
    frame = pd.DataFrame([row | {"seed": s, "exits": x, "accuracy": sum(x) / 3} for s, x in enumerate(exits)])
    table = budget_accuracies(pd.concat([frame, pd.DataFrame([row | {"seed": 9, "accuracy": np.nan}])]))
    assert table.budget.tolist() == [1, 2, 3, 1, 2, 3]
    assert table.deepest.tolist() == exits[0] + exits[1]
    assert table.held.tolist() == [10.0, 15.0, 30.0, 20.0, 30.0, 40.0]
    means = mean_sd(table, "held", ("variant", "budget"))
    assert means["mean"].tolist() == [15.0, 22.5, 35.0] and means.seeds.tolist() == [2, 2, 2]


def test_a_clients_accuracy_is_that_on_its_owners_held_out_examples(monkeypatch):
    from fedlib import build_federation
    from fedlib.runs.trained import client_accuracies

    f = build_federation(fake(monkeypatch).replace(method="depthfl", finetune="frozen"))
    # test owners 0, 1, 2, -1 three times over, labels 0, 1, 2, 0, 1, 2, ...: owner 0 has labels 0, 1, 2, so do 1 and 2
    truth, n = f.data.test_labels, len(f.data.test_labels)
    right = torch.nn.functional.one_hot(truth, 3).float()
    wrong = right.roll(1, 1)
    first = (torch.arange(n) < 4)[:, None]
    # exit 1 is always wrong, exit 2 right on the first of three examples of every owner, exits 3 and 4 always
    logits = torch.stack([wrong, torch.where(first, right, wrong), right, right])
    # budgets 0, 1, 2, 3, 0, 1 of clients 0..5
    assert client_accuracies(f, logits) == pytest.approx([0, 100 / 3, 100, 100, 0, 100 / 3])
