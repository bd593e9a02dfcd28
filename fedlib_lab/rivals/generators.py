"""Nets that a server trains to make examples, and what models are to share on them (DarkDistill).

Their numbers are the server's memory: a net is built empty, filled, trained for a round, and told again.
Read next: ``darkdistill.py``.
"""

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedlib.methods.mixtures import part_of
from fedlib.methods.values import Tensors

Net = TypeVar("Net", bound=nn.Module)


class Generator(nn.Module):
    """What the stem gives (n, *state), made of labels (n,), difficulties (n,) and noise (n, classes)."""

    def __init__(self, classes: int, hidden: int, state: Sequence[int]):
        super().__init__()
        self.classes, self.state = classes, tuple(state)
        with torch.device("meta"):  # numbers come from the server's memory
            self.embedding, self.difficulty = nn.Embedding(classes, classes), nn.Linear(1, classes)
            self.hidden, self.norm = nn.Linear(3 * classes, hidden), nn.BatchNorm1d(hidden)
            self.out = nn.Linear(hidden, int(np.prod(self.state)))

    def forward(self, labels: torch.Tensor, difficulty: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
        z = torch.cat((noise, self.embedding(labels), self.difficulty(difficulty[:, None])), 1)
        return self.out(self.norm(self.hidden(z)).relu()).unflatten(1, self.state)


def weigher() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(3, 100), nn.ReLU(), nn.Linear(100, 1), nn.Tanh())


def fresh(net: nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw ``net``: linear layers U(-1/sqrt(fan-in), 1/sqrt(fan-in)), embeddings N(0, 1), norms as they are."""
    out = {}
    for name, shape in {n: x.shape for n, x in net.state_dict().items()}.items():
        path, _, leaf = name.rpartition(".")
        if isinstance((layer := net.get_submodule(path)), nn.Linear):
            bound = layer.in_features**-0.5
            out[name] = torch.empty(shape).uniform_(-bound, bound, generator=generator)
        elif isinstance(layer, nn.Embedding):
            out[name] = torch.empty(shape).normal_(generator=generator)
        elif isinstance(layer, nn.BatchNorm1d):
            out[name] = nn.BatchNorm1d(layer.num_features).state_dict()[leaf]
    return out


def loaded(net: Net, memory: Tensors, key: str) -> Net:
    """Fill ``net`` with copies of the numbers under ``key``, in training."""
    net.load_state_dict({n: x.clone() for n, x in part_of(memory, key).items()}, assign=True)
    return net.train()


def step(loss: torch.Tensor, *optimisers: torch.optim.Optimizer) -> None:
    for optimiser in optimisers:
        optimiser.zero_grad()
    loss.backward(inputs=[p for o in optimisers for group in o.param_groups for p in group["params"]])
    for optimiser in optimisers:
        optimiser.step()


def leaving_numbers(n: int, exits: int, ratio: float) -> list[int]:
    """Count how many of ``n`` examples leave at each exit: floor of ratio^j / sum, the last takes the rest."""
    powers = [ratio**j for j in range(1, exits + 1)]
    first = [int(n * p / sum(powers)) for p in powers[:-1]]
    return [*first, n - sum(first)]


def leave(outputs: torch.Tensor, numbers: Sequence[int]) -> list[torch.Tensor]:
    """Return the rows of ``outputs`` (E, n, C) that leave at each exit: the most confident of those that are left."""
    left = outputs.softmax(-1).amax(-1)  # (E, n)
    groups = []
    for j, count in enumerate(numbers):
        groups.append(left[j].topk(count).indices)
        left = left.index_fill(1, groups[-1], -1.0)
    return groups


def relative_distances(x: torch.Tensor) -> torch.Tensor:
    """Return the distances of every pair of rows in units of their mean, (n, n)."""
    distances = (x[:, None] - x).square().sum(2).clamp(min=1e-12).sqrt() * (1 - torch.eye(len(x), device=x.device))
    return distances / (distances.sum() / max(len(x) * (len(x) - 1), 1))


def angles(x: torch.Tensor) -> torch.Tensor:
    """Return cosines of the angles at each row between the directions to every two others, (n, n, n)."""
    directions = F.normalize(x[None] - x[:, None], dim=2)
    return directions @ directions.transpose(1, 2)
