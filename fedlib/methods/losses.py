"""Local losses between exits, one equation each. All take a :class:`Batch` and return one value per client (K,).

What one method alone needs is in its file.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

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
    """Average each exit's loss over each member's batch, (E, M), the task's own; zero where it is not held."""
    return (batch.task.losses(batch.outputs, batch.labels) * batch.weights).sum(-1) * batch.held


def kl_to_teacher(batch: Batch, teacher: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Compute Eq. 6: tau^2 * sum over the held exits e of KL(p_teacher || p_e), (K,); ``teacher`` (K,) indexes exits.

    The KL is the task's own. The teacher is detached and its own term is exactly zero. The sum over exits is not
    divided.
    """
    return divergences(batch, teacher, temperature).sum(0) * temperature**2


def divergences(batch: Batch, teacher: torch.Tensor, temperature: float, detach: bool = True) -> torch.Tensor:
    """Average KL(p_teacher || p_e) of each held exit e over the batch, (E, K), softened and not scaled back."""
    outputs = batch.outputs.detach() if detach else batch.outputs
    target = outputs[teacher, torch.arange(len(teacher), device=outputs.device)]  # (K, B, *out)
    kl = batch.task.kl(target, batch.outputs, batch.labels, temperature)  # (E, K, B)
    return (kl * batch.weights).sum(-1) * batch.held


def last_exit(batch: Batch) -> torch.Tensor:
    """Return the deepest exit that each client holds, (K,): ScaleFL's teacher."""
    return (batch.held * torch.arange(1, len(batch.held) + 1, device=batch.held.device).unsqueeze(1)).argmax(0)


def ramp_up(t: int, length: float) -> float:
    """Return exp(-5 (1 - min(t, length) / length)^2): the weight eta(t) of distillation at round t (1-based)."""
    return math.exp(-5 * (1 - min(t, length) / length) ** 2) if length > 0 else 1.0
