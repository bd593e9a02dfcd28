"""Groups of options that several methods share: how exits teach one another, and what the server makes of the mean.

A method names the groups it uses before ``Method``: ``class ReeFL(Distillation, ServerStep, Method)``.
"""

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch

from ..core.clients import Client
from ..core.slices import Slice
from ..core.validation import AtLeast, AtMost, Below, Positive, When
from .jobs import Arrived, Round, Server
from .losses import Batch, cross_entropies, kl_to_teacher, last_exit, mutual_kl, ramp_up, running_best_exit
from .server import fedadam, feddyn_gradient, feddyn_server

TAUGHT = When(distill=("best", "mutual", "last"))
DYN, ADAM = When(aggregation="feddyn"), When(aggregation="fedadam")


@dataclass(frozen=True)
class Distillation:
    """Knowledge distillation between the exits of a client's own model (ReeFL, Eqs. 5-6)."""

    distill: Literal["none", "best", "mutual", "last"] = "none"  # who teaches whom (L_kl, Eq. 5)
    kd_weight: Annotated[float | None, AtLeast(0), TAUGHT] = None  # eta; None: ramped up over the first rounds
    # of the rounds until eta = 1; the papers' 300 of 1000
    ramp_fraction: Annotated[float, AtLeast(0), AtMost(1), TAUGHT, When(kd_weight=None)] = 0.3
    temperature: Annotated[Positive, TAUGHT] = 1.0  # tau, Eq. 6
    zeta: Annotated[Positive, AtMost(1), When(distill="best")] = 0.2  # running estimate of the loss

    @property
    def needs_classes(self) -> str:
        return "distill = 'mutual'" if self.distill == "mutual" else super().needs_classes

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Eq. 5, (M,): sum_e CE_e + eta * L_kl."""
        ce = cross_entropies(batch)  # (E, M)
        loss = ce.sum(0)
        if self.distill == "none":
            return loss
        eta = ramp_up(batch.t, self.ramp_fraction * batch.rounds) if self.kd_weight is None else self.kd_weight
        if self.distill == "mutual":
            return loss + eta * mutual_kl(batch, self.temperature)
        teacher = running_best_exit(batch, ce, self.zeta) if self.distill == "best" else last_exit(batch)
        return loss + eta * kl_to_teacher(batch, teacher, self.temperature)


@dataclass(frozen=True)
class JointExits(Distillation):
    """Every client trains the whole model, whose m exits count equally: a single-exit method's multi-exit form.

    With one exit it is the method as published. ``distill="last"`` is local distillation: the last exit teaches.
    """

    kd_weight: Annotated[float | None, AtLeast(0), TAUGHT] = 1.0

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """The whole model: budgets are ignored."""
        return r.setting.full()

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """1/m sum_j [CE_j + eta KL_j], (M,)."""
        return super().local_loss(batch) / batch.held.sum(0)


@dataclass(frozen=True)
class ServerStep:
    """What the server makes of the mean: it takes it as it is, or as the input of FedDyn or FedAdam."""

    aggregation: Literal["mean", "feddyn", "fedadam"] = "mean"
    feddyn_alpha: Annotated[Positive, DYN] = 0.1
    server_lr: Annotated[Positive, ADAM] = 1e-3
    beta1: Annotated[float, AtLeast(0), Below(1), ADAM] = 0.9
    beta2: Annotated[float, AtLeast(0), Below(1), ADAM] = 0.999
    adam_tau: Annotated[Positive, ADAM] = 1e-6

    def check_options(self) -> None:
        super().check_options()
        self.check_slices("aggregation", self.aggregation == "feddyn")

    @property
    def remembers(self) -> bool:
        """FedDyn's clients keep a gradient across rounds."""
        return self.aggregation == "feddyn" or super().remembers

    def local_update(self, cohort) -> None:
        """Local training, with FedDyn's term where that is the aggregation."""
        if self.aggregation != "feddyn":
            super().local_update(cohort)
            return
        alpha, start = self.feddyn_alpha, cohort.start
        g = cohort.recall("feddyn_gradient")  # zeros at a client's first participation
        cohort.train(self.local_loss, gradient=lambda name, p: feddyn_gradient(p, start[name], g[name], alpha))
        cohort.remember("feddyn_gradient", {n: g[n] - alpha * (p - start[n]) for n, p in cohort.trained.items()})

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        mean = arrived.sums[0]
        new, memory = dict(server.params), dict(server.memory)
        for name, value in mean.result(server.params).items():
            theta, count = server.params[name], mean.count[name]
            if r.setting.infos[name].kind == "statistic":
                new[name] = value
            elif self.aggregation == "feddyn":
                h = memory.get(f"h/{name}", torch.zeros_like(theta))
                share = (count / r.setting.num_clients).to(theta.dtype)
                new[name], memory[f"h/{name}"] = feddyn_server(theta, value, h, share, self.feddyn_alpha)
            elif self.aggregation == "fedadam":
                new[name], moments = self.adam_step(name, theta, theta - value, memory, count > 0)
                memory |= moments
            else:
                new[name] = value
        return replace(server, t=r.t, params=new, memory=memory)

    def adam_step(self, key: str, theta: torch.Tensor, delta: torch.Tensor, memory: dict, held: torch.Tensor):
        """One FedAdam step whose moments live under ``m/key`` and ``v/key``; entries not ``held`` stay."""
        m, v = (memory.get(f"{x}/{key}", torch.zeros_like(theta)) for x in "mv")
        stepped = fedadam(theta, delta, m, v, self.server_lr, self.beta1, self.beta2, self.adam_tau)
        theta, m, v = (torch.where(held, new, old) for new, old in zip(stepped, (theta, m, v), strict=True))
        return theta, {f"m/{key}": m, f"v/{key}": v}
