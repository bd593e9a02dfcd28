"""CAFEDistill: students and teachers by hand, rounds against a plain loop, batch norm of teachers, kills, memory."""

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.core.memories import ClientFiles, Overlay
from fedlib.core.storage import read_tensors
from fedlib.engine.cohort import Cohort
from fedlib.methods import Round, build_method
from fedlib.methods.losses import Batch
from fedlib.methods.mixtures import cosines, mixtures
from fedlib.methods.personal.cafedistill import most_alike, student_counts, students, teacher_shares
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.runs.store import run_path
from tests.helpers.plain_personal import LAST, OWN, World, exits, experiment, features, flat, is_exit, kl
from tests.helpers.stored import ONE, Forks, assert_nothing_left_over, assert_same, state

OWN["tiny_resnet"] = ResNetSpec(blocks=(1, 1), widths=(4, 8), size=12)


@pytest.mark.parametrize(
    "t, counts",
    [
        (1, (0, 6)),  # R = 0.2: 0.2 * 3 * 10 = 6 students
        (2, (1, 2)),  # R = 0.4: 12 students, all 10 at exit 1 and 2 at exit 2
        (3, (1, 8)),
        (4, (2, 4)),
        (5, (3, 0)),  # half of the rounds: all
        (10, (3, 0)),
    ],
)
def test_how_many_students_there_are(t, counts):
    assert student_counts(t, 10, exits=4, clients=10) == counts


def test_counts_are_exact_and_never_go_back():
    for rounds in (3, 7, 50, 300):
        for clients in (1, 3, 10):
            totals = [d * clients + q for d, q in (student_counts(t, rounds, 4, clients) for t in range(1, rounds + 1))]
            assert totals == sorted(totals) and totals[-1] == 3 * clients
            assert totals[0] == int(3 * clients * min(2 / rounds, 1) + 0.5)
    assert student_counts(100, 150, 4, 1) == (3, 0)  # 3 * min(200/150, 1), no rounding of 2.9999


def test_the_least_similar_is_dropped_first():
    """Row sums 0.5 + -0.2, 0.5 + -0.6, -0.2 - 0.6: the third goes first (Eq. 6), then the tie of 0.5s drops the later."""
    s = torch.tensor([[1, 0.5, -0.2], [0.5, 1, -0.6], [-0.2, -0.6, 1]])
    assert most_alike(s, 2) == [0, 1] and most_alike(s, 1) == [0] and most_alike(s, 0) == []


def test_cosines_that_are_clipped_at_zero_tie_and_the_plain_ones_decide():
    cosine = torch.tensor([[1, 0.1, 0.2], [0.1, 1, 0.6], [0.2, 0.6, 1]])  # all positive: min(0, cos) ties
    one = dict(t=1, rounds=3, exits=2)  # R = 2/3 of three clients: two students at exit 1
    assert students(cosine, **one).tolist() == [[0, 1], [1, 1], [1, 1]]  # client 0 is the least alike
    assert most_alike(cosine.clamp(max=0), 2) == [0, 1]  # without the cosine the first stay
    # min(0, cos): 1 and 2 repel each other by 0.9, 0 is fine with both, so one of these is dropped: 2 by its cosines;
    # the plain cosine sums 0.5, -0.2, -1.1: 2 as well
    cosine = torch.tensor([[1, 0.7, -0.2], [0.7, 1, -0.9], [-0.2, -0.9, 1]])
    assert students(cosine, **one)[:, 0].tolist() == [1, 1, 0]
    # min(0, cos) sums -0.1, -0.2, -0.1 (of the three others), so 1 goes; cosines sum 0.4, 0.8, 0.2: 2 goes
    cosine = torch.tensor([[1, 0.5, -0.1], [0.5, 1.0, 0.3], [-0.1, 0.3, 1]])
    assert students(cosine, **one)[:, 0].tolist() == [1, 1, 0]  # 0 and 2 tie at -0.1; 2 has the lower cosines
    assert students(cosine, **one, similarity="cosine")[:, 0].tolist() == [1, 1, 0]
    cosine = torch.tensor([[1, -0.05, -0.05], [-0.05, 1, 0.0], [-0.05, 0.0, 1]])
    assert students(cosine, **one)[:, 0].tolist() == [0, 1, 1]


def test_two_clients_always_tie_and_the_later_one_goes():
    """With two left both sums are the one number between them, however it was added up: 0.1 + 0.2 - 0.3 is no tie-break."""
    for seed in range(200):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        x /= x.norm(dim=1, keepdim=True)
        for cosine in (x @ x.T, (x @ x.T).clamp(max=0)):
            pair = most_alike(cosine, 2)
            assert most_alike(cosine, 1) == pair[:1], seed


def test_clients_without_an_exit_count_as_zero_and_need_no_room():
    """100,000 clients of whom three were seen: sums -0.5, -0.1, -0.8, of all others 0; then 0.1, 0.1 and 0 without the third."""
    cosine = torch.tensor([[1, 0.1, -0.6], [0.1, 1, -0.2], [-0.6, -0.2, 1]])
    whole = torch.zeros(6, 6)
    whole[[[1], [2], [5]], [1, 2, 5]] = cosine
    for keep in range(6):
        assert most_alike(cosine, keep, places=[1, 2, 5], clients=6) == most_alike(whole, keep)
    assert most_alike(cosine, 99_998, places=[1, 2, 5], clients=100_000) == [i for i in range(99_999) if i != 5]


def test_students_start_shallow_and_algorithm_2_as_printed_drops_one_more():
    cosine = torch.eye(4)
    for t, shallow in (
        (1, [[1, 0, 0]] * 3 + [[0, 0, 0]]),
        (2, [[1, 0, 0]] * 2 + [[1, 1, 0]] * 0),
        (4, [[1, 1, 1]] * 4),
    ):
        found = students(cosine, t, rounds=8, exits=4)
        assert found[:, 3].eq(1).all()
        if t == 1:  # R = 1/4 of 12: 3 students at exit 1, of equals the first
            assert found[:, :3].tolist() == shallow
        if t == 2:  # R = 1/2: 6: all at exit 1, two at exit 2
            assert found[:, :3].tolist() == [[1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 0, 0]]
        if t == 4:
            assert found[:, :3].tolist() == shallow
    printed = students(cosine, 1, rounds=8, exits=4, drop_one_more=True)
    assert printed[:, 0].tolist() == [1, 1, 0, 0]
    assert students(cosine, 8, rounds=8, exits=4, drop_one_more=True).eq(1).all()


def test_teachers_weights_by_hand():
    """n = 3 with two seen, mu = 1: y = 1/3 + (1, 0.5, 0)/2 = (5/6, 7/12, 1/3); theta = (21/12 - 1)/3 = 1/4."""
    shares, rest = teacher_shares(torch.tensor([[1.0, 0.5]], dtype=torch.float64), 3, 1.0)
    torch.testing.assert_close(shares, torch.tensor([[7 / 12, 1 / 3]], dtype=torch.float64))
    torch.testing.assert_close(rest, torch.tensor([1 / 12], dtype=torch.float64))
    # a small mu keeps to oneself, a large one is uniform, no cosine at all is uniform
    assert teacher_shares(torch.tensor([[1.0, 0.5]]).double(), 3, 0.01)[0].tolist() == [[1, 0]]
    torch.testing.assert_close(teacher_shares(torch.tensor([[1.0, 0.5]]).double(), 3, 1e6)[0], torch.full((1, 2), 1 / 3).double(), rtol=0, atol=1e-6)  # fmt: skip
    assert teacher_shares(torch.zeros(2, 0).double(), 4, 0.6)[1].tolist() == [1.0, 1.0]


def test_the_weights_are_the_solution_of_the_quadratic_programme():
    from scipy.optimize import minimize

    c = np.random.default_rng(0).uniform(-1, 1, 6)
    found = minimize(lambda k: -k @ c + 0.6 * ((k - 1 / 6) ** 2).sum(), np.full(6, 1 / 6), bounds=[(0, 1)] * 6,
                     constraints={"type": "eq", "fun": lambda k: k.sum() - 1}, method="SLSQP", options={"ftol": 1e-14})  # fmt: skip
    np.testing.assert_allclose(teacher_shares(torch.tensor(c)[None], 6, 0.6)[0][0], found.x, atol=1e-5)


def test_cosines_of_changes_and_mixtures_by_hand():
    a = {"w": torch.tensor([3.0, 1.0]), "b": torch.tensor([1.0])}
    b = {"w": torch.tensor([1.0, 5.0]), "b": torch.tensor([1.0])}
    origin = {"w": torch.tensor([1.0, 1.0]), "b": torch.tensor([1.0])}
    models = {7: b, 2: a}  # ids in increasing order: 2, 7
    # changes (2, 0, 0) and (0, 4, 0)
    assert cosines(models, [7, 2, 5], origin).tolist() == [[0, 1], [1, 0], [0, 0]]
    torch.testing.assert_close(cosines(models, [2])[0], torch.tensor([1, 9 / (11 * 27) ** 0.5], dtype=torch.float64))
    assert cosines({1: origin}, [1], origin).tolist() == [[0]] and cosines({}, [1]).shape == (1, 0)
    mixed = mixtures(models, torch.tensor([[0.25, 0.75], [1, 0]]))
    assert mixed["w"].tolist() == [[1.5, 4.0], [3.0, 1.0]] and mixed["w"].dtype is torch.float32


@pytest.mark.parametrize("options", [{}, {"kd_scaling": "plain"}, {"distill_last": True}, {"temperature": 2.0, "kd_weight": 0.3}])  # fmt: skip
def test_the_loss_by_hand(options):
    """Eq. 5: sum over the students of 1/m [CE + lambda KL(teacher || exit)]; Eq. 11 does not divide the KL by m."""
    generator = torch.Generator().manual_seed(0)
    out, teacher = (torch.randn(3, 2, 4, 5, generator=generator) for _ in range(2))
    labels = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    weights = torch.tensor([[0.25] * 4, [0.5, 0.5, 0, 0]])
    chosen = torch.tensor([[1.0, 0], [0, 1], [1, 1]])  # of member 0 exits 1 and 3, of member 1 exits 2 and 3
    batch = Batch(out, labels, weights, torch.ones(3, 2), teacher=lambda name: teacher)
    found = build_method("cafedistill", options).local_loss(batch, chosen)
    tau, lam = options.get("temperature", 1.0), options.get("kd_weight", 1.0)
    for k, n, taught in ((0, 4, (0, 2)), (1, 2, (1, 2))):
        ce = sum(F.cross_entropy(out[j, k, :n], labels[k, :n]) for j in taught) / 3
        kls = [kl(teacher[2, k, :n] / tau, out[j, k, :n] / tau) * tau**2 for j in taught if j != 2 or options.get("distill_last")]  # fmt: skip
        kd = lam * sum(kls) / (1 if "kd_scaling" in options else 3)
        torch.testing.assert_close(found[k], ce + kd)


@pytest.mark.parametrize("options", [{}, {"compare": "weights", "kd_scaling": "plain"}, {"progressive": False}, {"choose_among": "all", "mu": 0.1}, {"distill_last": True}])  # fmt: skip
def test_rounds_by_a_plain_loop(options):
    w = World("cafedistill", options=options, rounds=4)
    lam, mu, m = 1.0, options.get("mu", 0.6), 2
    phi, own = w.initial, [{n: x for n, x in w.initial.items() if is_exit(n)} for _ in w.clients]
    stored = [{n: w.initial[n] for n in LAST} for _ in w.clients]
    origin = 0 if "compare" in options else flat(stored[0])
    seen_students = []
    for t in (1, 2):
        vectors = [flat(h) - origin for h in stored]
        moved = "compare" not in options and t == 1 or t == 1  # nobody has sent an exit before round 2
        c = torch.zeros(3, 3).double() if moved else torch.stack(
            [torch.stack([F.cosine_similarity(a, b, 0) for b in vectors]) for a in vectors])  # fmt: skip
        k = teacher_shares(c, 3, mu)[0]
        teachers = [{n: sum(a * h[n] for a, h in zip(row, stored, strict=True)) for n in LAST} for row in k]
        chosen = students(c, t, 4, 2) if options.get("progressive", True) else torch.ones(3, 2)
        seen_students.append(chosen[:, 0].sum().item())
        models = []
        for i in w.clients:
            frozen = {**phi, **teachers[i]}

            def loss(p, x, y, frozen=frozen, taught=chosen[i]):
                out, target = exits(p, features(p, x)), exits({**p, **frozen}, features(frozen, x))[1]
                total = 0
                for j in (0, 1):
                    scale = 1 / m if options.get("kd_scaling") != "plain" else 1
                    scale = scale if j == 0 or options.get("distill_last") else 0
                    total = total + taught[j] * (F.cross_entropy(out[j], y) / m + scale * lam * kl(target, out[j]))
                return total

            which = lambda n, taught=chosen[i]: not n.startswith("head.exits.0") or taught[0] > 0  # noqa: E731
            models.append(w.train({**phi, **own[i], **teachers[i]}, i, t, loss, which))
            own[i] = {n: x for n, x in models[i].items() if is_exit(n)}
            stored[i] = {n: models[i][n] for n in LAST}
        phi = {**phi, **w.mean(models, lambda n: not is_exit(n))}
    assert seen_students == ([3, 3] if not options.get("progressive", True) else [2, 3])
    memories, mirrors = {}, {}
    rounds = run_rounds(w.f, ONE, memories=memories, mirrors=mirrors)
    next(rounds)
    server = next(rounds).server
    for found, expected in [(server.params, phi), *((memories[i], {f"model/{n}": x for n, x in own[i].items()}) for i in w.clients), *((mirrors[i], stored[i]) for i in w.clients)]:  # fmt: skip
        assert set(found) == set(expected)
        for n, x in expected.items():
            torch.testing.assert_close(found[n], x.view_as(found[n]), rtol=0, atol=3e-5)
    assert max(float((own[0][n] - w.initial[n]).abs().max()) for n in own[0]) > 0.01
    assert all(torch.equal(server.params[n], w.initial[n]) for n in w.initial if is_exit(n))  # exits never travel


def test_exits_that_are_no_students_stand_still():
    """Round 1 of 20: R = 0.1 of three clients' first exits, none. They do not even decay."""
    w, memories = World("cafedistill", rounds=20, weight_decay=0.1), {}
    next(run_rounds(w.f, ONE, memories=memories))
    for k in w.clients:
        still = {n: torch.equal(memories[k][f"model/{n}"], x) for n, x in w.initial.items() if is_exit(n)}
        assert still == {n: n not in LAST for n in still}


def test_a_client_answers_with_the_latest_backbone_and_its_own_exits():
    w = World("cafedistill", evaluate_every=2, clients_per_round=2)
    memories, mirrors = {}, {}
    rounds = run_rounds(w.f, ONE, memories=memories, mirrors=mirrors)
    next(rounds)
    done = next(rounds)
    found = []
    for k in w.clients:  # whoever never was sampled has the initial exits
        own = {n.removeprefix("model/"): x for n, x in memories.get(k, {}).items()}
        p, rows = {**done.server.params, **own}, torch.as_tensor(w.f.data.client_test(k))
        out = exits(p, features(p, w.f.data.view(w.f.data.test_inputs, (3, 12, 12), rows)))
        labels = w.f.data.test_labels[rows]
        found.append([100 * (o.argmax(-1) == labels).double().mean().item() for o in out])
        confident = out[0].softmax(-1).amax(-1) > 0.3
        leaving = torch.where(confident, out[0].argmax(-1), out[1].argmax(-1))
        found[-1] += [100 * (leaving == labels).double().mean().item(), confident.double().mean().item()]
    mean = np.mean(found, 0)
    personal = done.metrics["personal"]
    np.testing.assert_allclose(personal["exits"], mean[:2], atol=0.01)
    assert personal["leaving"]["0.3"]["accuracy"] == pytest.approx(mean[2], abs=0.01)
    assert personal["leaving"]["0.3"]["share"][0] == pytest.approx(mean[3], abs=1e-4)
    assert personal["leaving"]["0.3"]["sd"] == pytest.approx(np.std([x[2] for x in found]), abs=0.01)


@pytest.mark.parametrize("policy", ["tracked", "batch", "static", "local"])
@pytest.mark.parametrize("method", ["fedpac", "cafedistill"])
def test_every_policy_of_batch_norm_trains(method, policy):
    e = experiment(method, backbone="tiny_resnet", batch_norm=policy, rounds=2, lr=0.01)
    *_, r = run_rounds(build_federation(e), ONE)
    assert not r.diverged and np.isfinite(r.metrics["personal"]["accuracy"])


def test_statistics_of_padded_batches_count_examples_alone():
    """FedPAC's features under batch statistics do not depend on who shares the cohort."""
    e = experiment("fedpac", backbone="tiny_resnet", batch_norm="batch", num_train=70)
    f = build_federation(e)
    assert len(set(f.data.num_examples.tolist())) > 1
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    found = []
    for clients in (r.clients, *((c,) for c in r.clients)):
        members = [m for c in clients for m in f.method.members(c, f.server, r)]
        cohort = Cohort(f, f.model, f.server, r, members, {})
        rows = [c.id for c in cohort.clients]
        for i, k in enumerate(rows):
            seen = torch.cat([(x * w[..., None])[i] for x, _, w in cohort.answers()])
            found.append((k, seen.sum(0)))
    together, alone = dict(found[:3]), dict(found[3:])
    for k in together:
        torch.testing.assert_close(together[k], alone[k], rtol=0, atol=1e-3)


STATEFUL = ["cafedistill", "ditto", "fedamp", "pfedgraph", "fedpac"]


def interruptible(method):
    return experiment(
        method, backbone="convnet3_slim", num_exits=3, rounds=4, evaluate_every=2, num_clients=5, clients_per_round=2,
        num_train=40, num_test=20, local_epochs=1, batch_norm="tracked", lr=0.01,
    )  # fmt: skip


def everything(e, folder):
    """:func:`stored.state`, and the mirrors."""
    path = run_path(e, folder)
    named = read_tensors(path / "checkpoint.safetensors")[1].get("mirrors", {})
    mirrors = {c: read_tensors(path / "mirrors" / f"{c}-{t}.safetensors")[0] for c, t in named.items()}
    return state(e, folder), mirrors


def assert_all_the_same(a, b):
    assert_same(a[0], b[0])
    assert a[1].keys() == b[1].keys()
    assert all(torch.equal(x, b[1][c][n]) for c, m in a[1].items() for n, x in m.items())


def test_kill_9_leaves_personal_exits_mirrors_and_second_models_as_they_would_be(tmp_path):
    grid, rng, reached = [interruptible(m) for m in STATEFUL], random.Random(0), set()
    with Forks() as forks:
        forks.run(grid, tmp_path / "whole")
        while forks.run(grid, tmp_path / "parts", at_operation=rng.randrange(20, 150))["ends"] == [-9]:
            reached |= {p.read_bytes() for p in (tmp_path / "parts").rglob("checkpoint.safetensors")}
    assert len(reached) > 5
    for e in grid:
        assert_all_the_same(everything(e, tmp_path / "whole"), everything(e, tmp_path / "parts"))
    held = {e.method: len(everything(e, tmp_path / "whole")[1]) for e in grid}
    assert all(held[m] >= 2 for m in ("cafedistill", "fedamp", "pfedgraph", "fedpac")) and not held["ditto"]
    assert_nothing_left_over(tmp_path / "parts")


def test_memory_of_many_clients_with_personal_exits_does_not_grow(tmp_path):
    """A population of 100,000: what a run holds in memory follows from the sampled, not from all."""
    e = experiment(
        "cafedistill", num_clients=100_000, clients_per_round=10, partition="drawn", examples_per_client=5, rounds=12,
        test_split="central", local_epochs=1,
    )  # fmt: skip
    done = run(e, Execution(workers=1), tmp_path, progress=False, checkpoint_seconds=0)
    for folder in ("clients", "mirrors"):
        assert len(list((done.path / folder).iterdir())) >= 115  # 12 rounds of 10 clients, hardly ever one twice
    f = build_federation(e)
    memories, mirrors = ClientFiles(tmp_path / "a"), ClientFiles(tmp_path / "b")
    for r in run_rounds(f, ONE, memories=memories, mirrors=mirrors):
        memories.write(r.t), mirrors.write(r.t)
        assert not memories.changed and not mirrors.changed
        held = r.server.mirrors
        assert isinstance(held, Overlay) and len(held.changes) == 10 and held.maps[1] is mirrors
