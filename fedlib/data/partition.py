"""Partitions: which client holds which training examples, a function of (labels, options, seed).

``dirichlet`` is LDA (Hsu et al. 2019: balanced sizes, one class-proportion vector per client) as in ReeFL's release
and CAFEDistill; flwr-datasets' inner Dirichlet visits clients in random order and therefore is another algorithm.
``iid``, ``class_dirichlet`` and ``pathological`` are flwr-datasets' own. FeDepth's, ScaleFL's: ``label_partitions.py``.
What of the training set a partition leaves to nobody is said.

Deviations: flwr-datasets' ``pathological`` leaves a class that no client draws to nobody; here it takes, at one client,
the place of the class that most hold, where clients hold enough. The released LDA re-uses a partition cached on disk
whatever the seed; here the seed counts.
"""

import hashlib
import heapq
import warnings
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np
import torch

from ..core.rng import numpy_generator
from .cache import cached
from .label_partitions import capped_dirichlet, cover_classes, dealt_classes, grouped_dirichlet, weighted_dirichlet
from .silence import silence_libraries

MOST_CLIENTS = 10_000_000  # of a drawn population: what is kept per client is a few bytes
BY_OWNER, BY_CHANCE = ("natural", "natural_split"), ("iid",)  # the partitions that look at no label


@dataclass(frozen=True)
class Divided:
    """A partition of the examples: ``indices[offsets[i]:offsets[i+1]]`` are client i's rows."""

    indices: np.ndarray
    offsets: np.ndarray

    @property
    def num_examples(self) -> np.ndarray:
        return np.diff(self.offsets)

    def held(self) -> np.ndarray:
        """Return the rows that somebody holds, sorted."""
        return np.sort(self.indices)

    def client(self, i: int) -> np.ndarray:
        return self.indices[self.offsets[i] : self.offsets[i + 1]]

    def label_counts(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """Count ``labels`` (N,) by client: (clients, classes)."""
        clients, n = len(self.offsets) - 1, self.num_examples
        cells = np.repeat(np.arange(clients), n) * num_classes + labels[self.indices]
        return np.bincount(cells, minlength=clients * num_classes).reshape(clients, num_classes)


@dataclass(frozen=True)
class Drawn:
    """A population of any size: client i's rows are drawn from the data when it is asked for, and kept nowhere.

    Client i has class proportions P_i ~ Dir(alpha) and ``size`` examples: classes from P_i, then rows of the class,
    with replacement, so clients overlap. A function of (seed, i): memory and time do not grow with the population.
    """

    rows: np.ndarray
    labels: np.ndarray
    num_clients: int
    size: int
    alpha: float
    seed: int

    def __post_init__(self):
        if self.size > len(self.rows):
            why = f"examples_per_client = {self.size} exceeds the {len(self.rows)} training examples"
            raise ValueError(f"experiment: {why} that partition = 'drawn' draws from")
        if self.num_clients > MOST_CLIENTS:
            raise ValueError(f"experiment: num_clients = {self.num_clients} exceeds {MOST_CLIENTS:,}")
        classes = np.unique(self.labels)
        object.__setattr__(self, "_classes", classes)
        object.__setattr__(self, "_pools", [self.rows[self.labels == c] for c in classes])

    @property
    def num_examples(self) -> np.ndarray:
        return np.full(self.num_clients, self.size)

    def held(self) -> np.ndarray:
        """Return the rows that somebody may hold, sorted."""
        return np.sort(self.rows)

    def _counts(self, i: int) -> tuple[np.ndarray, np.random.Generator]:
        rng = numpy_generator(self.seed, "drawn client", client=i)
        return rng.multinomial(self.size, rng.dirichlet([self.alpha] * len(self._pools))), rng

    def client(self, i: int) -> np.ndarray:
        counts, rng = self._counts(i)
        return np.sort(np.concatenate([rng.choice(p, n) for p, n in zip(self._pools, counts, strict=True)]))

    def label_counts(self, labels: np.ndarray, num_classes: int) -> np.ndarray:
        """Count (clients, classes) without drawing any client's rows."""
        counts = np.zeros((self.num_clients, num_classes), np.int64)
        for i in range(self.num_clients):
            counts[i, self._classes] = self._counts(i)[0]
        return counts


def partition_examples(
    kind: str, labels: np.ndarray, num_clients: int, seed: int,
    dirichlet_alpha: float = 1.0, classes_per_client: int = 2, owners: np.ndarray | None = None,
) -> list[np.ndarray]:  # fmt: skip
    """Return one sorted index array per client; together they hold each example at most once.

    Warns of classes that are nobody's, of examples, one a client and more, and of clients without any. Raises
    ``ValueError`` if there are more clients than examples, or no natural owners where they are asked for.
    """
    if num_clients > len(labels):
        raise ValueError(f"experiment: num_clients = {num_clients} exceeds the {len(labels)} training examples")
    parts = _divided(kind, labels, num_clients, seed, dirichlet_alpha, classes_per_client, owners)
    left = len(labels) - sum(map(len, parts))
    lost = sorted(set(np.unique(labels).tolist()) - set(labels[np.concatenate(parts)].tolist())) if left else []
    if left >= num_clients or lost:  # what equal sizes leave is less
        classes = f", all of class{'es'[: 2 * (len(lost) > 1)]} {', '.join(map(str, lost))} among them" if lost else ""
        told = f"{left} of {len(labels)} training examples are nobody's{classes}"
        warnings.warn(f"experiment: partition = {kind!r} with num_clients = {num_clients}: {told}", stacklevel=2)
    if empty := sum(not len(p) for p in parts):
        told = f"experiment: partition = {kind!r} leaves {empty} of {num_clients} clients without a training example"
        warnings.warn(told, stacklevel=2)
    return parts


def _divided(
    kind: str, labels: np.ndarray, num_clients: int, seed: int, dirichlet_alpha: float, classes_per_client: int,
    owners: np.ndarray | None,
) -> list[np.ndarray]:  # fmt: skip
    if kind in BY_OWNER:
        if owners is None:
            raise ValueError(f"experiment: partition = {kind!r} but the dataset names no owner (writer, speaker)")
        return (natural_partition if kind == "natural" else natural_split)(owners, num_clients, seed)
    if kind in BY_DIRICHLET:
        return BY_DIRICHLET[kind](labels, num_clients, dirichlet_alpha, seed)
    classes = len(np.unique(labels))
    if kind in ("pathological", "dealt") and classes_per_client > classes:
        raise ValueError(f"experiment: classes_per_client = {classes_per_client} exceeds the {classes} classes")
    if kind == "dealt":
        return dealt_classes(labels, num_clients, classes_per_client, seed)
    parts = _flwr_partition(kind, labels, num_clients, seed, dirichlet_alpha, classes_per_client)
    if kind == "pathological" and sum(map(len, parts)) < len(labels) and classes <= num_clients * classes_per_client:
        return cover_classes(labels, parts, classes_per_client, seed)
    return parts


def natural_partition(owners: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Make the ``num_clients`` owners with most examples a client each, in the order of their ids."""
    if num_clients > (found := len(np.unique(owners))):
        why = f"the dataset has {found} natural clients; partition = 'natural_split' divides each among several"
        raise ValueError(f"experiment: num_clients = {num_clients}, but {why}")
    return [np.where(owners == o)[0] for o in sorted(np.argsort(-np.bincount(owners), kind="stable")[:num_clients])]


def natural_split(owners: np.ndarray, num_clients: int, seed: int) -> list[np.ndarray]:
    """Divide every owner's shuffled examples among clients that hold nobody else's; neighbours share an owner.

    Each owner starts with one client, and the next always goes to the owner whose clients are the largest (Adams'
    method of apportionment), so numbers are proportional to sizes and no client is left without an example. The
    clients of an owner differ by one example at most.
    """
    ids, sizes = np.unique(owners, return_counts=True)
    if num_clients < len(ids):
        why = f"num_clients = {num_clients}, but partition = 'natural_split' needs one for each"
        raise ValueError(f"experiment: {why} of the {len(ids)} owners; partition = 'natural' takes the largest")
    shares = [1] * len(ids)
    largest = [(-size, i) for i, size in enumerate(sizes.tolist())]
    heapq.heapify(largest)
    for _ in range(num_clients - len(ids)):
        i = largest[0][1]
        shares[i] += 1
        heapq.heapreplace(largest, (-sizes[i] / shares[i], i))
    parts = []
    for owner, share in zip(ids.tolist(), shares, strict=True):
        rows = numpy_generator(seed, "natural split", client=owner).permutation(np.where(owners == owner)[0])
        parts += [np.sort(p) for p in np.array_split(rows, share)]
    return parts


def dirichlet_partition(labels: np.ndarray, num_clients: int, alpha: float, seed: int) -> list[np.ndarray]:
    """Divide by latent Dirichlet allocation into equal sizes N // num_clients (facts of the ReeFL release).

    Client i has class proportions P_i ~ Dir(alpha). Clients are filled in order: each example's class is drawn from
    P_i restricted to the classes that still have examples (plus 1e-5, renormalised when a class runs out), without
    replacement. Late clients therefore get left-overs.

    Deviation: where a class runs out under a client's hands, the release adds the 1e-5 once more, to proportions that
    it has added it to and renormalised before; here it is always added once, to P_i. Of 10,000 examples of CIFAR-10
    for 100 clients that moves 0 to 13 at alpha 0.1 and none at alpha 1; of CIFAR-100's 50,000, 2,500 to 4,400 at either
    (seeds 1-3).
    """
    rng, classes = numpy_generator(seed, "partition"), int(labels.max()) + 1
    proportions = rng.dirichlet([alpha] * classes, num_clients)
    pools = [list(rng.permutation(np.where(labels == c)[0])) for c in range(classes)]
    size, out = len(labels) // num_clients, []
    for p in proportions:
        mine: list[int] = []
        while len(mine) < size:
            weights = np.where([len(pool) > 0 for pool in pools], p + 1e-5, 0)
            for c in rng.choice(classes, size - len(mine), p=weights / weights.sum()):
                mine.append(pools[c].pop())
                if not pools[c]:
                    break  # renormalise over what is left
        out.append(np.sort(np.array(mine, dtype=np.int64)))
    return out


BY_DIRICHLET = {
    "dirichlet": dirichlet_partition, "weighted_dirichlet": weighted_dirichlet, "capped_dirichlet": capped_dirichlet,
    "grouped_dirichlet": grouped_dirichlet,
}  # fmt: skip


def _flwr_partition(kind, labels, num_clients, seed, alpha, classes_per_client) -> list[np.ndarray]:
    key = {
        "partition": kind, "labels": hashlib.sha256(labels.astype(np.int64).tobytes()).hexdigest(), "seed": seed,
        "clients": num_clients, "alpha": alpha, "classes": classes_per_client, "flwr": version("flwr-datasets"),
    }  # fmt: skip

    def divide():
        parts = _divide(kind, labels, num_clients, seed, alpha, classes_per_client)
        ends = np.cumsum([len(p) for p in parts])
        return {"rows": torch.from_numpy(np.concatenate(parts)), "ends": torch.from_numpy(ends)}, []

    kept, _ = cached(key, divide)
    return np.split(kept["rows"].numpy(), kept["ends"].numpy()[:-1])


def _divide(kind, labels, num_clients, seed, alpha, classes_per_client) -> list[np.ndarray]:
    """Divide by flwr-datasets; ``ValueError`` names the keys where its draws cannot be met."""
    with silence_libraries():  # flwr-datasets warns about class imbalance, which is the point here
        from datasets import Dataset
        from flwr_datasets import partitioner as flwr

        table = Dataset.from_dict({"label": labels.tolist(), "row": np.arange(len(labels)).tolist()})
        table = table.shuffle(seed=int(numpy_generator(seed, "partition").integers(2**31)))
        if kind == "iid":
            partitioner = flwr.IidPartitioner(num_clients)
        elif kind == "class_dirichlet":
            why = (
                f"dirichlet_alpha = {alpha} leaves one of the clients (num_clients = {num_clients}) without an example"
            )
            allowed = "a larger alpha, or fewer clients"
            partitioner = flwr.DirichletPartitioner(
                num_clients, "label", alpha, min_partition_size=1, self_balancing=False, seed=seed
            )
        else:
            why = f"classes_per_client = {classes_per_client} with num_clients = {num_clients} gives a class"
            why, allowed = f"{why} to more clients than it has examples", "fewer of either"
            partitioner = flwr.PathologicalPartitioner(
                num_clients, "label", classes_per_client, class_assignment_mode="random", seed=seed
            )
        partitioner.dataset = table
        try:
            return [np.sort(np.asarray(partitioner.load_partition(i)["row"], np.int64)) for i in range(num_clients)]
        except ValueError as error:
            raise ValueError(f"experiment: partition = {kind!r}: {why}; allowed: {allowed}") from error
