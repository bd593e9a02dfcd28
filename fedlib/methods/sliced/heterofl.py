"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): sub-models cut in width, the leading part of every hidden axis.

Client (rate r): the first ceil(r n) of every n channels (features of each attention head), the whole depth, one exit;
outputs that enter a norm are divided by r; while it trains, the cross-entropy sees zero for classes that the client has
no example of. Server: plain mean over the holders of each entry; of the classifier a client sends its classes' rows.
Budgets are the rates, smallest first. ``dynamic`` draws every client's rate anew in every round.
Read next: ``widths.py`` (rates as budgets), ``core/slices.py`` (``Axis.leading``),
``rivals/fedrolex.py`` (other windows).

Deviations: the paper's static batch norm is the experiment's ``batch_norm="static"``, a mean over examples (as
released: over batches). A client's own answer, on its own test set, is its own sub-model's, as ScaleFL's comparison
takes it; with ``answers="whole"``, and with ``dynamic``, the whole model's, as the release tests it. That with the
experiment's ``test_mask`` is the paper's "Local". Where no client holds the whole, what those of the largest rate hold
answers in its place. A sub-model answers divided as it trains (the release divides in training alone): behind a layer
norm another scale is another function.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar, Literal

import numpy as np
import torch

from ...core.annotations import Natural, When
from ..base import NOTHING, Batch, Client, ExitModel, Member, Round, Server, Serving, Slice, cross_entropies
from ..widths import Rates


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

    def part(self, rate: float, r: Round) -> Slice:
        """Cut the sub-model of ``rate``: the leading entries."""
        return r.setting.cut(partial(self.kept, rate), scale=rate if self.scaler else 1.0)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Cut the net at the client's rate, or with ``dynamic`` at one drawn for the round."""
        budget = r.generator("rate", client.id).integers(len(self.rates)) if self.dynamic else client.budget
        return self.part(self.rates[budget], r)

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Return the whole net, or what clients of the largest rate train, divided alike, where that is less."""
        top = len(self.rates) - 1
        rate = self.rates[top if self.dynamic else r.setting.at_hand(top)]
        return r.setting.full() if rate == 1 else self.part(rate, r)

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        """Send of the classifier the rows of the classes that the client has an example of."""
        part = self.slice_for(client, server, r)
        own = tuple(np.flatnonzero(r.setting.label_counts(client.id)).tolist()) if self.masked else ()
        return [Member(client, part, upload=part.only(classes=own) if self.masked else None)]

    def local_loss(self, batch: Batch) -> torch.Tensor:
        return cross_entropies(zero_absent_at_client(batch) if self.masked else batch).sum(0)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Serve the trained sub-model with the same output scaling, or the central model."""
        whole = self.dynamic or self.answers == "whole"
        part = self.model_for(0, server, r) if whole else self.slice_for(client, server, r)
        return Serving((Member(client, part),))


@dataclass(frozen=True)
class HeteroFL(ScaledRates):
    """Five rates, kept by each client; ``weighting="examples"`` is the mean by examples."""

    label, color, marker = "HeteroFL", "#ce83ad", "P"

    averaged_from: Natural = 0  # clients of smaller budgets train and send nothing (FeDepth, Fig. 2)

    def check_options(self) -> None:
        super().check_options()
        if self.averaged_from >= len(self.rates):
            self.refuse(f"averaged_from = {self.averaged_from}; there are {len(self.rates)} rates")
        if self.noise_multiplier and self.masked:
            self.refuse("noise_multiplier needs masked = False: which classes' rows a client sends is private")

    @property
    def one_slice(self) -> bool:
        return not (self.dynamic or self.averaged_from)

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        if client.budget < self.averaged_from:
            return [Member(client, self.slice_for(client, server, r), upload=NOTHING)]
        return super().members(client, server, r)


def zero_absent_at_client(batch: Batch) -> Batch:
    """Zero the outputs of classes that the member's client has no example of."""
    return replace(batch, outputs=batch.outputs * (batch.label_counts() > 0).to(batch.outputs.dtype)[:, None])
