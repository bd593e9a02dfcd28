"""What a number may depend on: not on the order of the test set, on what nobody holds, or on labels that say nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib import Execution, Experiment, build_federation, register_data, run, run_rounds
from fedlib.data import federated
from fedlib.engine import evaluation, serving
from fedlib.engine.evaluation import evaluate, exit_logits, served_parts
from fedlib.engine.federation import with_caches
from fedlib.engine.lab import ServerLab
from fedlib.methods import METHODS
from fedlib_lab.rivals.ranks import Ranks
from tests.helpers.granted import few_blocks, granted

ONE = Execution(workers=1)
rng = np.random.default_rng(0)


@pytest.fixture
def sorted_digits(tiny):
    """A federation whose test pictures are sorted by class, as folders of pictures are, and how to put it in any order."""

    def reordered(f, order):
        x, y = f.data.test_inputs[order], f.data.test_labels[order]
        return with_caches(replace(f, data=replace(f.data, test_inputs=x, test_labels=y)))

    def build(**changes):
        values = dict(num_train=150, num_test=90, num_clients=5, clients_per_round=5, rounds=1, augment="none")
        f = build_federation(tiny.replace(**values | dict(finetune="full", finetune_options={}) | changes))
        f = reordered(f, f.data.test_labels.argsort())
        *_, r = run_rounds(f, ONE)
        return f, r.server

    return build, reordered


CONVNETS = {
    "resnet": dict(backbone="resnet8", num_exits=3),
    "pre-activation": dict(backbone="preresnet20", num_exits=1),
    "norms in exits": dict(backbone="resnet8", num_exits=3, exit_head="convolutions"),
    "several scales": dict(backbone="msdnet12_slim", num_exits=2),
    "plain": dict(backbone="convnet3_slim", num_exits=3),
}


@pytest.mark.parametrize("policy", ["batch", "tracked", "static", "local"])
@pytest.mark.parametrize("net", CONVNETS)
def test_no_answer_depends_on_the_order_of_the_test_set_or_on_how_many_run_at_once(
    sorted_digits, monkeypatch, net, policy
):
    build, reordered = sorted_digits
    if net == "plain" and policy in ("static", "local"):
        return  # without batch norm that is refused
    f, server = build(method="fedavg", options={"exits": "all"}, batch_norm=policy, **CONVNETS[net])
    part, order = served_parts(f, server)[-1], torch.from_numpy(rng.permutation(90))
    sorted_by_class = exit_logits(f, server, part)
    assert sorted_by_class[-1].std(0).max() > 1e-4
    mixed = exit_logits(reordered(f, order), server, part)
    torch.testing.assert_close(mixed, sorted_by_class[:, order], rtol=1e-3, atol=1e-3)
    monkeypatch.setattr(evaluation, "BATCH", 20)
    monkeypatch.setattr(evaluation, "AT_ONCE", 50 * f.model.backbone.spec.numbers(1)[0])
    if policy != "static" and net != "several scales":  # statistics of batches of training examples; half a minute
        torch.testing.assert_close(exit_logits(f, server, part), sorted_by_class, rtol=1e-3, atol=1e-3)


def test_statistics_of_several_batches_are_those_of_one_pass(sorted_digits, monkeypatch):
    """What a plain net gives in training mode, on all test pictures at once."""
    build, _ = sorted_digits
    f, server = build(method="fedavg", backbone="resnet8", num_exits=3, options={"exits": "all"})
    part = f.setting.full()
    evaluation.central_forward(f, server, part).place_(training=True)
    with torch.no_grad():
        want = f.model(f.data.view(f.data.test_inputs, (3, 32, 32), torch.arange(90))[None])[:, 0]
    for at_once in (2**30, 7 * f.model.backbone.spec.numbers(1)[0]):
        monkeypatch.setattr(evaluation, "AT_ONCE", at_once)
        torch.testing.assert_close(exit_logits(f, server, part), want, rtol=1e-3, atol=1e-4)
    assert all(m.running_mean is None for m in f.model.modules() if hasattr(m, "running_mean"))


@pytest.fixture
def spoiled(monkeypatch):
    """Pictures of one class each by brightness, and the same with noise in every training picture that nobody holds."""
    y = np.arange(400) % 4
    x = np.clip(rng.normal(50 + 50 * y[:, None, None], 30, (400, 32, 32)), 0, 255).astype(np.uint8)

    def both(**changes):
        register_data("whole", (x[:300], y[:300]), (x[300:], y[300:]))
        few = dict(dataset="whole", num_clients=5, clients_per_round=5, rounds=1, augment="none", pretrained=False)
        e = Experiment(**few | changes)
        f = build_federation(e)
        used = np.union1d(f.data.holdings.held(), f.data.public)
        other = rng.integers(0, 256, (300, 32, 32), dtype=np.uint8)
        other[used] = x[used]
        assert 0 < len(used) < 300
        register_data("spoiled", (other, y[:300]), (x[300:], y[300:]))
        return f, build_federation(e.replace(dataset="spoiled"))

    return both


@pytest.mark.parametrize("method", METHODS)
def test_pictures_that_nobody_holds_change_nothing(spoiled, monkeypatch, method):
    lora = issubclass(METHODS[method], Ranks)
    mode = dict(finetune="lora", finetune_options={"r": 4}) if lora else dict(finetune="full")
    net = dict(backbone=few_blocks(monkeypatch, method), method=method, num_train=60, test_split="like_train")
    found = []
    for f in spoiled(**mode, **net | granted(method)):
        memories = {}
        *_, r = run_rounds(f, ONE, memories=memories)
        found.append({k: x for k, x in r.metrics.items() if k != "right"})
    assert found[0] == found[1]


@pytest.mark.parametrize("policy", ["batch", "tracked", "static", "local"])
@pytest.mark.parametrize(
    "left_out",
    [
        dict(num_train=60),
        dict(validation_fraction=0.5, evaluate_on="validation"),
        dict(partition="drawn", examples_per_client=10, num_train=60),
        dict(partition="dirichlet", num_clients=7, num_train=299),  # equal sizes: 42 each, 5 are nobody's
    ],
    ids=["num_train", "validation", "drawn", "remainder"],
)
def test_no_statistic_reads_pictures_that_nobody_holds(spoiled, left_out, policy):
    net = dict(method="fedavg", finetune="full", backbone="resnet8", num_exits=3, batch_norm=policy)
    if "evaluate_on" in left_out:  # validation pictures are answered, so they stay: others are spoiled
        left_out = left_out | {"num_train": 100}
    first, second = spoiled(**{"partition": "iid"} | net | left_out)
    assert torch.equal(first.data.mean, second.data.mean) and torch.equal(first.data.std, second.data.std)
    if "evaluate_on" in left_out:
        return
    answers = []
    for f in (first, second):
        *_, r = run_rounds(f, ONE)
        answers.append(exit_logits(f, r.server, served_parts(f, r.server)[-1]))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-6)


def test_public_pictures_are_answered_in_an_order_of_the_seeds_where_norms_see_their_neighbours(spoiled):
    f, _ = spoiled(
        method="fedavg", finetune="full", backbone="resnet8", num_exits=3, num_train=100, public_fraction=0.5
    )
    rows = ServerLab(f.data, f.model, f.setting, 8).rows.numpy()
    assert sorted(rows) == f.data.public.tolist() and not np.array_equal(rows, f.data.public)


def oracle(f, server, memories, ids=None):
    for i in range(f.data.num_clients):
        if len(rows := f.data.client_test(i)):
            y = f.data.test_labels[torch.from_numpy(rows)]
            yield [i], answer_of(f, y)[:, None], y[None], [len(rows)]


def answer_of(f, labels):
    """Outputs (E, N, C), or (E, N, 1), that are right."""
    of_class = lambda: 9.0 * torch.nn.functional.one_hot(labels, len(f.data.classes)).float()  # noqa: E731
    right = of_class() if f.data.classes else labels[:, None]
    return right.expand(f.setting.num_exits, *right.shape)


@pytest.mark.parametrize("metric", ["accuracy", "f1", "macro_f1", "matthews", "pearson"])
def test_who_answers_everything_right_has_a_hundred_whatever_the_labels(monkeypatch, metric):
    """Clients of Dirichlet 0.1 are mostly tested on one class; their correlation is undefined and does not count."""
    classes = 2 if metric == "f1" else 4
    y = np.arange(800) % classes
    x = rng.integers(0, 256, (800, 16, 16), dtype=np.uint8)
    register_data("asked", (x[:400], y[:400]), (x[400:], y[400:]), classes=list("abcd")[:classes])
    number = metric == "pearson"
    task = federated.Regression() if number else federated.Classification((metric,))
    for place in ("data.federated", "engine.federation"):
        monkeypatch.setattr(f"fedlib.{place}.task_of", lambda name: task)
    how = dict(partition="iid") if number else dict(partition="dirichlet", dirichlet_alpha=0.05)
    e = Experiment(dataset="asked", method="fedavg", num_clients=40, clients_per_round=4, augment="none", rounds=1,
                   pretrained=False, finetune="frozen", test_split="like_train", num_exits=2,
                   options={"exits": "all"}, **how)  # fmt: skip
    monkeypatch.setattr(federated, "target_of", lambda labels: "number" if number else "class")
    f = build_federation(e)
    if number:  # ten clients' labels are all alike
        f = replace(f, data=replace(f.data, test_labels=f.data.test_labels.float(), classes=()))
        f.data.test_labels[torch.from_numpy(np.concatenate([f.data.client_test(i) for i in range(10)]))] = 2
    monkeypatch.setattr(serving, "client_outputs", oracle)
    own = serving.evaluate_clients(f, f.server, {})
    assert own["accuracy"] == own["last"] == 100 and own["sd"] == 0 and own["exits"] == [100, 100]
    asked = [f.data.test_labels[rows].unique().tolist() for i in range(40) if len(rows := f.data.client_test(i))]
    without = {"matthews": lambda y: len(y) < 2, "pearson": lambda y: len(y) < 2, "f1": lambda y: 1 not in y}
    undefined = sum(map(without.get(metric, lambda y: False), asked))
    assert own.get("undefined", 0) == undefined and (undefined > 5) == (metric in without)
    assert own["clients"] == len(own["by_client"]) == len(asked) - undefined
    if not number:
        assert all(of["accuracy"] == 100 for of in own["leaving"].values())
    monkeypatch.setattr(evaluation, "exit_logits", lambda f, server, part: answer_of(f, f.data.test_labels))
    assert evaluate(f, f.server)["accuracy"] == 100


def test_what_is_undefined_of_everybody_is_refused_before_any_compute(monkeypatch):
    for place in ("data.federated", "engine.federation"):
        monkeypatch.setattr(f"fedlib.{place}.task_of", lambda name: federated.Classification(("matthews",)))
    x, y = rng.integers(0, 256, (80, 16, 16), dtype=np.uint8), np.arange(80) % 2
    e = Experiment(dataset="alike", num_clients=4, clients_per_round=2, partition="pathological", classes_per_client=1,
                   test_split="like_train", pretrained=False)  # fmt: skip
    register_data("alike", (x, y), (x, y))
    with pytest.raises(ValueError, match="test_split = 'like_train': every client's own test labels are alike"):
        build_federation(e)
    register_data("alike", (x, y), (x, 0 * y), classes=["a", "b"])
    with pytest.raises(ValueError, match="dataset = 'alike': all 80 labels that are tested on are alike, and matthews"):
        build_federation(e.replace(test_split="central"))


@pytest.mark.parametrize("broken", ["nan", "inf", "huge"])
@pytest.mark.parametrize("exit", [0, 1])
def test_a_run_whose_central_answers_are_no_numbers_has_diverged(tiny, monkeypatch, tmp_path, broken, exit):
    """Of one exit or of the last; numbers so large that no loss of them is finite are none."""
    values = dict(num_exits=2, rounds=1, finetune="frozen", finetune_options={}, augment="none", num_clients=4)
    e = tiny.replace(method="fedavg", options={"exits": "all"}, clients_per_round=2, **values)
    original = exit_logits

    def spoil(*asked):
        out = original(*asked).clone()
        out[exit, 3, 2] = {"nan": torch.nan, "inf": torch.inf, "huge": 1e30}[broken]
        return out

    monkeypatch.setattr(evaluation, "exit_logits", spoil)
    done = run(e, folder=tmp_path)
    assert done.summary["status"] == "diverged" and done.summary["nonfinite"] == 1
    with pytest.raises(FloatingPointError, match="round 1: answers are not finite"):
        list(run_rounds(build_federation(e.replace(nonfinite="fail")), ONE))


@pytest.mark.parametrize("flat", [(2,), (0, 1, 2)], ids=["one channel", "all"])
def test_a_channel_that_is_the_same_everywhere_does_not_divide_by_zero(flat):
    x, y = rng.integers(0, 256, (60, 3, 8, 8), dtype=np.uint8), np.arange(60) % 2
    x[:, list(flat)] = 77
    register_data("flat", (x, y), (x, y))
    data = build_federation(Experiment(dataset="flat", num_clients=4, clients_per_round=2, pretrained=False)).data
    assert data.std[list(flat)].eq(1).all() and data.std.gt(0).all()
    assert data.view(data.inputs, (3, 32, 32), torch.arange(60)).isfinite().all()
