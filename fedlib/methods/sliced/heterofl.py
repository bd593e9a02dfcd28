"""HeteroFL (Diao, Ding and Tarokh, ICLR 2021): sub-models cut in width, the leading part of every hidden axis.

Client (rate r): the first ceil(r n) of every n channels (features of each attention head), the whole depth, one exit;
outputs that enter a norm are divided by r; while it trains, the cross-entropy sees zero for classes that the client has
no example of. Server: plain mean over the holders of each entry; of the classifier a client sends its classes' rows.
Budgets are the rates, smallest first. ``dynamic`` draws every client's rate anew in every round.
Read next: ``widths.py`` (what is the same of FedRolex), ``core/slices.py`` (``Axis.leading``).

Deviations: the paper's static batch norm is the experiment's ``batch_norm="static"``, a mean over examples (as
released: over batches). A client's own answer, on its own test set, is its own sub-model's, as ScaleFL's comparison
takes it; with ``answers="whole"``, and with ``dynamic``, the whole model's, as the release tests it. That with the
experiment's ``test_mask`` is the paper's "Local". Where no client holds the whole, what those of the largest rate hold
answers in its place. A sub-model answers divided as it trains (the release divides in training alone): behind a layer
norm another scale is another function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ...core.annotations import Natural
from ..base import NOTHING, Client, Member, Round, Server
from ..widths import ScaledRates


@dataclass(frozen=True)
class HeteroFL(ScaledRates):
    """Five rates, kept by each client; ``weighting="examples"`` is the mean by examples."""

    label, color, marker = "HeteroFL", "#ce83ad", "P"

    averaged_from: Natural = 0  # clients of smaller budgets train and send nothing (FeDepth, Fig. 2)

    def check_options(self) -> None:
        super().check_options()
        if self.averaged_from >= len(self.rates):
            self.refuse(f"averaged_from = {self.averaged_from}; there are {len(self.rates)} rates")

    @property
    def one_slice(self) -> bool:
        return not self.dynamic

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        if client.budget < self.averaged_from:
            return [Member(client, self.slice_for(client, server, r), upload=NOTHING)]
        return super().members(client, server, r)
