"""The server's arithmetic: pure functions on named tensors, one equation each; updates are consumed as a stream.

Sums run in float64 and are rounded once. Entries that no client held keep their value and their server state.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from .slices import ParamInfo, Slice, scatter_add_

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Client:
    """A sampled client: its id, its budget (deepest exit it can hold, 0-based), its number of training examples."""

    id: int
    budget: int
    num_examples: int


@dataclass(frozen=True)
class Update:
    """What a cohort sends back: ``params[name]`` stacks the tensors of the clients ``spans[name] = (lo, hi)``."""

    clients: tuple[Client, ...]
    slices: tuple[Slice, ...]
    params: Tensors
    spans: Mapping[str, tuple[int, int]]


class MaskedMean:
    """Per-entry weighted mean over the clients that hold the entry.

    theta = sum_i w_i theta_i / sum_i w_i, the early-exit FedAvg (w_i = number of examples) and, with width slices,
    the coordinate-wise mean (w_i = 1). Local names are resolved by ``name_of(slice, name)``.
    """

    def __init__(self, infos: Mapping[str, ParamInfo], name_of: Callable[[Slice, str], str] = Slice.source):
        self.infos, self.name_of = infos, name_of
        self.total: dict[str, torch.Tensor] = {}
        self.weight: dict[str, torch.Tensor] = {}
        self.count: dict[str, torch.Tensor] = {}
        self.local: dict[str, str] = {}

    def add(self, update: Update, weights: Iterable[float]) -> None:
        """Add every client of ``update`` with its weight; a weight of zero leaves the client out."""
        weights = torch.tensor(list(weights), dtype=torch.float64)
        for name, stack in update.params.items():
            lo, hi = update.spans[name]
            groups: dict[str, list[int]] = {}  # clients that write to the same server tensor
            for i in range(lo, hi):
                if weights[i]:
                    groups.setdefault(self.name_of(update.slices[i], name), []).append(i)
            for target, members in groups.items():
                w = weights[members].to(stack.device)
                rows = stack if len(members) == hi - lo else stack[[i - lo for i in members]]
                self._add(target, name, torch.tensordot(w, rows.double(), 1), w, update.slices[members[0]])

    def _add(self, target: str, name: str, value: torch.Tensor, w: torch.Tensor, part: Slice) -> None:
        info = self.infos[name]
        if target not in self.total:
            self.local[target] = name
            for store in (self.total, self.weight, self.count):
                store[target] = torch.zeros(info.shape, dtype=torch.float64, device=value.device)
        scatter_add_(self.total[target], value, info, part)
        scatter_add_(self.weight[target], w.sum(), info, part)
        scatter_add_(self.count[target], torch.tensor(float(len(w)), device=value.device), info, part)

    def result(self, old: Tensors) -> dict[str, torch.Tensor]:
        """The mean of what arrived; entries nobody held are ``old``'s."""
        out = {}
        for name, total in self.total.items():
            weight = self.weight[name]
            mean = total / weight.clamp(min=torch.finfo(torch.float64).tiny)
            out[name] = torch.where(weight > 0, mean.to(old[name].dtype), old[name])
        return out


def feddyn_server(
    theta: torch.Tensor, mean: torch.Tensor, h: torch.Tensor, share: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """FedDyn (Acar et al. 2021), server side: h <- h - alpha * share * (mean - theta); theta <- mean - h / alpha.

    ``share`` = participants holding the entry / all clients, per entry; where it is zero nothing changes.
    """
    new_h = h - alpha * share * (mean - theta)
    return torch.where(share > 0, mean - new_h / alpha, theta), torch.where(share > 0, new_h, h)


def feddyn_gradient(p: torch.Tensor, start: torch.Tensor, g: torch.Tensor, alpha: float) -> torch.Tensor:
    """Gradient of FedDyn's client term -<theta, g> + alpha/2 |theta - theta_global|^2."""
    return alpha * (p - start) - g


def fedadam(
    theta: torch.Tensor, delta: torch.Tensor, m: torch.Tensor, v: torch.Tensor,
    lr: float, beta1: float, beta2: float, tau: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """FedAdam (Reddi et al. 2021) without bias correction; ``delta`` = theta - mean of the clients.

    m <- b1 m + (1-b1) delta; v <- b2 v + (1-b2) delta^2; theta <- theta - lr m / (sqrt(v) + tau).
    """
    m = beta1 * m + (1 - beta1) * delta
    v = beta2 * v + (1 - beta2) * delta**2
    return theta - lr * m / (v.sqrt() + tau), m, v
