"""Memory budgets as shares of what training the whole model takes: FeDepth's comparison."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np

from ..core.annotations import Positive, When
from .base import Client, Method, Round, Server, Setting, Slice

SCENARIOS = {
    "fair": (1 / 6, 1 / 3, 1 / 2, 1.0),
    "lack": (1 / 8, 1 / 6, 1 / 2, 1.0),  # the poorest cannot train some block
    "surplus": (1 / 6, 1 / 3, 1 / 2, 2.0),  # the richest could train two models
}
BATCH = 32  # examples of a step, in the paper's estimate
SLACK = 0.05  # of a budget; it gives the released stages


@dataclass(frozen=True)
class MemoryBudgets(Method):
    """What the clients' budgets are: exits they can hold, or shares of the memory of training the whole model."""

    scenario: Literal["exits", "fair", "lack", "surplus", "own"] = "exits"
    ratios: Annotated[tuple[Positive, ...] | None, When(scenario="own")] = None  # r of scenario = own, one per budget

    def check_options(self) -> None:
        super().check_options()
        if self.scenario == "own" and not self.ratios:
            raise ValueError(f"{type(self).__name__.lower()}: scenario = 'own' needs ratios, e.g. (0.25, 0.5, 1)")

    @property
    def shares(self) -> tuple[float, ...]:
        """The ratios r, one per budget; none where budgets are exits."""
        return self.ratios or () if self.scenario == "own" else SCENARIOS.get(self.scenario, ())

    def num_budgets(self, num_exits: int) -> int:
        return len(self.shares) or super().num_budgets(num_exits)

    def sizes(self, depth: int) -> Sequence[float]:
        """Where budgets are shares of the memory, thirty-seconds of it."""
        return [(k + 1) / 32 for k in range(32)] if self.shares else super().sizes(depth)

    def of_sizes(self, sizes: Sequence[float]) -> dict[str, object]:
        own: dict[str, object] = {"options": {"scenario": "own", "ratios": tuple(sizes)}}
        return own if self.shares else super().of_sizes(sizes)


def usable(budget: float, slack: float) -> float:
    """Return how much of a ``budget`` may be used."""
    return budget * (1 + slack) * (1 + 1e-9)  # sums of floats


def memory_of(share: float, setting: Setting) -> tuple[list[float], float]:
    """Return what training each block takes, and a client's memory with this share for one model, in MiB."""
    blocks = [setting.measure.activation_mib(unit, BATCH) for unit in range(setting.spec.depth)]
    return blocks, min(share, 1) * setting.measure.total_mib(BATCH)


@dataclass(frozen=True)
class ExitsThatFit(MemoryBudgets):
    """Clients hold the exits that their share of the memory allows, and take no part where it allows none."""

    def fitting(self, budget: int, setting: Setting) -> int:
        """Count the exits that a client's memory allows, with all blocks up to the last of them."""
        needs, memory = memory_of(self.shares[budget], setting)
        return sum(sum(needs[: unit + 1]) <= usable(memory, SLACK) for unit in setting.exit_units)

    def eligible(self, budgets: np.ndarray, setting: Setting) -> np.ndarray:
        if not self.shares or setting.measure is None:
            return super().eligible(budgets, setting)
        return np.flatnonzero(np.array([self.fitting(b, setting) for b in range(len(self.shares))])[budgets])

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Cut the prefix that fits; of a client that holds nothing the first, for what asks without sampling."""
        exits = max(1, self.fitting(client.budget, r.setting)) if self.shares else client.budget + 1
        return Slice.prefix(r.setting.exit_units[exits - 1] + 1, range(exits))
