"""What each client is tested on: rows of the central test set, a function of who holds what and the seed.

``central``: all rows for everybody. ``like_train``: disjoint, the proportions of a client's training labels
(CAFEDistill; ScaleFL divides both sets at once). ``contiguous``: the test set cut evenly in its order (FeDepth).
``labels``: all rows of the labels that a client trains on, so clients overlap. ``owner``: those of its owner (a
writer, a speaker), all of them for each client that is made of the same one.

A class that nobody trains on is in nobody's test set under ``like_train`` and ``labels``; the central test set has it.
Under ``like_train`` and ``contiguous`` a client may get no row at all (one with a single example often does): it has no
accuracy, and means over clients are over those that have one.
"""

from dataclasses import dataclass

import numpy as np

from ..core.rng import numpy_generator
from .partition import Divided


@dataclass(frozen=True)
class ByLabel:
    """The test rows of every label that a client holds; ``held`` (clients, classes), rows sorted by class."""

    held: np.ndarray
    by_class: Divided

    def client(self, i: int) -> np.ndarray:
        pools = [self.by_class.client(c) for c in np.flatnonzero(self.held[i])]
        return np.sort(np.concatenate(pools)) if pools else np.zeros(0, np.int64)


def rows_by_owner(owners: np.ndarray, num_owners: int) -> Divided:
    """Group rows by owner, given each row's owner; -1 is nobody."""
    order = np.argsort(owners, kind="stable")[np.count_nonzero(owners < 0) :]
    return Divided(order, np.concatenate([[0], np.cumsum(np.bincount(owners[owners >= 0], minlength=num_owners))]))


def contiguous_split(num_rows: int, num_clients: int) -> Divided:
    """Divide the rows in order, as many for each client up to one."""
    return Divided(np.arange(num_rows), np.arange(num_clients + 1) * num_rows // num_clients)


@dataclass(frozen=True)
class ByOwner:
    """The test rows of each client's owner, who may be several clients' (-1: nobody)."""

    owners: np.ndarray  # (clients,)
    test_owners: np.ndarray  # (rows,)

    def client(self, i: int) -> np.ndarray:
        return np.flatnonzero((self.test_owners == self.owners[i]) & (self.test_owners >= 0))


def by_label(counts: np.ndarray, test_labels: np.ndarray) -> ByLabel:
    """Give each client all rows of the labels that it holds by ``counts`` (clients, classes)."""
    return ByLabel(counts > 0, rows_by_owner(test_labels, counts.shape[1]))


def like_train(counts: np.ndarray, test_labels: np.ndarray, seed: int) -> Divided:
    """Divide each class's rows in proportion to ``counts`` (clients, classes) by the largest remainders.

    Which of equal remainders get a row, and which rows, is drawn.
    """
    owners = np.full(len(test_labels), -1, np.int64)
    for c in np.flatnonzero(counts.sum(0)):
        rng = numpy_generator(seed, "test split", client=int(c))
        rows = rng.permutation(np.where(test_labels == c)[0])
        owners[rows] = np.repeat(np.arange(len(counts)), largest_remainders(counts[:, c], len(rows), rng))
    return rows_by_owner(owners, len(counts))


def largest_remainders(weights: np.ndarray, total: int, rng: np.random.Generator) -> np.ndarray:
    """Divide ``total`` into whole numbers proportional to ``weights``; weight 0 gets 0."""
    shares, remainders = np.divmod(weights.astype(np.int64) * total, weights.sum())
    order = rng.permutation(len(weights))
    shares[order[np.argsort(-remainders[order], kind="stable")][: total - shares.sum()]] += 1  # the lucky ones
    return shares
