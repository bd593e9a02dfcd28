"""FedRep (Collins et al., ICML 2021): a shared representation; first the personal exits are trained, then it.

Client: receives the backbone; ``head_epochs`` on its own exits with the backbone frozen, then the local epochs on the
backbone with the exits frozen; sends the backbone. Server: the mean of the backbones, by examples. A client answers
with the latest backbone and its own exits.
Read next: ``fedbabu.py``.

Deviations: while the exits train, tracked statistics of batch norm move with the batches, as in public code.
"""

from dataclasses import dataclass

from ...core.annotations import Count
from ..base import Cohort, JointExits, ParamInfo
from ..values import Stage


@dataclass(frozen=True)
class FedRep(JointExits):
    """Personal exits, trained in turn with the backbone."""

    label, color, marker = "FedRep", "#1150dc", "D"

    head_epochs: Count = 5  # E_p

    def personal(self, info: ParamInfo) -> bool:
        return info.exit is not None

    def local_update(self, cohort: Cohort) -> None:
        cohort.train(self.local_loss, Stage(lambda i: i.exit is not None, self.head_epochs))
        cohort.train(self.local_loss, Stage(lambda i: i.exit is None))
