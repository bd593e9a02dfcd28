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


def learning_rate(e: Experiment, t: int) -> float:
    """max(min_lr, lr/2 (1 + cos(pi t / rounds))) for round t = 1..rounds: a plain cosine to zero with a floor."""
    return max(e.min_lr, 0.5 * e.lr * (1 + math.cos(math.pi * t / e.rounds)))


@dataclass(frozen=True)
class Plan:
    """Example rows (S, K, B), views, weights, and who is active (S, K); S steps of K clients."""

    rows: torch.Tensor
    views: torch.Tensor | None
    weights: torch.Tensor
    examples: np.ndarray  # rows, in host memory
    width: list[int]  # examples in the fullest batch of each step
    active: np.ndarray


class Draws:
    """What K clients draw in round ``t``: a second training of a round goes on where the first stopped."""

    def __init__(self, e: Experiment, t: int, clients: Iterable[Client]):
        self.clients = tuple(clients)
        self.generators = [torch_generator(e.seed, "local", t, c.id) for c in self.clients]
        self.size = min(e.batch_size, max(c.num_examples for c in self.clients))

    def in_order(self, data: FederatedData) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """(rows, weights), each (K, B): every client's own examples once, in order, weight 0 on padding."""
        device, b = data.images.device, self.size
        for a in range(0, max(c.num_examples for c in self.clients), b):
            rows, weights = np.zeros((len(self.clients), b), np.int64), np.zeros((len(self.clients), b), np.float32)
            for k, client in enumerate(self.clients):
                mine = data.client(client.id)
                part = mine[a : a + b]
                rows[k, : len(part)], rows[k, len(part) :], weights[k, : len(part)] = part, mine[0], 1
            yield torch.from_numpy(rows).to(device), torch.from_numpy(weights).to(device)


def plan_batches(e: Experiment, data: FederatedData, draws: Draws, epochs: int | None = None) -> Plan:
    """Draw every client's order and views from its own generator, a function of (seed, round, client)."""
    epochs = e.local_epochs if epochs is None else epochs
    device, k, b = data.images.device, len(draws.clients), draws.size
    counts = [c.num_examples for c in draws.clients]
    per_epoch = [math.ceil(n / b) for n in counts]
    steps = epochs * max(per_epoch)
    rows = np.zeros((steps, k, b), np.int64)
    weights = np.zeros((steps, k, b), np.float32)
    augment = e.augment != "none"
    views = torch.zeros(steps, k, b, 5) if augment else None
    if augment:
        views[..., 2:4] = 1.0
    for i, (client, generator, n) in enumerate(zip(draws.clients, draws.generators, counts, strict=True)):
        mine = data.client(client.id)
        for epoch in range(epochs):
            order = torch.randperm(n, generator=generator).numpy()
            drawn = None
            if augment:
                drawn = sample_views(e.augment, n, data.images.shape[-1], generator, e.crop_pad, e.crop_scale)
            for s in range(per_epoch[i]):
                take_rows = order[s * b : (s + 1) * b]
                at, m = epoch * per_epoch[i] + s, len(take_rows)
                rows[at, i, :m] = mine[take_rows]
                rows[at, i, m:] = mine[0]  # padding has weight zero
                weights[at, i, :m] = 1 / m
                if drawn is not None:
                    views[at, i, :m] = drawn[s * b : s * b + m]
    width = [int((weights[s] > 0).sum(-1).max()) for s in range(steps)]
    return Plan(
        torch.from_numpy(rows).to(device), views.to(device) if views is not None else None,
        torch.from_numpy(weights).to(device), rows, width, (weights > 0).any(-1),
    )  # fmt: skip
