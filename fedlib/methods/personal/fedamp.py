"""FedAMP (Huang et al., AAAI 2021), heuristic form: clients whose models are alike draw one another nearer.

Server: keeps the last model w_j of every client; sends client i the cloud model
u_i = xi w_i + (1 - xi) sum_{j != i} softmax_j(sigma cos(w_i, w_j)) w_j. Client: goes on from its own w_i, minimises its
loss + lambda/(2 alpha) |w - u_i|^2, sends and keeps w_i. A client answers with w_i; there is no global model.
Read next: ``pfedgraph.py``, ``methods/mixtures.py``.

Deviations: cosines are those of w - w_initial (``compare="weights"``: of w, which are so alike that the weights are
nearly uniform; the paper does not say). Clients that never sent a model draw nobody. All parameters count, exits too.
lambda/alpha is one option; CAFEDistill gives lambda = 1 and no alpha.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ...core.annotations import Fraction, NotNegative, Positive
from ...core.memories import Overlay
from ..base import Arrived, Client, Cohort, JointExits, Member, Round, Server, Serving, Tensors
from ..mixtures import cosines, mixtures, row

INITIAL = -1  # the id under which the initial model stands among the clients'


@dataclass(frozen=True)
class FedAMP(JointExits):
    """Attentive message passing."""

    label, color, marker = "FedAMP", "#8e0d74", "h"

    needs_models: ClassVar[bool] = True

    own_share: Fraction = 0.5  # xi_ii
    sigma: Positive = 10.0
    attraction: NotNegative = 1.0  # lambda / alpha
    compare: Literal["change", "weights"] = "change"

    def prepare(self, server: Server, r: Round) -> Tensors:
        """Mix the cloud models of the sampled clients, stacked."""
        sent = next(iter(server.mirrors.values()), server.params)  # perhaps without batch norm's statistics
        models = Overlay(server.mirrors, {INITIAL: {n: server.params[n] for n in sent}})
        origin = server.params if self.compare == "change" else None
        columns = torch.tensor(sorted(models))
        mine = torch.tensor([c.id if c.id in server.mirrors else INITIAL for c in r.clients])
        own = mine[:, None] == columns
        alike = cosines(models, mine.tolist(), origin).masked_fill((columns == INITIAL) & ~own, -torch.inf)
        return mixtures(models, weights_of(alike, self.own_share, self.sigma, own))

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part, anchor = r.setting.full(), row(r.notes, r.clients.index(client))
        return [Member(client, part, keeps="all", upload=part, payload={"anchor": anchor})]

    def local_update(self, cohort: Cohort) -> None:
        u = cohort.payload("anchor")
        cohort.train(self.local_loss, gradient=lambda name, p: self.attraction * (p - u[name]))

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        return replace(server, t=r.t).with_mirrors(arrived.models)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, r.setting.full(), keeps="all"),))


def weights_of(
    similarities: torch.Tensor, own_share: float = 0.5, sharpness: float = 10.0, own: torch.Tensor | None = None
) -> torch.Tensor:
    """Return FedAMP's heuristic weights: rows of the simplex, (k, n), of the cosines of k clients with n models.

    ``own_share`` (xi_ii) goes to the client's own model, where ``own`` (k, n) is True (None: the diagonal); the rest
    by softmax of ``sharpness`` (sigma) times the cosine over the others. A cosine of -inf leaves a model out. A client
    alone keeps all.
    """
    s = similarities.double()
    own = torch.eye(*s.shape, dtype=torch.bool, device=s.device) if own is None else own
    others = (sharpness * s).masked_fill(own, -torch.inf)
    alone = others.isneginf().all(-1, keepdim=True)
    others = others.masked_fill(alone, 0.0).softmax(-1)
    return torch.where(alone, own.double(), (1 - own_share) * others + own_share * own)
