"""Local losses between exits, one equation each. All take a :class:`Batch` and return one value per client (K,).

Methods whose exits may teach one another name :class:`Distillation` before ``Method``, those compared in a
multi-exit form of their own :class:`JointExits`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le

from ..core.clients import Client
from ..core.slices import Slice
from ..core.validation import Positive, When
from ..data.tasks import Classification, Task
from .jobs import Round, Server, unknown


@dataclass
class Batch:
    """One optimiser step's data: what a local loss may look at.

    ``outputs`` (E, M, B, C); ``labels`` (M, B); ``weights`` (M, B), 1/n over a client's n real examples and 0 on
    padding; ``held`` (E, M), 1 where model m has exit e. ``scratch`` lives for one local training.
    """

    outputs: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    held: torch.Tensor
    t: int = 1  # round, 1..rounds
    rounds: int = 1
    scratch: dict[str, torch.Tensor] = field(default_factory=dict)
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by exit, what it saw: (M, B, ...)
    client: torch.Tensor | None = None  # (M,): whose model each is; peers share a number
    teacher: Callable[[str], torch.Tensor] = unknown  # outputs (E, M, B, C) of members that do not train, by name
    label_counts: Callable[[], torch.Tensor] = unknown  # (M, C): the clients' training examples by label
    task: Task = Classification()
    whole: Callable[[], torch.Tensor] = unknown  # outputs of all that members hold, where a part of it ran


def cross_entropies(batch: Batch) -> torch.Tensor:
    """Mean loss of each exit on each member's batch, (E, M), the task's own; zero where the exit is not held."""
    losses = batch.task.losses(batch.outputs, batch.labels)  # (E, M, B)
    return (losses * batch.weights).sum(-1) * batch.held


def zero_absent_at_client(batch: Batch) -> Batch:
    """``batch`` with zero for the outputs of classes that the member's client has no example of (HeteroFL)."""
    return replace(batch, outputs=batch.outputs * (batch.label_counts() > 0).to(batch.outputs.dtype)[:, None])


def zero_absent_in_batch(batch: Batch) -> Batch:
    """``batch`` with zero for the outputs of classes without an example in the member's batch (SplitMix, FeDepth)."""
    present = batch.outputs.new_zeros(batch.labels.shape[0], batch.outputs.shape[-1])  # (M, C)
    present.scatter_reduce_(1, batch.labels, (batch.weights > 0).to(present.dtype), "amax")
    return replace(batch, outputs=batch.outputs * present[:, None])


def kl_to_teacher(batch: Batch, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Eq. 6: tau^2 * sum over the held exits e of KL(p_teacher || p_e), (K,). ``teacher`` (K,) indexes exits.

    The KL is the task's own. The teacher is detached and its own term is exactly zero. The sum over exits is not
    divided.
    """
    target = batch.outputs.detach()[teacher, torch.arange(len(teacher), device=batch.outputs.device)]  # (K, B, *out)
    kl = batch.task.kl(target, batch.outputs, batch.labels, temperature)  # (E, K, B)
    return ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2


def mutual_kl(batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """DepthFL's deep mutual learning, (K,): 1/(n-1) * sum_i sum_{j != i} KL(p_j || p_i), p_j detached, n exits held."""
    logp = (batch.outputs / temperature).log_softmax(-1)
    held = batch.held[..., None, None]  # (E, K, 1, 1)
    p = logp.detach().exp() * held
    negative_entropy = (p * logp.detach()).sum(-1)  # (E, K, B)
    others = p.sum(0) - p  # sum of p_j over j != i
    kl = (negative_entropy.sum(0) - negative_entropy) - (others * logp).sum(-1)
    n = batch.held.sum(0)
    total = ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2
    return total / (n - 1).clamp(min=1)


def peer_kl(batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Mutual learning between the n models of a client (FeDepth), (M,): tau^2 * 1/(n-1) * sum_{j != m} KL(p_j || p_m).

    p_j is detached; the sum over exits is not divided. Zero for a client of one model.
    """
    client = batch.client
    if client is None or len(client.unique()) == len(client):
        return batch.outputs.new_zeros(batch.outputs.shape[1])
    peers = (client[:, None] == client).to(batch.outputs.dtype).fill_diagonal_(0)  # (M, M)
    logp = (batch.outputs / temperature).log_softmax(-1)  # (E, M, B, C)
    p = logp.detach().exp()
    negative_entropy = torch.einsum("mn,enb->emb", peers, (p * logp.detach()).sum(-1))
    kl = negative_entropy - (torch.einsum("mn,enbc->embc", peers, p) * logp).sum(-1)
    total = ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2
    return total / peers.sum(1).clamp(min=1)


def running_best_exit(batch: Batch, ce: torch.Tensor, zeta: float) -> torch.Tensor:
    """ReeFL's teacher (K,): argmin over held exits of the running loss, L <- (1 - zeta) L + zeta CE, from L = 0.

    The current batch counts. The running loss lives in ``scratch``: it restarts with every local training. zeta = 1
    selects by the mini-batch's own loss.
    """
    past = batch.scratch.get("running_loss", torch.zeros_like(ce))
    batch.scratch["running_loss"] = (1 - zeta) * past + zeta * ce.detach()
    return batch.scratch["running_loss"].masked_fill(batch.held == 0, math.inf).argmin(0)


def last_exit(batch: Batch) -> torch.Tensor:
    """ScaleFL's teacher (K,): the deepest exit each client holds."""
    depth = torch.arange(len(batch.held), device=batch.held.device).unsqueeze(1)
    return (batch.held * (depth + 1)).argmax(0)


def kl_to_last(batch: Batch, temperature: float, detach: bool = True) -> torch.Tensor:
    """tau^2 KL(p_last || p_e) of each held exit e, (E, M), averaged over the batch; the last's own is zero."""
    teacher = batch.outputs[last_exit(batch), torch.arange(batch.outputs.shape[1], device=batch.outputs.device)]
    teacher = teacher.detach() if detach else teacher
    kl = batch.task.kl(teacher.expand_as(batch.outputs), batch.outputs, batch.labels, temperature)  # (E, M, B)
    return (kl * batch.weights).sum(-1) * batch.held * temperature**2


def ramp_up(t: int, length: float) -> float:
    """eta(t) = exp(-5 (1 - min(t, length) / length)^2): the weight of distillation at round t (1-based)."""
    return math.exp(-5 * (1 - min(t, length) / length) ** 2) if length > 0 else 1.0


TAUGHT = When(distill=("best", "mutual", "last"))


@dataclass(frozen=True)
class Distillation:
    """Knowledge distillation between the exits of a client's own model (ReeFL, Eqs. 5-6)."""

    distill: Literal["none", "best", "mutual", "last"] = "none"  # who teaches whom (L_kl, Eq. 5)
    kd_weight: Annotated[float | None, Ge(0), TAUGHT] = None  # eta; None: ramped up over the first rounds
    # of the rounds until eta = 1; the papers' 300 of 1000
    ramp_fraction: Annotated[float, Ge(0), Le(1), TAUGHT, When(kd_weight=None)] = 0.3
    temperature: Annotated[Positive, TAUGHT] = 1.0  # tau, Eq. 6
    zeta: Annotated[Positive, Le(1), When(distill="best")] = 0.2  # running estimate of the loss

    @property
    def needs_classes(self) -> str:
        return "distill = 'mutual'" if self.distill == "mutual" else ""

    @property
    def paced_by(self) -> str:
        return "ramp_fraction" if self.distill != "none" and self.kd_weight is None else ""

    def eta(self, batch: Batch) -> float:
        """The weight of distillation in this round."""
        return ramp_up(batch.t, self.ramp_fraction * batch.rounds) if self.kd_weight is None else self.kd_weight

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """sum_e CE_e + eta * L_kl, (M,), whoever teaches: a method's own is written in its file."""
        ce = cross_entropies(batch)  # (E, M)
        if self.distill == "none":
            return ce.sum(0)
        if self.distill == "mutual":
            return ce.sum(0) + self.eta(batch) * mutual_kl(batch, self.temperature)
        teacher = running_best_exit(batch, ce, self.zeta) if self.distill == "best" else last_exit(batch)
        return ce.sum(0) + self.eta(batch) * kl_to_teacher(batch, teacher, self.temperature)


@dataclass(frozen=True)
class JointExits(Distillation):
    """Every client trains the whole model, whose m exits count equally: a single-exit method's multi-exit form.

    With one exit it is the method as published. ``distill="last"`` is local distillation: the last exit teaches.
    """

    kd_weight: Annotated[float | None, Ge(0), TAUGHT] = 1.0

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """The whole model: budgets are ignored."""
        return r.setting.full()

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """1/m sum_j [CE_j + eta KL_j], (M,)."""
        return super().local_loss(batch) / batch.held.sum(0)
