"""FedPer against a plain loop."""

import numpy as np
import torch.nn.functional as F

from tests.helpers.plain_personal import (
    World,
    answered,
    close,
    exits,
    features,
    images_of,
    is_exit,
    mean_ce,
    second_round,
    two_rounds,
)


def test_fedper():
    w = World("fedper")
    phi, own = w.initial, [w.initial] * 3
    for t in (1, 2):
        own = [w.train({n: (own[k] if is_exit(n) else phi)[n] for n in phi}, k, t) for k in w.clients]
        phi = {**phi, **w.mean(own, lambda n: not is_exit(n))}
    server, memories, _ = two_rounds(w)
    close(server.params, phi)  # whose exits are the initial ones
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items() if is_exit(n)})
        assert len(memories[k]) == 4


def test_fedper_with_shallow_exits_afterwards():
    """Figure 2's naive way: the federation trains backbone and last exit, shallow exits are trained for an answer."""
    w = World("fedper", options={"shallow": "afterwards", "tune_epochs": 3}, evaluate_every=2)
    deep = lambda n: not n.startswith("head.exits.0")  # noqa: E731
    loss = lambda p, x, y: F.cross_entropy(exits(p, features(p, x))[1], y)  # noqa: E731
    phi, own = w.initial, [w.initial] * 3
    for t in (1, 2):
        own = [w.train({n: (own[k] if is_exit(n) else phi)[n] for n in phi}, k, t, loss, deep) for k in w.clients]
        phi = {**phi, **w.mean(own, lambda n: not is_exit(n))}
    done, _ = second_round(w)
    close(done.server.params, phi)
    accuracies = []
    for k in w.clients:
        served = {n: (own[k] if is_exit(n) else phi)[n] for n in phi}
        w.generators.clear()  # an answer draws as the last round's training did
        tuned = w.train(served, k, 2, mean_ce, lambda n: not deep(n), 3)
        accuracies.append(answered(w, k, exits(tuned, features(tuned, images_of(w, k)))))
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)
