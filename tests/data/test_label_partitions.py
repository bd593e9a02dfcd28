"""Partitions by label of the papers: by hand, and for any labels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.rng import numpy_generator
from fedlib.data.label_partitions import capped_dirichlet, deal, dealt_classes, grouped_dirichlet, weighted_dirichlet

TEN = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 200))


def entropy(parts, labels):
    """Mean entropy of the clients' class proportions, nats."""
    counts = np.stack([np.bincount(labels[p], minlength=labels.max() + 1) for p in parts])
    p = counts / counts.sum(1, keepdims=True)
    return -(p * np.log(np.where(p > 0, p, 1))).sum(1).mean()


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


labels_strategy = st.lists(st.integers(0, 4), min_size=30, max_size=150).map(np.array)


@settings(deadline=None, max_examples=40)
@given(labels_strategy, st.integers(1, 15), st.sampled_from([0.001, 0.3, 1.0, 1000.0]), st.integers(0, 5))
def test_weighted_dirichlet_is_balanced_and_disjoint(labels, clients, alpha, seed):
    parts = weighted_dirichlet(labels, clients, alpha, seed)
    assert [len(p) for p in parts] == [len(labels) // clients] * clients
    rows = np.concatenate(parts)
    assert len(set(rows.tolist())) == len(rows) and all((np.diff(p) > 0).all() for p in parts)
    assert same(parts, weighted_dirichlet(labels, clients, alpha, seed))


@settings(deadline=None, max_examples=30)
@given(st.integers(300, 600), st.integers(1, 25), st.sampled_from([1.0, 100.0]), st.integers(0, 5))
def test_capped_partitions_use_every_example_once(n, clients, alpha, seed):
    labels = np.random.default_rng(n).integers(0, 5, n)
    for parts in (
        grouped_dirichlet(labels, clients, alpha, seed),
        capped_dirichlet(labels, min(clients, 6), alpha, seed, least=1),
    ):
        assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert same(parts, capped_dirichlet(labels, min(clients, 6), alpha, seed, least=1))


@settings(deadline=None, max_examples=40)
@given(labels_strategy, st.integers(5, 15), st.integers(1, 5), st.integers(0, 5))
def test_dealt_classes_use_every_example_once(labels, clients, each, seed):
    each = min(each, len(np.unique(labels)))
    parts = dealt_classes(labels, clients, each, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    assert all(len(np.unique(labels[p])) <= each for p in parts)
    assert same(parts, dealt_classes(labels, clients, each, seed))


def test_sizes_are_those_of_the_releases():
    """2,000 examples for 20 clients: 100 each; at least 50 (FeDepth); in groups of ten at least half the mean."""
    assert {len(p) for p in weighted_dirichlet(TEN, 20, 0.3, 1)} == {100}
    sizes = [len(p) for p in capped_dirichlet(TEN, 20, 0.3, 1)]
    assert sum(sizes) == 2000 and min(sizes) >= 50 and len(set(sizes)) > 5
    grouped = [len(p) for p in grouped_dirichlet(TEN, 20, 1.0, 1)]
    assert sum(grouped[:10]) == sum(grouped[10:]) == 1000 and min(grouped) >= 50
    # whoever holds the mean of 100 gets nothing of later classes: at most it has that, less one, and one class of 200
    assert max(sizes) < 300


def test_the_cap_by_hand(monkeypatch):
    """Two clients, classes of 6 and 4, shares (5/6, 1/6), then (3/4, 1/4): the first holds 5 = 10 / 2, so 4 go over."""

    class Fixed:
        shares = iter([np.array([5.0, 1.0]) / 6, np.array([3.0, 1.0]) / 4])

        def dirichlet(self, alpha):
            return next(self.shares)

        def permutation(self, x):
            return x

    monkeypatch.setattr("fedlib.data.label_partitions.numpy_generator", lambda *a: Fixed())
    parts = capped_dirichlet(np.array([0, 1] * 4 + [0, 0]), 2, 1.0, 1, least=1)
    assert [p.tolist() for p in parts] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


@pytest.mark.parametrize("partition", [weighted_dirichlet, capped_dirichlet, grouped_dirichlet])
def test_alpha_controls_heterogeneity(partition):
    labels = np.repeat(np.arange(10), 400)
    few, many = (entropy(partition(labels, 20, a, 3), labels) for a in (0.3, 1000.0))
    assert few < 1.8 and many == pytest.approx(np.log(10), abs=0.08)
    assert not same(partition(labels, 20, 0.3, 3), partition(labels, 20, 0.3, 4))


def test_weighted_draws_follow_weights():
    """One draw of two examples with weights 3:1 takes the first with probability 3/4."""

    def first(seed):
        proportions = numpy_generator(seed, "partition")
        proportions.permutation(2)
        p = proportions.dirichlet([1.0, 1.0])
        return p[0], weighted_dirichlet(np.array([0, 1]), 2, 1.0, seed)[0][0] == 0

    drawn = np.array([first(s) for s in range(3000)], float)
    for low, high in ((0.1, 0.3), (0.4, 0.6), (0.7, 0.9)):
        inside = drawn[(drawn[:, 0] > low) & (drawn[:, 0] < high)]
        assert inside[:, 1].mean() == pytest.approx(inside[:, 0].mean(), abs=0.06)


def test_cards_are_dealt_evenly_and_never_twice_to_one():
    """Ten classes, 100 clients, two each: every class has 20 holders. Three of ten do not divide: 30 each all the same."""
    for each, holders in ((2, 20), (3, 30)):
        hands = deal(list(range(10)), 100, each, np.random.default_rng(0))
        assert all(len(set(hand)) == each for hand in hands)
        assert np.bincount(np.concatenate(hands)).tolist() == [holders] * 10
    parts = dealt_classes(np.repeat(np.arange(10), 60), 100, 2, seed=5)
    assert [len(p) for p in parts] == [6] * 100  # 60 examples of a class among 20 holders, two classes
