"""FedPAC: mixing weights by hand and against a general solver; two rounds against a plain loop."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.methods.personal.fedpac import mixing_weights, smallest_mixture
from tests.helpers.plain_personal import World, close, exits, features, is_exit, mean_ce, two_rounds
from tests.helpers.simplex import on_simplex, solved


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


@pytest.mark.parametrize("rank", [3, 10])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_the_smallest_mixture_is_a_general_solvers(scale, rank):
    for seed in range(4):
        z = normal(10, rank, seed=seed)
        a = z @ z.T
        x = smallest_mixture(torch.from_numpy(z * scale)).numpy()
        best = solved(lambda x, a=a: x @ a @ x, lambda x, a=a: 2 * a @ x, 10)
        assert x.min() >= 0 and abs(x.sum() - 1) < 1e-9
        assert x @ a @ x <= best.fun + 1e-6


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2**31))
def test_no_mixture_is_smaller_however_unequal_the_points(n, rank, decades, seed):
    """The duality gap of FedPAC's points: an own direction for each, and what they share, over six decades."""
    rng = np.random.default_rng(seed)
    own, shared = (10.0 ** rng.uniform(-decades, decades, n) for _ in range(2))
    z = np.hstack((np.diag(own), rng.normal(size=(n, rank)) * shared[:, None]))
    x = smallest_mixture(torch.from_numpy(z)).numpy()
    slope = z @ (z.T @ x)  # every vertex, and so every mixture, against the one found
    assert x.min() >= 0 and abs(x.sum() - 1) < 1e-9 and x @ slope - slope.min() <= 1e-4 * (x @ slope)


def test_one_client_of_a_huge_variance_does_not_hide_the_others():
    """Squares of 81 and of 4e-7 to 1.5e-6: x_i ~ 1 / square, up to what the large one leaves."""
    squares = torch.tensor([81.0, 4e-7, 1.5e-6, 1.5e-6])
    wanted = (1 / squares) / (1 / squares).sum()
    torch.testing.assert_close(smallest_mixture(torch.diag(squares.sqrt())).float(), wanted, rtol=1e-5, atol=0)


def test_fedpacs_weights_by_hand():
    # Variances 1 and 3 of equal heads: x_i ~ 1 / V_i. At a distance of 4 from head 1 (D_1 = diag(0, 4)): 1 / 1 : 1 / 7.
    v, h = torch.tensor([1.0, 3.0]), torch.zeros(2, 1, 1)
    np.testing.assert_allclose(mixing_weights(v, h, 0), [0.75, 0.25], atol=1e-12)
    h[1] = 2.0
    np.testing.assert_allclose(mixing_weights(v, h, 0), [0.875, 0.125], atol=1e-12)
    np.testing.assert_allclose(mixing_weights(v, h, 1), [3 / 8, 5 / 8], atol=1e-12)  # D_2 = diag(4, 0): 1 / 5 : 1 / 3
    np.testing.assert_allclose(smallest_mixture(torch.zeros(3, 2)), [1 / 3] * 3)  # nothing to choose by


def test_points_on_both_sides_of_zero_cancel():
    np.testing.assert_allclose(smallest_mixture(torch.tensor([[-1.0], [3.0]])), [0.75, 0.25], atol=1e-12)
    np.testing.assert_allclose(smallest_mixture(torch.tensor([[1.0, 0], [0, 2.0**0.5], [0, 0]])), [0, 0, 1], atol=1e-12)


@pytest.mark.parametrize("head_lr", [None, 0.03])
def test_fedpac(head_lr):
    """The rate of round 2 is a tenth of round 1's: exits follow it, unless they have one of their own."""
    options = {"prototype_weight": 2.0} | ({"head_lr": head_lr} if head_lr else {})
    w = World("fedpac", options=options, schedule="exponential", decay=0.1)
    phi, mixed, known = w.initial, [w.initial] * 3, None
    for t in (1, 2):
        sent = []
        for k in w.clients:
            p = {n: (mixed[k] if is_exit(n) else phi)[n] for n in phi}
            counts = w.counts(k)
            mean, v = statistics(w, p, k)
            goal = mean if known is None else torch.where(known[1][:, None], known[0], mean)

            def aligned(p, x, y, goal=goal):
                seen = features(p, x)
                ce = sum(F.cross_entropy(out, y) for out in exits(p, seen)) / 2
                return ce + 2.0 * F.mse_loss(seen[1].flatten(1), goal[y])

            lr = 0.1 * 0.1 ** (t - 1)
            p = w.train(p, k, t, which=is_exit, epochs=1, lr=head_lr or lr)
            drawn = mean_ce if known is None else aligned  # in round 1 there is nothing to draw features to
            p = w.train(p, k, t, drawn, lambda n: not is_exit(n), lr=lr)
            h = mean * (counts / counts.sum())[:, None]
            sent.append((p, v, h, counts, statistics(w, p, k)[0]))
        models, counts = [s[0] for s in sent], torch.stack([s[3] for s in sent])
        phi = {**phi, **w.mean(models, lambda n: not is_exit(n))}
        total = counts.sum(0)
        new = sum(c[:, None] * s[4] for c, s in zip(counts, sent, strict=True)) / total.clamp(min=1)[:, None]
        known = (new if known is None else torch.where(total[:, None] > 0, new, known[0]), total > 0)
        for i in w.clients:
            difference = [(sent[i][2] - s[2]).flatten().double() for s in sent]
            a = torch.tensor([[x @ y for y in difference] for x in difference]) + torch.diag(
                torch.stack([s[1] for s in sent]).double()
            )
            x = on_simplex(lambda x, a=a: 1e3 * (x @ a @ x))
            x = torch.where(x < 1e-3, 0.0, x) / x[x >= 1e-3].sum()
            mixed[i] = {n: sum(b * m[n] for b, m in zip(x, models, strict=True)) for n in phi if is_exit(n)}
    server, memories, mirrors = two_rounds(w)
    close(server.params, phi, 1e-4)
    close(server.memory, {"prototypes/mean": known[0]}, 1e-4)
    assert torch.equal(server.memory["prototypes/known"], known[1])
    for k in w.clients:
        close(mirrors[k], mixed[k], 2e-3)  # as exact as the general solver
        assert all(n.startswith("model/head.") for n in memories[k])


def statistics(w, p, k):
    """FedPAC's mean feature of each class (10, 6) and V, of all the client's examples, class by class."""
    x, y = w.examples(k)
    f, n = features(p, x)[1].flatten(1), len(y)
    means = torch.stack([f[y == c].mean(0) if (y == c).any() else torch.zeros(6) for c in range(10)])
    share = [(y == c).double().mean() for c in range(10)]
    second = sum(share[c] * f[y == c].square().sum(1).mean() for c in range(10) if share[c])
    v = (second - sum(share[c] ** 2 * means[c].square().sum() for c in range(10))) / n
    return means, v
