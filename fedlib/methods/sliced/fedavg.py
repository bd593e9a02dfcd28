"""FedAvg (McMahan et al. 2017): every client trains the whole model.

The plain reference without heterogeneity: budgets are ignored. By default there is a single exit after the last block;
``exits="all"`` is the multi-exit form of CAFEDistill's comparison, loss 1/m sum of the exits' cross-entropies.
Read next: ``exclusivefl.py``.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from ...core.clients import Client
from ...core.slices import Slice
from ..base import Method
from ..jobs import Round, Server
from ..losses import Batch
from ..options import ServerStep


@dataclass(frozen=True)
class FedAvg(ServerStep, Method):
    """Full model, last exit, mean weighted by examples."""

    exits: Literal["last", "all"] = "last"

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,) if self.exits == "last" else super().exit_units(depth, num_exits)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full()

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """1/m sum of the exits' cross-entropies, (M,)."""
        return super().local_loss(batch) / batch.held.sum(0)
