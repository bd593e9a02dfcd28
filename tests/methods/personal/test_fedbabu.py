"""FedBABU against a plain loop, its tuning before it answers included."""

import numpy as np

from tests.helpers.plain_personal import World, answered, close, exits, features, images_of, is_exit, second_round


def test_fedbabu():
    w = World("fedbabu", options={"tune_epochs": 3}, evaluate_every=2)
    phi = w.initial
    for t in (1, 2):
        phi = {**phi, **w.mean([w.train(phi, k, t, which=lambda n: not is_exit(n)) for k in w.clients])}
    done, memories = second_round(w)
    close(done.server.params, phi)
    close(done.server.params, {n: x for n, x in w.initial.items() if is_exit(n)}, 0)  # as drawn
    assert not memories
    accuracies = []
    for k in w.clients:
        w.generators.clear()
        tuned = w.train(phi, k, 2, epochs=3)
        accuracies.append(answered(w, k, exits(tuned, features(tuned, images_of(w, k)))))
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)
