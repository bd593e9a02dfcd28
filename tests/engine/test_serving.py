"""Clients that share a backbone run it as one batch: the same answers, in about the time of the central test set."""

import time
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.engine import serving
from fedlib.engine.evaluation import central_forward, exit_logits
from fedlib.engine.forward import Forward
from fedlib.methods import METHODS, Member, Round, Serving
from fedlib_lab.rivals.ranks import Ranks
from tests.helpers.granted import few_blocks, granted

ONE = Execution(workers=1)


def trained(tiny, method, **changes):
    values = dict(method=method, budgets="maximum", num_train=150, num_test=70, num_clients=5, clients_per_round=5,
                  rounds=1, finetune="full", finetune_options={}, num_exits=2, test_split="like_train")  # fmt: skip
    f, memories = build_federation(tiny.replace(**values | changes)), {}
    *_, r = run_rounds(f, ONE, memories=memories)
    return f, r.server, memories


def answers(f, server, memories):
    found = {}
    for ids, outputs, _, counts in serving.client_outputs(f, server, memories):
        found |= {k: outputs[:, i, : counts[i]] for i, k in enumerate(ids)}
    return found


@pytest.mark.parametrize("method", METHODS)
def test_no_client_answers_at_another_scale_than_it_trains_at(tiny, monkeypatch, method):
    """In a transformer outputs divided by another number are another function."""
    mode = {} if issubclass(METHODS[method], Ranks) else dict(finetune="full", finetune_options={})
    net = dict(backbone=few_blocks(monkeypatch, method), test_split="like_train")
    f = build_federation(tiny.replace(method=method, **mode, **net, **granted(method)))
    clients = f.clients(range(f.data.num_clients))
    r = Round(1, tuple(clients), f.setting)
    r = replace(r, notes=f.method.prepare(f.server, r))
    for client in clients:
        trained = {m.part.scale for m in f.method.members(client, f.server, r) if m.trains}
        assert {m.part.scale for m in f.method.serve(client, f.server, r).members} <= trained


NETS = {
    "maps": dict(backbone="resnet8", batch_norm="tracked", augment="none", num_exits=3),
    "flat maps": dict(backbone="convnet3_slim", augment="none", num_exits=3),
    "tokens": dict(),
    "text": dict(dataset="docstrings", backbone="transformer4_slim", augment="none", num_exits=4),
}


@pytest.mark.parametrize("method", ["fedper", "fedavg", "fedrod", "cafedistill"])
@pytest.mark.parametrize("net", NETS)
def test_a_shared_backbone_runs_once_and_every_client_answers_as_before(tiny, monkeypatch, net, method):
    options = {"options": {"exits": "all"}} if method == "fedavg" else {}
    run, taken = trained(tiny, method, **NETS[net], **options), []
    original = Forward.as_one
    monkeypatch.setattr(Forward, "as_one", lambda *a: taken.append(1) or original(*a))
    together = answers(*run)
    assert taken
    monkeypatch.setattr(Forward, "shares_backbone", lambda *a: False)
    apart = answers(*run)
    assert together.keys() == apart.keys() and len(together) == 5
    for k, x in apart.items():
        torch.testing.assert_close(together[k], x, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "method, changes",
    [
        ("local", NETS["flat maps"]),  # a backbone each
        ("fedper", NETS["maps"] | {"batch_norm": "batch"}),  # answers depend on who shares a batch
        ("fedper", NETS["maps"] | {"batch_norm": "static"}),
        ("fedper", NETS["maps"] | {"batch_norm": "local"}),  # statistics of one's own
        ("reefl", {}),  # exits hand tokens back
    ],
)
def test_who_does_not_share_a_backbone_runs_apart(tiny, monkeypatch, method, changes):
    def refuse(*_):
        raise AssertionError("they do not share it")

    run = trained(tiny, method, **changes)
    monkeypatch.setattr(Forward, "as_one", refuse)
    assert len(answers(*run)) == 5


@pytest.mark.parametrize("policy", ["batch", "tracked", "static"])
@pytest.mark.parametrize("method", ["fedper", "scalefl", "heterofl"])
def test_what_a_client_answers_depends_on_nobody_who_answers_beside_it(tiny, monkeypatch, method, policy):
    """Alone, all together, and in parts of any size; with statistics of the batch these are the whole test set's."""
    options = {"scalefl": {"widths": [0.5, 0.75, 1.0]}, "heterofl": {"rates": [0.5, 1.0]}}.get(method, {})
    one_exit = {"num_exits": 1} if method == "heterofl" else {}
    net = NETS["maps"] | {"batch_norm": policy, "options": options, "budgets": "uniform"} | one_exit
    f, server, memories = trained(tiny, method, **net)
    alone = {}
    for client in range(5):
        alone |= {k: x for ((k,), x, *_) in serving.client_outputs(f, server, memories, [client])}
    sizes = {k: x.shape[2] for k, x in alone.items()}
    assert len(sizes) == 5 and len(set(sizes.values())) > 1 and max(sizes.values()) > 10
    for at_once, clients in ((250, 50), (10, 50), (40, 2)):
        monkeypatch.setattr(serving, "at_once", lambda f, n=at_once: n)
        monkeypatch.setattr(serving, "CLIENTS", clients)
        for k, x in answers(f, server, memories).items():
            torch.testing.assert_close(x, alone[k][:, 0], rtol=1e-3, atol=1e-4)


def test_a_clients_statistics_are_those_of_all_its_test_examples(tiny, monkeypatch):
    """The global model on one client's rows in one pass, and nothing else, is what it answers."""
    monkeypatch.setattr(serving, "at_once", lambda f: 10)
    f, server, memories = trained(tiny, "fedavg", **NETS["maps"] | {"batch_norm": "batch", "options": {"exits": "all"}})
    central_forward(f, server, f.setting.full()).place_(training=True)
    for k, x in answers(f, server, memories).items():
        rows = torch.from_numpy(f.data.client_test(k))
        with torch.no_grad():
            want = f.model(f.data.view(f.data.test_inputs, f.setting.spec.input_shape, rows)[None])
        torch.testing.assert_close(x, want[:, 0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", ["fedper", "heterofl"])
def test_outputs_of_classes_that_a_client_lacks_are_zero_only_where_asked(tiny, method):
    one_exit = {"num_exits": 1, "options": {"rates": [0.5, 1.0]}} if method == "heterofl" else {}
    net = NETS["flat maps"] | {"partition": "pathological", "classes_per_client": 4, "dirichlet_alpha": 1.0} | one_exit
    for asked in (False, True):
        f, server, memories = trained(tiny, method, **net, test_mask=asked)
        for k, x in answers(f, server, memories).items():
            absent = f.setting.label_counts(k) == 0
            assert absent.any() and x[..., absent].eq(0).all() == asked and x[..., ~absent].ne(0).any()


def test_a_mask_needs_classes_and_clients_own_test_sets(tiny):
    with pytest.raises(ValueError, match="test_mask = True has no effect with test_split = 'central'"):
        build_federation(tiny.replace(test_mask=True))
    with pytest.raises(ValueError, match="test_mask = True is for classes"):
        build_federation(tiny.replace(
            method="fedavg", test_mask=True, test_split="like_train", dataset="squad", backbone="bert_micro",
            augment="none", finetune="full", finetune_options={},
        ))  # fmt: skip


@pytest.mark.parametrize(
    "method, changes",
    [
        ("fedper", NETS["maps"] | {"batch_norm": "batch"}),
        ("fedper", NETS["maps"] | {"batch_norm": "static"}),  # statistics found anew for each group of clients
        ("ditto", NETS["flat maps"]),
        ("fedrod", {}),  # a head is tuned before the answer
        ("reefl", {"budgets": "uniform"}),
        ("depthfl", {"finetune": "loha", "budgets": "uniform"}),
    ],
)
def test_threads_answer_for_some_clients_each_and_change_no_answer(tiny, monkeypatch, method, changes):
    """Each has modules of its own over the same tensors, and one core of those that PyTorch's threads have."""
    monkeypatch.setattr(serving, "CLIENTS", 2)
    run, seen = trained(tiny, method, **changes), []
    original, before = serving._answer, torch.get_num_threads()

    def record(f, model, *rest):
        seen.append((model, torch.get_num_threads()))
        return original(f, model, *rest)

    monkeypatch.setattr(serving, "_answer", record)
    found = {}
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found[threads] = answers(*run)
    finally:
        torch.set_num_threads(before)
    half = len(seen) // 2
    assert half >= 3 and {id(m) for m, _ in seen[:half]} == {id(run[0].model)}
    models = {id(m): m for m, _ in seen[half:]}
    assert len(models) == 2 and id(run[0].model) not in models and {t for _, t in seen[half:]} == {1}
    for k, x in found[1].items():
        torch.testing.assert_close(found[2][k], x, rtol=1e-3, atol=1e-4)


def test_clients_without_the_only_exit_that_answers_are_refused_before_compute(tiny):
    """Of depth prefixes all but the deepest; what they get was no number, and nothing said why."""

    @dataclass(frozen=True)
    class LastAnswers(METHODS["decoupled"]):
        last_answers = True

    @dataclass(frozen=True)
    class Whole(LastAnswers):
        def serve(self, client, server, r):
            return Serving((Member(client, r.setting.full()),))

    METHODS["last_answers"], METHODS["whole"] = LastAnswers, Whole
    try:
        e = tiny.replace(method="last_answers", options={}, num_exits=2, test_split="like_train")
        told = r"last_answers: last_answers = True, but clients of budget 0 are served a model without the last exit; allowed:"
        with pytest.raises(ValueError, match=told):
            build_federation(e)
        build_federation(e.replace(test_split="central"))
        build_federation(e.replace(budgets="maximum"))
        build_federation(e.replace(method="whole"))
    finally:
        del METHODS["last_answers"], METHODS["whole"]


def test_a_hundred_clients_cost_little_more_than_the_central_test_set(tiny):
    """CPU seconds of the same 1,000 images, the best of three; 1.1 times was measured."""
    f, server, memories = trained(
        tiny, "fedper", backbone="convnet3", augment="none", num_exits=3, num_clients=100, clients_per_round=2,
        num_train=2000, num_test=1000, partition="dirichlet",
    )  # fmt: skip

    def seconds(work):
        began = time.process_time()
        work()
        return time.process_time() - began

    central = [lambda: exit_logits(f, server, f.setting.full()), lambda: answers(f, server, memories)]
    best = [min(seconds(work) for _ in range(3)) for work in central]
    assert best[1] < 1.6 * best[0]  # with room for a busy machine


@pytest.mark.parametrize("method", ["fedper", "depthfl", "heterofl"])
def test_beside_what_clients_get_stands_what_always_guessing_gives_and_what_their_labels_add(tiny, method):
    """By a plain loop over clients: the most frequent training label, and log(n + 1) on every class's output."""
    one_exit = {"num_exits": 1, "options": {"rates": [0.5, 1.0]}} if method == "heterofl" else {}
    f, server, memories = trained(tiny, method, **NETS["flat maps"] | one_exit)
    found, r = serving.evaluate_clients(f, server, memories), Round(server.t, (), f.setting)
    prior, last_prior, majority = [], [], []
    for k, x in answers(f, server, memories).items():
        counts = np.bincount(f.data.labels.numpy()[f.data.client(k)], minlength=len(f.data.classes))
        own = f.data.test_labels[f.data.client_test(k)]
        held = f.method.serve(f.clients([k])[0], server, r).members[0].part.exits
        with_prior = (x + torch.tensor(np.log(counts + 1.0))).argmax(-1)[[f.answering.index(j) for j in held]]
        prior.append(100 * (with_prior == own).double().mean().item())
        last_prior.append(100 * (with_prior[-1] == own).double().mean().item())
        majority.append(100 * (own == int(counts.argmax())).double().mean().item())
    for name, wanted in (("prior", prior), ("last_prior", last_prior), ("majority", majority)):
        assert found[name] == pytest.approx(np.mean(wanted), abs=1e-3)
        assert found[f"{name}_sd"] == pytest.approx(np.std(wanted), abs=1e-3)
    assert found["majority"] > 100 / len(f.data.classes) and found["prior"] != found["accuracy"]
