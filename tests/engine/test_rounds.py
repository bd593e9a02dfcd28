"""What a client can send that no mean should hold, and clients with next to nothing: reported, dropped, or refused."""

import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.core.storage import read_tensors
from fedlib.data import federated
from fedlib.methods.sliced.depthfl import DepthFL
from fedlib.methods.sliced.fedavg import FedAvg
from tests.helpers.plain_personal import experiment
from tests.helpers.stored import ONE, short


def poisoned(monkeypatch, method, bad, value=math.nan, seen=None):
    """Clients ``bad`` (all if None) return one entry ``value`` in their first tensor from round 2 on; losses stay."""
    original = method.local_update

    def update(self, cohort):
        original(self, cohort)
        if seen is not None:
            seen.append((cohort.t, cohort.update()))
        name = next(iter(cohort.params))
        for row, i in enumerate(cohort.rows[name]):
            if cohort.t >= 2 and (bad is None or cohort.clients[i].id in bad):
                cohort.params[name] = cohort.params[name].clone()
                cohort.params[name][row].view(-1)[-1] = value

    monkeypatch.setattr(method, "local_update", update)


def everyone(method, **changes):
    return short(method, num_train=80, num_clients=4, clients_per_round=4, num_test=20, **changes)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_record_ends_the_run_as_diverged(value, tmp_path, monkeypatch):
    """Finite losses do not hide it, not even in the last round."""
    poisoned(monkeypatch, FedAvg, {1}, value)
    for rounds in (2, 4):
        found = run(everyone("fedavg", rounds=rounds), ONE, tmp_path, progress=False)
        assert found.summary["status"] == "diverged" and found.summary["t"] == 2 and "dropped" not in found.summary


@pytest.mark.parametrize("execution", [ONE, Execution(workers=2, cohort_size=1, executor="threads")])
def test_drop_takes_the_mean_over_the_others(execution, monkeypatch):
    e, seen = everyone("fedavg", rounds=2, nonfinite="drop"), []
    poisoned(monkeypatch, FedAvg, {1, 3}, seen=seen)
    first, second = run_rounds(build_federation(e), execution)
    assert first.dropped == () and second.dropped == (1, 3) and not second.diverged and set(second.losses) == {0, 2}
    for name in second.server.params:
        total, weight = 0.0, 0
        for t, update in seen:
            for row, i in enumerate(update.rows[name]):
                client = update.clients[i]
                if t == 2 and client.id in (0, 2):
                    total, weight = total + client.num_examples * update.params[name][row].double(), weight + client.num_examples  # fmt: skip
        torch.testing.assert_close(second.server.params[name], (total / weight).float(), rtol=0, atol=1e-6)


def test_drop_counts_and_leaves_memories_alone(tmp_path, monkeypatch):
    poisoned(monkeypatch, DepthFL, {1})
    found = run(everyone("depthfl", rounds=3, nonfinite="drop"), ONE, tmp_path, progress=False, checkpoint_seconds=0)
    assert found.summary["status"] == "finished" and found.summary["dropped"] == 2
    assert [m["dropped"] for m in found.metrics] == [0, 1, 2] and all(
        math.isfinite(m["train_loss"]) for m in found.metrics
    )
    memories = read_tensors(found.path / "checkpoint.safetensors")[1]["memories"]
    assert memories == {"0": 3, "1": 1, "2": 3, "3": 3}  # client 1's is that of round 1


def test_a_round_in_which_every_client_is_dropped_leaves_the_server_as_it_was(tmp_path, monkeypatch):
    for method, cls in (("depthfl", DepthFL), ("fedavg", FedAvg)):
        with monkeypatch.context() as m:
            poisoned(m, cls, None)
            e = everyone(method, rounds=3, nonfinite="drop")
            one, two, three = run_rounds(build_federation(e), ONE)
            assert three.server.t == 3 and three.dropped == (0, 1, 2, 3) and not three.losses and not three.diverged
            for k, v in one.server.params.items():
                assert torch.equal(three.server.params[k], v)
            found = run(e, ONE, tmp_path, progress=False)
            assert found.summary["dropped"] == 8 and found.metrics[-1]["train_loss"] is None
            json.loads((found.path / "metrics.jsonl").read_text().splitlines()[-1], parse_constant=pytest.fail)


@pytest.mark.parametrize("execution", [ONE, Execution(workers=2)])
def test_fail_names_round_client_and_tensor_and_keeps_what_was_stored(execution, tmp_path, monkeypatch):
    e = everyone("fedavg", rounds=3, nonfinite="fail")
    with monkeypatch.context() as m:
        poisoned(m, FedAvg, {2})
        name = next(iter(build_federation(e).server.params))
        for _ in range(2):  # and again after a resume
            with pytest.raises(
                FloatingPointError, match=rf"round 2: client 2: {name} is not finite .nonfinite = 'fail'."
            ):
                run(e, execution, tmp_path, progress=False, checkpoint_seconds=0)
    done = run(
        e, execution, tmp_path, progress=False, accept="method"
    )  # what stood in the kit's place is part of a run
    assert done.summary["status"] == "finished"


def test_an_infinite_loss_counts_like_an_infinite_update():
    e = short("fedavg", finetune="full", lr=1e30, clip_value=None, rounds=3)
    with pytest.raises(FloatingPointError, match=r"round \d: client \d: [\w.]+ is not finite"):
        list(run_rounds(build_federation(e.replace(nonfinite="fail", evaluate_every=0)), ONE))
    with pytest.raises(FloatingPointError, match="round 1: answers are not finite"):  # where one looks before
        list(run_rounds(build_federation(e.replace(nonfinite="fail")), ONE))
    last = list(run_rounds(build_federation(e.replace(nonfinite="drop")), ONE))[-1]
    assert all(p.isfinite().all() for p in last.server.params.values()) and last.metrics["nonfinite"] == 1
    assert last.diverged  # what is left is finite, and too large to answer by


def test_a_server_that_overflows_on_finite_updates_is_diverged():
    """Even where bad clients are dropped: FedAdam's step leaves float32."""
    e = everyone("fedavg", rounds=2, nonfinite="drop", options={"aggregation": "fedadam", "server_lr": 1e39})
    assert next(iter(run_rounds(build_federation(e), ONE))).diverged


def test_the_policy_renames_no_stored_run():
    assert short("reefl").hash == short("reefl", nonfinite="record").hash != short("reefl", nonfinite="drop").hash


def with_sizes(monkeypatch, sizes):
    cuts = np.cumsum(sizes)
    monkeypatch.setattr(
        federated, "partition_examples", lambda kind, labels, *a: np.split(np.arange(cuts[-1]), cuts[:-1])
    )


@pytest.mark.parametrize("method", ["reefl", "depthfl", "inclusivefl", "scalefl_vit"])
def test_clients_with_one_example_train_and_those_with_none_are_never_sampled(method, monkeypatch):
    """(In a batch of one, autograd hands out one tensor as the gradient of class token and positions.)"""
    with_sizes(monkeypatch, [1, 0, 40, 1, 0, 33, 2, 0])
    e = short(method, finetune="full", finetune_options={}, rounds=2, local_epochs=2, momentum=0.5, weight_decay=0.1)
    f = build_federation(e)
    assert {c.id for t in range(20) for c in f.sample_clients(t)} == {0, 2, 3, 5, 6}
    *_, alone = run_rounds(f, Execution(workers=1, cohort_size=1))
    *_, together = run_rounds(build_federation(e), ONE)
    start = build_federation(e).server.params
    assert any((p - start[n]).abs().max() > 1e-4 for n, p in alone.server.params.items())
    for name, p in alone.server.params.items():
        torch.testing.assert_close(together.server.params[name], p, rtol=0, atol=3e-5)


def test_fewer_clients_with_examples_than_a_round_asks_for(monkeypatch):
    with_sizes(monkeypatch, [0, 5, 0, 0, 3, 0, 0, 0])
    (first, *_) = run_rounds(build_federation(short("fedavg", rounds=1)), ONE)
    assert set(first.losses) == {1, 4}


def test_no_eligible_client_with_an_example_is_refused_before_any_compute(tmp_path, monkeypatch):
    with_sizes(monkeypatch, [9, 9, 9, 0, 9, 9, 9, 0])  # ExclusiveFL samples clients 3 and 7 only
    with pytest.raises(ValueError, match="partition = 'dirichlet' leaves none of the 2 clients that exclusivefl can"):
        run(short("exclusivefl"), ONE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_huge_batch_size_costs_no_memory():
    """Batches are as large as the largest client, whatever is asked for."""
    e = short("fedavg", rounds=1)
    (huge,), (all_of_it,) = (list(run_rounds(build_federation(e.replace(batch_size=b)), ONE)) for b in (10**12, 500))
    assert all(torch.equal(p, all_of_it.server.params[n]) for n, p in huge.server.params.items())


@pytest.mark.parametrize("evaluate_every", [0, 1])
def test_a_run_whose_clients_tune_themselves_to_pieces_has_diverged(evaluate_every, tmp_path):
    """All that is sent stays finite; fifty epochs of tuning at that rate do not."""
    e = experiment("fedbabu", lr=10.0, options={"tune_epochs": 50}, evaluate_every=evaluate_every)
    found = run(e, ONE, tmp_path, progress=False)
    assert found.summary["t"] == 3 and all(math.isfinite(m["train_loss"]) for m in found.metrics)
    assert found.summary["status"] == "diverged" and found.summary["personal"]["nonfinite"] == 3
    with pytest.raises(FloatingPointError, match="client 0: its answers are not finite"):
        run(e.replace(nonfinite="fail"), ONE, tmp_path, progress=False)


WRONG = {
    "None; allowed: ((10,), torch.float32)": lambda n, p: {},
    "((1,), torch.float32); allowed: ((10,), torch.float32)": lambda n, p: {n: p[:1]},
    "((10,), torch.float64); allowed: ((10,), torch.float32)": lambda n, p: {n: p.double()},
}


@pytest.mark.parametrize("words", WRONG)
def test_what_aggregate_gives_is_named_where_it_does_not_fit(words, monkeypatch):
    """It was an error deep in the next round."""

    def aggregate(self, server, arrived, r):
        name = next(n for n, p in server.params.items() if p.shape == (10,))
        params = {n: p for n, p in server.params.items() if n != name}
        return replace(server, params={**params, **WRONG[words](name, server.params[name])})

    monkeypatch.setattr(FedAvg, "aggregate", aggregate)
    with pytest.raises(ValueError, match="fedavg: aggregate.. gave .*" + re.escape(words)):
        next(run_rounds(build_federation(everyone("fedavg")), ONE))


def test_rounds_are_counted_whatever_aggregate_says(tmp_path, monkeypatch):
    """A server whose ``t`` stood still was read back as if nothing had been trained: its rounds were run again."""
    aggregate = FedAvg.aggregate
    monkeypatch.setattr(FedAvg, "aggregate", lambda self, server, *more: replace(aggregate(self, server, *more), t=0))
    e = everyone("fedavg", rounds=3, evaluate_every=1)
    assert run(e, ONE, tmp_path, on_round=lambda r: r.t == 2).summary["status"] == "stopped"
    assert [m["t"] for m in run(e, ONE, tmp_path).metrics] == [1, 2, 3]
