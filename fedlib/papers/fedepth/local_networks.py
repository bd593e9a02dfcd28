"""What clients' own networks make of the same examples, layer by layer (FeDepth, Figure 5).

Read next: ``fedepth/similarity.py`` (CKA and CCA of two representations).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ...engine.cohort import Cohort
from ...engine.federation import Federation
from ...engine.forward import Forward
from ...methods import Round, Server
from ...models.route import Route
from .similarity import linear_cka, mean_cca


def local_features(f: Federation, server: Server, ids: Sequence[int], examples: int) -> dict[int, list[torch.Tensor]]:
    """Per client of ``ids`` what its network makes of the first ``examples`` test examples after each unit.

    The networks are trained from ``server`` in one more round. Maps are averaged over pixels: (examples, channels).
    """
    r = Round(server.t + 1, tuple(f.clients(sorted(ids))), f.setting)
    out = {}
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


MEASURES = {"CKA": linear_cka, "CCA": lambda x, y: mean_cca(x, y, 0.99)}


def similarities(features: Mapping[int, Sequence[torch.Tensor]]) -> dict[str, np.ndarray]:
    """Per measure the mean over pairs of clients of how alike layer i of one and layer j of the other are, (L, L)."""
    ids = list(features)
    pairs = [(a, b) for a in ids for b in ids if a != b]
    out = {}
    for name, measure in MEASURES.items():
        tables = [[[measure(x, y) for y in features[b]] for x in features[a]] for a, b in pairs]
        out[name] = np.mean(tables, 0)
    return out
