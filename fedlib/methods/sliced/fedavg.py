"""FedAvg (McMahan et al. 2017): every client trains the whole model with its one, final classifier.

The plain reference without heterogeneity: budgets are ignored and there is a single exit after the last block.
Read next: ``exclusivefl.py``.
"""

from dataclasses import dataclass

from ...core.clients import Client
from ...core.slices import Slice
from ..base import Method
from ..jobs import Round, Server
from ..options import ServerStep


@dataclass(frozen=True)
class FedAvg(ServerStep, Method):
    """Full model, last exit, mean weighted by examples."""

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full()
