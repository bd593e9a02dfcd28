"""The server's arithmetic, one equation each, and what a method makes of the mean of its clients' models.

Entries that no client held keep their value and their server state. Read next: ``sums.py`` (the mean itself).
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from ..core.annotations import Part, Positive, When
from .base import Method
from .cohort import Cohort
from .values import Arrived, Round, Server

DYN, ADAM = When(aggregation="feddyn"), When(aggregation="fedadam")


def feddyn_server(
    theta: torch.Tensor, mean: torch.Tensor, h: torch.Tensor, share: torch.Tensor, alpha: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply FedDyn's server (Acar et al. 2021): h <- h - alpha * share * (mean - theta); theta <- mean - h / alpha.

    ``share`` = participants holding the entry / all clients, per entry; where it is zero nothing changes.
    """
    new_h = h - alpha * share * (mean - theta)
    return torch.where(share > 0, mean - new_h / alpha, theta), torch.where(share > 0, new_h, h)


def feddyn_gradient(p: torch.Tensor, start: torch.Tensor, g: torch.Tensor, alpha: float) -> torch.Tensor:
    """Return the gradient of FedDyn's client term -<theta, g> + alpha/2 |theta - theta_global|^2."""
    return alpha * (p - start) - g


def fedadam(
    theta: torch.Tensor, delta: torch.Tensor, m: torch.Tensor, v: torch.Tensor,
    lr: float, beta1: float, beta2: float, tau: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Step FedAdam (Reddi et al. 2021) without bias correction; ``delta`` = theta - mean of the clients.

    m <- b1 m + (1-b1) delta; v <- b2 v + (1-b2) delta^2; theta <- theta - lr m / (sqrt(v) + tau).
    """
    m, v = beta1 * m + (1 - beta1) * delta, beta2 * v + (1 - beta2) * delta**2
    return theta - lr * m / (v.sqrt() + tau), m, v


@dataclass(frozen=True)
class ServerStep(Method):
    """What the server makes of the mean: it takes it as it is, or as the input of FedDyn or FedAdam."""

    aggregation: Literal["mean", "feddyn", "fedadam"] = "mean"
    feddyn_alpha: Annotated[Positive, DYN] = 0.1
    server_lr: Annotated[Positive, ADAM] = 1e-3
    beta1: Annotated[Part, ADAM] = 0.9
    beta2: Annotated[Part, ADAM] = 0.999
    adam_tau: Annotated[Positive, ADAM] = 1e-6

    def check_options(self) -> None:
        super().check_options()
        self.check_slices("aggregation", self.aggregation == "feddyn")

    @property
    def remembers(self) -> bool:
        """Whether clients keep memory across rounds; FedDyn's keep a gradient."""
        return self.aggregation == "feddyn" or super().remembers

    def local_update(self, cohort: Cohort) -> None:
        """Train; with FedDyn its term, then g <- g - alpha (theta - theta_global): zero at first, kept."""
        if self.aggregation != "feddyn":
            return super().local_update(cohort)
        alpha, start, g = self.feddyn_alpha, cohort.start, cohort.recall("feddyn_gradient")
        cohort.train(self.local_loss, gradient=lambda name, p: feddyn_gradient(p, start[name], g[name], alpha))
        cohort.remember("feddyn_gradient", {n: g[n] - alpha * (p - start[n]) for n, p in cohort.trained.items()})

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        """Take the mean over the holders of each entry, or what FedDyn or FedAdam makes of it."""
        averaged, memory = super().aggregate(server, arrived, r), dict(server.memory)
        if self.aggregation == "mean":
            return averaged
        new = dict(averaged.params)
        for name, holders in arrived.mean.count.items():
            if r.setting.infos[name].kind == "statistic":  # averaged, and never stepped
                continue
            theta = server.params[name]
            if self.aggregation == "feddyn":
                h, share = memory.get(f"h/{name}", torch.zeros_like(theta)), holders / r.setting.num_clients
                new[name], memory[f"h/{name}"] = feddyn_server(
                    theta, new[name], h, share.to(theta.dtype), self.feddyn_alpha
                )
            else:
                new[name], moments = self.adam_step(name, theta, theta - new[name], memory, holders > 0)
                memory |= moments
        return replace(averaged, params=new, memory=memory)

    def adam_step(self, key: str, theta: torch.Tensor, delta: torch.Tensor, memory: dict, held: torch.Tensor):
        """Take one FedAdam step whose moments live under ``m/key`` and ``v/key``; entries not ``held`` stay."""
        m, v = (memory.get(f"{x}/{key}", torch.zeros_like(theta)) for x in "mv")
        stepped = fedadam(theta, delta, m, v, self.server_lr, self.beta1, self.beta2, self.adam_tau)
        theta, m, v = (torch.where(held, new, old) for new, old in zip(stepped, (theta, m, v), strict=True))
        return theta, {f"m/{key}": m, f"v/{key}": v}
