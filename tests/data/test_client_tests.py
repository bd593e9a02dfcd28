"""What each client is tested on, by hand and for any labels."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.data.client_tests import by_label, contiguous_split, largest_remainders, like_train
from fedlib.data.federated import load_federated

pytestmark = pytest.mark.usefixtures("kept_cache")


COUNTS = np.array([[3, 0, 0], [1, 4, 0], [0, 4, 0], [0, 0, 0]])  # (clients, classes): nobody trains on class 2
TEST = np.array([0, 1, 2, 0, 1, 2, 0, 1, 0])  # four of class 0, three of class 1, two of class 2


def rows(split, clients):
    return [split.client(i).tolist() for i in range(clients)]


def test_like_train_by_hand():
    """Class 0: 4 x (3/4, 1/4) = 3 and 1. Class 1: 3 x 1/2 each = 1.5: one of the two gets the third, drawn by seed."""
    found = [rows(like_train(COUNTS, TEST, seed), 4) for seed in range(20)]
    for parts in found:
        by_class = [np.bincount(TEST[p], minlength=3).tolist() if p else [0, 0, 0] for p in parts]
        assert by_class[0] == [3, 0, 0] and by_class[1][0] == 1 and by_class[3] == [0, 0, 0]
        assert sorted([by_class[1][1], by_class[2][1]]) == [1, 2] and by_class[2][0] == 0
        assert sorted(sum(parts, [])) == [0, 1, 3, 4, 6, 7, 8]  # all but class 2, which is in nobody's
    assert {len(parts[2]) for parts in found} == {1, 2} and found[0] == rows(like_train(COUNTS, TEST, 0), 4)


def test_largest_remainders_by_hand():
    """10 by weights 1, 2, 4: 1.43, 2.86, 5.71 -> 1, 2, 5 and the two largest remainders .86, .71."""
    rng = np.random.default_rng(0)
    assert largest_remainders(np.array([1, 2, 4, 0]), 10, rng).tolist() == [1, 3, 6, 0]
    assert largest_remainders(np.array([1, 0, 0]), 5, rng).tolist() == [5, 0, 0]
    drawn = [largest_remainders(np.ones(4, int), 1, np.random.default_rng(s)).argmax() for s in range(40)]
    assert set(drawn) == {0, 1, 2, 3}  # one row for four equal clients is not always the first one's


@settings(deadline=None, max_examples=50)
@given(st.data(), st.integers(1, 12), st.integers(1, 5), st.integers(0, 3))
def test_like_train_is_disjoint_and_within_one_of_the_proportions(data, clients, classes, seed):
    cells = data.draw(st.lists(st.integers(0, 9), min_size=clients * classes, max_size=clients * classes))
    counts = np.array(cells).reshape(clients, classes)
    test = np.array(data.draw(st.lists(st.integers(0, classes - 1), max_size=60)), np.int64)
    split = like_train(counts, test, seed)
    parts = [split.client(i) for i in range(clients)]
    taken = np.concatenate(parts)
    assert len(set(taken.tolist())) == len(taken) and all((np.diff(p) > 0).all() for p in parts)
    assert sorted(set(test[taken].tolist())) == sorted(c for c in set(test.tolist()) if counts[:, c].any())
    for c in np.flatnonzero(counts.sum(0)):
        total = np.count_nonzero(test == c)
        exact = total * counts[:, c] / counts[:, c].sum()
        found = np.array([np.count_nonzero(test[p] == c) for p in parts])
        assert found.sum() == total and (np.abs(found - exact) < 1).all() and not found[counts[:, c] == 0].any()


def test_contiguous_and_labels_by_hand():
    assert rows(contiguous_split(7, 3), 3) == [[0, 1], [2, 3], [4, 5, 6]]
    assert rows(contiguous_split(2, 3), 3) == [[], [0], [1]]
    split = by_label(COUNTS, TEST)
    assert rows(split, 4) == [[0, 3, 6, 8], [0, 1, 3, 4, 6, 7, 8], [1, 4, 7], []]


def test_clients_with_one_example_often_have_no_test_rows():
    e = Experiment(num_clients=4000, clients_per_round=2, partition="iid", test_split="like_train")
    data = load_federated(e)
    sizes = np.array([len(data.client_test(i)) for i in range(4000)])
    assert set(data.num_examples.tolist()) == {1} and sizes.sum() == 1000 and set(sizes.tolist()) == {0, 1}


def test_a_hundred_thousand_clients_are_cheap():
    counts = np.random.default_rng(0).integers(0, 3, (100_000, 10))
    test = np.arange(10_000) % 10
    start = time.perf_counter()
    for split in (like_train(counts, test, 1), contiguous_split(10_000, 100_000), by_label(counts, test)):
        assert len(split.client(99_999)) <= 10_000
    assert time.perf_counter() - start < 5


def test_a_drawn_population_has_test_sets_of_its_labels():
    e = Experiment(
        num_clients=50, clients_per_round=2, partition="drawn", examples_per_client=5, dirichlet_alpha=0.1,
        test_split="labels",
    )  # fmt: skip
    data = load_federated(e)
    held, labels = set(data.labels.numpy()[data.client(49)].tolist()), data.test_labels.numpy()
    assert set(labels[data.client_test(49)].tolist()) == held
