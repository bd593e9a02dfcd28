"""Ditto against a plain loop."""

import numpy as np

from fedlib import run_rounds
from fedlib.engine.serving import client_outputs
from tests.helpers.plain_personal import (
    ONE,
    World,
    answered,
    close,
    exits,
    features,
    flat,
    images_of,
    mean_ce,
    second_round,
)


def test_a_client_of_ditto_starts_at_the_initial_model_however_late_it_comes():
    """One client of three in a round: another comes in round 2, when the global model has moved; the third never."""
    for start in ("initial", "global"):
        w = World("ditto", options={"mu": 0.4, "start": start}, clients_per_round=1, rounds=2, seed=3)
        (first,), (late,) = (w.f.sample_clients(t) for t in (1, 2))
        assert first.id != late.id
        moved = w.train(w.initial, first.id, 1)
        begin, memories = w.initial if start == "initial" else moved, {}
        server = [done.server for done in run_rounds(w.f, ONE, memories=memories)][-1]
        loss = lambda q, x, y, p=moved: mean_ce(q, x, y) + 0.2 * (flat(q) - flat(p)).square().sum()  # noqa: E731
        own = w.train(begin, late.id, 2, loss)
        close(memories[late.id], {f"own/{n}": x for n, x in own.items()})
        never = ({0, 1, 2} - {first.id, late.id}).pop()
        (_, out, *_) = next(client_outputs(w.f, server, memories, [never]))
        answers = w.initial if start == "initial" else server.params
        close({"out": out[:, 0]}, {"out": exits(answers, features(answers, images_of(w, never)))})


def test_ditto():
    w = World("ditto", options={"mu": 0.4}, evaluate_every=2)
    p, own = w.initial, [None] * 3
    for t in (1, 2):
        models = []
        for k in w.clients:
            batches = list(w.batches(k, t))  # both models see the same
            loss = lambda q, x, y, p=p: mean_ce(q, x, y) + 0.2 * (flat(q) - flat(p)).square().sum()  # noqa: E731
            own[k] = w.train(own[k] or p, k, t, loss, batches=batches)
            models.append(w.train(p, k, t, batches=batches))
        p = w.mean(models)
    done, memories = second_round(w)
    close(done.server.params, p)
    for k in w.clients:
        close(memories[k], {f"own/{n}": x for n, x in own[k].items()})
    accuracies = [answered(w, k, exits(own[k], features(own[k], images_of(w, k)))) for k in w.clients]
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)
