"""FedProx, and FedAvg with all exits, against a plain loop."""

import pytest

from tests.helpers.plain_personal import World, close, flat, mean_ce, two_rounds


@pytest.mark.parametrize("method, options", [("fedavg", {"exits": "all"}), ("fedprox", {"mu": 0.3})])
def test_one_model_for_all(method, options):
    w = World(method, options=options)
    p, mu = w.initial, options.get("mu", 0.0)
    for t in (1, 2):
        loss = lambda q, x, y, p=p: mean_ce(q, x, y) + mu / 2 * (flat(q) - flat(p)).square().sum()  # noqa: E731
        p = w.mean([w.train(p, k, t, loss) for k in w.clients])
    server, memories, mirrors = two_rounds(w)
    close(server.params, p)
    assert not memories and not mirrors
