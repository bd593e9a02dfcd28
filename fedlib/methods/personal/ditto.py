"""Ditto (Li et al., ICML 2021): a global model by FedAvg, and beside it a personal one that is drawn to it.

Client: receives the global model w and trains it as in FedAvg; trains its own model v, which it keeps, on
loss + mu/2 |v - w|^2, w as received; sends the trained w alone. Server: the mean, by examples. A client answers with v.
Read next: ``fedamp.py``.

v starts at the initial model, as the paper's box has it, which is what a client that was never sampled answers with; or
(``start="global"``) at the global model of the client's first participation, as some public code does, whose clients
then answer with the global model before it.

Deviations: both models see the same batches. CAFEDistill does not say its mu.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from ...core.annotations import NotNegative
from ..base import NOTHING, Client, Cohort, JointExits, Member, Round, Server, Serving


@dataclass(frozen=True)
class Ditto(JointExits):
    """Two models a client."""

    label, color, marker = "Ditto", "#77ddaa", ">"

    version: ClassVar[int] = 2  # 1 had no ``start``, and started at the global model
    remembers: ClassVar[bool] = True  # its clients' own models

    mu: NotNegative = 0.5  # the paper's lambda
    start: Literal["initial", "global"] = "initial"  # where v starts

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part = r.setting.full()
        own = Member(client, part, name="own", keeps="all", upload=NOTHING, fresh=self.start == "initial")
        return [Member(client, part), own]

    def local_update(self, cohort: Cohort) -> None:
        received, own = cohort.received, cohort.rows_named("own")
        cohort.train(self.local_loss, gradient=lambda name, p: own(name) * self.mu * (p - received[name]))

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((self.members(client, server, r)[1],))
