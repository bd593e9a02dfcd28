"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): sub-models cut in width, the leading part of every hidden axis.

Client (rate r): the first ceil(r n) of every n channels (features of each attention head), the whole depth, one exit;
outputs that enter a norm are divided by r while it trains; the cross-entropy sees zero for classes that the client has
no example of. Server: plain mean over the holders of each entry; of the classifier a client sends its classes' rows.
Budgets are the rates, smallest first. ``dynamic`` draws every client's rate anew in every round.
Read next: ``scalefl.py`` (width and depth), ``core/slices.py`` (``Axis.leading``).

Deviations: the paper's static batch norm is the experiment's ``batch_norm="static"``, a mean over examples (as
released: over batches). A client's own answer, on its own test set, is its own sub-model's, as ScaleFL's comparison
takes it, and with ``dynamic`` the whole model's. The paper's "local" metric is that with the experiment's
``test_mask``, which any method may have.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

import torch
from annotated_types import Ge

from ...core.clients import Client
from ...core.slices import NOTHING, Slice
from ...models.exit_model import ExitModel
from ..jobs import Member, Round, Server, Serving
from ..losses import Batch, cross_entropies, zero_absent_at_client
from ..widths import Rates, of_own_classes


@dataclass(frozen=True)
class HeteroFL(Rates):
    """Five rates, kept by each client; ``weighting="examples"`` is the mean by examples."""

    label, color, marker = "HeteroFL", "#ce83ad", "P"

    dynamic: bool = False
    scaler: bool = True
    masked: bool = True  # the cross-entropy, and what is sent of the classifier
    averaged_from: Annotated[int, Ge(0)] = 0  # clients of smaller budgets train and send nothing (FeDepth, Fig. 2)
    weighting: Literal["examples", "clients"] = "clients"

    def check_options(self) -> None:
        super().check_options()
        if self.averaged_from >= len(self.rates):
            self.refuse(f"averaged_from = {self.averaged_from}; there are {len(self.rates)} rates")

    @property
    def one_slice(self) -> bool:
        return not self.dynamic

    @property
    def needs_classes(self) -> str:
        return "masked = True" if self.masked else ""

    def configure(self, model: ExitModel) -> None:
        model.context.scaled = ("norm",)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        budget = r.generator("rate", client.id).integers(len(self.rates)) if self.dynamic else client.budget
        rate = self.rates[budget]
        return r.setting.cut(partial(self.kept, rate), scale=rate if self.scaler else 1.0)

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        part = self.slice_for(client, server, r)
        if client.budget < self.averaged_from:
            return [Member(client, part, upload=NOTHING)]
        return [Member(client, part, upload=of_own_classes(client, part, r.setting) if self.masked else None)]

    def local_loss(self, batch: Batch) -> torch.Tensor:
        return cross_entropies(zero_absent_at_client(batch) if self.masked else batch).sum(0)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Not scaled: the division is for training only."""
        part = r.setting.full() if self.dynamic else replace(self.slice_for(client, server, r), scale=1.0)
        return Serving((Member(client, part),))
