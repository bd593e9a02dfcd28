"""Local losses between exits, one equation each. All take a :class:`Batch` and return one value per client (K,).

What one method alone needs is in its file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from ..data.tasks import Classification, Task
from .values import unknown


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
    client: torch.Tensor | None = None  # (M,): whose model each is; peers share a number. None: there are no peers
    teacher: Callable[[str], torch.Tensor] = unknown  # outputs (E, M, B, C) of members that do not train, by name
    label_counts: Callable[[], torch.Tensor] = unknown  # (M, C): the clients' training examples by label
    task: Task = Classification()
    whole: Callable[[], torch.Tensor] = unknown  # outputs of all that members hold, where a view of it ran


def cross_entropies(batch: Batch) -> torch.Tensor:
    """Mean loss of each exit on each member's batch, (E, M), the task's own; zero where the exit is not held."""
    losses = batch.task.losses(batch.outputs, batch.labels)  # (E, M, B)
    return (losses * batch.weights).sum(-1) * batch.held


def zero_absent_at_client(batch: Batch) -> Batch:
    """``batch`` with zero for the outputs of classes that the member's client has no example of (HeteroFL)."""
    return replace(batch, outputs=batch.outputs * (batch.label_counts() > 0).to(batch.outputs.dtype)[:, None])


def kl_to_teacher(batch: Batch, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Eq. 6: tau^2 * sum over the held exits e of KL(p_teacher || p_e), (K,). ``teacher`` (K,) indexes exits.

    The KL is the task's own. The teacher is detached and its own term is exactly zero. The sum over exits is not
    divided.
    """
    target = batch.outputs.detach()[teacher, torch.arange(len(teacher), device=batch.outputs.device)]  # (K, B, *out)
    kl = batch.task.kl(target, batch.outputs, batch.labels, temperature)  # (E, K, B)
    return ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2


def peer_kl(batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Mutual learning between the n models of a client (FeDepth), (M,): tau^2 * 1/(n-1) * sum_{j != m} KL(p_j || p_m).

    p_j is detached; the sum over exits is not divided. Zero for a client of one model.
    """
    client = batch.client
    if client is None:
        return batch.outputs.new_zeros(batch.outputs.shape[1])
    peers = (client[:, None] == client).to(batch.outputs.dtype).fill_diagonal_(0)  # (M, M)
    logp = (batch.outputs / temperature).log_softmax(-1)  # (E, M, B, C)
    p = logp.detach().exp()
    negative_entropy = torch.einsum("mn,enb->emb", peers, (p * logp.detach()).sum(-1))
    kl = negative_entropy - (torch.einsum("mn,enbc->embc", peers, p) * logp).sum(-1)
    total = ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2
    return total / peers.sum(1).clamp(min=1)


def last_exit(batch: Batch) -> torch.Tensor:
    """ScaleFL's teacher (K,): the deepest exit each client holds."""
    depth = torch.arange(len(batch.held), device=batch.held.device).unsqueeze(1)
    return (batch.held * (depth + 1)).argmax(0)


def ramp_up(t: int, length: float) -> float:
    """eta(t) = exp(-5 (1 - min(t, length) / length)^2): the weight of distillation at round t (1-based)."""
    return math.exp(-5 * (1 - min(t, length) / length) ** 2) if length > 0 else 1.0
