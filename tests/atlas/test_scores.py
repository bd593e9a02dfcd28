"""The atlas's arithmetic on numbers worked out by hand."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedlib_lab.atlas.plots import plot_choice, plot_cost, plot_ranking, plot_wins
from fedlib_lab.atlas.scores import (
    BINDS,
    Entries,
    best_rates,
    headline,
    improvement,
    interquartile_mean,
    judge,
    load_entries,
    normalised,
    own_parameters,
    ranking,
    resampled,
    tasks_of,
    wins,
    worst,
)
from fedlib_lab.report.clients import numbers_of
from fedlib_lab.report.table import Table
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.store import shown_run
from tests.helpers.tracked import OUTPUTS

TASK = {
    "smallest": np.array([[10.0, 30.0], [20.0, 20.0]]),  # mean 20
    "whole": np.array([[60.0, 60.0], [50.0, 70.0]]),  # mean 60
    "a": np.array([[40.0, 40.0], [50.0, 50.0]]),
    "b": np.array([[40.0, 40.0], [30.0, 30.0]]),
}


def test_scores_lie_between_the_smallest_level_and_the_whole_model():
    assert normalised(TASK, "a").tolist() == [0.5, 0.75] and normalised(TASK, "b").tolist() == [0.5, 0.25]
    assert normalised(TASK, "smallest").mean() == 0 and normalised(TASK, "whole").mean() == 1
    low, high = (10 + 20) / 2, (60 + 50) / 2  # of the worst client
    assert normalised(TASK, "a", worst).tolist() == [(40 - low) / (high - low), (50 - low) / (high - low)]
    with pytest.raises(ValueError, match=r"no runs of \['whole'\]"):
        normalised({k: v for k, v in TASK.items() if k != "whole"}, "a")
    with pytest.raises(ValueError, match=r"the whole model \(20.00\) is not above the smallest level \(20.00\)"):
        normalised({**TASK, "whole": TASK["smallest"]}, "a")


def test_the_best_of_all_rates_that_a_row_was_given():
    rows = [("a", "lr_1", 20.0, 60), ("a", "lr_2", 30.0, 60), ("b", "lr_1", 40.0, 30), ("b", "lr_2", 40.0, 30),
            ("c", "lr_1", 50.0, 6), ("c", "lr_2", None, 0)]  # fmt: skip
    found = best_rates(pd.DataFrame(rows, columns=["label", "column", "local", "seconds"])).set_index("label")
    assert found.best.tolist()[:2] == ["lr_2", "lr_1"] and pd.isna(found.best["c"])  # of equal ones the smaller rate
    assert found.minutes.tolist() == [2, 1, 0.1] and found["lr_2"].tolist()[:2] == [30, 40]


def rates_of(task, caps):
    rates, tuned = (load_grid("atlas", f"{task}_{name}", "small") for name in ("rates", f"{caps}_tuned"))
    scores = {(c.variant, c.experiment.lr): shown_run(c.experiment, OUTPUTS / "runs") for c in rates}
    return scores, {c.variant: c.experiment.lr for c in tuned}


@pytest.mark.parametrize(("caps", "task"), [(caps, task) for caps in BINDS for task in tasks_of(f"{caps}_tuned")])
def test_each_tuned_row_has_the_rate_that_its_stored_runs_found_best(caps, task):
    """All six were tried of each, and the best has the highest score on held-out examples."""
    scores, tuned = rates_of(task, caps)
    for variant, lr in tuned.items():
        tried = {r: run for (v, r), run in scores.items() if v == variant}
        assert len(tried) == 6 and None not in tried.values(), variant
        assert lr == max(sorted(tried), key=lambda r: round(numbers_of(tried[r].summary)["local"], 2)), variant


def test_what_another_value_gains_over_a_method_s_default():
    rows = [
        ("a", "A", 20.0),
        ("a", "A, weight 5", 26.5),
        ("b", "B", 30.0),
        ("a", "A, 1", 24.0),
        ("b", "B, 1", 33.0),
        ("a", "A, off", None),
        ("c", "C", None),  # no gain can be told before the default has run
        ("c", "C, 1", 9.0),
        ("c", "C, 2", 19.0),
    ]
    frame = pd.DataFrame(rows, columns=["method", "label", "local"]).assign(variant=lambda t: t.label)
    found = own_parameters(frame).set_index("label")
    assert found.gain[["A", "A, weight 5", "A, 1", "B", "B, 1"]].tolist() == [0, 6.5, 4, 0, 3]
    assert found.gain[["A, off", "C", "C, 1", "C, 2"]].isna().all()
    assert found.index[found.taken].tolist() == ["A, weight 5"]  # the best of its method; three points are noise


@pytest.mark.parametrize("task", tasks_of("own"))
def test_rows_of_own_parameters_differ_from_a_run_of_the_rates_by_one_thing(task):
    """The first row of a method is the best of its row there; the others have its rate, and other options."""
    rates, best = rates_of(task, "macs")
    for caps in BINDS:
        best = {**(rates_of(task, caps)[1] if task in tasks_of(f"{caps}_tuned") else {}), **best}
    own, default = load_grid("atlas", f"{task}_own", "small"), {}
    for cell in own:
        first = default.setdefault(cell.method, cell)
        assert cell.experiment.lr == best[first.variant], cell.variant
        assert cell.experiment.replace(options={}) == first.experiment.replace(options={}), cell.variant
        assert cell is not first or rates[cell.variant, cell.experiment.lr] is not None


@pytest.mark.parametrize(("caps", "task"), [(caps, task) for caps in BINDS for task in tasks_of(f"{caps}_tuned")])
def test_each_tuned_row_has_what_its_method_gained_by(caps, task):
    """Of a method's own parameter the tuned row has the value that was taken, on top of the row that is not tuned."""
    table = Table("atlas", f"{task}_own", "small", {}, OUTPUTS / "runs")
    found, of = own_parameters(table.frame), {c.variant: dict(c.experiment.options) for c in table.cells}
    taken = dict(found[found.taken].groupby("method").variant.first())
    first = dict(found.groupby("method").variant.first())
    plain = {c.variant: c for c in load_grid("atlas", f"{task}_{caps}", "small")}
    for cell in load_grid("atlas", f"{task}_{caps}_tuned", "small"):
        own = {}
        if cell.method in taken and cell.variant == first[cell.method]:
            own = dict(of[taken[cell.method]].items() - of[cell.variant].items())
        assert dict(cell.experiment.options) == {**plain[cell.variant].experiment.options, **own}, cell.variant


def test_a_ranking_s_title_says_who_leads_on_what():
    entries = Entries({"cifar10": TASK}, {}, {"a": ("A", "fedavg")})
    order = ranking(entries, 20)
    assert order[["variant", "label", "method"]].values.tolist() == [["a", "A", "fedavg"], ["b", "b", "b"]]
    title = "A leads where compute binds: score 0.62\nCIFAR-10, 2 seeds, rates searched"
    assert headline(order, entries, "compute", "rates searched") == title
    two = Entries({"cifar10": TASK, "ag_news": TASK}, {}, entries.methods)
    several = title.replace("CIFAR-10, ", "CIFAR-10, AG News\n")
    assert headline(order, two, "compute", "rates searched") == several
    assert headline(order[:0], entries, "memory", "") == "No task can be scored yet where memory binds"


def test_the_worst_tenth():
    assert worst(np.arange(20.0)) == 0.5 and worst(np.array([3.0, 1.0])) == 1


def test_middle_half_and_probability_of_improvement():
    assert interquartile_mean({"x": np.array([0.0, 1.0]), "y": np.array([2.0, 100.0])}) == 1.5
    a, b = {"x": np.array([0.5, 0.75])}, {"x": np.array([0.5, 0.25])}
    assert improvement(a, b) == (0.5 + 1 + 1 + 1) / 4 and improvement(b, a) == 0.125
    assert improvement({**a, "y": np.array([1.0])}, {**b, "y": np.array([2.0])}) == (0.875 + 0) / 2
    assert np.isnan(improvement(a, {"y": np.array([1.0])}))


def test_draws_are_the_same_for_all_methods():
    entries = Entries({"x": {**TASK, "twin": TASK["a"] + 1}}, {})
    again = resampled(entries, np.random.default_rng(0)).clients["x"]
    assert (again["twin"] - again["a"] == 1).all() and again["a"].shape == (2, 2)


def test_ranking_wins_and_flags():
    entries = Entries({"x": TASK, "y": {k: v for k, v in TASK.items() if k != "b"}}, {("x", "b"): ("rising",)})
    table = ranking(entries, resamples=200).set_index("variant")
    assert list(table.index) == ["a", "b"] and table.tasks.to_dict() == {"a": 2, "b": 1}
    assert table.score.a == 0.625 and table.score.b == 0.375 and table["flags"]["b"] == "x: rising"
    assert (table.low <= table.score).all() and (table.score <= table.high).all()
    fair, unfair = np.full((2, 20), 40.0), np.r_[[20.0] * 2, [60.0] * 18][None].repeat(2, 0)
    both = {"x": {"smallest": fair - 20, "whole": fair + 20, "fair": fair, "unfair": unfair}}
    assert ranking(Entries(both, {}), 5).set_index("variant")["worst tenth"].to_dict() == {"fair": 0.5, "unfair": 0.0}
    one_fails = {"x": {**both["x"], "whole": unfair}}  # its mean is above the smallest level's, its worst tenth is not
    assert ranking(Entries(one_fails, {}), 5)["worst tenth"].isna().all()
    matrix = wins(entries)
    assert matrix.loc["a", "b"] == 0.875 and matrix.loc["b", "a"] == 0.125 and matrix.loc["a", "a"] == 0.5


def test_predictions_are_judged_on_the_tasks_they_name():
    one = {"smallest": np.full((5, 8), 20.0), "whole": np.full((5, 8), 60.0)}
    entries = Entries({"x": {**one, "a": np.full((5, 8), 50.0), "b": np.full((5, 8), 40.0)}}, {})
    told = {"says": "", "source": ""}
    predictions = {
        "right": {**told, "pair": ["a", "b"]},
        "wrong": {**told, "pair": ["b", "a"]},
        "equal": {**told, "pair": ["a", "a"]},
        "against the smallest": {**told, "pair": ["a", "smallest"]},
        "elsewhere": {**told, "pair": ["a", "b"], "tasks": ["y"]},
        "absent": {**told, "pair": ["a", "c"]},
        "other caps": {**told, "pair": ["a", "b"], "caps": ["memory"]},
    }
    found = judge(predictions, entries, "macs", resamples=50).set_index("prediction")
    assert found.verdict.to_dict() == {
        "right": "holds", "wrong": "contradicted", "equal": "undecided", "against the smallest": "holds",
        "elsewhere": "not testable", "absent": "not testable",
    }  # fmt: skip
    assert found.difference["right"] == pytest.approx(0.25) and found.difference["against the smallest"] == 0.75
    few = Entries({"x": {m: s[:3] for m, s in entries.clients["x"].items()}}, {})
    assert judge(predictions, few, "macs", resamples=50).verdict[0] == "holds, indicative"


def test_where_the_whole_model_is_never_above_nothing_is_ranked():
    flat = Entries({"x": {**TASK, "whole": TASK["smallest"]}}, {})
    assert ranking(flat, resamples=5).empty and ranking(Entries({}, {}), resamples=5).empty
    assert wins(Entries({}, {})).empty


def test_figures_of_the_map():
    entries = Entries({"x": TASK}, {})
    table = ranking(entries, resamples=20).assign(label=["A", "B"])
    ax = plot_ranking(table, "a title")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A", "B"] and ax.figure.get_suptitle() == "a title"
    ax = plot_ranking(table.assign(tasks=[2, 1]), "one lacks a task")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A", "B (1 of 2 tasks)"]
    ax = plot_ranking(table.assign(score=[0.5, -7.3], low=[0.4, -14.0]), "one far below")
    assert [t.get_text() for t in ax.texts] == ["-7.3"] and ax.get_xlim()[0] > -3
    assert len(plot_wins(wins(entries), "wins").texts) == 4 and not plot_wins(wins(Entries({}, {})), "none").texts


def test_a_table_to_choose_by():
    table = pd.DataFrame({"compute: X": [60.0, 20.0, 40.0], "memory: X": [30.0, 10.0, None]}, index=["A", "B", "C"])
    ax = plot_choice(table, "A gives most")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A", "C", "B"]  # C is in the middle of its one place
    assert [t.get_text() for t in ax.texts] == ["60.0", "30.0", "40.0", "20.0", "10.0"]  # nothing where it is absent
    assert [t.get_text() for t in ax.get_xticklabels()] == ["compute:\nX", "memory:\nX"]


def test_quality_stands_against_what_is_capped():
    rows = [("whole", 60.0, 3e9, 8.0), ("whole", 62.0, 3e9, 8.0), ("smallest", 20.0, 1e9, 2.0), ("a", 40.0, 2e9, 4.0)]
    frame = pd.DataFrame(rows, columns=["method", "score", "macs", "upload MiB"]).assign(label=lambda t: t.method)
    cells = [
        SimpleNamespace(variant=m, method=of)
        for m, of in (("whole", "fedavg"), ("smallest", "fedavg"), ("a", "hetlora"))
    ]
    for caps, unit, x in (("macs", "10⁹ MACs", {1, 2, 3}), ("upload_tuned", "MiB", {2, 4, 8})):
        ax = plot_cost(frame.assign(caps=caps), cells, "a title")
        points = {(float(x), float(y)) for line in ax.get_lines() for x, y in zip(*line.get_data(), strict=True)}
        assert {x for x, _ in points} == x and {y for _, y in points} == {20, 40, 61} and unit in ax.get_xlabel()
        assert (
            ax.get_title() == "a gives clients most under the caps, 40.0 %\na title"
        )  # the whole model does not keep to the caps


@pytest.mark.parametrize(("deep", "counts"), [(64.0, True), (66.0, False)])
def test_a_task_counts_only_where_its_whole_model_trained(monkeypatch, deep, counts):
    """60 for the whole model on all test examples: a whole net of a capped method may be 5 points above it, not 6."""
    found = {"smallest": (20, 20), "whole": (60, 60), "depthfl": (40, deep)}
    cells = [SimpleNamespace(variant=v, label=v, method=v, seed=1, experiment=v) for v in found]
    runs = {
        v: SimpleNamespace(summary={"personal": {"by_client": {"0": score, "1": score}}, "exits": [1.0, net]})
        for v, (score, net) in found.items()
    }
    monkeypatch.setattr("fedlib_lab.atlas.scores.shown_run", lambda e, folder: runs[e])
    monkeypatch.setattr("fedlib_lab.atlas.scores.flags_of", lambda run, value: ())
    if counts:
        entries = load_entries({"task": cells})
        assert entries.clients["task"]["depthfl"].tolist() == [[40, 40]] and entries.of("depthfl")["task"] == 0.5
        assert entries.names["depthfl"] == ("DepthFL", "depthfl")
    else:
        with pytest.warns(
            UserWarning, match="task is left out: its whole model did not train .*60.00.*depthfl's has 66"
        ):
            assert not load_entries({"task": cells}).clients
