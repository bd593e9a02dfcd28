"""FedRoD against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import run_rounds
from tests.helpers.plain_personal import ONE, World, close, exits, features, kl, two_rounds


@pytest.mark.parametrize("head_epochs", [3, None])
def test_fedrod(head_epochs):
    w = World("fedrod", options={"head_epochs": head_epochs})
    mine = lambda n: n.startswith("head.personal")  # noqa: E731
    phi, own = w.initial, [w.initial] * 3

    def balanced(p, x, y, prior):
        return sum(F.cross_entropy(out + prior, y) for out in exits(p, features(p, x), "head.generic")) / 2

    def both(p, x, y):
        seen = features(p, x)
        return sum(F.cross_entropy(g + q, y) for g, q in zip(exits(p, seen, "head.generic"), exits(p, seen, "head.personal"), strict=True)) / 2  # fmt: skip

    def at_once(p, x, y, prior):
        seen = [z.detach() for z in features(p, x)]
        g, q = exits(p, seen, "head.generic").detach(), exits(p, seen, "head.personal")
        return balanced(p, x, y, prior) + sum(F.cross_entropy(a + b, y) for a, b in zip(g, q, strict=True)) / 2

    for t in (1, 2):
        for k in w.clients:
            p = {n: (own[k] if mine(n) else phi)[n] for n in phi}
            prior = w.counts(k).float().log()  # -inf masks classes that the client lacks
            if head_epochs is None:
                own[k] = w.train(p, k, t, lambda p, x, y, prior=prior: at_once(p, x, y, prior))
            else:
                loss = lambda p, x, y, prior=prior: balanced(p, x, y, prior)  # noqa: E731
                p = w.train(p, k, t, loss, lambda n: not mine(n))
                own[k] = w.train(p, k, t, both, mine, 3)
        phi = {**phi, **w.mean(own, lambda n: not mine(n))}
    assert any((w.counts(k) == 0).any() for k in w.clients)
    server, memories, _ = two_rounds(w)
    close(server.params, phi)
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items() if mine(n)})


def test_fedrod_distils_where_a_client_lacks_classes():
    """KL of balanced logits: a class that the client lacks weighs nothing, and makes no loss infinite."""
    w = World("fedrod", options={"head_epochs": None, "distill": "last"}, rounds=1)
    own = {}

    def loss(p, x, y, prior):
        seen = features(p, x)
        g, q = exits(p, seen, "head.generic"), exits(p, [z.detach() for z in seen], "head.personal")
        total = 0
        for out in ((g + prior)[..., prior > -torch.inf], (g.detach() + q)):
            labels = y if out.shape[-1] == 10 else (torch.cumsum(prior > -torch.inf, 0) - 1)[y]
            total = total + sum(F.cross_entropy(o, labels) for o in out) / 2 + kl(out[1].detach(), out[0]) / 2
        return total

    for k in w.clients:
        prior = w.counts(k).float().log()
        own[k] = w.train(w.initial, k, 1, lambda p, x, y, prior=prior: loss(p, x, y, prior))
    (done,) = run_rounds(w.f, ONE)
    assert not done.diverged and all(np.isfinite(x) for x in done.losses.values())
    close(done.server.params, w.mean(list(own.values()), lambda n: not n.startswith("head.personal")))
