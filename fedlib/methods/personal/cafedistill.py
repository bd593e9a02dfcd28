"""CAFEDistill (Liu, Zhou & Tong 2026): shallow exits learn from the last exits of like clients, shallowest first.

Server, before a round: student exits S_i (``coordination.students``: the last exit always, shallow ones joining over
the first half of the rounds, depth by depth, of a depth first those of like clients); teacher exit of client i,
sum_j k_j h_jm over the last exits of all clients, k by likeness (``coordination.teacher_shares``, Eqs. 8-9). Client:
receives the backbone phi and its teacher exit, which becomes its last exit; the teacher is a frozen copy of both;
minimises sum_{j in S_i} 1/m [CE_j + lambda KL(teacher || exit j)] (Eqs. 5, 10); sends phi and its last exit, shallow
ones never leave. Server: the mean of the backbones by examples; keeps the last exits. A client answers with the latest
backbone and its own exits (the initial ones, if it never was sampled).
Read next: ``methods/coordination.py``, ``fedper.py`` (without distillation).

There is no release. What the paper leaves open, the default first:
- ``kd_scaling``: 1/m on the KL term too (Eq. 5), or not (``plain``, Eq. 11).
- ``choose_among``: students are chosen among the sampled (Algorithm 2), or among all clients (Section 4.2).
- ``drop_one_more``: Algorithm 2's ">=" drops one student more than R(t) asks for; its undefined E is taken as Q.
- ``similarity``: min(0, cos) ties wherever cosines are positive, and the plain one decides; or ``shifted``, cos - 1.
- ``compare``: the "gradient-based proxy" is how far a last exit has moved from the initial one, or its ``weights``, as
  Eq. 8 writes. What has not moved (all exits in round 1) has cosine 0 with every exit, so all teach it alike.
- ``distill_last``: m is in S_i, so the last exit is distilled from its own start too; or the shallow ones alone.
- ``temperature`` is not stated: 1. ``mu`` is 0.6 (Appendix D); Figure 9 finds 0.6 to 0.8 best.
- Exits are pooling and a linear layer, as the printed traffic asks for.
- Proposition 1 holds before the softmax only: built is the algorithm, not the equivalence.
- Batch norm ``tracked``: the teacher answers as a served model would, by the statistics received, while students train
  on their batch's; the server averages statistics like weights.
``progressive=False`` is Table 4's row without student selection.

Deviations: none known besides.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from ...core.clients import Client
from ...core.slices import NOTHING, ParamInfo, Slice
from ...core.validation import AtLeast, Positive, When
from ..base import Method
from ..coordination import students, teacher_shares
from ..jobs import Arrived, Member, Round, Server, Serving, Setting, Tensors
from ..losses import Batch, cross_entropies
from ..mixtures import cosines, mixtures, part_of, row, under

STEPWISE = When(progressive=True)


@dataclass(frozen=True)
class CAFEDistill(Method):
    """Conflict-aware federated exit distillation."""

    needs_extras: ClassVar[bool] = True

    kd_weight: Annotated[float, AtLeast(0)] = 1.0  # lambda, Eq. 5
    mu: Positive = 0.6  # Eq. 7: large is uniform, small is oneself
    temperature: Positive = 1.0
    kd_scaling: Literal["exits", "plain"] = "exits"
    distill_last: bool = True
    compare: Literal["change", "weights"] = "change"
    progressive: bool = True
    choose_among: Annotated[Literal["sampled", "all"], STEPWISE] = "sampled"
    similarity: Annotated[Literal["clipped", "shifted"], STEPWISE] = "clipped"
    drop_one_more: Annotated[bool, STEPWISE] = False

    def personal(self, info: ParamInfo) -> bool:
        return info.exit is not None

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full()

    def prepare(self, server: Server, r: Round) -> Tensors:
        """``students`` (|C|, m), ``shares`` (|C|, seen) of the teachers' ids ``seen``, and the ``teacher`` exits."""
        initial, ids = last_exit(server.params, r.setting), [c.id for c in r.clients]
        origin = initial if self.compare == "change" else None
        seen = sorted(server.mirrors)
        shares, others = teacher_shares(cosines(server.mirrors, ids, origin), r.setting.num_clients, self.mu)
        mixed = mixtures(server.mirrors, shares)
        rest = mixtures({0: initial}, others[:, None])
        teacher = {n: mixed.get(n, 0) + rest.get(n, 0) for n in initial}
        notes = {"students": self.students(server, r, origin), "shares": shares, "seen": torch.tensor(seen)}
        return notes | under("teacher", teacher)

    def students(self, server: Server, r: Round, origin: Tensors | None) -> torch.Tensor:
        """S_i of the sampled clients, (|C|, m)."""
        ids, exits = [c.id for c in r.clients], r.setting.num_exits
        if not self.progressive:
            return torch.ones(len(ids), exits)
        among = ids if self.choose_among == "sampled" else list(range(r.setting.num_clients))
        known = {i: server.mirrors[i] for i in among if i in server.mirrors}
        cosine = torch.zeros(len(among), len(among), dtype=torch.float64)
        cosine[:, [among.index(i) for i in sorted(known)]] = cosines(known, among, origin)
        chosen = students(cosine, r.t, r.rounds, exits, self.similarity, self.drop_one_more)
        return chosen[[among.index(i) for i in ids]]

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        i, part = r.clients.index(client), r.setting.full()
        teacher = row(part_of(r.notes, "teacher"), i)
        payload = {"start": teacher, "students": {"exits": r.notes["students"][i]}}
        above = part.only(exits=part.exits[-1:])
        return [Member(client, part, payload=payload),
                Member(client, above, "teacher", NOTHING, payload={"start": teacher}, trains=False)]  # fmt: skip

    def local_update(self, cohort) -> None:
        chosen = cohort.payload("students")["exits"].T  # (m, M)
        cohort.train(lambda batch: self.local_loss(batch, chosen))
        for name, info in cohort.setting.infos.items():  # what is no student does not even decay
            if info.exit is not None:
                p = cohort.params[name]
                taught = chosen[info.exit].view(-1, *(1,) * (p.dim() - 1)) > 0
                cohort.params[name] = torch.where(taught, p, cohort.start[name])
        cohort.send("exit", last_exit(cohort.params, cohort.setting))

    def local_loss(self, batch: Batch, chosen: torch.Tensor) -> torch.Tensor:
        """sum_{j in S_i} w_j [CE_j + lambda KL(teacher || j)], w_j = 1/m, (M,). Eq. 11: lambda without w_j."""
        m, tau = len(batch.outputs), self.temperature
        teacher = batch.teacher("teacher")[-1:]  # (1, M, B, C)
        kl = batch.task.kl(teacher, batch.outputs, batch.labels, tau) * tau**2  # (m, M, B)
        taught = chosen.clone()
        if not self.distill_last:
            taught[-1] = 0
        kl = (taught * (kl * batch.weights).sum(-1)).sum(0)
        kd = self.kd_weight * (kl / m if self.kd_scaling == "exits" else kl)
        return (chosen * cross_entropies(batch)).sum(0) / m + kd

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        """phi: the mean; the last exits that arrived replace those the server had."""
        server = super().aggregate(server, arrived, r)
        return server.with_mirrors({i: part_of(x, "exit") for i, x in arrived.extras.items()})

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, r.setting.full()),))


def last_exit(params: Tensors, setting: Setting) -> dict[str, torch.Tensor]:
    """The last exit's tensors of a model, or of stacked ones."""
    return {n: params[n] for n, i in setting.infos.items() if i.exit == setting.num_exits - 1 and n in params}
