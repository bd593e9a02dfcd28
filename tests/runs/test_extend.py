"""A finished run of few rounds goes on to more, to the numbers of one that was long from the start."""

import ast
from pathlib import Path

import pytest

import fedlib
from fedlib import extend, run
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


class SaysNothing(METHODS["fedavg"]):
    """A method of the user's own."""


class Says(SaysNothing):
    paced_by = ""


class Inherits(Says):
    """What it adds to its base is not said."""


class Paced(SaysNothing):
    paced_by = "ramp"


@pytest.mark.parametrize(
    "method, why",
    [
        (SaysNothing, "late does not say whether round t depends on the number of rounds; .* say paced_by = ''"),
        (Inherits, "late does not say whether"),
        (Paced, "by ramp, late does in round t what depends on the number of rounds"),
    ],
)
def test_an_own_method_that_does_not_say_that_nothing_is_paced_is_not_extended(method, why, tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "late", method)
    with pytest.raises(ValueError, match=why):
        extend(small("late", **PLAIN), 5, tmp_path)


def test_an_own_method_is_extended_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(METHODS, "late", Says)
    e = small("late", **PLAIN)
    run(e, ONE, tmp_path, progress=False)
    assert extend(e, 5, tmp_path, execution=ONE, progress=False).summary["t"] == 5


def test_whoever_reads_the_number_of_rounds_says_so():
    """Each file of a method in which a hook reads ``.rounds`` says of what it depends (``paced_by``)."""
    for path in (Path(fedlib.__file__).parent / "methods").rglob("*.py"):
        tree = ast.parse(path.read_text())
        reads = any(isinstance(n, ast.Attribute) and n.attr == "rounds" for n in ast.walk(tree))
        says = any(isinstance(n, ast.FunctionDef) and n.name == "paced_by" for n in ast.walk(tree))
        assert not reads or says or path.name == "values.py", path.name
    assert build_method("depthfl", {"distill": "none"}).paced_by == "" and len(METHODS) > 20
