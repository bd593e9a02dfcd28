"""Memory budgets as shares of what training the whole model takes (FeDepth), and stages that fit one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from ..core.clients import Client
from ..core.validation import AtLeast, Positive, When
from ..models.backbone import Spec
from ..models.measure import FLOAT, MIB
from .jobs import Setting, Stage

SCENARIOS = {
    "fair": (1 / 6, 1 / 3, 1 / 2, 1.0),
    "lack": (1 / 8, 1 / 6, 1 / 2, 1.0),  # the poorest cannot train some block
    "surplus": (1 / 6, 1 / 3, 1 / 2, 2.0),  # the richest could train two models
}
BATCH = 32  # examples of a step, in the paper's estimate
SLACK = 0.05  # of a budget; it gives the released plans


@dataclass(frozen=True)
class MemoryBudgets:
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


@dataclass(frozen=True)
class Decomposition(MemoryBudgets):
    """How a client's memory divides the net into stages (FeDepth)."""

    slack: Annotated[float, AtLeast(0)] = SLACK
    partial: Literal["forward", "absent", "refused"] = "forward"  # what blocks that fit no stage do

    def plan(self, share: float, setting: Setting) -> tuple[range, ...]:
        """The stages of a client with this share of the memory, as ranges of blocks."""
        return pack(*memory_of(share, setting), self.slack)

    def kept(self, plan: Sequence[range], client: Client, setting: Setting) -> list[bool]:
        """For each stage: has the client room for z_{j-1} of all its examples beside what the stage trains?

        In steps of its own size, of the share of the memory that these take for the whole net. While one z is made
        of another, both are held.
        """
        measure, batch = setting.measure, min(setting.batch_size, client.num_examples)
        room = _limit(min(self.shares[client.budget], 1) * measure.total_mib(setting.batch_size), self.slack)
        out, before, one = [], 0.0, setting.spec.one_state
        for units in plan:
            z = kept_mib(units.start, client.num_examples, setting)
            trained = sum(measure.activation_mib(unit, batch) for unit in units)
            out.append(units.start > 0 and one and z + max(trained, before) <= room)
            before = z if out[-1] else 0.0
        return out

    def models(self, share: float) -> int:
        """M: how many whole models fit."""
        return max(1, int(share))

    def check_decomposition(self, setting: Setting, skips: bool) -> None:
        """``ValueError`` for a share that cannot train the net; ``skips``: every stage ends at the last head."""
        for share in self.shares if setting.measure is not None else ():
            try:
                check_stages(*memory_of(share, setting), self.slack, self.partial != "refused")
                plan = self.plan(share, setting)
                if skips:
                    check_skips(setting.spec, [units.stop - 1 for units in plan])
                if self.partial == "absent":
                    check_left_out(setting.spec, plan[0].start)
            except ValueError as error:
                name = type(self).__name__.lower()
                raise ValueError(f"{name}: scenario = {self.scenario!r}, r = {share:.3g}: {error}") from None


def kept_mib(unit: int, examples: int, setting: Setting) -> float:
    """What it takes to keep what ``unit`` reads of so many examples, in MiB; inputs are the client's anyway."""
    return FLOAT * examples * math.prod(setting.spec.state(unit - 1)) / MIB if unit else 0.0


def _limit(budget: float, slack: float) -> float:
    return budget * (1 + slack) * (1 + 1e-9)  # sums of floats


def memory_of(share: float, setting: Setting) -> tuple[list[float], float]:
    """What training each block takes, and what a client with this share has for one model, in MiB."""
    blocks = [setting.measure.activation_mib(unit, BATCH) for unit in range(setting.spec.depth)]
    return blocks, min(share, 1) * setting.measure.total_mib(BATCH)


def prefixes_that_fit(share: float, setting: Setting) -> int:
    """How many exits a client with this share of the memory can hold, with all blocks up to the last of them."""
    memories, budget = memory_of(share, setting)
    return sum(sum(memories[: unit + 1]) <= _limit(budget, SLACK) for unit in setting.exit_units)


def pack(memories: Sequence[float], budget: float, slack: float = SLACK) -> tuple[range, ...]:
    """Stages as ranges of blocks: in order, a stage takes blocks as long as their sum fits the budget.

    ``memories`` and ``budget`` are in one unit; 5 % ``slack`` gives the released plans. A block that alone exceeds the
    budget is in no stage (partial training): it runs forward only. Raises ``ValueError`` if none fits.
    """
    limit = _limit(budget, slack)
    stages, start, held = [], None, 0.0
    for block, memory in enumerate(memories):
        if start is not None and held + memory > limit:
            stages.append(range(start, block))
            start = None
        if memory > limit:
            continue
        if start is None:
            start, held = block, 0.0
        held += memory
    if start is not None:
        stages.append(range(start, len(memories)))
    if not stages:
        raise ValueError(f"packing: no block fits a budget of {budget:g}; the smallest needs {min(memories):g}")
    return tuple(stages)


def check_stages(memories: Sequence[float], budget: float, slack: float, leaves_out: bool) -> None:
    """``ValueError`` if the stages do not cover the blocks, all but leading ones where the method ``leaves_out`` those.

    So the last block is always trained.
    """
    large = [block for block, memory in enumerate(memories) if memory > _limit(budget, slack)]
    allowed = range(len(memories) - 1) if leaves_out else range(0)
    why = "only blocks before the first trained one may be left out" if leaves_out else "no block may be left out"
    for place, block in enumerate(large):
        if block != place or block not in allowed:
            raise ValueError(
                f"block {block + 1} of {len(memories)} needs {memories[block]:.2f} MiB, the budget is {budget:.2f} MiB "
                f"with {slack:.0%} slack, and {why}"
            )


def check_skips(spec: Spec, ends: Sequence[int]) -> None:
    """``ValueError`` if what comes after one of the units ``ends`` cannot stand for what comes after the last unit.

    Tokens can where they are as wide; maps where they are no wider, and as large or a whole multiple.
    """
    last = spec.feature(spec.depth - 1)
    for unit in ends:
        own = spec.feature(unit)
        fits = own[0] <= last[0] and all(a % b == 0 for a, b in zip(own[1:], last[1:], strict=True))
        if not (fits if len(own) > 1 else own == last):
            raise ValueError(
                f"what comes after block {unit + 1}, {' x '.join(map(str, own))}, cannot skip to the head, which reads "
                f"{' x '.join(map(str, last))}"
            )


def check_left_out(spec: Spec, first: int) -> None:
    """``ValueError`` if unit ``first`` cannot read what the stem gives."""
    if first and spec.state(-1) != spec.state(first - 1):
        stem, wanted = (" x ".join(map(str, spec.state(u))) for u in (-1, first - 1))
        raise ValueError(f"block {first + 1} reads {wanted} and cannot read the stem's {stem}")


def staged_effort(stages: Sequence[Stage], setting: Setting, epochs: int, unaugmented: bool) -> float:
    """MACs of training ``stages`` one after the other, in those of training the whole net at once; exits left out.

    A trained unit costs three forward passes, a frozen one ahead of it one, in every epoch or, cached, once: of the
    units that the stage before has not kept the output of.
    """
    stem, *units = setting.measure.unit_macs()
    total, known = 0.0, 0  # units whose output is kept
    for stage in stages:
        cached = stage.cached and unaugmented
        known = known if cached else 0
        ahead = [u for u in range(known, stage.units.start) if u not in stage.without]
        passes = 1 / (stage.epochs or epochs) if cached else 1
        frozen = sum(units[u] for u in ahead) + (stem if ahead and not known else 0)
        trained = sum(units[u] for u in stage.units) + (0 if ahead else stem)
        total += 3 * trained + passes * frozen
        known = stage.units.start if cached and ahead else 0
    return total / (3 * (stem + sum(units)))
