"""FedRolex (Alam et al., NeurIPS 2022): sub-models cut in width by a window that rolls over the whole net.

Round t, client (rate b): of every n channels (features of each attention head) the floor(b n) that start at entry
t - 1 mod n, around the end; the whole depth, one exit. So every entry is trained, and after n rounds each as often.
Else it is HeteroFL: outputs that enter a norm are divided by b while it trains, the cross-entropy sees zero for classes
that the client has no example of, of the classifier it sends its classes' rows, and the server takes the plain mean
over the holders of each entry. Budgets are the rates; ``dynamic`` draws every client's rate anew in every round.
Read next: ``heterofl.py``, ``core/slices.py`` (``Axis.rolling``).

Deviations: ``windows="release"`` are its windows: they roll downwards and are ceil(b n) long. The release rolls queries
and keys as one list, so that heads mix, and weights norms and biases by the order of the clients; neither is done. A
client's own answer is that of the sub-model that it would train last, with ``dynamic`` the whole model's. The release
answers with batch norm's statistics of the test batch: the experiment's ``batch_norm="batch"``.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch

from ...core.clients import Client
from ...core.slices import Slice
from ...models.exit_model import ExitModel
from ..jobs import Member, Round, Server, Serving
from ..losses import Batch, cross_entropies, zero_absent_at_client
from ..widths import Rates, of_own_classes, rounded_down, rounded_up


@dataclass(frozen=True)
class FedRolex(Rates):
    """Five rates, kept by each client."""

    label, color, marker = "FedRolex", "#e6695e", "p"

    one_slice: ClassVar[bool] = False

    dynamic: bool = False
    scaler: bool = True
    masked: bool = True  # the cross-entropy, and what is sent of the classifier
    windows: Literal["paper", "release"] = "paper"
    weighting: Literal["examples", "clients"] = "clients"

    @property
    def needs_classes(self) -> str:
        return "masked = True" if self.masked else ""

    def configure(self, model: ExitModel) -> None:
        model.context.scaled = ("norm",)

    def kept(self, rate: float, size: int) -> int:
        return rounded_down(rate, size) if self.windows == "paper" else rounded_up(rate, size)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        budget = r.generator("rate", client.id).integers(len(self.rates)) if self.dynamic else client.budget
        rate, start = self.rates[budget], r.t - 1 if self.windows == "paper" else 1 - r.t
        return r.setting.cut(partial(self.kept, rate), scale=rate if self.scaler else 1.0, start=start)

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        part = self.slice_for(client, server, r)
        return [Member(client, part, upload=of_own_classes(client, part, r.setting) if self.masked else None)]

    def local_loss(self, batch: Batch) -> torch.Tensor:
        return cross_entropies(zero_absent_at_client(batch) if self.masked else batch).sum(0)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Not scaled: the division is for training only."""
        part = r.setting.full() if self.dynamic else replace(self.slice_for(client, server, r), scale=1.0)
        return Serving((Member(client, part),))
