"""Every batch of a cohort's local training, drawn before it begins: rows, views, weights and who is active."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.rng import torch_generator
from ..data.federated import FederatedData
from ..data.transforms import sample_views


@dataclass(frozen=True)
class Plan:
    """S steps of K clients: rows of the data, their views, weights 1/n on n real examples and 0 on padding.

    A step is computed on its first ``width`` examples; clients without a batch are not ``active``.
    """

    rows: torch.Tensor  # (S, K, B) int64
    views: torch.Tensor | None  # (S, K, B, 5); None: not augmented
    weights: torch.Tensor  # (S, K, B)
    examples: np.ndarray  # rows, in host memory
    width: list[int]  # examples in the fullest batch of each step
    active: np.ndarray  # (S, K) bool


class Draws:
    """What clients draw in round ``t``, each a function of (seed, round, client).

    It lives for the round: a second training goes on drawing where the first stopped.
    """

    def __init__(self, e: Experiment, t: int, clients: Iterable[Client]):
        self.clients = tuple(clients)
        self.generators = [torch_generator(e.seed, "local", t, c.id) for c in self.clients]
        self.size = min(e.batch_size, max(c.num_examples for c in self.clients))

    def in_order(self, data: FederatedData) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows, weights), each (K, B): every client's own examples once, in order; weight 1, on padding 0."""
        device, shape = data.images.device, (len(self.clients), self.size)
        for start in range(0, max(c.num_examples for c in self.clients), self.size):
            rows, weights = np.zeros(shape, np.int64), np.zeros(shape, np.float32)
            for k, client in enumerate(self.clients):
                mine = data.client(client.id)
                part = mine[start : start + self.size]
                rows[k], weights[k, : len(part)] = mine[0], 1
                rows[k, : len(part)] = part
            yield torch.from_numpy(rows).to(device), torch.from_numpy(weights).to(device)


def plan_batches(e: Experiment, data: FederatedData, draws: Draws, epochs: int | None = None) -> Plan:
    """Plan ``epochs`` (None: the experiment's) over each client's examples, each in an order of its own."""
    epochs, b, device = e.local_epochs if epochs is None else epochs, draws.size, data.images.device
    longest = max(c.num_examples for c in draws.clients)
    shape = (epochs * math.ceil(longest / b), len(draws.clients), b)
    rows, weights, views = np.zeros(shape, np.int64), np.zeros(shape, np.float32), None
    if e.augment != "none":
        views = torch.zeros(*shape, 5)
        views[..., 2:4] = 1.0
    for k, (client, generator) in enumerate(zip(draws.clients, draws.generators, strict=True)):
        mine = data.client(client.id)
        batches = _batches_of(e, client.num_examples, data.images.shape[-1], generator, epochs, b)
        for step, (chosen, seen) in enumerate(batches):
            n = len(chosen)
            rows[step, k, :n], rows[step, k, n:] = mine[chosen], mine[0]  # padding has weight zero
            weights[step, k, :n] = 1 / n
            if views is not None:
                views[step, k, :n] = seen
    real = weights > 0
    return Plan(
        torch.from_numpy(rows).to(device), views.to(device) if views is not None else None,
        torch.from_numpy(weights).to(device), rows, real.sum(-1).max(-1).tolist(), real.any(-1),
    )  # fmt: skip


def _batches_of(
    e: Experiment, n: int, size: int, generator: torch.Generator, epochs: int, b: int
) -> Iterator[tuple[np.ndarray, torch.Tensor | None]]:
    """Batches of at most b of n examples, and their views (b, 5) of images of ``size`` pixels."""
    for _ in range(epochs):
        order, views = torch.randperm(n, generator=generator).numpy(), None
        if e.augment != "none":
            views = sample_views(e.augment, n, size, generator, e.crop_pad, e.crop_scale)
        for start in range(0, n, b):
            yield order[start : start + b], views[start : start + b] if views is not None else None
