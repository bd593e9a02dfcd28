"""DarkDistill (Qu et al., KDD 2025): shallow models teach deeper ones, on examples that the server makes.

Client (depth e): the prefix up to exit e with all exits on the way, trained on the sum of their cross-entropies. Of
each example it also sends the label and the difficulty, its loss at the first exit in the last epoch.
Server: (1) per depth e a model S_e, the mean over the depth's clients, and a generator G_e, which makes what a stem
gives, x = G_e(label, noise, difficulty). Then ``passes`` times: (2) G_e learns to minimise the cross-entropy of each x
at the exit of S_e where it leaves + (its loss at the global model's first exit - the difficulty asked for)^2 +
exp(-mean_ij |noise_i - noise_j|^2 |x_i - x_j|); (3) of the x that leave S_e last, its last exit teaches all exits j of
the next deeper S their relations, sum_j w_j (5 R_distance + 10 R_angle), w = softmax(-sum_x d_j(x)), d the shares of a
small net's answers to (difficulty of x, mean and variance of the difficulties of what leaves at j). (4) Each unit of
the global model is the mean over the S_e that hold it, by examples.
Who leaves where: the most confident of those left, shares in proportion to ``leaving``^j; the last exit takes the rest.
Read next: ``feddf.py``, ``engine/lab.py`` (how the server runs a model).

Deviations, the paper's text not being at hand: what is built is the release with its exits on their own (``base``).
There clients are sampled until every depth is present; here depths without a client are left out of the round. The
difficulty of what is made is measured by last round's global model, there by its deepest one before (4). Difficulties
of fewer than two examples have variance zero, there NaN. Labels of single examples leave the client.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F

from fedlib.core.annotations import Count, Natural, NotNegative, Positive
from fedlib.core.devices import to_host
from fedlib.core.rng import torch_generator
from fedlib.methods.base import Arrived, Batch, Client, Cohort, Experiment, Member, Method, Round, Sizes, Slice
from fedlib.methods.mixtures import under
from fedlib.methods.values import Server, Setting

from .generators import Generator, angles, fresh, leave, leaving_numbers, loaded, relative_distances, step, weigher

WEIGHER_LR = 1e-3
Asked = tuple[torch.Tensor, torch.Tensor]  # labels (n,) and difficulties (n,) of examples to be made


@dataclass(frozen=True)
class DarkDistill(Method):
    """The defaults are the release's; without ``passes`` it is FedAvg with early exits."""

    label, color, marker = "DarkDistill", "#3c2342", "P"

    needs_extras: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "its generators' examples"

    passes: Natural = 2  # a round: generators learn, then models
    made: Count = 32  # examples at once
    hidden: Count = 1000  # of a generator
    generator_lr: Positive = 1e-2
    steps: Count = 5  # of the models, a pass
    server_lr: Positive = 0.05
    server_decay: NotNegative = 1e-3
    distance_weight: NotNegative = 5.0
    angle_weight: NotNegative = 10.0
    leaving: Positive = 1.5

    def check(self, setting: Setting, e: Experiment) -> None:
        if setting.spec.reads != "images" or len(setting.spec.feature(0)) != 1:
            why = "darkdistill: generators make the tokens that a vision transformer's stem gives,"
            raise ValueError(f"{why} and backbone = {e.backbone!r} has none; allowed: a ViT or Vim")

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """Draw generators and the small net at random, as PyTorch would."""
        memory, nets = {}, {f"generator/{e}": self.generator(setting) for e in range(setting.num_exits)}
        for name, net in [*nets.items(), ("weigher", weigher())]:
            memory |= under(name, fresh(net, torch_generator(setting.seed, name)))
        return Server(0, params, {n: x.to(next(iter(params.values())).device) for n, x in memory.items()})

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part = self.slice_for(client, server, r)
        return [Member(client, part, upload=replace(part, aliases=self.sent(client.budget, r.setting)))]

    def local_update(self, cohort: Cohort) -> None:
        steps: list[tuple[torch.Tensor, ...]] = []

        def loss(batch: Batch) -> torch.Tensor:
            difficulty = batch.task.losses(batch.outputs[:1].detach(), batch.labels)[0]
            steps.append((batch.labels, difficulty, batch.weights))
            return self.local_loss(batch)

        cohort.train(loss)
        labels, difficulty, weights = (torch.cat(x, 1) for x in zip(*steps, strict=True))  # (M, N), with padding
        place, epochs = (weights > 0).cumsum(1), cohort.experiment.local_epochs
        last = (weights > 0) & (place * epochs > place[:, -1:] * (epochs - 1))  # each client's own last epoch
        most = max(c.num_examples for c in cohort.clients)
        first = last.long().argsort(dim=1, descending=True, stable=True)[:, :most]
        cohort.send("examples", {"label": labels.gather(1, first), "difficulty": difficulty.gather(1, first)})

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """A label and a difficulty an example go up beside the model."""
        sizes = [*shared.values()]
        return sizes, [*sizes, 2 * client.num_examples]

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        names = {e: self.sent(e, r.setting) for e in range(r.setting.num_exits)}
        start = {sent: server.params[n] for own in names.values() for n, sent in own.items() if n in server.params}
        mean, weight = arrived.mean.result(start), arrived.mean.weight
        models = {e: {n: mean[sent] for n, sent in own.items() if sent in mean} for e, own in names.items()}
        models = {e: model for e, model in models.items() if model}  # (1)
        shares = {e: weight[names[e][next(iter(model))]] for e, model in models.items()}
        memory = dict(server.memory)
        if self.passes and models:
            models, memory = Distillation(self, server, models, shares, self.received_examples(arrived, r), r).run()
        new = dict(server.params)
        for n in dict.fromkeys(n for model in models.values() for n in model):  # (4)
            held = [e for e, model in models.items() if n in model]
            total = sum((shares[e] * models[e][n].double() for e in held), torch.zeros((), dtype=torch.float64))
            new[n] = (total / sum(shares[e] for e in held)).to(new[n].dtype)
        return replace(server, t=r.t, params=new, memory=memory)

    def received_examples(self, arrived: Arrived, r: Round) -> dict[int, Asked]:
        """Gather labels and difficulties of the examples of each depth's clients, in host memory."""
        ids = sorted(arrived.extras)
        sent = to_host([arrived.extras[i][f"examples/{key}"] for i in ids for key in ("label", "difficulty")])
        clients, found = {c.id: c for c in r.clients}, {}
        for i, label, difficulty in zip(ids, sent[::2], sent[1::2], strict=True):
            own = found.setdefault(clients[i].budget, ([], []))
            own[0].append(label[: clients[i].num_examples])
            own[1].append(difficulty[: clients[i].num_examples])
        return {e: (torch.cat(labels), torch.cat(difficulties)) for e, (labels, difficulties) in found.items()}

    def sent(self, e: int, setting: Setting) -> dict[str, str]:
        """Name what clients of depth e send, which is averaged among them alone."""
        part = prefix(e, setting)
        return {n: f"{e}/{n}" for n, info in setting.infos.items() if part.holds(info)}

    def generator(self, setting: Setting) -> Generator:
        return Generator(setting.axes["classes"].size, self.hidden, setting.spec.state(-1))


class Distillation:
    """Steps (2) and (3) of a round: ``models`` S_e of the depths present, ``shares`` their examples."""

    def __init__(
        self, method: DarkDistill, server: Server, models: dict[int, dict[str, torch.Tensor]],
        shares: Mapping[int, torch.Tensor], told: Mapping[int, Asked], r: Round,
    ):  # fmt: skip
        self.method, self.server, self.shares, self.told, self.r = method, server, shares, told, r
        self.device = next(iter(server.params.values())).device
        self.noise, self.rows = torch_generator(r.setting.seed, "noise", r.t), r.generator("examples")
        self.makers = {e: loaded(method.generator(r.setting), server.memory, f"generator/{e}") for e in models}
        self.weigher = loaded(weigher(), server.memory, "weigher")
        self.models = {e: {n: p.detach().clone() for n, p in model.items()} for e, model in models.items()}

    def run(self) -> tuple[dict[int, dict[str, torch.Tensor]], dict[str, torch.Tensor]]:
        """Return the models after it, and the server's memory."""
        m, infos, memory = self.method, self.r.setting.infos, dict(self.server.memory)
        tensors = [(n, p) for s in self.models.values() for n, p in s.items()]
        trained = [p.requires_grad_() for n, p in tensors if infos[n].kind != "statistic"]
        learners = {e: torch.optim.Adam(net.parameters(), m.generator_lr) for e, net in self.makers.items()}
        students = torch.optim.SGD(trained, m.server_lr, weight_decay=m.server_decay)
        weighing = torch.optim.Adam(self.weigher.parameters(), WEIGHER_LR)
        for _ in range(m.passes):
            asked = {e: self.draw(e) for e in self.models}
            for e in self.models:
                step(self.making_loss(e, asked[e]), learners[e])
            for _ in range(m.steps if len(self.models) > 1 else 0):
                step(self.teaching_loss(asked), students, weighing)
        for name, net in [*((f"generator/{e}", net) for e, net in self.makers.items()), ("weigher", self.weigher)]:
            memory |= under(name, {n: x.detach() for n, x in net.state_dict().items()})
        return {e: {n: p.detach() for n, p in s.items()} for e, s in self.models.items()}, memory

    def draw(self, e: int) -> Asked:
        """Draw labels and difficulties to ask for: of examples that clients of depth e have, with repetition."""
        labels, difficulty = self.told[e]
        chosen = torch.from_numpy(self.rows.integers(len(labels), size=self.method.made))
        return labels[chosen].to(self.device), difficulty[chosen].to(self.device)

    def make(self, e: int, asked: Asked) -> tuple[torch.Tensor, torch.Tensor]:
        """Make (x (n, *state), noise (n, classes)) by generator e."""
        net = self.makers[e]
        noise = torch.rand(len(asked[0]), net.classes, generator=self.noise).to(self.device)
        return net(*asked, noise), noise

    def answers(self, e: int, x: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs (e+1, n, C) of S_e, what its exits read (n, d), and which of ``x`` leave at each."""
        outputs, features = self.r.setting.lab.run_state(prefix(e, self.r.setting), self.models[e], x)
        return outputs, features, leave(outputs.detach(), leaving_numbers(len(x), len(outputs), self.method.leaving))

    def making_loss(self, e: int, asked: Asked) -> torch.Tensor:
        """Return the loss (2), to be minimised by generator e."""
        (labels, difficulty), setting = asked, self.r.setting
        x, noise = self.make(e, asked)
        outputs, _, groups = self.answers(e, x)
        judged = torch.cat([outputs[j][rows] for j, rows in enumerate(groups)])
        first, _ = setting.lab.run_state(prefix(0, setting), self.server.params, x)  # of the global model
        measured, flat = F.cross_entropy(first[0], labels, reduction="none"), x.flatten(1)
        apart = torch.cdist(noise, noise).square() / noise.shape[1] * torch.cdist(flat, flat, p=1) / flat.shape[1]
        loss = F.cross_entropy(judged, labels[torch.cat(groups)]) + F.mse_loss(measured, difficulty)
        return loss + (-apart.mean()).exp()

    def teaching_loss(self, asked: Mapping[int, Asked]) -> torch.Tensor:
        """Return the loss (3), to be minimised by all models that are taught, and by the net that weighs exits."""
        depths, total = sorted(self.models), torch.zeros((), device=self.device)
        everybody = sum(self.shares[e] for e in depths[:-1])
        for e, deeper in pairwise(depths):
            with torch.no_grad():
                self.makers[e].eval()
                x, _ = self.make(e, asked[e])
                self.makers[e].train()
                _, read, groups = self.answers(e, x)
            last, teacher = groups[-1], read[-1][groups[-1]]
            _, features, of_exits = self.answers(deeper, x)
            weights = self.weights(asked[e][1], last, of_exits)
            losses = torch.stack([self.relations(f[last], teacher) for f in features])
            total = total + (self.shares[e] / everybody).to(losses.dtype) * (weights * losses).mean()
        return total

    def weights(self, difficulty: torch.Tensor, last: torch.Tensor, groups: Sequence[torch.Tensor]) -> torch.Tensor:
        """Weight each exit of the student by softmax_j(-sum_x d_j(x)), (exits,)."""
        each = [difficulty[rows] for rows in groups]
        means = torch.stack([d.sum() / max(len(d), 1) for d in each])
        variances = torch.stack([d.var() if len(d) > 1 else d.new_zeros(()) for d in each])
        about = torch.stack((means, variances), 1)  # (exits, 2)
        own = difficulty[last][:, None, None].expand(-1, len(each), 1)
        distances = self.weigher(torch.cat((own, about.expand(len(last), -1, -1)), 2)).squeeze(2)  # (n, exits)
        return (-(distances / distances.sum(1, keepdim=True)).sum(0)).softmax(0)

    def relations(self, student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
        """Compare two sets of features (n, d) by their distances and angles (Park et al., CVPR 2019)."""
        apart = F.smooth_l1_loss(relative_distances(student), relative_distances(teacher))
        turned = F.smooth_l1_loss(angles(student), angles(teacher))
        return self.method.distance_weight * apart + self.method.angle_weight * turned


def prefix(e: int, setting: Setting) -> Slice:
    """Cut what clients of depth e hold."""
    return Slice.prefix(setting.exit_units[e] + 1, range(e + 1))
