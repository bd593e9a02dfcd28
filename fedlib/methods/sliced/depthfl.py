"""DepthFL (Kim et al., ICLR 2023): depth-scaled sub-models whose exits teach each other, aggregated with FedDyn.

Client (budget r): blocks and classifiers up to exit r; sum of cross-entropies + eta/(r-1) * mutual KL + FedDyn's term.
Server: FedDyn on the unweighted mean over holders.
Read next: ``server.py`` (FedDyn's term at the client, its step at the server).

Deviations: as in ReeFL's release, every exit has the same LN + Linear classifier (the original grows them:
``exit_head="towers"`` on a ResNet), and FedDyn's server divides by all clients, not by those whose budget includes the
parameter. In FeDepth's ``scenario``s a client holds the exits that its memory allows (counted as FeDepth counts its
stages), the whole net where it has all; one that cannot even hold the first takes no part.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from ...core.annotations import Fraction, NotNegative, Positive, When
from ..base import Batch, cross_entropies
from ..losses import ramp_up
from ..memory_budgets import ExitsThatFit
from ..server import ServerStep

TAUGHT = When(distill="mutual")


@dataclass(frozen=True)
class DepthFL(ExitsThatFit, ServerStep):
    """Table 3: ``aggregation="mean", weighting="examples"`` is the FedAvg variant; ``distill="none"`` is without KD."""

    label, color, marker = "DepthFL", "#0072b2", "s"

    distill: Literal["mutual", "none"] = "mutual"
    kd_weight: Annotated[NotNegative | None, TAUGHT] = None  # eta; None: ramped up over the first rounds
    # of the rounds until eta = 1; 300 of 1000 in ReeFL's release
    ramp_fraction: Annotated[Fraction, TAUGHT, When(kd_weight=None)] = 0.3
    temperature: Annotated[Positive, TAUGHT] = 1.0  # tau
    aggregation: Literal["mean", "feddyn", "fedadam"] = "feddyn"
    weighting: Literal["examples", "clients"] = "clients"

    @property
    def needs_classes(self) -> str:
        return "distill = 'mutual'" if self.distill == "mutual" else ""

    @property
    def paced_by(self) -> str:
        return "ramp_fraction" if self.distill != "none" and self.kd_weight is None else ""

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return sum_e CE_e + eta/(n-1) * sum_i sum_{j != i} KL(p_j || p_i) over the n exits held, (M,)."""
        ce = cross_entropies(batch).sum(0)
        if self.distill == "none":  # Table 3
            return ce
        eta = ramp_up(batch.t, self.ramp_fraction * batch.rounds) if self.kd_weight is None else self.kd_weight
        return ce + eta * mutual_kl(batch, self.temperature)


def mutual_kl(batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Return mutual learning's loss, (K,): 1/(n-1) * sum_i sum_{j != i} KL(p_j || p_i), p_j detached, n exits held."""
    logp = (batch.outputs / temperature).log_softmax(-1)
    held = batch.held[..., None, None]  # (E, K, 1, 1)
    p = logp.detach().exp() * held
    negative_entropy = (p * logp.detach()).sum(-1)  # (E, K, B)
    others = p.sum(0) - p  # sum of p_j over j != i
    kl = (negative_entropy.sum(0) - negative_entropy) - (others * logp).sum(-1)
    n = batch.held.sum(0)
    return ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2 / (n - 1).clamp(min=1)
