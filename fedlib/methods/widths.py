"""What can be cut in width, checked before any compute in the words of the method that asks; a rate for each budget.

A method whose clients hold a rate of every width derives from :class:`Rates`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from ..core.annotations import Share
from ..core.validation import check_known
from .base import Experiment, Method, Setting, Spec

CUTTABLE = ("full", "frozen", "lora", "pa", "sa", "ssf")  # fine-tuning modes whose tensors name their axes


def rounded_up(rate: float, size: int) -> int:
    """Return ceil(rate size), whatever the product's last digit is."""
    return math.ceil(rate * size - 1e-9)


def check_axes(e: Experiment) -> None:
    """Raise ``ValueError`` if ``e``'s fine-tuning mode has parameters whose axes are not named."""
    check_known([e.finetune], CUTTABLE, f"{e.method}: finetune = {{}} cannot be cut in width")


def check_cuttable(
    setting: Setting, e: Experiment, least: float = 1.0, rounded: Callable[[float, int], int] = rounded_up
) -> None:
    """Raise ``ValueError`` if ``e``'s backbone or fine-tuning mode has parameters whose axes are not named.

    And, once there are axes, if a share ``least`` of a residual stream is one feature, which a norm makes a constant.
    """
    check_axes(e)
    if reason := uncut(setting.spec):
        raise ValueError(f"{e.method}: backbone = {e.backbone!r} cannot be cut in width: {reason}")
    features = setting.axes["residual"].size if "residual" in setting.axes else 0
    if features > 1 and rounded(least, features) <= 1:
        of = f"{e.method}: {least:.3g} of the {features} features of backbone = {e.backbone!r} is one"
        raise ValueError(f"{of}, which a norm makes a constant; allowed: {2 / features:.3g} or more")


def uncut(spec: Spec) -> str:
    """Say why a backbone of shape ``spec`` cannot be cut in width; "" if it can."""
    if spec.centred:
        return "its exits read a class token standardised by constants of the whole width; *.stream and *.mean are not"
    return "its queries and keys are rotated in pairs by position" if spec.rotary else spec.not_cut


@dataclass(frozen=True)
class Shares(Method):
    """The whole depth, one exit; a budget is a share of something, of which the option ``share_option`` lists them."""

    share_option: ClassVar[str]

    def check_options(self) -> None:
        super().check_options()
        given = list(getattr(self, self.share_option))
        if not given or given != sorted(set(given)):
            self.refuse(f"{self.share_option} = {given} must increase within (0, 1]")

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,)

    def num_budgets(self, num_exits: int) -> int:
        return len(getattr(self, self.share_option))

    def sizes(self, depth: int) -> Sequence[float]:
        """Thirty-seconds."""
        return [(k + 1) / 32 for k in range(32)]

    def of_sizes(self, sizes: Sequence[float]) -> dict[str, object]:
        return {"num_exits": 1, "options": {self.share_option: tuple(sizes)}}

    def check(self, setting: Setting, e: Experiment) -> None:
        if len(setting.exit_units) > 1:
            given = list(setting.exit_units)
            raise ValueError(f"{e.method}: exit_blocks = {given}: its network has one exit; allowed: one block")


@dataclass(frozen=True)
class Rates(Shares):
    """A client holds a rate of every hidden width; budgets are the rates."""

    share_option: ClassVar[str] = "rates"

    rates: tuple[Share, ...] = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)

    def kept(self, rate: float, size: int) -> int:
        """Count the entries of ``size`` that a rate keeps."""
        return rounded_up(rate, size)

    def check(self, setting: Setting, e: Experiment) -> None:
        super().check(setting, e)
        check_cuttable(setting, e, min(self.rates), self.kept)
