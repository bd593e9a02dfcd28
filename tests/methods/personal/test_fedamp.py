"""FedAMP: weights by hand; two rounds against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.methods.personal.fedamp import weights_of
from tests.helpers.plain_personal import World, close, flat, mean_ce, two_rounds


def test_weights_by_hand():
    cosines = torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.5], [0.2, 0.5, 1.0]])
    weights = weights_of(cosines, own_share=0.4, sharpness=10.0)
    e = np.exp(1.0)
    np.testing.assert_allclose(weights[0], [0.4, 0.6 / (1 + e), 0.6 * e / (1 + e)])  # exp(1) and exp(2) of the rest
    np.testing.assert_allclose(weights.sum(1), 1.0)
    np.testing.assert_allclose(weights.diagonal(), 0.4)
    np.testing.assert_allclose(weights_of(torch.full((4, 4), 0.3))[2], [1 / 6, 1 / 6, 0.5, 1 / 6])
    assert weights_of(torch.ones(1, 1)).tolist() == [[1.0]]


@pytest.mark.parametrize("compare", ["change", "weights"])
def test_fedamp(compare):
    w = World("fedamp", options={"sigma": 3.0, "attraction": 0.5, "own_share": 0.4, "compare": compare})
    own, clouds = [w.initial] * 3, [w.initial] * 3  # nobody has sent a model: the cloud model is one's own
    origin = flat(w.initial) if compare == "change" else 0
    for t in (1, 2):
        if t == 2:
            vectors = [flat(p) - origin for p in own]
            for i in w.clients:
                others = [j for j in w.clients if j != i]
                weights = torch.stack([3.0 * F.cosine_similarity(vectors[i], vectors[j], 0) for j in others]).softmax(0)
                pulled = {n: sum(a * own[j][n].double() for a, j in zip(weights, others, strict=True)) for n in own[i]}
                clouds[i] = {n: (0.4 * own[i][n] + 0.6 * pulled[n]).float() for n in own[i]}
        for k in w.clients:
            u = flat(clouds[k])
            loss = lambda q, x, y, u=u: mean_ce(q, x, y) + 0.25 * (flat(q) - u).square().sum()  # noqa: E731
            own[k] = w.train(own[k], k, t, loss)
        own = list(own)
    server, memories, mirrors = two_rounds(w)
    close(server.params, w.initial, 0)
    for k in w.clients:
        close(mirrors[k], own[k])
        close(memories[k], {f"model/{n}": x for n, x in own[k].items()})


@pytest.mark.parametrize("compare", ["change", "weights"])
def test_statistics_that_stay_with_clients_are_not_compared(compare):
    """It was PyTorch's error of unequal sizes, in the first round of a client that took part and one that had not."""
    e = Experiment(
        method="fedamp", options={"compare": compare}, backbone="resnet8", finetune="full", pretrained=False, rounds=3,
        batch_norm="local", num_train=24, num_test=10, num_clients=4, clients_per_round=2, num_exits=1, batch_size=4,
    )  # fmt: skip
    f = build_federation(e)
    seen = [{c.id for c in f.sample_clients(t)} for t in (1, 2, 3)]
    assert any(now & set().union(*seen[:t]) and now - set().union(*seen[:t]) for t, now in enumerate(seen))
    *_, last = run_rounds(f, Execution(workers=1))
    assert not last.diverged and last.metrics
