"""A finished run of few rounds goes on to more, to the numbers of one that was long from the start."""

import ast
import dataclasses
import functools
import operator
import threading
from pathlib import Path

import pytest

import fedlib
from fedlib import extend, run
from fedlib.engine.schedules import round_rate
from fedlib.methods import METHODS, build_method
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import ONE, assert_nothing_left_over, assert_same, small, state

PLAIN = dict(schedule="constant", rounds=3, evaluate_every=2)


@pytest.mark.parametrize(
    "method, changes",
    [
        ("fedavg", {"schedule": "exponential", "decay": 0.9}),
        ("depthfl", {"options": {"kd_weight": 0.5, "aggregation": "feddyn"}}),
        ("ditto", {"test_split": "like_train"}),  # client memories
        ("fedper", {"test_split": "like_train", "schedule": "step", "decay": 0.1, "milestones": (2.0,)}),
    ],
)
def test_a_finished_run_goes_on_to_the_numbers_of_a_long_one(method, changes, tmp_path):
    e = small(method, **(PLAIN | changes))
    run(e, ONE, tmp_path / "parts", progress=False)
    before, short = state(e, tmp_path / "parts"), []
    found = extend(e, 5, tmp_path / "parts", execution=ONE, progress=False, on_round=lambda r: short.append(r.t))
    assert short == [4, 5] and found.summary["t"] == 5 and [m["t"] for m in found.metrics] == [2, 4, 5]
    assert [r["after_round"] for r in found.record["resumed"]] == [3]
    long = e.replace(rounds=5)
    run(long, ONE, tmp_path / "whole", progress=False)
    assert_same(state(long, tmp_path / "parts"), state(long, tmp_path / "whole"))
    assert_same(before, state(e, tmp_path / "parts"))
    assert_nothing_left_over(tmp_path)
    assert extend(e, 5, tmp_path / "parts", execution=ONE, progress=False, on_round=lambda r: 1 / 0).accuracy == found.accuracy  # fmt: skip


def test_the_curve_of_the_stored_run_goes_on_whatever_is_asked(tmp_path):
    e = small("fedavg", **PLAIN)
    run(e, ONE, tmp_path, progress=False)
    found = extend(e.replace(evaluate_every=None), 5, tmp_path, execution=ONE, progress=False)
    assert [m["t"] for m in found.metrics] == [2, 4, 5] and find_run(e.replace(rounds=5), tmp_path) is not None


@pytest.mark.parametrize(
    "method, changes, rounds, why",
    [
        ("fedavg", {}, 3, "it has 3 already"),
        ("fedavg", {"schedule": "cosine"}, 5, "schedule = 'cosine' is paced by the number of rounds: the rate is 0.0375 in round 1 there, 0.04523 in"),
        ("reefl", {}, 5, "by ramp_fraction, reefl does in round t what depends on the number of rounds"),
        ("fedavg", {"seed": 9}, 5, "its run is not stored; run it first"),
    ],
)  # fmt: skip
def test_what_depends_on_the_end_is_not_extended_and_says_why(method, changes, rounds, why, tmp_path):
    with pytest.raises(ValueError, match=why):
        extend(small(method, **(PLAIN | changes)), rounds, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_run_that_came_without_weights_is_not_extended(tmp_path):
    e = small("fedavg", **PLAIN)
    run(e, ONE, tmp_path, progress=False)
    (run_path(e, tmp_path) / "checkpoint.safetensors").unlink()
    with pytest.raises(ValueError, match="came without its weights"):
        extend(e, 5, tmp_path)
    assert find_run(e.replace(rounds=5), tmp_path) is None


FedAvg = METHODS["fedavg"]
first_of = operator.attrgetter("setting.rounds")


def share(r):
    return r.t / r.rounds


def asked(experiment, name="rounds"):
    return getattr(experiment, name)


class Paced(FedAvg):
    """A base of the user's own."""

    def ramp(self, batch):
        return batch.t / batch.rounds


class ByProperty(FedAvg):
    last = property(lambda self: lambda batch: batch.rounds)

    def local_loss(self, batch):
        return super().local_loss(batch) / self.last(batch)


class ByBase(Paced):
    def local_loss(self, batch):
        return super().local_loss(batch) * self.ramp(batch)


def method_of(loss):
    """A method whose loss is scaled by ``loss`` of the batch."""

    class Own(FedAvg):
        def local_loss(self, batch):
            return super().local_loss(batch) * loss(batch)

    return Own


def nested(batch):
    def inner():
        return [t for t in range(batch.rounds)]

    return len(inner())


def imported(batch):
    from fedlib.engine.schedules import round_rate as of

    return of(batch.experiment, batch.t)


INDIRECT = {
    "itself": method_of(lambda batch: batch.rounds),
    "a helper": method_of(share),
    "a helper's helper": method_of(lambda batch: share(batch)),
    "getattr": method_of(lambda batch: getattr(batch, "rounds")),  # noqa: B009
    "getattr by a default": method_of(asked),
    "getattr of a name that is put together": method_of(lambda batch: getattr(batch, "rou" + "nds"[batch.t :])),
    "attrgetter": method_of(first_of),
    "partial": method_of(functools.partial(asked, name="rounds")),
    "a nested function": method_of(nested),
    "a lambda in a table": method_of({"a": [share]}["a"][0]),
    "a property": ByProperty,
    "a base of one's own": ByBase,
    "all fields": method_of(lambda batch: dataclasses.astuple(batch.setting)[4]),
    "the configuration as a dict": method_of(lambda batch: {**vars(batch.setting)}.popitem()[1]),
    "a pattern": method_of(lambda batch: batch.experiment.to_dict().popitem()[1]),
    "the curve": method_of(lambda batch: batch.experiment.looks_every),
    "the schedule": method_of(lambda batch: round_rate(batch.experiment, batch.t)),
    "the schedule, imported inside": method_of(imported),
    "a method of the kit that is paced": method_of(METHODS["reefl"].local_loss),
    "a table of the kit's methods": method_of(lambda batch: METHODS["reefl"]().local_loss(batch)),
    "a kit's method that is built": method_of(lambda batch: build_method("reefl", {}).local_loss(batch)),
    "a lock": method_of(lambda batch, lock=threading.Lock(): lock),
}


@pytest.mark.parametrize("way", INDIRECT)
def test_an_own_method_that_reads_the_number_of_rounds_is_not_extended(way, tmp_path, monkeypatch):
    """However it comes to it."""
    monkeypatch.setitem(METHODS, "late", INDIRECT[way])
    with pytest.raises(ValueError, match="by .*, late does in round t what depends on the number of rounds"):
        extend(small("late", **PLAIN), 5, tmp_path)


def test_the_refusal_leads_to_the_function(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "late", INDIRECT["a helper's helper"])
    with pytest.raises(ValueError, match="by share in loss in local_loss, late .*paced_by = ''"):
        extend(small("late", **PLAIN), 5, tmp_path)


def half(batch):
    """Of all rounds, whose name is not read here: ``rounds``."""
    return 0.5  # rounds


class Says(Paced):
    paced_by = ""


class SaysNothing(Says):
    pass


def test_an_own_method_is_extended_that_reads_no_rounds_or_says_that_nothing_depends_on_them(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "late", SaysNothing)  # what it adds to its base is not said
    with pytest.raises(ValueError, match="by ramp, late does"):
        extend(small("late", **PLAIN), 5, tmp_path)
    for method in (method_of(half), Says):
        monkeypatch.setitem(METHODS, "late", method)
        e = small("late", **PLAIN)
        run(e, ONE, tmp_path / method.__name__, progress=False)
        found = extend(e, 5, tmp_path / method.__name__, execution=ONE, progress=False)
        assert found.summary["t"] == 5


def test_whoever_reads_the_number_of_rounds_says_so():
    """Each file of a method in which a hook reads ``.rounds`` says of what it depends (``paced_by``)."""
    for path in (Path(fedlib.__file__).parent / "methods").rglob("*.py"):
        tree = ast.parse(path.read_text())
        reads = any(isinstance(n, ast.Attribute) and n.attr == "rounds" for n in ast.walk(tree))
        says = any(isinstance(n, ast.FunctionDef) and n.name == "paced_by" for n in ast.walk(tree))
        assert not reads or says or path.name == "values.py", path.name
    assert build_method("depthfl", {"distill": "none"}).paced_by == "" and len(METHODS) > 20
