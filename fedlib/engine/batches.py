"""The batches of a local training, drawn before its first step: a function of (seed, round, client)."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.rng import numpy_generator
from ..data.federated import FederatedData
from ..data.transforms import sample_views
from ..models.registry import backbone_spec


@dataclass(frozen=True)
class Batches:
    """Every batch of S steps of K members: rows of the data, their views, weights 1/n on n real examples, 0 on padding.

    A step is computed on its first ``width`` examples; members without a batch are not ``active``.
    """

    rows: torch.Tensor  # (S, K, B) int64, where the data's inputs are
    views: torch.Tensor | None  # (S, K, B, 5); None: not augmented
    weights: torch.Tensor  # (S, K, B)
    host_weights: torch.Tensor  # weights, in host memory: on a CPU the same
    examples: np.ndarray  # rows, in host memory
    width: list[int]  # examples in the fullest batch of each step
    active: np.ndarray  # (S, K) bool
    place: torch.Tensor | None = None  # (1,), on the device: the step that is read, where a recorded one is repeated

    @property
    def steps(self) -> np.ndarray:
        """Steps of each member (K,)."""
        return self.active.sum(0)

    def at(self, step: int, every: torch.Tensor | Sequence[Any]) -> Any:
        """Return one step's of ``every`` (S, ...), which lies where ``place`` does, or is a list of what is alike."""
        if self.place is None or not isinstance(every, torch.Tensor):
            return every[step]
        return every.index_select(0, self.place)[0]

    def of(self, step: int, every: torch.Tensor) -> torch.Tensor:
        """Return the first ``width`` examples of one step of ``every`` (S, K, B, ...)."""
        return self.at(step, every)[:, : self.width[step]]

    def padding(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights (K, width) of a step, in host memory and on the device."""
        return self.host_weights[step, :, : self.width[step]], self.of(step, self.weights)


def draw_batches(
    e: Experiment, data: FederatedData, clients: Sequence[Client], draws: Callable[[int], torch.Generator],
    epochs: int | None = None,
) -> Batches:  # fmt: skip
    """Draw the batches of ``epochs`` (None: the experiment's) over each client's examples, in a new order in each.

    ``clients`` has one entry for each member that trains: members of one client share its batches.
    """
    epochs, counts = e.local_epochs if epochs is None else epochs, [c.num_examples for c in clients]
    b = min(e.batch_size, max(counts))
    shape = (epochs * math.ceil(max(counts) / b), len(clients), b)
    rows, weights, views = np.zeros(shape, np.int64), np.zeros(shape, np.float32), None
    if e.augment != "none":
        views = torch.zeros(*shape, 5)
        views[..., 2:4] = 1.0
    first = {}  # of each client's members
    for i, client in enumerate(clients):
        if (same := first.setdefault(client.id, i)) != i:
            rows[:, i], weights[:, i] = rows[:, same], weights[:, same]
            if views is not None:
                views[:, i] = views[:, same]
            continue
        mine = data.client(client.id)
        for step, (chosen, seen) in enumerate(_client_batches(e, data, client, draws(client.id), epochs, b)):
            n = len(chosen)
            rows[step, i, :n] = mine[chosen]
            rows[step, i, n:] = mine[0]  # padding has weight zero
            weights[step, i, :n] = 1 / n
            if views is not None and seen is not None:
                views[step, i, :n] = seen
    device, active, host = data.device, weights > 0, torch.from_numpy(weights)
    return Batches(
        torch.from_numpy(rows).to(data.inputs.device), views.to(device) if views is not None else None,
        host.to(device), host, rows, active.sum(-1).max(-1).tolist(), np.asarray(active.any(-1)),
    )  # fmt: skip


def _client_batches(
    e: Experiment, data: FederatedData, client: Client, generator: torch.Generator, epochs: int, b: int
) -> Iterator[tuple[np.ndarray, torch.Tensor | None]]:
    """Yield batches of at most b positions among the client's examples, and their views (n, 5)."""
    n = client.num_examples
    for _ in range(epochs):
        order, views = torch.randperm(n, generator=generator).numpy(), None
        if e.augment != "none":
            side = backbone_spec(e.backbone).input_shape[-1]  # a shift is in pixels of what the net reads
            views = sample_views(e.augment, n, side, generator, e.crop_pad, e.crop_scale)
        for start in range(0, n, b):
            yield order[start : start + b], views[start : start + b] if views is not None else None


def shuffled_rows(data: FederatedData) -> torch.Tensor:
    """Return the training rows that clients hold, in an order drawn from the seed: for batch norm's statistics."""
    return torch.from_numpy(numpy_generator(data.seed, "in order").permutation(data.holdings.held()))


def client_rows(data: FederatedData, client: int, by_example: bool) -> np.ndarray:
    """Return a client's rows, in an order drawn from the seed unless each example is treated by itself."""
    return data.client(client) if by_example else data.in_order(client)


def in_order(
    data: FederatedData, clients: Sequence[Client], size: int, by_example: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (rows, weights), each (K, B), in host memory: each client's ``client_rows`` in order.

    Weight 0 on padding.
    """
    own = [client_rows(data, c.id, by_example) for c in clients]
    for a in range(0, max(c.num_examples for c in clients), size):
        rows, weights = np.zeros((len(clients), size), np.int64), np.zeros((len(clients), size), np.float32)
        for i, mine in enumerate(own):
            part = mine[a : a + size]
            rows[i, : len(part)], rows[i, len(part) :], weights[i, : len(part)] = part, mine[0], 1
        yield torch.from_numpy(rows), torch.from_numpy(weights)


def positions_of(data: FederatedData, clients: Sequence[Client], examples: np.ndarray, by_example: bool) -> np.ndarray:
    """Return the position of each of ``examples`` (S, K, B), rows of the data, among its client's ``client_rows``."""
    places = np.zeros_like(examples)
    for i, client in enumerate(clients):
        mine = client_rows(data, client.id, by_example)
        order = np.argsort(mine, kind="stable")
        places[:, i] = order[np.searchsorted(mine, examples[:, i], sorter=order)]
    return places
