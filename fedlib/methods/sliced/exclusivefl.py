"""ExclusiveFL: only clients that can hold the full model take part; they train all exits, without distillation.

Source: the baseline of ReeFL (Section 4.1, Appendix B).

Deviations: none known. As released, min(clients_per_round, eligible) clients are sampled, not a share of the eligible.
"""

from dataclasses import dataclass

import numpy as np

from ..base import Setting
from ..server import ServerStep


@dataclass(frozen=True)
class ExclusiveFL(ServerStep):
    """FedAvg over the clients of the largest budget, loss = sum of all exits' cross-entropies."""

    label, color, marker = "ExclusiveFL", "#868a8e", "v"

    def eligible(self, budgets: np.ndarray, setting: Setting) -> np.ndarray:
        return np.where(budgets == setting.num_exits - 1)[0]
