"""Flags that take a row out of the count."""

from dataclasses import replace

import numpy as np
import pytest

from fedlib.methods import METHODS
from fedlib_lab.report.flags import bound_on_variance, flags_of
from fedlib_lab.runs.code_digest import code_of
from fedlib_lab.runs.costs import load_shapes
from fedlib_lab.runs.identity import CENTRAL, kit_rules
from fedlib_lab.runs.store import Run


def run_of(e, exits, evaluations, status="finished", **summary):
    metrics = [{"t": t, "accuracy": float(np.mean(x)), "exits": x} for t, x in evaluations]
    summary = {"accuracy": float(np.mean(exits)), "exits": exits, "status": status, **summary}
    return Run(e, None, summary, metrics)


def test_flags_follow_the_curve(tiny):
    def flags(*evaluations, **changes):
        return flags_of(run_of(tiny.replace(**changes), evaluations[-1][1], evaluations))

    assert flags((25, [40.0]), (50, [50.0]), (75, [52.0]), (100, [52.5])) == ()
    assert flags((25, [40.0]), (50, [50.0]), (75, [52.0]), (100, [55.0])) == ("rising",)  # 3 > 2.75
    assert flags((75, [80.0]), (100, [83.0])) == ()  # 3 < 4.15
    assert flags((75, [10.0, 10.0]), (100, [10.0, 10.0])) == ("constant",)  # one of ten classes
    assert flags((75, [84.0]), (100, [84.0])) == ()  # the same, but far from chance
    assert flags((25, [60.0]), (75, [50.0]), (100, [40.0])) == ("collapsed",)  # 20 > 15
    assert flags((25, [60.0]), (75, [50.0]), (100, [46.0])) == ()
    assert flags((100, [40.0])) == ()
    assert flags_of(run_of(tiny, [1.0], [(2, [1.0])], status="diverged")) == ("diverged",)


def test_flags_look_at_what_is_compared(tiny):
    """A method that keeps the server's model at its start may serve clients well."""
    r = run_of(tiny, [10.0], [])
    own = [{"t": t, "accuracy": 10.0, "exits": [10.0], "personal": {"accuracy": a, "sd": 1.0, "exits": [a], "exits_sd": [1.0]}} for t, a in ((1, 50.0), (2, 50.5))]  # fmt: skip
    r = Run(r.experiment, None, r.summary, own)
    assert flags_of(r, "accuracy") == ("constant",) and flags_of(r, "clients") == ()


def test_a_run_of_an_older_rule_says_so_where_that_rule_counts(tiny):
    """Batch norm's view of the central test set concerns no client's own; a class's version and a crop all numbers."""
    e = tiny.replace(method="scalefl_vit", backbone="resnet8", finetune="full", finetune_options={}, augment="crop")
    now = kit_rules(e)
    assert len(now) == 3  # a subset, crops, batch norm

    def flags(value, method=None, **rules):
        inputs = {"kit": {k: v for k, v in now.items() if k != rules.get("without")}, "method": method or {}}
        record = {"inputs": inputs} if rules.get("says", True) else {}
        return flags_of(Run(e, None, {"accuracy": 50.0, "exits": [50.0], "status": "finished"}, [], record), value)

    assert flags("accuracy") == flags("accuracy", says=False) == ()  # a run that says nothing is not asked
    for value in ("accuracy", "last", "clients"):
        assert flags(value, without="how crops are counted") == ("older rule",)
        assert flags(value, without=CENTRAL) == (("older rule",) if value != "clients" else ())
    scalefl = e.replace(method="scalefl", backbone="deit_micro", augment="none")
    run = Run(scalefl, None, {"accuracy": 50.0, "exits": [50.0], "status": "finished"}, [], {})
    old = {"kit": kit_rules(scalefl), "method": code_of(METHODS["scalefl"]) | {"ScaleFL": 2}}
    assert flags_of(replace(run, record={"inputs": old}), "clients") == ("older rule",)


def test_a_level_over_its_share_is_over_budget(tiny, monkeypatch):
    """Level 1 for all costs an eighth for everybody; asked to cost a twelfth, it is over budget."""
    from fedlib.methods import METHODS
    from fedlib_lab.report.flags import OVER, over_budget
    from fedlib_lab.runs.params import load_grid

    (e,) = (c.experiment for c in load_grid("scalefl", "resnet110", "smoke", {"method": "fedavg_level1"}))
    assert not over_budget(tiny) and not over_budget(e)
    original, shapes = METHODS[e.method].ratios_of, load_shapes(e, 10)
    OVER.clear()
    monkeypatch.setattr(METHODS[e.method], "ratios_of", lambda self, n: tuple(0.66 * x for x in original(self, n)))
    monkeypatch.setattr("fedlib_lab.report.flags.load_shapes", lambda *_: shapes)
    assert over_budget(e)
    OVER.clear()


def test_the_test_examples_leave_what_their_number_says(tiny):
    e = tiny.replace(num_test=5000)
    (bound,) = bound_on_variance(run_of(e, [50.0], []), np.array([50.0]))
    assert bound == pytest.approx(100**2 * 0.25 / 5000)  # half a point squared, nearly: 0.5
    (bound,) = bound_on_variance(
        run_of(e.replace(dataset="cola", backbone="bert_micro", augment="none"), [30.0], []), np.array([30.0])
    )
    assert bound == pytest.approx(100**2 * (1 - 0.09) / 5000)  # of a correlation
