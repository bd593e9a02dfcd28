"""DepthFL (Kim et al., ICLR 2023): depth-scaled sub-models whose exits teach each other, aggregated with FedDyn.

Client (budget r): blocks and classifiers up to exit r; sum of cross-entropies + eta/(r-1) * mutual KL + FedDyn's term.
Server: FedDyn on the unweighted mean over holders.
Read next: ``losses.mutual_kl``, ``server.train_with_feddyn`` (the client's term), ``server.feddyn_step``.

Deviations: as in ReeFL's release, every exit has the same LN + Linear classifier (the original grows them:
``exit_head="towers"`` on a ResNet), and FedDyn's server divides by all clients, not by those whose budget includes the
parameter. In FeDepth's ``scenario``s a client holds the exits that its memory allows (counted as FeDepth counts its
stages), the whole net where it has all; one that cannot even hold the first takes no part.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from ...core.clients import Client
from ...core.slices import Slice
from ..base import Method
from ..jobs import Round, Server, Setting
from ..losses import Batch, Distillation, cross_entropies, mutual_kl
from ..memory_budgets import MemoryBudgets, prefixes_that_fit
from ..server import ServerStep


@dataclass(frozen=True)
class DepthFL(MemoryBudgets, Distillation, ServerStep, Method):
    """Table 3: ``aggregation="mean", weighting="examples"`` is the FedAvg variant; ``distill="none"`` is without KD."""

    label, color, marker = "DepthFL", "#0072b2", "s"

    distill: Literal["none", "best", "mutual", "last"] = "mutual"
    aggregation: Literal["mean", "feddyn", "fedadam"] = "feddyn"
    weighting: Literal["examples", "clients"] = "clients"

    def eligible(self, budgets: np.ndarray, setting: Setting) -> np.ndarray:
        if not self.shares or setting.measure is None:
            return super().eligible(budgets, setting)
        fitting = np.array([prefixes_that_fit(share, setting) for share in self.shares])
        return np.flatnonzero(fitting[budgets])

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        if not self.shares:
            return super().slice_for(client, server, r)
        exits = max(1, prefixes_that_fit(self.shares[client.budget], r.setting))
        return Slice.prefix(r.setting.exit_units[exits - 1] + 1, range(exits))

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """sum_e CE_e + eta/(n-1) * sum_i sum_{j != i} KL(p_j || p_i) over the n exits held, (M,)."""
        if self.distill != "mutual":  # Table 3: none
            return super().local_loss(batch)
        return cross_entropies(batch).sum(0) + self.eta(batch) * mutual_kl(batch, self.temperature)
