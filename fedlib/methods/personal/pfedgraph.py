"""pFedGraph (Ye et al., ICML 2023): the server infers who should collaborate with whom, and mixes models accordingly.

Client: starts from the model that the server mixed for it, minimises its loss - lambda <c_i, theta>/|theta|, sends
theta_i. Server: among the sampled clients d_ij = -cos(theta_i - theta^0, theta_j - theta^0); row i of the graph is
argmin_x d_i.x + alpha |x - p|^2 on the simplex, p the clients' shares of the examples, that is, the projection of
p - d_i/(2 alpha); client i's next model is sum_j x_ij theta_j, and c_i = sum_j x_ij theta_j/|theta_j|. A client answers
with its mixed model; there is no global one, and whoever never was sampled has the initial model.
Read next: ``methods/mixtures.py``.

Deviations: the released code adds the regulariser, which drives models apart; the paper wants them alike, so it is
subtracted (``repel=True``: as released; at lambda 0.01 neither moves much). A client keeps its last mixed model through
rounds without it, where the release fails. The release snaps d below -0.9 to -1 and evaluates models after the local
training; neither is done here.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from ...core.annotations import NotNegative, Positive
from ..base import Arrived, Batch, Client, Cohort, JointExits, Member, Round, Server
from ..mixtures import cosines, mixtures, part_of, project_to_simplex, row, under


@dataclass(frozen=True)
class PFedGraph(JointExits):
    """A collaboration graph between the sampled clients."""

    label, color, marker = "pFedGraph", "#ddcc11", "d"

    needs_models: ClassVar[bool] = True

    alpha: Positive = 0.8  # how near the graph's rows stay to p
    attraction: NotNegative = 0.01  # lambda
    repel: bool = False

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        mine = server.mirrors.get(client.id, {})
        payload = {"start": part_of(mine, "model"), "direction": part_of(mine, "direction")} if mine else {}
        return [Member(client, r.setting.full(), payload=payload)]

    def local_update(self, cohort: Cohort) -> None:
        c, sign = cohort.payload("direction"), 1 if self.repel else -1

        def loss(batch: Batch) -> torch.Tensor:
            if not c:
                return self.local_loss(batch)
            theta = cohort.trained
            inner = sum((c[n] * p).flatten(1).sum(1) for n, p in theta.items())
            norm = sum((p.square().flatten(1).sum(1) for p in theta.values()), torch.zeros(())).sqrt()
            return self.local_loss(batch) + sign * self.attraction * inner / norm

        cohort.train(loss)

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        models = {i: arrived.models[i] for i in sorted(arrived.models)}
        trained = {i: {n: x for n, x in m.items() if r.setting.infos[n].kind != "statistic"} for i, m in models.items()}
        examples = torch.tensor([{c.id: c.num_examples for c in r.clients}[i] for i in models], dtype=torch.float64)
        alike = cosines(trained, list(models), server.params)
        graph = project_to_simplex(examples / examples.sum() + alike / (2 * self.alpha))
        mixed, directions = mixtures(models, graph), mixtures({i: unit(m) for i, m in trained.items()}, graph)
        new = {i: under("model", row(mixed, k)) | under("direction", row(directions, k)) for k, i in enumerate(models)}
        return replace(server, t=r.t).with_mirrors(new)


def unit(model: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Divide the model by its norm."""
    norm = sum((x.double().square().sum() for x in model.values()), torch.zeros(())).sqrt()
    return {n: x / norm for n, x in model.items()}
