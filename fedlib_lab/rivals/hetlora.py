"""HetLoRA (Cho et al., EMNLP 2024): clients of unequal LoRA rank, padded with zeros, weighted by what they learnt.

Client (rank r_k): receives the first r_k rows of every A and columns of every B; trains on the loss + lambda * sum over
adapters of |B tail| |A tail|, the tail being its ranks from gamma r_k on; if the tails' sum is smaller than on arrival,
it drops them, and holds gamma r_k ranks from then on. Server: of every adapter, with what a client does not hold as
zero, the mean of the B and of the A, weighted by |B_k A_k|, a client's share of what was learnt; heads by examples.
Read next: ``rivals/ranks.py``, ``flexlora.py``.

Deviations: the paper's text was not at hand, and there is no official release; lambda is not known. The paper writes
one weight matrix: weights are an adapter's own, or (``weights_by="model"``) those of all of a client's adapters
together. A client's rank stays with the server, which cuts what it is served. LoRA's scaling is one constant for all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Literal

import torch

from fedlib.core.annotations import NotNegative, Share
from fedlib.core.devices import to_host
from fedlib.methods.base import Arrived, Batch, Client, Cohort, Round, Server, Setting, Slice
from fedlib.methods.cohort import Stacked
from fedlib.methods.sums import MaskedMean, Update
from fedlib.methods.widths import rounded_up

from .ranks import Ranks, factors, of_rank, without_factors

LEAST = 1e-12  # of a weight: as long as no B has moved, all clients count alike


@dataclass(frozen=True)
class HetLoRA(Ranks):
    """Ranks that prune themselves."""

    label, color, marker = "HetLoRA", "#ca0dad", "s"

    needs_extras: ClassVar[bool] = True
    remembers: ClassVar[bool] = True  # a client's rank

    gamma: Share = 0.99  # 1: no pruning
    prune_weight: NotNegative = 1e-3  # lambda
    weights_by: Literal["matrix", "model"] = "matrix"

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        whole = partial(rounded_up, self.rank_shares[client.budget])
        left = server.mirrors.get(client.id, {}).get("rank")  # in host memory
        if left is None:
            return of_rank(r.setting, whole)
        return of_rank(r.setting, lambda n: min(max(1, int(left)), whole(n)))

    def local_update(self, cohort: Cohort) -> None:
        setting, before = cohort.setting, tails(cohort.start, cohort.setting, self.gamma)

        def loss(batch: Batch) -> torch.Tensor:
            return self.local_loss(batch) + self.prune_weight * tails(cohort.params, setting, self.gamma)

        cohort.train(loss if self.gamma < 1 else self.local_loss)
        pruned = tails(cohort.params, setting, self.gamma) < before  # (M,)
        ranks = torch.zeros_like(pruned, dtype=torch.int64)
        for a, b, kept, rank in tail_of(cohort.params, setting, self.gamma):
            a[:, kept:] *= ~pruned[:, None, None]
            b[..., kept:] *= ~pruned[:, None, None]
            ranks = ranks.maximum(torch.where(pruned, kept, rank))
        cohort.send("rank", {"rank": ranks})

    def summarise(self, update: Update, setting: Setting) -> MaskedMean:
        mean = super().summarise(without_factors(update, setting), setting)
        held = [pair for pair in factors(setting).values() if pair[0] in update.params]
        norms = torch.stack([learnt(update.params[a], update.params[b]) for a, b in held])  # (adapters, K)
        if self.weights_by == "model":
            norms = norms.square().sum(0).sqrt().expand_as(norms)
        for pair, weights in zip(held, norms + LEAST, strict=True):
            mean.add(replace(update, params={n: update.params[n] for n in pair}), weights)
        return mean

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        server, mean = super().aggregate(server, arrived, r), arrived.mean
        # all hold the first rank
        whole = lambda n: (mean.total[n] / mean.weight[n].max()).to(server.params[n].dtype)  # noqa: E731
        padded = {n: whole(n) for pair in factors(r.setting).values() for n in pair}
        ranks = to_host([sent["rank/rank"] for sent in arrived.extras.values()])
        mirrors = {k: {"rank": rank} for k, rank in zip(arrived.extras, ranks, strict=True)}
        return replace(server, params={**server.params, **padded}).with_mirrors(mirrors)


def tail_of(params: Stacked, setting: Setting, gamma: float) -> Iterator[tuple[torch.Tensor, torch.Tensor, int, int]]:
    """Yield every adapter's A (M, r, in), B (M, out, r), number of ranks before the tail (one at least), and r."""
    for a, b in factors(setting).values():
        rank = params[a].shape[1]
        yield params[a], params[b], max(1, int(gamma * rank)), rank


def tails(params: Stacked, setting: Setting, gamma: float) -> torch.Tensor:
    """Sum |B tail| |A tail| over adapters, Frobenius, (M,); zero where a rank is too small to have a tail."""
    norm, parts = partial(torch.linalg.vector_norm, dim=(1, 2)), tail_of(params, setting, gamma)
    return torch.stack([norm(b[..., kept:]) * norm(a[:, kept:]) for a, b, kept, _ in parts]).sum(0)


def learnt(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return |B A|, Frobenius, of A (K, r, in) and B (K, out, r), (K,) in float64."""
    a, b = a.double(), b.double()
    return ((b.mT @ b) * (a @ a.mT)).sum((1, 2)).clamp(min=0).sqrt()
