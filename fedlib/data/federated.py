"""Federated data: one set of examples on the training device, and per client an index array into it."""

import json
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from ..core.experiment import Experiment
from ..core.rng import numpy_generator
from .datasets import ImageData, is_text, load_dataset, source_key
from .partition import Divided, Drawn, partition_examples
from .transforms import render


@dataclass(frozen=True)
class FederatedData:
    """uint8 images (N, C, H, W) or token ids (N, T), and labels (N,), on the device, and who holds which rows."""

    images: torch.Tensor
    labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    mean: torch.Tensor
    std: torch.Tensor
    holdings: Divided | Drawn
    owners: np.ndarray | None = None  # of all training rows; set where no client holds examples of two owners
    test_owners: np.ndarray | None = None  # of the test examples, where the data name them
    digest: str = ""  # of the whole data set, of which an experiment may use a part

    @property
    def num_clients(self) -> int:
        return len(self.num_examples)

    @property
    def num_examples(self) -> np.ndarray:
        """Training examples per client."""
        return self.holdings.num_examples

    def client(self, i: int) -> np.ndarray:
        """Rows of client i."""
        return self.holdings.client(i)

    def client_owners(self) -> np.ndarray | None:
        """Whose examples each client holds (-1: nobody's); None where clients are not made of owners."""
        if self.owners is None:
            return None
        rows = (self.client(i)[:1] for i in range(self.num_clients))
        return np.array([self.owners[r[0]] if len(r) else -1 for r in rows])

    def label_counts(self) -> np.ndarray:
        """Counts (clients, classes)."""
        labels = self.labels.cpu().numpy()
        return np.stack(
            [np.bincount(labels[self.client(i)], minlength=len(self.classes)) for i in range(self.num_clients)]
        )

    def view(
        self, images: torch.Tensor, shape: tuple[int, ...], rows: torch.Tensor, views: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of ``images`` as a network of input ``shape`` sees them: (n, *shape), images seen through ``views``.

        Token ids stay as they are; what is longer than the network's input is cut.
        """
        if is_text(images):
            return images[rows, : shape[0]]
        return render(images[rows], views, shape[-1], self.mean, self.std, shape[0])


@lru_cache(maxsize=4)
def _on_device(name: str, groups: bool, device: str, source: str) -> tuple[ImageData, tuple[torch.Tensor, ...]]:
    """``source`` says which files are meant: changed ones are read again."""
    data = load_dataset(name, groups)
    fields = (data.train_images, data.train_labels, data.test_images, data.test_labels, *data.mean_std())
    return data, tuple(t.to(device) for t in fields)


def load_federated(e: Experiment, device: str = "cpu") -> FederatedData:
    """Load and partition ``e``'s data. The examples are shared by all experiments of the process on one device."""
    data, (images, labels, test_images, test_labels, mean, std) = _on_device(
        e.dataset, e.label_groups, device, json.dumps(source_key(e.dataset))
    )  # fmt: skip
    train, test = _subset(data.train_labels, e.num_train, "train"), _subset(data.test_labels, e.num_test, "test")
    owners, test_owners = (o.numpy() if o is not None else None for o in (data.owners, data.test_owners))
    values = data.train_labels.numpy()[train]
    if e.partition == "drawn":
        holdings = Drawn(train, values, e.num_clients, e.examples_per_client, e.dirichlet_alpha, e.seed)
    else:
        parts = partition_examples(
            e.partition, values, e.num_clients, e.seed, e.dirichlet_alpha, e.classes_per_client,
            owners[train] if owners is not None else None,
        )  # fmt: skip
        holdings = Divided(train[np.concatenate(parts)], np.cumsum([0, *map(len, parts)]))
    if e.num_test is not None:
        keep = torch.from_numpy(test).to(device)
        test_images, test_labels = test_images[keep], test_labels[keep]
    by_owner = e.partition.startswith("natural")
    return FederatedData(
        images, labels, test_images, test_labels, data.classes, mean, std, holdings,
        owners if by_owner else None, test_owners[test] if test_owners is not None else None, data.digest,
    )  # fmt: skip


def _subset(labels: torch.Tensor, n: int | None, split: str) -> np.ndarray:
    """The rows of the first ``n`` of a fixed class-balanced shuffle (the same for every seed), or all rows."""
    if n is None:
        return np.arange(len(labels))
    if n > len(labels):
        raise ValueError(f"experiment: num_{split} = {n} exceeds the {len(labels)} {split} examples")
    values, rng = labels.numpy(), numpy_generator(0, f"{split} subset")
    order = rng.permutation(len(values))
    rank = np.empty(len(values), np.int64)  # position of each example within its class
    for c in np.unique(values):
        rows = order[values[order] == c]
        rank[rows] = np.arange(len(rows))
    return np.sort(order[np.argsort(rank[order], kind="stable")][:n])
