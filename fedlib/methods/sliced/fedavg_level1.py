"""FedAvg at level 1 (the baseline of ScaleFL): everybody trains the smallest level's sub-model, which all can hold.

Client: ScaleFL's sub-model of level 1, with its one exit; cross-entropy. Server: plain mean. The other levels' exits
are never trained: every exit is evaluated with level 1's model.
Read next: ``decoupled.py``.

Deviations: none known; the slides say no more than the first line.
"""

from dataclasses import dataclass

from ..base import Client, Round, Server, Slice
from ..scaling import Levels


@dataclass(frozen=True)
class FedAvgLevel1(Levels):
    """The levels are ScaleFL's; budgets are ignored."""

    label, color, marker = "FedAvg, level 1", "#222222", "X"

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.part(0, r.setting)
