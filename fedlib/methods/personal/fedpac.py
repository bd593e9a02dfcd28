"""FedPAC (Xu et al., ICLR 2023): features are aligned by class, classifiers mixed where that lowers the risk.

Client: receives backbone, its mixed exits and every class's global prototype; (1) with the backbone as received, takes
h_c = p(c) * mean feature of class c, and V = (sum_c p(c) E|f|^2 - sum_c |h_c|^2)/n; (2) trains its exits for an epoch;
(3) trains the backbone on the loss + lambda * mean squared distance between a feature and its class's prototype (its
own, of a class without a global one; in round 1 there are none, and no such term); (4) sends backbone, exits, new
prototypes, V and h. Server: the mean of the backbones; prototypes by class counts; the exits of client i are sum_j a_j
exits_j over the sampled, a minimising a.(diag(V) + D_i) a on the simplex, D_i[j, k] = sum_c <h_ic - h_jc, h_ic - h_kc>.
A client answers with the backbone and its mixed exits.
Read next: ``methods/mixtures.py``, ``cafedistill.py``.

Deviations: statistics are those of what the last exit sees (maps are averaged over pixels, unless that exit reads all
of them), and one a mixes all exits. Weights a below 0.001 are dropped and the rest scaled up, as released. Prototypes
of classes that no sampled client has stay as they were. The release's exits have a rate of 0.1 (``head_lr``) beside a
backbone's that never decays; here they follow the round's. Client i's mixed exits are kept by the server.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ...core.annotations import Count, NotNegative, Positive
from ...core.devices import to_host
from ...models.maps import MapSpec
from ..base import Batch, Client, Cohort, Experiment, JointExits, ParamInfo, Setting, Sizes, Spec
from ..mixtures import class_means, mixtures, part_of, row, under
from ..values import Arrived, Member, Round, Server, Stage


@dataclass(frozen=True)
class FedPAC(JointExits):
    """Feature alignment and classifier collaboration."""

    label, color, marker = "FedPAC", "#322995", "8"

    version: ClassVar[int] = 3  # 1 drew to own prototypes in round 1, 2 read an empty cache
    needs_extras: ClassVar[bool] = True
    needs_classes: ClassVar[str] = "its feature alignment"

    prototype_weight: NotNegative = 1.0  # lambda
    head_epochs: Count = 1
    head_lr: Positive | None = None  # None: the round's; else one for all rounds

    def personal(self, info: ParamInfo) -> bool:
        return info.exit is not None

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        payload = {"start": server.mirrors.get(client.id, {}), "global": part_of(server.memory, "prototypes")}
        return [Member(client, r.setting.full(), payload=payload)]

    def local_update(self, cohort: Cohort) -> None:
        spec, counts = cohort.setting.spec, cohort.label_counts().float()  # (M, C)
        own, variance = class_statistics(cohort, counts)
        known = cohort.payload("global")
        target = torch.where(known["known"][..., None], known["mean"], own) if known else own  # (M, C, d)

        def aligned(batch: Batch) -> torch.Tensor:
            f = vectors(spec, batch.features[len(batch.outputs) - 1])  # (M, B, d)
            goal = target.gather(1, batch.labels[..., None].expand_as(f))
            distance = ((f - goal).square().mean(-1) * batch.weights).sum(1)
            return self.local_loss(batch) + self.prototype_weight * distance

        cohort.train(self.local_loss, Stage(lambda i: i.exit is not None, self.head_epochs, lr=self.head_lr))
        cohort.train(aligned if known else self.local_loss, Stage(lambda i: i.exit is None))
        new, _ = class_statistics(cohort, counts)
        share = (counts / counts.sum(1, keepdim=True))[..., None]
        cohort.send("statistics", {"V": variance, "h": share * own, "counts": counts, "prototypes": new})
        cohort.send("exits", {n: p for n, p in cohort.params.items() if cohort.setting.infos[n].exit is not None})

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """Beside the body: down a head and prototypes; up a head, prototypes, class means, counts and the variance."""
        sizes = [*shared.values(), *(math.prod(i.shape) for i in setting.infos.values() if self.personal(i))]
        read = torch.empty(1, 1, *setting.spec.feature(setting.exit_units[-1]), device="meta")
        means = (classes := setting.axes["classes"].size) * vectors(setting.spec, read).shape[-1]
        return [*sizes, means + classes], [*sizes, 2 * means + classes + 1]

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        server, ids = super().aggregate(server, arrived, r), sorted(arrived.extras)
        told = [part_of(arrived.extras[i], "statistics") for i in ids]
        v, h, counts, means = (torch.stack([x[k] for x in told]) for k in ("V", "h", "counts", "prototypes"))
        v, h = to_host((v, h))
        shares = torch.stack([mixing_weights(v, h, i) for i in range(len(ids))])
        exits = mixtures({i: part_of(arrived.extras[i], "exits") for i in ids}, shares)
        prototypes = class_means(means, counts, part_of(server.memory, "prototypes"))
        memory = {**server.memory, **under("prototypes", prototypes)}
        return replace(server, memory=memory).with_mirrors({i: row(exits, k) for k, i in enumerate(ids)})


def vectors(spec: Spec, feature: torch.Tensor) -> torch.Tensor:
    """Return what an exit's linear layer reads: a token (M, B, d), or a map (M, B, C, H, W) averaged or flat."""
    if feature.dim() == 3:
        return feature
    return feature.flatten(2) if isinstance(spec, MapSpec) and spec.final_exit == "flatten" else feature.mean((3, 4))


def class_statistics(cohort: Cohort, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Average the features of each class, (M, C, d), zero where there is none; and V (M,), of members' own examples."""
    spec, unit, totals, squares = cohort.setting.spec, cohort.setting.exit_units[-1], 0.0, 0.0
    for flat, labels, weights in cohort.answers():
        f = vectors(spec, flat.unflatten(2, spec.feature(unit)))
        totals = totals + torch.einsum("mbc,mbd->mcd", F.one_hot(labels, counts.shape[1]) * weights[..., None], f)
        squares = squares + (f.square().sum(2) * weights).sum(1)
    n = counts.sum(1)
    h = totals / n[:, None, None]
    return totals / counts.clamp(min=1)[..., None], (squares / n - h.square().sum((1, 2))) / n


def mixing_weights(v: torch.Tensor, h: torch.Tensor, i: int) -> torch.Tensor:
    """Return argmin a.(diag(v) + D_i) a on the simplex, (n,); v (n,), h (n, C, d).

    That is |sum_j a_j p_j|^2 with p_j = (sqrt(v_j) e_j, h_i - h_j).
    """
    spread = torch.diag(v.double().clamp(min=0).sqrt())
    a = smallest_mixture(torch.cat((spread, (h[i] - h).flatten(1).double()), 1))
    a = torch.where(a < 1e-3, 0.0, a)
    return a / a.sum()


def smallest_mixture(points: torch.Tensor) -> torch.Tensor:
    """Return argmin |sum_i x_i points_i| over the simplex, (n,), of points (n, D) in host memory.

    The minimum is that of non-negative least squares, |sum_i y_i points_i|^2 + (sum y - 1)^2, scaled to sum 1: both
    have points_i . (their mixture) equal where y_i > 0, and no smaller elsewhere. Found by an active set (Lawson and
    Hanson 1974, in SciPy), which unequal points do not slow. All alike if all are zero; NaN where one is not finite.
    """
    from scipy.optimize import nnls  # half a second, which other methods are spared

    rotated = torch.linalg.qr(points.double().T, mode="r").R.numpy()  # a rotation makes n numbers of each point
    lengths, n = np.linalg.norm(rotated, axis=0), len(points)
    if not 0 < lengths.max() < np.inf:
        return torch.full((n,), 1 / n if lengths.max() == 0 else np.nan, dtype=torch.float64)
    system = np.vstack((rotated / lengths[lengths > 0].min(), np.ones(n)))
    y, _ = nnls(system, np.append(np.zeros(len(rotated)), 1.0), maxiter=100 * n)
    return torch.from_numpy(y / y.sum())
