"""FedProx (Li et al., MLSys 2020): FedAvg whose clients are held back to the global model.

Client: receives the global model w, minimises its loss + mu/2 |theta - w|^2, sends theta. Server: the mean, by
examples. One model for all.
Read next: ``ditto.py``.

Deviations: the term is added to the gradient, mu (theta - w), and not to the loss that is reported.
"""

from dataclasses import dataclass

from ...core.annotations import NotNegative
from ..base import Cohort, JointExits


@dataclass(frozen=True)
class FedProx(JointExits):
    """A proximal term on all that is trained."""

    label, color, marker = "FedProx", "#92375b", "p"

    mu: NotNegative = 0.05

    def local_update(self, cohort: Cohort) -> None:
        cohort.train(self.local_loss, gradient=lambda name, p: self.mu * (p - cohort.start[name]))
