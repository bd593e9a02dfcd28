"""DepthFL (Kim et al., ICLR 2023): depth-scaled sub-models whose exits teach each other, aggregated with FedDyn.

Client (budget r): blocks and classifiers up to exit r; sum of cross-entropies + eta/(r-1) * mutual KL + FedDyn's term.
Server: FedDyn on the unweighted mean over holders.
Read next: ``distillation.mutual_kl``, ``aggregation.feddyn_server``.

Deviations: as in ReeFL's release, every exit has the same LN + Linear classifier (the original grows them), and
FedDyn's server divides by all clients, not by those whose budget includes the parameter.
"""

from dataclasses import dataclass
from typing import Literal

from ..base import Method
from ..options import Distillation, ServerStep


@dataclass(frozen=True)
class DepthFL(Distillation, ServerStep, Method):
    """Table 3: ``aggregation="mean", weighting="examples"`` is the FedAvg variant; ``distill="none"`` is without KD."""

    distill: Literal["none", "best", "mutual", "last"] = "mutual"
    aggregation: Literal["mean", "feddyn", "fedadam"] = "feddyn"
    weighting: Literal["examples", "clients"] = "clients"
