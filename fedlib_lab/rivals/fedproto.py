"""FedProto (Tan et al., AAAI 2022): clients share no parameters, only the mean feature of each class.

Client: receives every class's global prototype C^j; trains a whole model of its own on cross-entropy + lambda * sum_j
|mean feature of the batch's examples of class j - C^j|^2 / d (none in round 1, nor for a class without a prototype);
sends the mean feature of each of its classes, by the trained model, and how many examples it has of it. Server: each
prototype is the mean of the clients', by examples of the class; a class that nobody sent keeps its own. A client
answers with the class of the nearest prototype. Features are what the last linear layer reads.
Models may differ: of ``rates``, the clients' budgets, every hidden width is cut but that of the features.
Read next: ``fedpac.py``, ``local.py``.

Deviations: the release's readings are options: every example is drawn to its prototype by its own mean squared distance
(``distance="example"``), prototypes are averaged with equal weights (``weighting="clients"``) and collected while the
model trains, over all its epochs (``collected="training"``). Its answers are of the client's own classes alone
(``answer="own"``), or its classifier's (``answer="classifier"``); it adds up correct answers over clients, which is not
done. Centrally evaluated is the initial model: there is no other.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F

from fedlib.core.annotations import NotNegative, Share
from fedlib.methods.base import NOTHING, Batch, Client, Cohort, Experiment, Sizes, Slice
from fedlib.methods.mixtures import class_means, part_of, under
from fedlib.methods.values import Arrived, Member, Round, Server, Serving, Setting, Tensors
from fedlib.methods.widths import Rates, check_cuttable

LAST = "head.exits.0.linear"  # reads the features
NEVER = -1e30  # what a class without a prototype is answered with


@dataclass(frozen=True)
class FedProto(Rates):
    """By default everybody trains the whole net; rates below one are of narrower ones."""

    label, color, marker = "FedProto", "#3207ea", "*"

    needs_extras: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "a prototype"
    remembers: ClassVar[bool] = True
    sends_model: ClassVar[bool] = False

    rates: tuple[Share, ...] = (1.0,)
    prototype_weight: NotNegative = 1.0  # lambda
    distance: Literal["prototype", "example"] = "prototype"
    collected: Literal["afterwards", "training"] = "afterwards"
    answer: Literal["known", "own", "classifier"] = "known"

    def check(self, setting: Setting, e: Experiment) -> None:
        super(Rates, self).check(setting, e)  # the features' own width is not cut
        if min(self.rates) < 1:
            check_cuttable(setting, e)
            if any(axis.tied for axis in setting.axes.values()):
                why = f"backbone = {e.backbone!r} concatenates its features, which must stay whole"
                raise ValueError(f"fedproto: rates = {list(self.rates)}: {why}; allowed: [1.0]")
        if e.test_mask and self.answer != "classifier":
            raise ValueError("fedproto: test_mask = True is of a classifier; allowed: False, or answer = 'own'")

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        part, rate = r.setting.full(), self.rates[client.budget]
        features = r.setting.infos[f"{LAST}.weight"].axes[1]
        cut = [x for x in r.setting.axes.values() if x.permutable and x.name != features]
        index = {x.name: x.leading(lambda n: self.kept(rate, n)) for x in cut}
        return part if rate == 1 else replace(part, index=index)

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        payload = {"global": part_of(server.memory, "prototypes")}
        return [Member(client, self.slice_for(client, server, r), upload=NOTHING, keeps="all", payload=payload)]

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """Prototypes and whether each is known; prototypes and how many examples there are of each."""
        sizes = [shared[f"{LAST}.weight"], shared[f"{LAST}.bias"]]  # as those of the last layer
        return sizes, sizes

    def local_update(self, cohort: Cohort) -> None:
        known, counts = cohort.payload("global"), cohort.label_counts().float()  # (M, C)
        seen: dict[str, torch.Tensor] = {}
        totals, numbers = torch.zeros((), device=counts.device), torch.zeros_like(counts)

        def collect(labels: torch.Tensor, weights: torch.Tensor, keep: bool) -> tuple[torch.Tensor, torch.Tensor]:
            nonlocal totals, numbers
            shares = F.one_hot(labels, counts.shape[1]) * weights[..., None]  # (M, B, C)
            sums, number = torch.einsum("mbc,mbd->mcd", shares, seen["features"]), shares.sum(1)
            if keep:
                totals, numbers = totals + sums.detach(), numbers + number
            return sums, number

        def loss(batch: Batch) -> torch.Tensor:
            sums, number = collect(batch.labels, (batch.weights > 0).float(), self.collected == "training")
            if not known:
                return self.local_loss(batch)
            goal, is_known = known["mean"], known["known"].float()
            if self.distance == "example":
                goal = goal.gather(1, batch.labels[..., None].expand_as(seen["features"]))
                weights = batch.weights * is_known.gather(1, batch.labels)
                distance = ((seen["features"] - goal).square().mean(-1) * weights).sum(1)
            else:
                means = sums / number.clamp(min=1)[..., None]
                distance = ((means - goal).square().mean(-1) * is_known * (number > 0)).sum(1)
            return self.local_loss(batch) + self.prototype_weight * distance

        layer = cohort.model.head.get_submodule(LAST.removeprefix("head."))
        hook = layer.register_forward_pre_hook(lambda _, read: seen.update(features=read[0].flatten(2).float()))
        try:
            cohort.train(loss)
            for _, labels, weights in cohort.answers() if self.collected == "afterwards" else ():
                collect(labels, weights, True)
        finally:
            hook.remove()
        cohort.send("prototypes", {"mean": totals / numbers.clamp(min=1)[..., None], "counts": counts})

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        told = [part_of(arrived.extras[i], "prototypes") for i in sorted(arrived.extras)]
        means, counts = (torch.stack([x[k] for x in told]) for k in ("mean", "counts"))  # (n, C, d), (n, C)
        weights = counts if self.weighting == "examples" else (counts > 0).float()
        prototypes = class_means(means, weights, part_of(server.memory, "prototypes"))
        return replace(server, t=r.t, memory=under("prototypes", prototypes))

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Serve a last layer whose outputs are -|f - C^j|^2 / d, but for |f|^2 / d, which all classes share."""
        (member,), known = self.members(client, server, r), part_of(server.memory, "prototypes")
        if self.answer != "classifier" and known:
            allowed = known["known"]
            if self.answer == "own":
                allowed = allowed & (torch.from_numpy(r.setting.label_counts(client.id)) > 0).to(allowed.device)
            layer = nearest(known["mean"], allowed, r.setting.infos[f"{LAST}.weight"].shape)
            member = replace(member, payload={"start": layer})
        return Serving((member,))


def nearest(mean: torch.Tensor, known: torch.Tensor, shape: tuple[int, ...]) -> Tensors:
    """Build weight (``shape``) and bias of f -> (2 f.C^j - |C^j|^2) / d, largest at the nearest; ``mean`` (C, d)."""
    weight = torch.where(known[:, None], 2 * mean / mean.shape[1], 0.0).view(shape)
    return {f"{LAST}.weight": weight, f"{LAST}.bias": torch.where(known, -mean.square().mean(1), NEVER)}
