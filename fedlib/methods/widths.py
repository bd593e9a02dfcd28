"""What can be cut in width, checked before any compute in the words of the method that asks; a rate for each budget.

A method whose clients hold a rate of every width derives from :class:`Rates`; HeteroFL, and what takes other windows of
the net, from :class:`ScaledRates`.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from ..core.annotations import Share, When
from ..core.slices import Slice
from .base import Batch, Client, ExitModel, Experiment, Method, Spec, cross_entropies
from .losses import zero_absent_at_client
from .values import Member, Round, Server, Serving, Setting

CUTTABLE = ("full", "frozen", "lora", "pa", "sa", "ssf")  # fine-tuning modes whose tensors name their axes


def rounded_up(rate: float, size: int) -> int:
    """ceil(rate size), whatever the product's last digit is."""
    return math.ceil(rate * size - 1e-9)


def rounded_down(rate: float, size: int) -> int:
    """floor(rate size), at least one."""
    return max(1, math.floor(rate * size + 1e-9))


def check_axes(e: Experiment) -> None:
    """Raise ``ValueError`` if ``e``'s fine-tuning mode has parameters whose axes are not named."""
    if e.finetune not in CUTTABLE:
        raise ValueError(
            f"{e.method}: finetune = {e.finetune!r} cannot be cut in width; allowed: {', '.join(CUTTABLE)}"
        )


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
    """Why a backbone of shape ``spec`` cannot be cut in width; empty if it can."""
    if spec.centred:
        return "its exits read a class token standardised by constants of the whole width; *.stream and *.mean are not"
    if spec.rotary:
        return "its queries and keys are rotated in pairs by position"
    return spec.not_cut


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
        """How many of ``size`` entries a rate keeps."""
        return rounded_up(rate, size)

    def check(self, setting: Setting, e: Experiment) -> None:
        super().check(setting, e)
        check_cuttable(setting, e, min(self.rates), self.kept)


@dataclass(frozen=True)
class ScaledRates(Rates):
    """Outputs that enter a norm are divided by a client's rate; while it trains it knows of its own classes alone."""

    version: ClassVar[int] = 3  # a client's own answer was not divided; a width that nobody trained answered centrally

    dynamic: bool = False
    scaler: bool = True
    masked: bool = True  # the cross-entropy, and what is sent of the classifier
    weighting: Literal["examples", "clients"] = "clients"
    answers: Annotated[Literal["own", "whole"], When(dynamic=False)] = "own"  # what a client answers with

    @property
    def needs_classes(self) -> str:
        return "masked = True" if self.masked else ""

    def configure(self, model: ExitModel) -> None:
        model.context.scaled = ("norm",)

    def rate_of(self, client: Client, r: Round) -> float:
        """The client's own, or with ``dynamic`` one drawn for the round."""
        budget = r.generator("rate", client.id).integers(len(self.rates)) if self.dynamic else client.budget
        return self.rates[budget]

    def part(self, rate: float, r: Round) -> Slice:
        """The sub-model of ``rate``: the leading entries."""
        return r.setting.cut(partial(self.kept, rate), scale=rate if self.scaler else 1.0)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.part(self.rate_of(client, r), r)

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """The whole net, or what clients of the largest rate train, divided alike, where that is less."""
        top = len(self.rates) - 1
        rate = self.rates[top if self.dynamic else r.setting.at_hand(top)]
        return r.setting.full() if rate == 1 else self.part(rate, r)

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        """Of the classifier a client sends the rows of the classes that it has an example of."""
        part = self.slice_for(client, server, r)
        own = tuple(np.flatnonzero(r.setting.label_counts(client.id)).tolist()) if self.masked else ()
        return [Member(client, part, upload=part.only(classes=own) if self.masked else None)]

    def local_loss(self, batch: Batch) -> torch.Tensor:
        return cross_entropies(zero_absent_at_client(batch) if self.masked else batch).sum(0)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """What it trains, divided alike: in a transformer another scale is another function. Or the central model."""
        whole = self.dynamic or self.answers == "whole"
        part = self.model_for(0, server, r) if whole else self.slice_for(client, server, r)
        return Serving((Member(client, part),))
