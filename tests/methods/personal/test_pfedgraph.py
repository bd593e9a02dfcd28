"""pFedGraph against a plain loop."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.plain_personal import World, close, flat, mean_ce, two_rounds
from tests.helpers.simplex import on_simplex


@pytest.mark.parametrize("repel", [False, True])
def test_pfedgraph(repel):
    w = World("pfedgraph", options={"alpha": 0.7, "attraction": 0.5, "repel": repel})
    starts, directions = [w.initial] * 3, [None] * 3
    for t in (1, 2):
        models = []
        for k in w.clients:

            def loss(p, x, y, c=directions[k]):
                if c is None:
                    return mean_ce(p, x, y)
                return mean_ce(p, x, y) + (0.5 if repel else -0.5) * (flat(c) @ flat(p)) / flat(p).norm()

            models.append(w.train(starts[k], k, t, loss))
        change = [flat(m) - flat(w.initial) for m in models]
        for i in w.clients:
            d = torch.stack([-F.cosine_similarity(change[i], change[j], 0) for j in w.clients])
            x = on_simplex(lambda x, d=d: d @ x + 0.7 * (x - torch.tensor(w.shares)).square().sum())
            starts[i] = {n: sum(a * m[n] for a, m in zip(x, models, strict=True)) for n in models[0]}
            directions[i] = {
                n: sum(a * m[n] / flat(m).norm() for a, m in zip(x, models, strict=True)) for n in models[0]
            }
    server, memories, mirrors = two_rounds(w)
    close(server.params, w.initial, 0)
    assert not memories
    for k in w.clients:
        close(mirrors[k], {f"model/{n}": x for n, x in starts[k].items()}, 1e-4)
        close(mirrors[k], {f"direction/{n}": x for n, x in directions[k].items()}, 1e-4)
