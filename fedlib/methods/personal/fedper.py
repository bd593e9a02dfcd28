"""FedPer (Arivazhagan et al. 2019): a shared backbone, and exits that never leave their client.

Client: receives the backbone, trains it together with its own exits, sends the backbone. Server: the mean of the
backbones, by examples. A client answers with the latest backbone and its own exits (the initial ones, if it never was
sampled). ``shallow="afterwards"`` is the naive way to early exits of CAFEDistill's Figure 2: the federation trains
backbone and last exit, and each client its shallow exits alone, on the final backbone, when it is asked.
Read next: ``fedrep.py``, ``cafedistill.py``.

Deviations: CAFEDistill does not say how long shallow exits train afterwards; five epochs (``tune_epochs``).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from ...core.annotations import Count, When
from ..base import Client, Cohort, JointExits, ParamInfo, cross_entropies
from ..values import Round, Server, Serving, Stage


@dataclass(frozen=True)
class FedPer(JointExits):
    """Personal exits; Table 3's local distillation is ``distill="last"``."""

    label, color, marker = "FedPer", "#6baad4", "H"

    shallow: Literal["joint", "afterwards"] = "joint"  # when shallow exits are trained
    tune_epochs: Annotated[Count, When(shallow="afterwards")] = 5

    def personal(self, info: ParamInfo) -> bool:
        return info.exit is not None

    def local_update(self, cohort: Cohort) -> None:
        if self.shallow == "joint":
            super().local_update(cohort)
            return
        last = cohort.setting.num_exits - 1
        cohort.train(lambda batch: cross_entropies(batch)[last], Stage(lambda i: i.exit in (None, last)))

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        serving, last = super().serve(client, server, r), r.setting.num_exits - 1
        if self.shallow == "joint" or not last:
            return serving
        return Serving(serving.members, tune=Stage(lambda i: i.exit not in (None, last), self.tune_epochs))
