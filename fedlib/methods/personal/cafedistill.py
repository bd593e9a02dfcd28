"""CAFEDistill (Liu, Zhou & Tong 2026): shallow exits learn from the last exits of like clients, shallowest first.

Server, before a round: student exits S_i (the last one always; shallow ones join over the first half of the rounds,
depth by depth, of a depth first those of like clients); teacher exit of client i, sum_j k_j h_jm over the last exits of
all clients, k by likeness (Eqs. 8-9). Client: receives the backbone phi and its teacher exit, which becomes its last
exit; the teacher is a frozen copy of both; minimises sum_{j in S_i} 1/m [CE_j + lambda KL(teacher || exit j)] (Eqs. 5,
10); sends phi and its last exit, shallow ones never leave. Server: the mean of the backbones by examples; keeps the
last exits. A client answers with the latest backbone and its own exits (initial ones, if it never was sampled).
Read next: ``methods/mixtures.py``, ``fedper.py`` (without distillation).

There is no release. What the paper leaves open, the default first:
- ``kd_scaling``: 1/m on the KL term too (Eq. 5), or not (``plain``, Eq. 11).
- ``choose_among``: students are chosen among the sampled (Algorithm 2), or among all clients (Section 4.2).
- ``drop_one_more``: Algorithm 2's ">=" drops one student more than R(t) asks for; its undefined E is taken as Q.
- ``similarity``: min(0, cos) ties wherever cosines are positive, so the plain one decides; or ``cosine``, it.
- ``compare``: the "gradient-based proxy" is how far a last exit has moved from the initial one, or its ``weights``, as
  Eq. 8 writes. What has not moved (all exits in round 1) has cosine 0 with every exit, so all teach it alike.
- ``distill_last``: "the remaining (m-1)n exits" are students (Section 4.1): the shallow ones alone are distilled; or,
  as Eqs. 5 and 11 read literally (m is in S_i), the last exit too, from its own start: a brake as strong as its loss.
- ``temperature`` is not stated: 1. ``mu`` is 0.6 (Appendix D); Figure 9 finds 0.6 to 0.8 best.
- Exits: pooling, linear; all but the last may be ``exit_head="towers"``. Proposition 1 holds before the softmax only.
- Batch norm: ``tracked``, averaged like weights; the teacher answers as if served, by the statistics received.

Deviations: none known besides. ``progressive=False`` is Table 4's row without student selection.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch

from ...core.annotations import NotNegative, Positive, When
from ..base import NOTHING, Batch, Client, Cohort, Method, ParamInfo, Slice, cross_entropies
from ..mixtures import cosines, mixtures, part_of, project_to_simplex, row, under
from ..values import Arrived, Member, Round, Server, Serving, Setting, Tensors

STEPWISE = When(progressive=True)


@dataclass(frozen=True)
class CAFEDistill(Method):
    """Conflict-aware federated exit distillation."""

    label, color, marker = "CAFEDistill", "#c9002d", "o"

    version: ClassVar[int] = 2  # 1 told equal clients apart by rounding
    needs_extras: ClassVar[bool] = True

    kd_weight: NotNegative = 1.0  # lambda, Eq. 5
    mu: Positive = 0.6  # Eq. 7: large is uniform, small is oneself
    temperature: Positive = 1.0
    kd_scaling: Literal["exits", "plain"] = "exits"
    distill_last: bool = False
    compare: Literal["change", "weights"] = "change"
    progressive: bool = True
    choose_among: Annotated[Literal["sampled", "all"], STEPWISE] = "sampled"
    similarity: Annotated[Literal["clipped", "cosine"], STEPWISE] = "clipped"
    drop_one_more: Annotated[bool, STEPWISE] = False

    @property
    def paced_by(self) -> str:
        return "progressive" if self.progressive else ""

    def personal(self, info: ParamInfo) -> bool:
        return info.exit is not None

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return r.setting.full()

    def prepare(self, server: Server, r: Round) -> Tensors:
        """Choose ``students`` (|C|, m), and mix the ``teacher`` exits by ``shares`` (|C|, seen) of the ids ``seen``."""
        initial, ids = last_exit(server.params, r.setting), [c.id for c in r.clients]
        origin = initial if self.compare == "change" else None
        seen = sorted(server.mirrors)
        cosine = cosines(server.mirrors, ids, origin)  # (|C|, seen)
        shares, others = teacher_shares(cosine, r.setting.num_clients, self.mu)
        mixed = mixtures(server.mirrors, shares)
        none = torch.zeros((), dtype=torch.int64)
        rest = mixtures({0: initial}, others[:, None])
        teacher = {n: mixed.get(n, none) + rest.get(n, none) for n in initial}
        chosen = torch.ones(len(ids), r.setting.num_exits)
        if self.progressive:
            among = ids if self.choose_among == "sampled" else range(r.setting.num_clients)
            places = [k for k, i in enumerate(among) if i in server.mirrors]
            columns = [k for k, i in enumerate(seen) if i in among]
            alike = cosine[places][:, columns] if among is ids else cosines(server.mirrors, seen, origin)
            rule = r.t, r.rounds, r.setting.num_exits, self.similarity, self.drop_one_more
            chosen = students(alike, *rule, places, len(among))[[among.index(i) for i in ids]]
        return {"students": chosen, "shares": shares, "seen": torch.tensor(seen), **under("teacher", teacher)}

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        i, part = r.clients.index(client), r.setting.full()
        start = {"start": row(part_of(r.notes, "teacher"), i)}
        above = part.only(exits=part.exits[-1:])
        return [Member(client, part, payload=start | {"students": {"exits": r.notes["students"][i]}}),
                Member(client, above, "teacher", NOTHING, payload=start, trains=False)]  # fmt: skip

    def local_update(self, cohort: Cohort) -> None:
        chosen = cohort.payload("students")["exits"].T  # (m, M)
        cohort.train(lambda batch: self.local_loss(batch, chosen))
        for name, p in cohort.params.items():  # what is no student does not even decay
            if (exit := cohort.setting.infos[name].exit) is not None:
                taught = chosen[exit].view(-1, *(1,) * (p.dim() - 1)) > 0
                cohort.params[name] = torch.where(taught, p, cohort.start[name])
        cohort.send("exit", last_exit(cohort.params, cohort.setting))

    def local_loss(self, batch: Batch, chosen: torch.Tensor) -> torch.Tensor:
        """Return sum_{j in S_i} w_j [CE_j + lambda KL(teacher || j)], w_j = 1/m, (M,). Eq. 11: lambda without w_j."""
        m, tau, teacher = len(batch.outputs), self.temperature, batch.teacher("teacher")[-1:]  # (1, M, B, C)
        kl = batch.task.kl(teacher, batch.outputs, batch.labels, tau) * tau**2  # (m, M, B)
        taught = chosen.clone()
        if not self.distill_last:
            taught[-1] = 0
        kd = self.kd_weight * (taught * (kl * batch.weights).sum(-1)).sum(0)
        return (chosen * cross_entropies(batch)).sum(0) / m + (kd / m if self.kd_scaling == "exits" else kd)

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        """Average phi; the last exits that arrived replace those the server had."""
        server = super().aggregate(server, arrived, r)
        return server.with_mirrors({i: part_of(x, "exit") for i, x in arrived.extras.items()})

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, r.setting.full()),))


def last_exit(params: Tensors, setting: Setting) -> dict[str, torch.Tensor]:
    """Select the last exit's tensors of a model, or of stacked ones."""
    return {n: params[n] for n, i in setting.infos.items() if i.exit == setting.num_exits - 1 and n in params}


def student_counts(t: int, rounds: int, exits: int, clients: int) -> tuple[int, int]:
    """Return (l, q) at round t: everybody's l shallowest exits are students, and exit l + 1 of q clients.

    R = min(2t/T, 1) of the (m - 1)|C| exits before the last: l = floor((m - 1) R), q the rest, rounded half up.
    """
    share = (exits - 1) * min(2 * t, rounds)  # (m - 1) R T
    depth = share // rounds
    return depth, (2 * share * clients + rounds) // (2 * rounds) - clients * depth


def most_alike(
    similarities: torch.Tensor, keep: int, ties: torch.Tensor | None = None, places: Sequence[int] | None = None,
    clients: int | None = None,
) -> list[int]:  # fmt: skip
    """Choose ``keep`` of n clients: again and again whoever is least similar to the rest is dropped (Eq. 6).

    ``similarities`` (k, k), those with oneself not counted, are of the clients ``places`` (None: of all n), all others
    are 0. Sums count to nine digits; of equals, the one with the lower sum of ``ties`` goes, then the later one.
    """
    n, places = clients or len(similarities), list(range(len(similarities)) if places is None else places)
    alike = torch.stack((similarities, similarities if ties is None else ties)).double()  # (2, k, k)
    sums = torch.zeros(2, n, dtype=torch.float64)
    sums[:, places] = alike.sum(2) - alike.diagonal(dim1=1, dim2=2)
    row, left = {i: k for k, i in enumerate(places)}, list(range(n))
    while len(left) > keep:
        scores = sums.round(decimals=9).T.tolist()
        dropped = min(left, key=lambda i, scores=scores: (*scores[i], -i))
        left.remove(dropped)
        if dropped in row:
            sums[:, places] -= alike[:, :, row[dropped]]
    return left


def students(
    cosine: torch.Tensor, t: int, rounds: int, exits: int, similarity: str = "clipped", drop_one_more: bool = False,
    places: Sequence[int] | None = None, clients: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """Choose S_i of n clients at round t, (n, exits) of zeros and ones; ``cosine`` (k, k) compares the last exits.

    It is that of the clients ``places`` of all n ``clients`` (None: of all); with the others it is 0.
    ``similarity``: ``clipped`` is min(0, cos), the plain cosine breaking its many ties; ``cosine`` is the plain one.
    ``drop_one_more``: Algorithm 2's loop as printed, which drops until fewer than q are left.
    """
    n = clients or len(cosine)
    depth, rest = student_counts(t, rounds, exits, n)
    out = torch.zeros(n, exits)
    out[:, :depth], out[:, -1] = 1, 1
    keep = max(rest - 1, 0) if drop_one_more and rest else rest
    if keep:
        alike = cosine.clamp(max=0) if similarity == "clipped" else cosine
        out[most_alike(alike, keep, cosine, places, n), depth] = 1
    return out


def teacher_shares(cosine: torch.Tensor, clients: int, mu: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute Eq. 8: k = the projection of 1/n + c/(2 mu) on the simplex, for each row c of (k, seen).

    Of the n = ``clients``, those not seen so far have cosine 0 and share one exit, the initial one. Returns the shares
    of the seen (k, seen) and of all the others together (k,).
    """
    seen = cosine.shape[1]
    whole = torch.cat((cosine, cosine.new_zeros(len(cosine), clients - seen)), 1)
    shares = project_to_simplex(1 / clients + whole / (2 * mu))
    return shares[:, :seen], shares[:, seen:].sum(1)
