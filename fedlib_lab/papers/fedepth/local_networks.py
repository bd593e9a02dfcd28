"""What clients' own networks make of the same examples, layer by layer, and how alike that is (FeDepth, Figure 5).

CKA (Kornblith et al. 2019) and CCA compare features X (N, p) and Y (N, q), centred, in float64; each example's features
are flattened. CKA does not change under rotation and isotropic scaling of either side, CCA under any invertible map.
"""

from collections.abc import Mapping, Sequence
from itertools import permutations

import numpy as np
import torch

from fedlib.engine.cohort import Cohort
from fedlib.engine.federation import Federation
from fedlib.engine.forward import Forward
from fedlib.methods import Round, Server
from fedlib.models.route import Route


def local_features(f: Federation, server: Server, ids: Sequence[int], examples: int) -> dict[int, list[torch.Tensor]]:
    """Return per client of ``ids`` its network's features of the first ``examples`` test examples after each unit.

    The networks are trained from ``server`` in one more round. Maps are averaged over pixels: (examples, channels).
    """
    r, out = Round(server.t + 1, tuple(f.clients(sorted(ids))), f.setting), {}
    for client in r.clients:
        cohort = Cohort(f, f.model, server, r, f.method.members(client, server, r)[:1], {})
        f.method.local_update(cohort)
        out[client.id] = _features(f, cohort, examples)
    return out


@torch.no_grad()
def _features(f: Federation, cohort: Cohort, examples: int) -> list[torch.Tensor]:
    forward, seen = Forward(f.model, cohort.slices, *cohort.forward.tensors, data=f.data, test=True).place_(), {}
    route = Route([1] * f.model.depth, {len(f.model.exit_units) - 1: slice(0, 1)})
    x = forward.inputs(torch.arange(examples, device=f.device)[None])
    forward(x, route=route, watch=lambda unit, z, feature, *_: seen.update({unit: feature[0]}))
    return [seen[u].flatten(2).mean(-1) if seen[u].dim() > 2 else seen[u] for u in sorted(seen)]


def linear_cka(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute ||Y'X||^2 / (||X'X|| ||Y'Y||) in Frobenius norms, 0..1; zero where a side is constant."""
    k, m = (z @ z.T for z in _centred(x, y))  # Gram matrices (N, N): ||Y'X||^2 is the sum over XX' * YY'
    own = k.norm() * m.norm()
    return ((k * m).sum() / own).item() if own > 0 else 0.0


def mean_cca(x: torch.Tensor, y: torch.Tensor, variance: float = 1.0) -> float:
    """Return the mean canonical correlation, 0..1, over the smaller side's directions; zero if a side is constant.

    ``variance`` < 1 keeps of each side only the leading principal components that hold this share of its variance
    (0.99 is SVCCA, Raghu et al. 2017): small directions are noise, and where features are as many as examples every
    correlation is one. Raises ``ValueError`` outside 0..1.
    """
    if not 0 < variance <= 1:
        raise ValueError(f"mean_cca: variance = {variance} must be in (0, 1]")
    x, y = (_basis(z, variance) for z in _centred(x, y))
    return torch.linalg.svdvals(x.T @ y).clamp(max=1.0).mean().item() if min(x.shape[1], y.shape[1]) else 0.0


def _basis(x: torch.Tensor, variance: float) -> torch.Tensor:
    """Return orthonormal (N, rank): the leading components of the columns' span with ``variance`` of its variance."""
    u, s, _ = torch.linalg.svd(x, full_matrices=False)
    rank = int((s > s[0] * max(x.shape) * torch.finfo(s.dtype).eps).sum())
    return u[:, : min(rank, int((s.square().cumsum(0)[:rank] / s.square().sum() < variance - 1e-12).sum()) + 1)]


def _centred(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if len(x) != len(y) or len(x) < 2:
        raise ValueError(f"representations of {len(x)} and {len(y)} examples cannot be compared: equal, 2 or more")
    x, y = (z.reshape(len(z), -1).double() for z in (x, y))
    return x - x.mean(0), y - y.mean(0)


MEASURES = {"CKA": linear_cka, "CCA": lambda x, y: mean_cca(x, y, 0.99)}


def similarities(features: Mapping[int, Sequence[torch.Tensor]]) -> dict[str, np.ndarray]:
    """Return per measure the similarity (L, L) of layer i of one and layer j of another client, mean over pairs."""
    pairs = [*permutations(features.values(), 2)]
    table = lambda measure, one, other: [[measure(x, y) for y in other] for x in one]  # noqa: E731
    return {name: np.mean([table(measure, *pair) for pair in pairs], 0) for name, measure in MEASURES.items()}
