"""Every personalised baseline: two rounds against a plain loop, value by value; what travels; who answers with what."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.engine.serving import client_outputs
from fedlib.methods import METHODS, build_method
from tests.helpers.plain_personal import (
    BACKBONE,
    EXITS,
    LAST_EXIT,
    World,
    exits,
    experiment,
    features,
    flat,
    is_exit,
    kl,
    mean_ce,
)
from tests.helpers.traffic import round_traffic

ONE = Execution(workers=1)
PERSONAL = ["local", "fedprox", "fedper", "fedrep", "fedbabu", "fedamp", "pfedgraph", "fedrod", "ditto", "fedpac",
            "cafedistill"]  # fmt: skip


def two_rounds(world):
    """(server, memories, mirrors) after rounds 1 and 2 of the engine."""
    memories, mirrors = {}, {}
    rounds = run_rounds(world.f, ONE, memories=memories, mirrors=mirrors)
    next(rounds)
    server = next(rounds).server
    rounds.close()
    return server, memories, mirrors


def second_round(world):
    """Round 2 with its metrics, and the clients' memories."""
    memories = {}
    rounds = run_rounds(world.f, ONE, memories=memories)
    next(rounds)
    done = next(rounds)
    rounds.close()
    return done, memories


def close(found, expected, atol=2e-5):
    assert set(found) >= set(expected)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.to(found[name].dtype).view_as(found[name]), rtol=0, atol=atol)


def moved(a, b):
    return max(float((a[n] - b[n]).abs().max()) for n in b)


def test_local():
    w = World("local")
    own = [w.initial] * 3
    for t in (1, 2):
        own = [w.train(own[k], k, t) for k in w.clients]
    server, memories, mirrors = two_rounds(w)
    close(server.params, w.initial, 0)
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items()})
        assert moved(own[k], w.initial) > 0.01
    assert not mirrors


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
        accuracies.append(answered(w, k, exits(tuned, features(tuned, test_images(w, k)))))
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)


def test_images(w, k):
    rows = torch.as_tensor(w.f.data.client_test(k))
    return w.f.data.view(w.f.data.test_images, (3, 12, 12), rows)


test_images.__test__ = False


def answered(w, k, logits):
    """Accuracy of each exit on a client's own test set, percent."""
    labels = w.f.data.test_labels[torch.as_tensor(w.f.data.client_test(k))]
    return [100 * (out.argmax(-1) == labels).double().mean().item() for out in logits]


def test_fedrep():
    w = World("fedrep", options={"head_epochs": 3})
    phi, own = w.initial, [w.initial] * 3
    for t in (1, 2):
        for k in w.clients:
            p = {n: (own[k] if is_exit(n) else phi)[n] for n in phi}
            own[k] = w.train(w.train(p, k, t, which=is_exit, epochs=3), k, t, which=lambda n: not is_exit(n))
        phi = {**phi, **w.mean(own, lambda n: not is_exit(n))}
    server, memories, _ = two_rounds(w)
    close(server.params, phi)
    for k in w.clients:
        close(memories[k], {f"model/{n}": x for n, x in own[k].items() if is_exit(n)})


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
        accuracies.append(answered(w, k, exits(tuned, features(tuned, test_images(w, k)))))
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)


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
        close({"out": out[:, 0]}, {"out": exits(answers, features(answers, test_images(w, never)))})


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
    accuracies = [answered(w, k, exits(own[k], features(own[k], test_images(w, k)))) for k in w.clients]
    np.testing.assert_allclose(done.metrics["personal"]["exits"], np.mean(accuracies, 0), atol=0.01)


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


def on_simplex(objective, n=3):
    """The minimiser over the simplex by scipy's general solver."""
    from scipy.optimize import minimize

    found = minimize(
        lambda x: float(objective(torch.tensor(x))), np.full(n, 1 / n), method="SLSQP", bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1}, options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert found.success
    return torch.tensor(found.x)


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


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbabu", "fedrod", "fedpac"])
def test_local_distillation_is_an_option_of_the_personalised(method):
    """Table 3: 1/m sum_j [CE_j + lambda KL(exit m || exit j)], the teacher without gradient."""
    from fedlib.methods.losses import Batch

    m = build_method(method, {"distill": "last", "kd_weight": 0.7})
    outputs = torch.randn(2, 1, 5, 10, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[1, 2, 3, 4, 0]])
    batch = Batch(outputs, labels, torch.full((1, 5), 0.2), torch.ones(2, 1))
    ce = [F.cross_entropy(out[0], labels[0]) for out in outputs]
    by_hand = (sum(ce) + 0.7 * kl(outputs[1, 0], outputs[0, 0])) / 2
    torch.testing.assert_close(m.local_loss(batch)[0], by_hand)
    assert build_method(method, {}).distill == "none"


TRAFFIC = {  # numbers per round and client, once everybody has been sampled: down, up (facts' table)
    "local": (0, 0), "fedavg": (BACKBONE + EXITS, BACKBONE + EXITS), "fedprox": (BACKBONE + EXITS, BACKBONE + EXITS),
    "fedper": (BACKBONE, BACKBONE), "fedrep": (BACKBONE, BACKBONE), "fedbabu": (BACKBONE, BACKBONE),
    "fedamp": (BACKBONE + EXITS, BACKBONE + EXITS),
    "pfedgraph": (2 * (BACKBONE + EXITS), BACKBONE + EXITS),  # the mixed model and c_i
    "fedrod": (BACKBONE + EXITS, BACKBONE + EXITS), "ditto": (BACKBONE + EXITS, BACKBONE + EXITS),
    # prototypes and whether they are known; prototypes, h, V and class counts
    "fedpac": (BACKBONE + EXITS + 10 * 6 + 10, BACKBONE + EXITS + 2 * 10 * 6 + 1 + 10),
    "cafedistill": (BACKBONE + LAST_EXIT + 2, BACKBONE + LAST_EXIT),  # S_i: a number an exit
}  # fmt: skip


@pytest.mark.parametrize("method", TRAFFIC)
def test_traffic_per_round_is_the_tables(method):
    e = experiment(method, options={"exits": "all"} if method == "fedavg" else {})
    assert round_traffic(e) == TRAFFIC[method]


@pytest.mark.parametrize("method", PERSONAL)
def test_a_cohort_of_three_is_three_cohorts_of_one(method):
    ends = []
    for size in (1, 4):
        memories, mirrors = {}, {}
        f = build_federation(experiment(method, rounds=2))
        *_, r = run_rounds(f, Execution(workers=1, cohort_size=size), memories=memories, mirrors=mirrors)
        ends.append((r, memories, mirrors))
    (a, *kept), (b, *others) = ends
    for name, p in a.server.params.items():
        torch.testing.assert_close(p, b.server.params[name], rtol=0, atol=1e-5)
    for here, there in zip(kept, others, strict=True):
        assert here.keys() == there.keys()
        for k in here:
            for name, p in here[k].items():
                torch.testing.assert_close(p, there[k][name], rtol=0, atol=1e-4)
    assert a.metrics["personal"]["exits"] == pytest.approx(b.metrics["personal"]["exits"], abs=2.0)


@pytest.mark.parametrize("method", PERSONAL)
def test_with_one_exit_it_is_the_published_single_exit_method(method):
    f = build_federation(experiment(method, num_exits=1, rounds=2, num_clients=4, clients_per_round=2))
    assert f.setting.exit_units == (1,)
    *_, r = run_rounds(f, ONE)
    assert len(r.metrics["personal"]["exits"]) == 1 and not r.diverged and "leaving" not in r.metrics["personal"]


@pytest.mark.parametrize("method", PERSONAL)
def test_clients_never_sampled_of_one_example_and_without_a_class(method):
    """12 clients of 1 to 20 examples, 3 sampled once: everybody with test examples answers, with finite numbers."""
    e = experiment(
        method, num_clients=12, clients_per_round=3, rounds=1, partition="class_dirichlet", dirichlet_alpha=0.2,
        test_split="contiguous", num_test=120, batch_size=4,
    )  # fmt: skip
    f = build_federation(e)
    examples = f.data.num_examples
    assert examples.min() <= 2 and len(f.candidates()) >= 10
    trained = {c.id: set(f.data.labels[torch.as_tensor(f.data.client(c.id))].tolist()) for c in f.clients(range(12))}
    tested = {k: set(f.data.test_labels[torch.as_tensor(f.data.client_test(k))].tolist()) for k in range(12)}
    assert any(tested[k] - trained[k] for k in range(12))  # asked for a class it never saw
    small = [k for k in f.candidates() if examples[k] <= 2]
    for ids in (None, small[:3]):
        g = f if ids is None else with_sampled(f, ids)
        *_, r = run_rounds(g, ONE)
        assert not r.diverged and r.metrics["personal"]["clients"] == 12
        assert np.isfinite([*r.metrics["personal"]["by_client"].values()]).all()


def with_sampled(f, ids):
    """``f`` whose rounds sample the clients ``ids``."""

    class Fixed(type(f)):
        def sample_clients(self, t):
            return self.clients(sorted(ids))

    return Fixed(**{k: getattr(f, k) for k in f.__dataclass_fields__})


@pytest.mark.parametrize("method", ["fedamp", "pfedgraph", "fedpac", "cafedistill"])
def test_noise_is_refused_where_the_server_looks_at_single_clients(method):
    options = {"update_norm": 1.0, "noise_multiplier": 1.0, "weighting": "clients"}
    with pytest.raises(ValueError, match=f"options of {method}: noise_multiplier protects sums"):
        build_method(method, options)


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedrod", "ditto", "cafedistill"])
def test_who_keeps_something_at_its_clients_says_so(method):
    assert build_method(method, {}).remembers and not build_method("fedprox", {}).remembers


@pytest.mark.parametrize("method", ["fedrod", "fedpac"])
def test_labels_must_be_classes(method):
    with pytest.raises(ValueError, match="is for classes, and the labels of dataset = 'stsb' are none"):
        build_federation(experiment(method, dataset="stsb", backbone="bert_micro", num_exits=3))


def test_compressed_models_mix_in_single_precision():
    e = experiment("fedamp", options={"compress": "quantise"}, rounds=2)
    mirrors = {}
    *_, r = run_rounds(build_federation(e), ONE, mirrors=mirrors)
    assert {x.dtype for m in mirrors.values() for x in m.values()} == {torch.float32} and not r.diverged


def test_all_personalised_methods_are_listed():
    from fedlib.methods import personal

    listed = {name for name, cls in METHODS.items() if cls.__module__.startswith(personal.__name__)}
    assert listed == set(PERSONAL)


@pytest.mark.parametrize("method", PERSONAL)
def test_training_that_overflows_is_recorded_and_does_not_stop_the_program(method, tmp_path):
    found = run(experiment(method, lr=1e12, rounds=3), ONE, tmp_path, progress=False)
    assert found.summary["status"] == "diverged"
