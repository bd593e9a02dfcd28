"""Partitions: by hand, for any labels and owners, what is refused, and what is said to be nobody's."""

import re
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.data.federated import load_federated
from fedlib.data.label_partitions import cover_classes
from fedlib.data.partition import (
    Divided,
    Drawn,
    _flwr_partition,
    dirichlet_partition,
    natural_split,
    partition_examples,
)

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


TEN = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))


@pytest.mark.parametrize(
    "kind, values, message",
    [
        ("capped_dirichlet", {}, "num_clients = 100 is too many: with 2000 examples a client has 20.0, .* at least 50"),
        ("dealt", {"classes_per_client": 11}, "classes_per_client = 11 exceeds the 10 classes"),
        ("dealt", {"num_clients": 4}, "classes_per_client = 2: 4 clients hold at most 8 of the 10 classes"),
        (
            "grouped_dirichlet",
            {"labels": TEN % 2, "dirichlet_alpha": 1e-4},
            "dirichlet_alpha = 0.0001 left a client with",
        ),
        (
            "class_dirichlet",
            {"dirichlet_alpha": 0.01, "num_clients": 1500},
            r"^experiment: partition = 'class_dirichlet': dirichlet_alpha = 0.01 leaves one of the clients \(num_clients = "
            r"1500\) without an example; allowed: a larger alpha, or fewer clients$",
        ),
        (
            "pathological",
            {"classes_per_client": 5, "num_clients": 1500},
            "^experiment: partition = 'pathological': classes_per_client = 5 with num_clients = 1500 gives a class to more "
            "clients than it has examples; allowed: fewer of either$",
        ),
    ],
)
def test_impossible_divisions_are_refused(kind, values, message, monkeypatch):
    monkeypatch.setattr("fedlib.data.label_partitions.TRIES", 30)
    with pytest.raises(ValueError, match=message):
        partition_examples(kind, **({"labels": TEN, "num_clients": 100, "seed": 1} | values))


def test_label_counts_by_hand():
    held = Divided(np.array([0, 1, 4, 3]), np.array([0, 3, 3, 4]))  # row 2 is nobody's, the second client has nothing
    assert held.label_counts(np.array([0, 2, 1, 1, 2]), 3).tolist() == [[1, 0, 2], [0, 0, 0], [0, 1, 0]]
    drawn = Drawn(np.arange(4, 10), np.array([0, 0, 3, 3, 3, 5]), 7, 5, 1.0, 1)
    labels = np.array([9, 9, 9, 9, 0, 0, 3, 3, 3, 5])
    expected = [np.bincount(labels[drawn.client(i)], minlength=6).tolist() for i in range(7)]
    assert drawn.label_counts(labels, 6).tolist() == expected


def test_absurd_populations_are_refused():
    rows = np.arange(50)
    with pytest.raises(ValueError, match="examples_per_client = 1000000 exceeds the 50 training examples"):
        Drawn(rows, rows % 5, 10, 10**6, 1.0, 1)
    with pytest.raises(ValueError, match="num_clients = 1000000000 exceeds 10,000,000"):
        Drawn(rows, rows % 5, 10**9, 10, 1.0, 1)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(12, 90), st.floats(0.05, 100), st.integers(0, 2**32))
def test_dirichlet_gives_every_client_its_share_and_no_example_twice(clients, classes, n, alpha, seed):
    labels = np.random.default_rng(0).integers(0, classes, n)
    parts = partition_examples("dirichlet", labels, clients, seed, alpha)
    rows = np.concatenate(parts)
    assert [len(p) for p in parts] == [n // clients] * clients and len(set(rows)) == len(rows) and rows.max() < n
    again = partition_examples("dirichlet", labels, clients, seed, alpha)
    assert all(np.array_equal(p, q) and np.array_equal(p, np.sort(p)) for p, q in zip(parts, again, strict=True))


@settings(deadline=None, max_examples=8)
@given(st.sampled_from(["iid", "class_dirichlet", "pathological"]), st.integers(2, 6), st.integers(0, 1000))
def test_every_partition_holds_each_example_once_and_covers_all_clients(kind, clients, seed):
    labels = np.arange(120) % 4
    parts = partition_examples(kind, labels, clients, seed, 1.0, 2)
    rows = np.concatenate(parts)
    assert len(parts) == clients and min(map(len, parts)) > 0 and len(set(rows)) == len(rows)
    covered = set(labels[rows]) if kind == "pathological" else set(range(4))  # a class that nobody drew stays out
    assert set(rows) == set(np.where(np.isin(labels, list(covered)))[0])
    assert all(
        np.array_equal(p, q)
        for p, q in zip(parts, partition_examples(kind, labels, clients, seed, 1.0, 2), strict=True)
    )


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 6), min_size=1, max_size=60), st.data())
def test_natural_clients_are_the_largest_owners_whole(owners, data):
    owners = np.array(owners)
    clients = data.draw(st.integers(1, len(np.unique(owners))))
    parts = partition_examples("natural", np.zeros(len(owners), int), clients, 0, owners=owners)
    assert all(len(set(owners[p])) == 1 and (owners == owners[p[0]]).sum() == len(p) for p in parts)
    counts = sorted(np.unique(owners, return_counts=True)[1])
    assert sorted(map(len, parts)) == counts[-clients:]


def told(*args, **more):
    """A partition, and what is said of it."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        parts = partition_examples(*args, **more)
    return parts, [str(w.message) for w in heard]


def test_no_class_is_left_to_nobody_where_clients_hold_enough():
    """Of seeds 1 to 12 flwr-datasets' draw covers all classes in some; those stay as it divides them."""
    labels, covered = np.repeat(np.arange(10), 30), 0
    for seed in range(1, 13):
        drawn = _flwr_partition("pathological", labels, 10, seed, 1.0, 2)
        parts, heard = told("pathological", labels, 10, seed, classes_per_client=2)
        rows = np.concatenate(parts)
        assert sorted(rows.tolist()) == list(range(300)) and not heard
        assert all(len(np.unique(labels[p])) <= 2 and len(p) for p in parts)
        if sum(map(len, drawn)) == 300:
            assert all(np.array_equal(a, b) for a, b in zip(parts, drawn, strict=True))
            covered += 1
        else:  # only clients that gave a class away hold another
            hands = [[set(labels[p]) for p in x] for x in (parts, drawn)]
            missing = 10 - len(set().union(*hands[1]))
            assert sum(a != b for a, b in zip(*hands, strict=True)) <= missing
            again = partition_examples("pathological", labels, 10, seed, classes_per_client=2)
            assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert 0 < covered < 12


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8), st.integers(1, 8), st.integers(1, 4), st.integers(0, 5), st.data())
def test_classes_that_nobody_drew_find_a_place(classes, clients, each, seed, data):
    each = min(each, classes)
    if clients * each < classes:
        return
    labels = np.arange(classes * clients) % classes
    hands = [
        data.draw(st.lists(st.integers(0, classes - 1), min_size=each, max_size=each, unique=True))
        for _ in range(clients)
    ]
    drawn = [np.sort([np.flatnonzero(labels == c)[i] for c in hand]) for i, hand in enumerate(hands)]
    parts = cover_classes(labels, drawn, each, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(0 < len(np.unique(labels[p])) <= each for p in parts)


@pytest.mark.parametrize(
    "kind, clients, more, sentence",
    [
        ("pathological", 4, {"classes_per_client": 2}, r"of 300 training examples are nobody's, all of class(es)? \d"),
        ("natural", 3, {"owners": np.arange(300) % 5}, r"120 of 300 training examples are nobody's$"),
        (
            "natural",
            1,
            {"owners": np.arange(300) // 30},
            "270 of 300 .* nobody's, all of classes 1, 2, 3, 4, 5, 6, 7, 8, 9",
        ),
    ],
)
def test_what_a_partition_leaves_to_nobody_is_said(kind, clients, more, sentence):
    _, heard = told(kind, np.repeat(np.arange(10), 30), clients, 1, **more)
    assert len(heard) == 1 and re.search(sentence, heard[0]), heard


@pytest.mark.parametrize(
    "kind", ["iid", "class_dirichlet", "pathological", "dealt", "natural", "natural_split", "dirichlet"]
)
def test_nothing_is_said_where_all_is_somebodys(kind):
    _, heard = told(kind, np.repeat(np.arange(10), 30), 10, 1, classes_per_client=2, owners=np.arange(300) % 10)
    assert heard == []
    if kind == "dirichlet":  # nor of what equal sizes leave, 6 examples of 7 clients
        assert told(kind, np.repeat(np.arange(10), 30), 7, 1)[1] == []


def test_clients_without_an_example_are_said():
    parts, heard = told("dealt", np.arange(300) % 10, 250, 3)
    sentence = f"leaves {(empty := sum(not len(p) for p in parts))} of 250 clients without a training example"
    assert empty == 100 and any(text.endswith(sentence) for text in heard)
