"""LEAF's json files: FEMNIST in exactly the format that its preprocess.sh writes, and what is refused."""

import json

import numpy as np
import pytest
import torch

from fedlib import Experiment
from fedlib.data.datasets import MNIST_STATS, is_available, load_dataset
from fedlib.data.federated import load_federated

WRITERS = {"f3795_00": 5, "f0040_12": 3, "f1234_07": 4}  # training examples; one test example each


pytestmark = pytest.mark.usefixtures("cache")


def leaf(counts, seed=0):
    """What LEAF writes for these writers: white is 1, ink is near 0, whole-number labels."""
    rng = np.random.default_rng(seed)
    data = {
        u: {"x": [[round(float(p), 7) for p in rng.choice([0.0, 0.4980392, 1.0], 784)] for _ in range(n)],
            "y": [int(y) for y in rng.integers(0, 62, n)]}
        for u, n in counts.items()
    }  # fmt: skip
    return {"users": list(counts), "num_samples": list(counts.values()), "user_data": data}


def write(folder, train=WRITERS, per_file=2):
    """Two writers a file, as LEAF keeps several hundred in each."""
    users = list(train)
    for split, counts in (("train", train), ("test", dict.fromkeys(train, 1))):
        (folder / split).mkdir(parents=True, exist_ok=True)
        for i in range(0, len(users), per_file):
            part = leaf({u: counts[u] for u in users[i : i + per_file]}, seed=i + (split == "test"))
            name = f"all_data_{i // per_file}_niid_0_keep_0_{split}_9.json"
            (folder / split / name).write_text(json.dumps(part))
    return folder


def test_a_leaf_folder_is_femnist_by_writer(tmp_path, monkeypatch):
    write(tmp_path / "femnist")
    data = load_dataset(str(tmp_path / "femnist"))
    assert data.num_classes == 62 and (data.classes[0], data.classes[10], data.classes[61]) == ("0", "A", "z")
    assert data.train_inputs.shape == (12, 1, 28, 28) and data.train_inputs.dtype == torch.uint8
    # writers sorted by name: f0040_12, f1234_07, f3795_00
    assert data.owners.tolist() == [0] * 3 + [1] * 4 + [2] * 5 and data.test_owners.tolist() == [0, 1, 2]
    first = json.loads((tmp_path / "femnist/train/all_data_0_niid_0_keep_0_train_9.json").read_text())
    mine = first["user_data"]["f0040_12"]
    assert data.train_labels[:3].tolist() == mine["y"]
    pixels = [int(255 * p) for p in mine["x"][1]]  # truncated, not rounded: 255 * 0.4980392 = 126.99999
    assert data.train_inputs[1].flatten().tolist() == pixels and set(pixels) == {0, 126, 255}
    assert data.stats is None

    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    assert is_available("femnist") and torch.equal(load_dataset("femnist").stats, MNIST_STATS)
    e = Experiment(dataset="femnist", partition="natural", num_clients=2, clients_per_round=1)
    federated = load_federated(e)
    assert federated.num_examples.tolist() == [4, 5] and federated.client_owners().tolist() == [1, 2]


def damage(change):
    content = leaf({"a": 2, "b": 1})
    change(content)
    return json.dumps(content)


@pytest.mark.parametrize(
    "text, message",
    [
        (json.dumps(leaf({"a": 2}))[:-40], "Expecting|delimiter|Unterminated"),
        ("[" * 100_000, "recursion"),
        ("[1]", "expected an object with users"),
        ('{"users": "ab", "num_samples": [1, 1], "user_data": {}}', "expected lists of users"),
        (damage(lambda c: c.pop("num_samples")), "expected an object with users"),
        (damage(lambda c: c["users"].append("c")), "do not name the same writers"),
        (damage(lambda c: c["user_data"].pop("a")), "do not name the same writers"),
        (damage(lambda c: c.update(users=[["a"], "b"])), "unhashable"),
        (damage(lambda c: c["user_data"].update(a=[1])), "writer 'a': expected x and y"),
        (damage(lambda c: c["user_data"]["a"]["x"].pop()), r"shapes \(1, 784\) and \(2,\) are not 2 x 784"),
        (damage(lambda c: c["user_data"]["a"]["x"][0].pop()), "inhomogeneous"),
        (damage(lambda c: c.update(num_samples=[3, 1])), "are not 3 x 784"),
        (damage(lambda c: c["user_data"]["a"]["x"][0].__setitem__(5, 1.5)), "outside"),
        (damage(lambda c: c["user_data"]["a"]["x"][0].__setitem__(5, float("nan"))), "outside"),
        (damage(lambda c: c["user_data"]["a"]["x"][0].__setitem__(5, "__import__('os')")), "could not convert"),
        (damage(lambda c: c["user_data"]["a"].update(y=[1, 62])), "labels must be whole numbers in 0..61"),
        (damage(lambda c: c["user_data"]["a"].update(y=[1, -1])), "labels must be whole numbers"),
        (damage(lambda c: c["user_data"]["a"].update(y=[1.5, 2])), "labels must be whole numbers"),
        (damage(lambda c: c["user_data"]["a"].update(y=[10**30, 2])), "labels must be whole numbers"),
    ],
)
def test_damaged_files_are_named(text, message, tmp_path):
    write(tmp_path / "set")
    file = tmp_path / "set/train/all_data_0_niid_0_keep_0_train_9.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"(?s){file.name} is damaged or no LEAF file.*({message})"):
        load_dataset(str(tmp_path / "set"))


def test_bytes_that_are_no_text_and_pickles_are_refused(tmp_path):
    import pickle

    write(tmp_path / "set")
    for content in (b"\xff\xfe\x00", pickle.dumps({"users": []})):
        (tmp_path / "set/test/all_data_1_niid_0_keep_0_test_9.json").write_bytes(content)
        with pytest.raises(ValueError, match="test_9.json is damaged or no LEAF file"):
            load_dataset(str(tmp_path / "set"))


def test_a_writer_twice_and_a_missing_split_are_errors(tmp_path):
    folder = write(tmp_path / "set")
    (folder / "train/z.json").write_text(json.dumps(leaf({"f0040_12": 1})))
    with pytest.raises(ValueError, match="z.json is damaged or no LEAF file .writer 'f0040_12' is in two files"):
        load_dataset(str(folder))
    (folder / "train/z.json").unlink()
    for file in (folder / "test").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="no test/.*json; LEAF's preprocess.sh"):
        load_dataset(str(folder))


@pytest.mark.parametrize(
    "x",
    [["the quick brown fox", "o"], [["4", "Mon", "q", "user", "sad"]] * 2, ["000001.jpg"] * 2, [[["<BOS>", "a"]]] * 2],
)
def test_sets_of_words_are_not_called_damaged(x, tmp_path):
    """Shakespeare, Sent140, CelebA and Reddit as LEAF writes them."""
    write(tmp_path / "set")
    file = next((tmp_path / "set/train").iterdir())
    file.write_text(json.dumps({"users": ["a"], "num_samples": [2], "user_data": {"a": {"x": x, "y": ["n", "o"]}}}))
    with pytest.raises(
        ValueError, match="json: writer 'a' has words .* not read; allowed: FEMNIST's pixels, or train.par"
    ) as e:
        load_dataset(str(tmp_path / "set"))
    assert "damaged" not in str(e.value)


@pytest.mark.parametrize("test", ["val", "validation", "dev", "eval"])
def test_a_split_of_another_name_tests_and_other_files_are_named(test, tmp_path):
    write(tmp_path / "set")
    expected = load_dataset(str(tmp_path / "set")).test_labels
    (tmp_path / "set/test").rename(tmp_path / "set" / test)
    (tmp_path / "set/all_data").mkdir()
    (tmp_path / "set/all_data/all.json").write_text("{}")
    (tmp_path / "set/README.md").write_text("words")
    with pytest.warns(UserWarning, match=f"tested on {test}/.*json; not used: all_data/all.json$"):
        data = load_dataset(str(tmp_path / "set"))
    assert data.test_labels.equal(expected)
