"""The server's arithmetic, one equation each, and what a method makes of the mean of its clients' models.

Entries that no client held keep their value and their server state. Read next: ``sums.py`` (the mean itself).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Lt

from ..core.validation import Positive, When
from .base import Method
from .cohort import Cohort, Loss
from .jobs import Arrived, Round, Server

DYN, ADAM = When(aggregation="feddyn"), When(aggregation="fedadam")


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


def trained(arrived: Arrived, r: Round) -> list[str]:
    """The names that arrived, without statistics: those are averaged, and never stepped."""
    return [name for name in arrived.mean.total if r.setting.infos[name].kind != "statistic"]


def train_with_feddyn(cohort: Cohort, loss: Loss, alpha: float) -> None:
    """Local training with FedDyn's term; then g <- g - alpha (theta - theta_global): zero at first, clients keep it."""
    start, g = cohort.start, cohort.recall("feddyn_gradient")
    cohort.train(loss, gradient=lambda name, p: feddyn_gradient(p, start[name], g[name], alpha))
    cohort.remember("feddyn_gradient", {n: g[n] - alpha * (p - start[n]) for n, p in cohort.trained.items()})


def feddyn_step(server: Server, arrived: Arrived, r: Round, alpha: float) -> Server:
    """FedDyn's server on the mean of all that arrived; h of each entry is kept in the server's memory."""
    new, memory = {**server.params, **arrived.mean.result(server.params)}, dict(server.memory)
    for name in trained(arrived, r):
        theta, key = server.params[name], f"h/{name}"
        share = (arrived.mean.count[name] / r.setting.num_clients).to(theta.dtype)
        h = memory.get(key, torch.zeros_like(theta))
        new[name], memory[key] = feddyn_server(theta, new[name], h, share, alpha)
    return replace(server, t=r.t, params=new, memory=memory)


@dataclass(frozen=True)
class ServerStep(Method):
    """What the server makes of the mean: it takes it as it is, or as the input of FedDyn or FedAdam."""

    aggregation: Literal["mean", "feddyn", "fedadam"] = "mean"
    feddyn_alpha: Annotated[Positive, DYN] = 0.1
    server_lr: Annotated[Positive, ADAM] = 1e-3
    beta1: Annotated[float, Ge(0), Lt(1), ADAM] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1), ADAM] = 0.999
    adam_tau: Annotated[Positive, ADAM] = 1e-6

    def check_options(self) -> None:
        super().check_options()
        self.check_slices("aggregation", self.aggregation == "feddyn")

    @property
    def remembers(self) -> bool:
        """FedDyn's clients keep a gradient across rounds."""
        return self.aggregation == "feddyn" or super().remembers

    def local_update(self, cohort: Cohort) -> None:
        """Local training, with FedDyn's term where that is the aggregation."""
        if self.aggregation == "feddyn":
            train_with_feddyn(cohort, self.local_loss, self.feddyn_alpha)
        else:
            super().local_update(cohort)

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if self.aggregation == "feddyn":
            return feddyn_step(server, arrived, r, self.feddyn_alpha)
        server, old = super().aggregate(server, arrived, r), server
        if self.aggregation == "mean":
            return server
        new, memory = dict(server.params), dict(server.memory)
        for name in trained(arrived, r):
            theta, held = old.params[name], arrived.mean.count[name] > 0
            new[name], moments = self.adam_step(name, theta, theta - new[name], memory, held)
            memory |= moments
        return replace(server, params=new, memory=memory)

    def adam_step(self, key: str, theta: torch.Tensor, delta: torch.Tensor, memory: dict, held: torch.Tensor):
        """One FedAdam step whose moments live under ``m/key`` and ``v/key``; entries not ``held`` stay."""
        m, v = (memory.get(f"{x}/{key}", torch.zeros_like(theta)) for x in "mv")
        stepped = fedadam(theta, delta, m, v, self.server_lr, self.beta1, self.beta2, self.adam_tau)
        theta, m, v = (torch.where(held, new, old) for new, old in zip(stepped, (theta, m, v), strict=True))
        return theta, {f"m/{key}": m, f"v/{key}": v}
