"""Members, stages, personal parameters, teachers, payloads, mirrors: against plain loops and by hand."""

import re
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.core.slices import NOTHING, Slice
from fedlib.engine import rounds
from fedlib.engine.cohort import Cohort
from fedlib.engine.executors import plan_round
from fedlib.methods import METHODS, Member, Method, Round, Serving, Stage, register
from fedlib.methods.losses import cross_entropies

ONE = Execution(workers=1)


@pytest.fixture
def method(monkeypatch):
    """Register a method for one test: ``method(cls)`` -> its name."""

    def add(cls):
        monkeypatch.setitem(METHODS, cls.__name__.lower(), dataclass(frozen=True)(cls))
        return cls.__name__.lower()

    return add


def experiment(tiny, name, **changes):
    fields = dict(method=name, options={}, num_train=120, num_test=60, num_clients=4, clients_per_round=4, rounds=2)
    return tiny.replace(**fields | {"finetune": "full", "finetune_options": {}, "num_exits": 2} | changes)


def cohort_of(f, t=1, memories=None, **changes):
    r = Round(t, tuple(f.sample_clients(t)), f.setting)
    r = replace(r, notes=f.method.prepare(f.server, r))
    (members,) = plan_round(f, f.server, r, 1, None)
    return Cohort(f, f.model, f.server, r, members, memories or {})


def test_a_client_remembers_several_keys(tiny):
    f = build_federation(experiment(tiny, "depthfl"))
    first = cohort_of(f)
    name = next(iter(first.params))
    ones = {name: torch.ones_like(first.params[name])}
    first.remember("a", ones)
    first.remember("b", {name: 2 * ones[name]})
    client = first.clients[0].id
    assert set(first.new_memories[client]) == {f"a/{name}", f"b/{name}"}
    second = cohort_of(f, memories=first.new_memories)
    second.remember("b", {name: 3 * ones[name]})  # the other key stays
    assert second.new_memories[client][f"a/{name}"].eq(1).all() and second.new_memories[client][f"b/{name}"].eq(3).all()


def test_exits_that_are_not_nested_train_and_count_their_holders_alone(tiny, method):
    class Skipping(Method):
        def slice_for(self, client, server, r):
            exits = {0: (0, 2), 1: (1, 2), 2: (0, 1, 2)}[client.id % 3]
            return Slice.prefix(r.setting.exit_units[-1] + 1, exits)

    f = build_federation(experiment(tiny, method(Skipping), num_exits=3, num_clients=6, clients_per_round=6))
    cohort = cohort_of(f)
    name = "head.exits.0.linear.weight"
    holders = [i for i, c in enumerate(cohort.clients) if c.id % 3 != 1]
    assert list(cohort.rows[name]) == holders and cohort.held[0].tolist() == [
        float(c.id % 3 != 1) for c in cohort.clients
    ]
    f.method.local_update(cohort)
    alone = []
    for i in holders:
        r = Round(1, (cohort.clients[i],), f.setting)
        single = Cohort(f, f.model, f.server, r, f.method.members(cohort.clients[i], f.server, r), {})
        f.method.local_update(single)
        alone.append(single.params[name][0])
    torch.testing.assert_close(cohort.params[name], torch.stack(alone), rtol=0, atol=1e-5)
    mean = f.method.summarise(f.method.upload(cohort), f.setting)
    assert mean.count[name].item() == 4 and mean.count["head.exits.2.linear.weight"].item() == 6


def test_a_second_training_of_a_round_draws_anew(tiny):
    f = build_federation(experiment(tiny, "fedavg", num_exits=1))
    seen = []

    def loss(batch):
        seen.append(batch.labels[0].tolist())
        return cross_entropies(batch).sum(0)

    cohort = cohort_of(f)
    cohort.train(loss)
    first, n = list(seen), len(seen)
    cohort.train(loss)
    assert seen[n:] != first and sorted(sum(seen[n:], [])) == sorted(sum(first, []))
    again = cohort_of(f)
    seen.clear()
    again.train(loss)
    assert seen == first  # a function of (seed, round, client)


def test_what_a_stage_does_not_train_or_the_loss_not_reach_stands_still(tiny):
    f = build_federation(experiment(tiny, "fedavg", num_exits=1, weight_decay=0.1, momentum=0.9))
    cohort = cohort_of(f)
    cohort.train(f.method.local_loss, Stage(lambda info: info.kind == "head"))
    moved = {n for n, p in cohort.params.items() if not torch.equal(p, cohort.start[n])}
    assert moved and all(n.startswith("head.") for n in moved)
    cohort = cohort_of(f)
    cohort.train(lambda batch: batch.outputs.mean((0, 2, 3)) * 0 + cohort.params["head.exits.0.linear.bias"].sum(1))
    assert cohort.params["head.exits.0.linear.bias"].ne(cohort.start["head.exits.0.linear.bias"]).any()


@pytest.mark.parametrize("workers", [1, 2])
def test_personal_heads_stay_with_their_clients(tiny, method, workers, tmp_path):
    class Personal(Method):
        def personal(self, info):
            return info.exit is not None

    e = experiment(tiny, method(Personal), test_split="like_train", evaluate_every=1)
    f, memories = build_federation(e), {}
    *_, r = run_rounds(f, Execution(workers=workers, executor="threads"), memories=memories)
    heads = {n for n in f.server.params if n.startswith("head.")}
    assert all(torch.equal(r.server.params[n], f.server.params[n]) for n in heads)  # nothing of them travelled
    assert any(not torch.equal(r.server.params[n], p) for n, p in f.server.params.items() if n not in heads)
    weight = "model/head.exits.1.linear.weight"
    assert set(memories[0]) <= {f"model/{n}" for n in heads} and not torch.equal(
        memories[3][weight], memories[1][weight]
    )
    assert r.metrics["personal"]["clients"] == 4 and set(r.metrics["personal"]["by_client"]) == set("0123")
    start = cohort_of(f, 2, memories).start["head.exits.0.linear.weight"]
    assert len({tuple(row.flatten().tolist()) for row in start}) > 1  # each starts from its own


def test_a_second_model_of_a_client_and_a_pull_to_what_was_received_by_a_plain_loop(tiny, method):
    """Ditto: v <- v - lr (grad F(v) + mu (v - w)), w the global model received; w itself trains plainly."""

    class Pulled(Method):
        def members(self, client, server, r):
            whole = r.setting.full()
            return [Member(client, whole), Member(client, whole, name="own", keeps="all", upload=NOTHING)]

        def local_update(self, cohort):
            received, own = cohort.received, cohort.rows_named("own")
            cohort.train(self.local_loss, gradient=lambda n, p: own(n) * 0.5 * (p - received[n]))

        def serve(self, client, server, r):
            return Serving((self.members(client, server, r)[1],))

    e = experiment(tiny, method(Pulled), num_clients=2, clients_per_round=2, augment="none", lr=0.1, clip_value=None)
    f, memories = build_federation(e), {}
    assert len(plan_round(f, f.server, Round(1, tuple(f.sample_clients(1)), f.setting), 1, None)[0]) == 4
    *_, last = run_rounds(f, ONE, memories=memories)
    plain = build_federation(experiment(tiny, "exclusivefl", budgets="maximum", num_clients=2, clients_per_round=2, augment="none", lr=0.1, clip_value=None))  # fmt: skip
    *_, expected = run_rounds(plain, ONE)
    for name, p in expected.server.params.items():  # the first model alone reaches the server
        torch.testing.assert_close(last.server.params[name], p, rtol=0, atol=1e-5)
    name, v = "head.exits.1.linear.bias", {}
    servers = [f.server, *(r.server for r in run_rounds(plain, ONE))]
    for t in (1, 2):  # client 0's own model, one step at a time, by autograd on a single model
        server, r = servers[t - 1], Round(t, tuple(f.sample_clients(t)), f.setting)
        single = Cohort(f, f.model, server, r, [Member(r.clients[0], f.setting.full())], {})
        single.params = {n: (v[n] if v else p.clone()) for n, p in single.params.items()}
        w = {n: server.params[n][None] for n in single.params}
        single.train(f.method.local_loss, gradient=lambda n, p, w=w: 0.5 * (p - w[n]))
        v = single.params
    torch.testing.assert_close(memories[0][f"own/{name}"], v[name][0], rtol=0, atol=1e-5)
    assert (memories[0][f"own/{name}"] - last.server.params[name]).abs().max() > 1e-4


def test_a_teacher_answers_with_what_was_received_and_gets_no_gradient(tiny, method):
    answers = []

    class Taught(Method):
        def members(self, client, server, r):
            part = self.slice_for(client, server, r)
            return [Member(client, part), Member(client, part, name="teacher", trains=False, upload=NOTHING)]

        def local_loss(self, batch):
            teacher = batch.teacher("teacher")
            answers.append((teacher, batch.outputs.detach()))
            assert not teacher.requires_grad
            return cross_entropies(batch).sum(0) + (batch.outputs - teacher).square().mean((0, 2, 3))

    f = build_federation(experiment(tiny, method(Taught), num_train=200))
    cohort = cohort_of(f)
    f.method.local_update(cohort)
    torch.testing.assert_close(answers[0][0], answers[0][1], rtol=0, atol=1e-5)  # the first step: the same model
    assert (answers[-1][0] - answers[-1][1]).abs().max() > 1e-4
    f.method.local_update(cohort)


def test_payloads_start_models_and_reach_the_cohort(tiny, method):
    class Paid(Method):
        def members(self, client, server, r):
            bias = {"head.exits.0.linear.bias": torch.full((10,), float(client.id))}
            extra = {"weights": torch.tensor([client.id, -1.0])}
            part = self.slice_for(client, server, r)
            return [Member(client, part, payload={"start": bias, "students": extra})]

        def local_update(self, cohort):
            cohort.send("found", {"head.exits.0.linear.bias": cohort.start["head.exits.0.linear.bias"]})
            cohort.send("students", cohort.payload("students"))
            super(type(self), self).local_update(cohort)

        def aggregate(self, server, arrived, r):
            for c in r.clients:
                assert arrived.extras[c.id]["found/head.exits.0.linear.bias"].tolist() == [float(c.id)] * 10
                assert arrived.extras[c.id]["students/weights"].tolist() == [c.id, -1.0]
            return Method.aggregate(self, server, arrived, r).with_mirrors({1: {"t": torch.tensor([float(r.t)])}})

    f = build_federation(experiment(tiny, method(Paid)))
    for execution in (ONE, Execution(workers=2, executor="threads")):
        mirrors = {}
        for r in run_rounds(f, execution, mirrors=mirrors):
            assert set(r.mirrors) == {1}
        assert mirrors[1]["t"].item() == 2


def test_an_upload_may_be_a_part_of_what_was_trained(tiny, method):
    """HeteroFL's classifier rows: client i sends the rows of two labels; the others keep the server's."""

    class Rows(Method):
        def members(self, client, server, r):
            part = self.slice_for(client, server, r)
            return [Member(client, part, upload=part.only(classes=range(2 * client.id, 2 * client.id + 2)))]

    f = build_federation(experiment(tiny, method(Rows), rounds=1))
    (last,) = run_rounds(f, ONE)
    name = "head.exits.0.linear.weight"
    changed = last.server.params[name].ne(f.server.params[name]).any(1)
    assert changed.tolist() == [True] * 8 + [False] * 2
    cohort = cohort_of(f)
    f.method.local_update(cohort)
    for row, i in enumerate(cohort.rows[name]):
        kept = range(2 * cohort.clients[i].id, 2 * cohort.clients[i].id + 2)
        torch.testing.assert_close(last.server.params[name][list(kept)], cohort.params[name][row][list(kept)], rtol=0, atol=1e-6)  # fmt: skip


def test_methods_that_need_models_get_them_whole(tiny, method):
    class Whole(Method):
        needs_models = True

        def aggregate(self, server, arrived, r):
            assert set(arrived.models) == {c.id for c in r.clients}
            mean = Method.aggregate(self, server, arrived, r)
            n = {c.id: c.num_examples for c in r.clients}
            name = "backbone.blocks.0.attn.q.weight"
            by_hand = sum(n[k] * m[name].double() for k, m in arrived.models.items()) / sum(n.values())
            torch.testing.assert_close(mean.params[name], by_hand.float(), rtol=0, atol=1e-6)
            return mean

    list(run_rounds(build_federation(experiment(tiny, method(Whole))), Execution(workers=2, executor="threads")))


def test_mirrors_lie_on_disk_in_the_checkpoints_consistency(tiny, method, tmp_path, monkeypatch):
    class Mirrored(Method):
        def prepare(self, server, r):
            return {"seen": torch.tensor([len(server.mirrors)])}

        def aggregate(self, server, arrived, r):
            bias = server.params["head.exits.0.linear.bias"]
            new = {c.id: {"bias": bias + r.notes["seen"]} for c in r.clients}
            return Method.aggregate(self, server, arrived, r).with_mirrors(new)

    e = experiment(tiny, method(Mirrored), rounds=4, clients_per_round=2, nonfinite="fail")
    whole = run(e, ONE, tmp_path / "whole", progress=False, checkpoint_seconds=0)
    original, steps = rounds.privatise, []

    def breaking(*arguments):
        steps.append(arguments)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(rounds, "privatise", breaking)
    with pytest.raises(KeyboardInterrupt):
        run(e, ONE, tmp_path / "broken", progress=False, checkpoint_seconds=0)
    resumed = run(e, ONE, tmp_path / "broken", progress=False, checkpoint_seconds=0)
    found = {p.name: p.read_bytes() for p in (resumed.path / "mirrors").iterdir()}
    assert found and found == {p.name: p.read_bytes() for p in (whole.path / "mirrors").iterdir()}
    assert resumed.summary["accuracy"] == whole.summary["accuracy"]


def test_scalefls_widest_clients_read_the_frozen_cache(tiny):
    f = build_federation(experiment(tiny, "scalefl_vit", finetune="frozen", augment="none", num_exits=4))
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    cohorts = [Cohort(f, f.model, f.server, r, members, {}) for members in plan_round(f, f.server, r, 1, None)]
    assert {c.clients[0].budget: c.forward.cache is not None for c in cohorts} == {
        0: False,
        1: False,
        2: False,
        3: True,
    }


@pytest.mark.parametrize("decorated", [dataclass(frozen=True), lambda cls: cls], ids=["no type", "no dataclass"])
def test_a_default_that_would_not_count_is_refused(decorated):
    """Python takes ``mu = 2.0`` for no field, and without ``@dataclass`` not ``mu: float = 2.0``: the base's counts."""

    class Mine(METHODS["fedprox"]):
        mu = 2.0
        weighting: str = METHODS["fedprox"].weighting

    with pytest.raises(ValueError, match="of mine: mu = 2.0 does not count; allowed: with a type, below @dataclass"):
        decorated(Mine)()


WRONG = [  # hook, what it gives, and what is said
    ("members", None, "members() = None: expected Iterable"),
    ("members", [None], "members(): one of them = None: expected Member"),
    ("slice_for", None, "a member's part, of slice_for(), = None: expected Slice"),
    ("upload", None, "upload() = None: expected Update"),
    ("summarise", None, "summarise() = None: expected MaskedMean"),
    ("aggregate", None, "aggregate() = None: expected Server"),
    ("serve", None, "serve() = None: expected Serving"),
    ("model_for", None, "model_for() = None: expected Slice"),
    ("model_for", (), "model_for() = (): expected Slice, got tuple"),
    ("model_for", (Slice.prefix(12, (0, 1)), 1), "model_for() = 1: expected Slice, got int"),
    ("init_server", None, "init_server() = None: expected Server"),
    ("num_budgets", 0, "num_budgets() = 0 must be at least 1"),
    ("client_budgets", [0, 1, 2, 0], "client_budgets() gave [0, 1, 2, 0]; allowed: 4 numbers, one a client, 0..1"),
    ("eligible", [0.0, 1.0], "eligible() gave [0.0, 1.0]; allowed: distinct ids"),
    ("exit_units", None, "exit_units() = None: expected Iterable"),
    ("exit_units", (5, 2), "exit_units() = [5, 2]; allowed: numbers of units that increase"),
    ("exit_units", (2.0, 5.0), "exit_units() = 2.0: expected int, got float"),
    ("exit_units", (5,), "odd: 1 exits, and clients of budget 1; allowed: an exit a budget"),
    ("place_exits", None, "place_exits() = None: expected Iterable"),
    ("place_exits", (5, 5), "place_exits() = [5, 5]; allowed: numbers of units that increase"),
    ("build_head", None, "build_head() = None: expected Head"),
    ("program", [1], "program() = [1]: expected Hashable, got list"),
    ("prepare", None, "prepare() = None: expected Mapping"),
    ("personal", None, "personal() = None: expected bool"),
]


@pytest.mark.parametrize(("hook", "given", "said"), WRONG)
def test_what_a_hook_gives_is_checked_where_it_is_asked(tiny, method, hook, given, said):
    name = method(type("Odd", (Method,), {hook: lambda self, *_: given}))
    with pytest.raises(ValueError, match=re.escape(said)):
        [*run_rounds(build_federation(experiment(tiny, name, rounds=1, test_split="like_train")), ONE)]


def test_what_a_frozen_backbone_keeps_for_skips_is_checked(tiny, method):
    name = method(type("Odd", (Method,), {"skips": lambda self, setting: None}))
    with pytest.raises(ValueError, match=re.escape("skips() = None: expected Collection")):
        build_federation(experiment(tiny, name, finetune="frozen", augment="none"))


VALUES = {
    "serve(): members = (): nothing would answer; allowed: a model or more": lambda: Serving(()),
    "serve(): one of its members = 1: expected Member": lambda: Serving((1,)),
    "Stage: units = 3: expected range": lambda: Stage(units=3),
    "Stage: trains = 'head': expected": lambda: Stage("head"),
    "Stage: without = 3: expected": lambda: Stage(without=3),
}


@pytest.mark.parametrize("said", VALUES)
def test_values_of_a_wrong_kind_are_refused_where_they_are_made(said):
    with pytest.raises(ValueError, match=re.escape(said)):
        VALUES[said]()


@pytest.mark.parametrize("keep", ["remember", "send"])
def test_what_a_client_keeps_or_sends_has_names(tiny, keep):
    with pytest.raises(ValueError, match=re.escape("to remember or send = 1.0: expected Mapping")):
        getattr(cohort_of(build_federation(experiment(tiny, "depthfl"))), keep)("a", 1.0)


def test_eligible_may_give_a_list(tiny, method):
    name = method(type("Listed", (Method,), {"eligible": lambda self, budgets, setting: [0, 2, 3]}))
    f = build_federation(experiment(tiny, name))
    assert {c.id for t in range(9) for c in f.sample_clients(t)} == {0, 2, 3}


@pytest.mark.parametrize("hook", ["eligible", "prepare", "slice_for", "aggregate"])
def test_a_hook_of_the_server_that_draws_from_a_global_generator_is_refused(tiny, method, hook):
    """Who was sampled, and what was averaged, followed from what else had drawn in the process."""

    def drawing(self, *given):
        np.random.rand()
        return getattr(Method, hook)(self, *given)

    f = build_federation(experiment(tiny, method(type("Draws", (Method,), {hook: drawing}))))
    with pytest.raises(ValueError, match="draws draws from NumPy's global generator; allowed: .*r.generator"):
        next(run_rounds(f, ONE))


def test_a_stage_goes_downhill_for_whole_epochs():
    for wrong in ({"lr": -0.1}, {"lr": float("nan")}, {"epochs": -1}, {"epochs": 1.5}):
        with pytest.raises(ValueError, match=f"Stage: {next(iter(wrong))} = "):
            Stage(**wrong)
    assert Stage(lr=torch.tensor([0.1, 0.0]), epochs=0).epochs == 0


WRONG_STAGES = {  # of twelve units and two exits
    "unit 12 is not there": {"units": range(2, 13)},
    "unit -1 is not there": {"units": range(-1, 12)},
    "unit 19 is not there": {"units": range(12), "without": {19}},
    "exit = 2 is not there": {"units": range(4), "exit": 2},
    "exit = -3 is not there": {"units": range(4), "exit": -3},
    "nothing answers at the end of units": {"units": range(4)},
    "nothing answers at the end of units .*, 3": {"units": range(3), "exit": 0, "without": {2}},
    "exit, without and cached have no effect without units": {"exit": 0},
}


@pytest.mark.parametrize("told", WRONG_STAGES)
def test_a_stage_of_what_is_not_there_is_refused(tiny, method, told):
    """A unit to leave out that is not there left out nothing, and an exit without units answered as all do."""

    class Odd(Method):
        def local_update(self, cohort):
            cohort.train(self.local_loss, Stage(**WRONG_STAGES[told]))

    with pytest.raises(ValueError, match=f"Stage: {told}"):
        list(run_rounds(build_federation(experiment(tiny, method(Odd))), ONE))


@pytest.mark.parametrize("trains", [True, False])
def test_a_first_round_that_changes_nothing_is_said(tiny, method, trains):
    class Idle(Method):
        def local_update(self, cohort):
            if trains:
                cohort.train(self.local_loss, Stage(lambda info: False))

    with pytest.warns(UserWarning, match="idle: round 1 changed no tensor and no client's memory"):
        list(run_rounds(build_federation(experiment(tiny, method(Idle), rounds=2)), ONE))


def test_a_misspelt_hook_is_said_and_what_is_no_method_refused(monkeypatch):
    """Nothing called it, so FedAvg ran under the method's name."""
    monkeypatch.setattr("fedlib.methods.METHODS", dict(METHODS))
    with pytest.warns(UserWarning, match=re.escape("method 'odd': local_updates() is no hook; did you mean local_up")):
        register("odd")(type("Odd", (Method,), {"local_updates": lambda self, cohort: None}))
    with pytest.raises(ValueError, match=re.escape("above a class that derives from Method")):
        register("odd")(type("Odd", (), {}))
