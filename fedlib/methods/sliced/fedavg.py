"""FedAvg (McMahan et al. 2017): every client trains the whole model.

The plain reference without heterogeneity: budgets are ignored. By default there is a single exit after the last block;
``exits="all"`` is the multi-exit form of CAFEDistill's comparison, loss 1/m sum of the exits' cross-entropies. At a
``width`` below one everybody trains and serves the same narrow net, which the poorest client can hold (FeDepth's).
Read next: ``exclusivefl.py``.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from ...core.annotations import Share
from ..base import Batch, Client, Experiment, Round, Server, Setting, Slice
from ..server import ServerStep
from ..widths import check_cuttable, rounded_up


@dataclass(frozen=True)
class FedAvg(ServerStep):
    """Full model, last exit, mean weighted by examples."""

    label, color, marker = "FedAvg", "#222222", "X"

    exits: Literal["last", "all"] = "last"
    width: Share = 1.0  # of every hidden axis, rounded up

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,) if self.exits == "last" else super().exit_units(depth, num_exits)

    def check(self, setting: Setting, e: Experiment) -> None:
        if self.width < 1:
            check_cuttable(setting, e, self.width)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full() if self.width == 1 else r.setting.cut(partial(rounded_up, self.width))

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return 1/m sum of the exits' cross-entropies, (M,)."""
        return super().local_loss(batch) / batch.held.sum(0)
