"""Federated data: one set of examples on the training device, and per client an index array into it.

What examples are made of stays in host memory where it would fill a GPU; batches of it are copied ahead of their use.
"""

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

import numpy as np
import torch

from ..core.devices import free_memory, to_device
from ..core.experiment import Experiment
from ..core.rng import numpy_generator
from .client_tests import ByLabel, ByOwner, by_label, contiguous_split, like_train
from .datasets import DataSet, is_text, load_dataset, source_key, target_of
from .partition import BY_CHANCE, BY_OWNER, Divided, Drawn, partition_examples
from .questions import AnswerKey, unpack
from .tasks import CORRELATIONS, IGNORED, Classification, NextToken, Regression, Span, task_of
from .transforms import render

Rows = np.ndarray  # of a training set: their numbers, or what each is of


@dataclass(frozen=True)
class FederatedData:
    """uint8 images (N, C, H, W) or token ids (N, T), and labels (N,), and who holds which rows.

    All tensors are on ``device``; ``inputs`` and ``test_inputs`` perhaps in host memory.
    """

    inputs: torch.Tensor
    labels: torch.Tensor
    test_inputs: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    mean: torch.Tensor
    std: torch.Tensor
    holdings: Divided | Drawn
    owners: np.ndarray | None = None  # of all training rows; set where no client holds examples of two owners
    test_owners: np.ndarray | None = None  # of the test examples, where the data name them
    test_split: str = "central"  # how client_test divides the test set (client_tests.py)
    seed: int = 0  # of that division
    digest: str = ""  # of the whole data set, of which an experiment may use a part
    vocabulary: torch.Tensor | None = None  # token ids of the answers, by label; None where labels are no tokens
    answers: AnswerKey | None = None  # where labels are spans
    public: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # training rows for the server alone

    def __post_init__(self):
        granted = np.zeros(len(self.labels), bool)
        granted[self.public] = True
        for i in range(self.num_clients) if len(self.public) else ():
            if (both := granted[rows := self.client(i)]).any():
                held = f"client {i} holds {both.sum()} of these {len(self.public)}, row {rows[both].min()} for one"
                raise ValueError(f"public examples must be nobody's: {held}")

    @property
    def device(self) -> torch.device:
        return self.mean.device

    @property
    def num_outputs(self) -> int:
        """What a head must tell apart: classes, or the tokens that answers are made of."""
        return len(self.classes) if self.vocabulary is None else len(self.vocabulary)

    @cached_property
    def host_labels(self) -> np.ndarray:
        """``labels`` in host memory."""
        return self.labels.cpu().numpy()

    @property
    def num_clients(self) -> int:
        return len(self.num_examples)

    @property
    def num_examples(self) -> np.ndarray:
        """Training examples per client."""
        return self.holdings.num_examples

    def client(self, i: int) -> np.ndarray:
        """Return the rows of client i."""
        return self.holdings.client(i)

    def in_order(self, i: int) -> np.ndarray:
        """Return the rows of client i in an order drawn from the seed."""
        return numpy_generator(self.seed, "in order", client=i).permutation(self.client(i))

    def client_owners(self) -> np.ndarray | None:
        """Return the owner of each client's examples (-1: none); None where clients are not made of owners."""
        if self.owners is None:
            return None
        return np.array([self.owners[r[0]] if len(r := self.client(i)) else -1 for i in range(self.num_clients)])

    def label_counts(self) -> np.ndarray:
        """Count training examples (clients, classes); no columns where labels are no classes."""
        if not self.classes:
            return np.zeros((self.num_clients, 0), np.int64)
        return self.holdings.label_counts(self.host_labels, len(self.classes))

    def client_test(self, i: int) -> np.ndarray:
        """Return the rows of the test set that client i is tested on, sorted; perhaps none."""
        return np.arange(len(self.test_labels)) if self.test_split == "central" else self._tests.client(i)

    @cached_property
    def _tests(self) -> Divided | ByLabel | ByOwner:
        rows, clients = len(self.test_labels), self.num_clients
        if self.test_split == "owner" and (owners := self.client_owners()) is not None:
            assert self.test_owners is not None  # as load_federated asks
            return ByOwner(owners, self.test_owners)
        if self.test_split == "contiguous":
            return contiguous_split(rows, clients)
        counts, labels = self.label_counts(), self.test_labels.cpu().numpy()
        if not self.classes:  # in proportion to sizes
            counts, labels = self.num_examples[:, None], np.zeros(rows, np.int64)
        return by_label(counts, labels) if self.test_split == "labels" else like_train(counts, labels, self.seed)

    def view(
        self, inputs: torch.Tensor, shape: tuple[int, ...], rows: torch.Tensor, views: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return rows of ``inputs`` as a network of input ``shape`` sees them, (n, *shape), images through ``views``.

        Token ids stay as they are; what is longer than the network's input is cut. ``rows`` are best where inputs are.
        """
        rows = rows.to(inputs.device)
        if is_text(inputs):
            return to_device(inputs[rows, : shape[0]], self.device)
        return render(to_device(inputs[rows], self.device), views, shape[-1], self.mean, self.std, shape[0])


SHARE_OF_GPU = 0.5  # of its free memory; inputs that take more stay in host memory


def input_device(inputs: Sequence[torch.Tensor], device: str) -> str:
    """Return the device that holds ``inputs`` if ``device`` trains: the CPU where they would fill a GPU."""
    size = sum(x.nbytes for x in inputs)
    return "cpu" if "cuda" in device and size > SHARE_OF_GPU * free_memory(torch.device(device)) else device


@lru_cache(maxsize=4)
def _on_device(
    name: str, groups: bool, device: str, size: int | None, tokenizer: str | None, source: str
) -> tuple[DataSet, tuple[torch.Tensor, ...]]:
    """Load a data set and copy its tensors to ``device``.

    ``source`` says which files are meant: changed ones are read again.
    """
    data = load_dataset(name, groups, size, tokenizer)
    inputs = data.train_inputs, data.test_inputs
    place = input_device(inputs, device)
    return data, (*(x.to(place) for x in inputs), data.train_labels.to(device), data.test_labels.to(device))


def load_federated(
    e: Experiment, device: str = "cpu", size: int | None = None, tokenizer: str | None = None
) -> FederatedData:
    """Load and partition ``e``'s data. The examples are shared by all experiments of the process on one device.

    ``size`` is the network's input, ``tokenizer`` what its words come from (see :func:`datasets.load_dataset`).
    """
    source = json.dumps(source_key(e.dataset, tokenizer))
    data, (inputs, test_inputs, labels, test_labels) = _on_device(
        e.dataset, e.label_groups, device, size, tokenizer, source
    )
    check_division(e, data)
    if e.test_split == "owner" and (data.test_owners is None or e.partition not in BY_OWNER):
        but = f"{e.dataset} says no owners of its test examples"
        but = but if data.test_owners is None else f"with partition = {e.partition!r}"
        allowed = f"data whose examples have owners, with partition = {' or '.join(BY_OWNER)}"
        raise e.refused("test_split", f", but {but}", allowed)
    values, test_values = _strata(data, data.train_labels), _strata(data, data.test_labels)
    balanced = e.subset == "balanced"
    chosen = _subset(values, e.num_train, "train", balanced)
    test = _subset(test_values, e.num_test, "test", balanced)
    owners, test_owners = (o.numpy() if o is not None else None for o in (data.owners, data.test_owners))
    train, held = hold_out(values, chosen, e.validation_fraction)
    if e.evaluate_on == "validation":
        test, test_inputs, test_labels, test_owners = held, inputs, labels, owners
    train, public = _draw_public(values, train, np.setdiff1d(np.arange(len(values)), chosen), e.public_fraction)
    holdings = _partition(e, values[train], train, owners)
    mean, std = (x.to(device) for x in data.mean_std(holdings.held()))
    if e.num_test is not None or e.evaluate_on == "validation":
        keep = torch.from_numpy(test)
        test_inputs, test_labels = test_inputs[keep], test_labels[keep]
    vocabulary = None
    if data.target == "tokens":
        vocabulary = data.vocabulary.to(device)
        labels, test_labels = (vocabulary_positions(vocabulary, x) for x in (labels, test_labels))
        if n := int((test_labels == len(vocabulary)).any(1).sum()):
            told = f"{e.dataset}: {n} of {len(test_labels)} answers that are tested hold tokens of no training answer"
            warnings.warn(f"{told}, which nothing predicts", stacklevel=2)
    key = unpack(data.answer_texts, data.answer_offsets) if data.target == "span" else None
    return FederatedData(
        inputs, labels, test_inputs, test_labels, data.classes, mean, std, holdings,
        owners if e.partition in BY_OWNER else None, test_owners[test] if test_owners is not None else None,
        e.test_split, e.seed, data.digest, vocabulary, key, public,
    )  # fmt: skip


def vocabulary_positions(vocabulary: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Map token ids to positions in the sorted ``vocabulary``, so that a head tells only tokens of answers apart.

    A token that is not in it gets a label that nothing predicts; ``IGNORED`` stays.
    """
    place = torch.searchsorted(vocabulary, labels).clamp(max=len(vocabulary) - 1)
    return place.masked_fill(vocabulary[place] != labels, len(vocabulary)).where(labels != IGNORED, labels)


def check_division(e: Experiment, data: DataSet) -> None:
    """Raise ``ValueError`` if ``e`` divides by class what has none, or validates on nothing."""
    if data.target != "class":
        allowed = (*BY_CHANCE, *BY_OWNER)
        if e.partition not in allowed:
            why = f"divides by class, but the labels of {e.dataset!r} are no classes"
            raise e.refused("partition", why, ", ".join(allowed))
        if e.test_split == "labels":
            raise e.refused("test_split", f", but the labels of {e.dataset!r} are no classes")
    if e.evaluate_on == "validation" and e.validation_fraction == 0:
        raise e.refused("evaluate_on", "needs a validation_fraction above 0")


ASKS = {Classification: "class", Regression: "number", Span: "span", NextToken: "tokens"}  # labels of each task


def check_task(e: Experiment, data: FederatedData) -> None:
    """Raise ``ValueError`` if the labels are not what the task of ``e``'s data set (``tasks.TASKS``) asks for."""
    task, found = task_of(e.dataset), target_of(data.labels)
    if found != ASKS[type(task)]:
        why = f"is taken for a {type(task).__name__}, but each of its labels is a {found}"
        raise e.refused("dataset", f"{why}; a copy under $FEDLIB_DATA has the task of the set that it is named after")
    if isinstance(task, Span) and not task.unanswerable:
        if n := sum(int((x[:, :2] == 0).all(1).sum()) for x in (data.labels, data.test_labels)):
            raise e.refused("dataset", f": {n} questions have no answer", "questions with one; squad_v2 may lack it")
    if "f1" in getattr(task, "metrics", ()):
        if (n := len(data.classes)) > 2:
            raise e.refused("dataset", f"has {n} classes, and its f1 is of two", "two, or a copy of another name")
        if data.classes[-1].lower().startswith("not"):  # words, sorted
            warnings.warn(f"{e.dataset}: its f1 is of class {data.classes[-1]!r}, the second by name", stacklevel=3)
    if task.metric in CORRELATIONS:
        labels, why = data.test_labels.cpu(), f"are alike, and {task.metric} of them is undefined"
        if len(labels.unique()) < 2:
            raise e.refused("dataset", f": all {len(labels)} labels that are tested on {why}")
        own = range(data.num_clients) if e.test_split != "central" and e.partition != "drawn" else ()
        if own and all(len(labels[data.client_test(i)].unique()) < 2 for i in own):
            raise e.refused("test_split", f": every client's own test labels {why}")


def hold_out(values: Rows, rows: Rows, fraction: float, purpose: str = "validation") -> tuple[Rows, Rows]:
    """Return (training rows, held-out rows): ``fraction`` of every class, rounded, the same for every seed.

    ``ValueError`` if that is none, though some were asked for, or all.
    """
    held = np.zeros(len(rows), bool)
    for c in np.unique(values[rows]) if fraction else ():
        own = np.flatnonzero(values[rows] == c)
        order = numpy_generator(0, f"{purpose} split", client=int(c)).permutation(own)
        held[order[: round(fraction * len(own))]] = True
    if fraction and (held.all() or not held.any()):
        found = "leaves none of" if held.all() else "rounds to none of these"
        least = 0.5 / np.unique(values[rows], return_counts=True)[1].max()
        allowed = "less" if held.all() else f"0, or more than {least:.3g}"
        why = f"experiment: {purpose}_fraction = {fraction} of every class's training examples {found} {len(rows)}"
        raise ValueError(f"{why}; allowed: {allowed}")
    return rows[~held], rows[held]


def _draw_public(values: Rows, rows: Rows, left_out: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Return (training rows, public rows): as many of every class as :func:`hold_out` takes of ``rows``.

    They are of those ``left_out``, which nobody uses, and the training rows stay whole; else, of these.
    """
    kept, held = hold_out(values, rows, fraction, "public")
    spare = []
    for c, n in zip(*np.unique(values[held], return_counts=True), strict=True):
        own = left_out[values[left_out] == c]
        spare += numpy_generator(0, "public split", client=int(c)).permutation(own)[:n].tolist()
    return (rows, np.sort(spare)) if spare and len(spare) == len(held) else (kept, held)


def _partition(e: Experiment, values: np.ndarray, rows: np.ndarray, owners: np.ndarray | None) -> Divided | Drawn:
    """Divide the training ``rows``, whose classes are ``values``, among the clients."""
    if e.partition == "drawn":
        return Drawn(rows, values, e.num_clients, e.examples_per_client, e.dirichlet_alpha, e.seed)
    parts = partition_examples(
        e.partition, values, e.num_clients, e.seed, e.dirichlet_alpha, e.classes_per_client,
        owners[rows] if owners is not None else None,
    )  # fmt: skip
    return Divided(rows[np.concatenate(parts)], np.cumsum([0, *map(len, parts)]))


def _strata(data: DataSet, labels: torch.Tensor) -> np.ndarray:
    """Return the classes that subsets and partitions go by, or zeros where labels are no classes."""
    return labels.numpy() if data.target == "class" else np.zeros(len(labels), np.int64)


def _subset(values: np.ndarray, n: int | None, split: str, balanced: bool = False) -> np.ndarray:
    """Choose ``n`` rows with classes in proportion, or ``balanced`` as far as they go, for every seed alike; None: all.

    Of a fixed shuffle the k-th row of a class of N has the place (k - 1/2) / N, balanced k, and the first n are taken:
    as many of each class as its share of n, up to one. Where classes are equally large both are the same rows.
    """
    if n is None:
        return np.arange(len(values))
    if n > len(values):
        raise ValueError(f"experiment: num_{split} = {n} exceeds the {len(values)} {split} examples")
    order = numpy_generator(0, f"{split} subset").permutation(len(values))
    place = np.empty(len(values))  # of each example, by its position within its class
    for c in np.unique(values):
        rows = order[values[order] == c]
        place[rows] = np.arange(len(rows)) if balanced else (np.arange(len(rows)) + 0.5) / len(rows)
    return np.sort(order[np.argsort(place[order], kind="stable")][:n])
