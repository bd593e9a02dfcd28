"""The atlas's arithmetic on numbers worked out by hand, and what its titles may say of how many seeds."""

import re
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedlib.methods import METHODS
from fedlib_lab.atlas.plots import plot_choice, plot_cost, plot_standings
from fedlib_lab.atlas.scores import (
    BINDS,
    against,
    apart,
    best_rates,
    compared,
    drawn,
    headline,
    judge,
    own_parameters,
    ranks,
    standings,
    tasks_of,
    worst,
)
from fedlib_lab.report.clients import numbers_of
from fedlib_lab.report.table import Table
from fedlib_lab.report.verdicts import RANKED, not_ranked
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.params_files import grids
from fedlib_lab.runs.store import shown_run
from tests.helpers.tracked import OUTPUTS


def rows_of(scores, column="x"):
    """A task's frame, as ``Table.frame``: of a row its scores by seed; a row is called by its method."""
    return pd.DataFrame([
        {"finetune": "lora", "column": column, "variant": v, "method": v, "label": v, "seed": k, "dataset": "cifar10",
         "local": x, "accuracy": x, "found": None}
        for v, own in scores.items() for k, x in enumerate(own, 1)
    ])  # fmt: skip


# reefl is 10 above fedper at each seed but for a tenth, and depthfl anywhere
THREE = {"whole": [70.0] * 3, "reefl": [50.0, 51.0, 52.0], "fedper": [40.0, 41.1, 41.9], "depthfl": [20.0, 60.0, 45.0]}


def test_fewer_than_three_seeds_rank_nothing():
    assert RANKED == 3 and not_ranked([3, 5]) == "" == not_ranked([])
    assert not_ranked([2, 2]) == "two seeds: not ranked" and not_ranked([1]) == "one seed: not ranked"
    assert not_ranked([2, 3, 1]) == "2 of 3 rows have fewer than three seeds: not ranked"


def test_ranks_are_what_paired_differences_leave_open():
    assert ranks(rows_of(THREE)) == {
        "reefl": "1–2 of 3 ranked",
        "fedper": "2–3 of 3 ranked",
        "depthfl": "1–3 of 3 ranked",
    }
    two = rows_of({**THREE, "reefl": [50.0, 51.0]})
    assert ranks(two)["reefl"] == "two seeds: not ranked" and ranks(two)["fedper"] == "1–2 of 2 ranked"
    assert ranks(rows_of({v: x[:1] for v, x in THREE.items()})) == dict.fromkeys(
        list(THREE)[1:], "one seed: not ranked"
    )
    alone = ranks(rows_of({"reefl": THREE["reefl"], "fedper": [1.0]}))
    assert alone == {"reefl": "–", "fedper": "one seed: not ranked"}
    apart_seeds = rows_of(THREE).assign(seed=lambda t: t.seed + 10 * (t.variant == "fedper"))
    assert ranks(apart_seeds)["fedper"] == "1–3 of 3 ranked"  # no seed in common: nothing is sure


def test_a_title_says_who_leads_only_of_three_seeds_a_row():
    assert (
        headline({"cifar10": rows_of({v: THREE[v] for v in ("whole", "reefl", "fedper")})})
        == "CIFAR-10: ReeFL leads FedPer by 10.0 points"
    )
    fewer = rows_of({**THREE, "fedper": [90.0, 91.0]})
    assert headline({"cifar10": fewer}) == "1 of 3 rows have fewer than three seeds: not ranked"
    both = headline({"cifar10": rows_of({v: THREE[v] for v in ("reefl", "fedper")}), "ag_news": fewer})
    assert both == "CIFAR-10: ReeFL leads FedPer by 10.0 points; 1 of 3 rows have fewer than three seeds: not ranked"
    assert headline({"x": rows_of({v: x[:2] for v, x in THREE.items()})}) == "two seeds: not ranked"
    assert headline({}) == ""
    level = rows_of({"reefl": [50.0, 51.0, 52.0], "fedper": [52.0, 50.0, 51.5]})
    said = headline({"cifar10": rows_of({v: THREE[v] for v in ("reefl", "fedper")}), "ag_news": level, "mnist": level})
    assert said == "CIFAR-10: ReeFL leads FedPer by 10.0 points; no lead is sure in 2 places"  # of many the sure ones


def test_what_is_set_apart_is_in_no_figure_ranking_or_title():
    assert set(apart()) == {"decoupled", "fedamp", "pfedgraph", "scalefl_vit"} <= set(METHODS)
    frame = rows_of({**THREE, "decoupled": [99.0] * 3})
    assert set(compared(frame).variant) == {"reefl", "fedper", "depthfl"}  # nor the whole model, over the caps
    assert "decoupled" not in ranks(frame) and "Decoupled" not in headline({"x": frame})
    table = pd.DataFrame({"method": ["a", "b"]})
    assert list(drawn(table, {"a": "reefl", "b": "decoupled"}).method) == ["a"]


def entries_of(scores, majority=45.0, task="x"):
    """As ``entries_frame`` gives."""
    return pd.DataFrame([
        {"task": task, "caps": "macs", "method": v, "label": v, "seed": k, "score": x, "worst": x - 20, "central": 10.0 + k,
         "prior": x + 5.0, "majority": majority, "flags": "rising" * (k == 1), "macs": 1e9, "upload MiB": 2.0}
        for v, own in scores.items() for k, x in enumerate(own, 1)
    ])  # fmt: skip


def test_both_worlds_and_the_control_stand_in_the_map_s_table():
    table = standings(entries_of(THREE), {"x": rows_of(THREE)}).set_index("method")
    row = table.loc["reefl"]
    assert (row["own labels"], row.sd, row["worst tenth"], row["all alike"]) == (51, 1, 31, 12)
    assert (row.prior, row.majority, row.above, row.seeds, row["rank"]) == (56, 45, 6, 3, "1–2 of 3 ranked")
    assert row["flags"] == "rising" and table["rank"].whole == "–" and list(table.index) == list(THREE)
    unknown = standings(entries_of(THREE, np.nan), {"x": rows_of(THREE)})
    assert unknown.majority.isna().all() and unknown.above.isna().all()


def test_the_best_of_all_rates_that_a_row_was_given():
    rows = [("a", "lr_1", 20.0, 60), ("a", "lr_2", 30.0, 60), ("b", "lr_1", 40.0, 30), ("b", "lr_2", 40.0, 30),
            ("c", "lr_1", 50.0, 6), ("c", "lr_2", None, 0), ("d", "lr_1", 9.0, 6), ("e", "lr_2", 7.0, 6),
            ("e", "lr_0.5", 7.0, 6), ("e", "lr_1", 6.0, 6)]  # fmt: skip
    found = best_rates(pd.DataFrame(rows, columns=["label", "column", "local", "seconds"])).set_index("label")
    assert found.best.tolist()[:2] == ["lr_2", "lr_1"] and pd.isna(found.best["c"])  # of equal ones the smaller rate
    assert found.best["e"] == "lr_0.5" and list(found)[:3] == ["lr_0.5", "lr_1", "lr_2"]  # though others had no 0.5
    assert found.minutes.tolist() == [2, 1, 0.1, 0.1, 0.3] and found["lr_2"].tolist()[:2] == [30, 40]
    assert found.best["d"] == "lr_1" and pd.isna(found["lr_2"]["d"])  # which is asked of other rows alone


def searched(task, what, caps):
    """The table in which rows under ``caps`` were searched: of some tasks those not of compute are of other sizes."""
    other = f"{task}_{what}_one_block"
    return other if other in grids("atlas") and caps != "macs" else f"{task}_{what}"


def rates_of(task, caps):
    rates, tuned = (
        load_grid("atlas", name, "small") for name in (searched(task, "rates", caps), f"{task}_{caps}_tuned")
    )
    scores = {(c.variant, c.experiment.lr): shown_run(c.experiment, OUTPUTS / "runs") for c in rates}
    return scores, {c.variant: c.experiment.lr for c in tuned}


@pytest.mark.parametrize(("caps", "task"), [(caps, task) for caps in BINDS for task in tasks_of(f"{caps}_tuned")])
def test_each_tuned_row_has_the_rate_that_its_stored_runs_found_best(caps, task):
    """All six were tried of each, some larger ones of some; the best has the highest score on held-out examples."""
    scores, tuned = rates_of(task, caps)
    for variant, lr in tuned.items():
        tried = {r: run for (v, r), run in scores.items() if v == variant}
        assert len(tried) >= 6 and None not in tried.values(), variant
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
    table = Table("atlas", searched(task, "own", caps), "small", {}, OUTPUTS / "runs")
    found, of = own_parameters(table.frame), {c.variant: dict(c.experiment.options) for c in table.cells}
    taken = dict(found[found.taken].groupby("method").variant.first())
    first = dict(found.groupby("method").variant.first())
    plain = {c.variant: c for c in load_grid("atlas", f"{task}_{caps}", "small")}
    for cell in load_grid("atlas", f"{task}_{caps}_tuned", "small"):
        own = {}
        if cell.method in taken and cell.variant == first[cell.method]:
            own = dict(of[taken[cell.method]].items() - of[cell.variant].items())
        assert dict(cell.experiment.options) == {**plain[cell.variant].experiment.options, **own}, cell.variant


def test_the_worst_tenth():
    assert worst(np.arange(20.0)) == 0.5 and worst(np.array([3.0, 1.0])) == 1


def test_differences_are_in_points_and_judged_of_three_seeds():
    found = against(rows_of(THREE), [("reefl", "fedper"), ("fedper", "depthfl")])
    assert found.obtained.tolist() == [10, -0.67] and found.seeds.tolist() == [3, 3]
    assert found.verdict.tolist() == ["first is higher", "undecided"] and found.interval[0] != "–"
    two = against(rows_of({v: x[:2] for v, x in THREE.items()}), [("reefl", "fedper")])
    assert two.verdict.tolist() == ["two seeds: not ranked"] and two.interval.tolist() == ["–"]


def test_predictions_are_judged_on_the_tasks_they_name():
    told = {"says": "s", "source": "t"}
    predictions = {
        "right": {**told, "pair": ["reefl", "fedper"]},
        "wrong": {**told, "pair": ["fedper", "reefl"], "note": "because"},
        "open": {**told, "pair": ["reefl", "depthfl"], "note": "never shown"},
        "elsewhere": {**told, "pair": ["reefl", "fedper"], "tasks": ["z"]},
        "absent": {**told, "pair": ["reefl", "scalefl"]},
        "other caps": {**told, "pair": ["reefl", "fedper"], "caps": ["memory"]},
    }
    few = {v: x[:2] for v, x in THREE.items()}
    found = judge(predictions, {"x": rows_of(THREE), "y": rows_of(few)}, "macs").set_index(["task", "prediction"])
    assert found.verdict.x.to_dict() == {
        "right": "holds, indicative", "wrong": "contradicted, indicative", "open": "undecided",
    }  # fmt: skip
    assert set(found.verdict.y) == {"two seeds: not ranked"} and found.difference.x["right"] == 10
    assert found.note.x.to_dict() == {"right": "", "wrong": "because", "open": ""} and set(found.says) == {"s"}
    untested = found[found.verdict == "not testable"]
    assert [name for _, name in untested.index] == ["elsewhere", "absent"]
    five = rows_of({"reefl": [50.0] * 5, "fedper": [40.0] * 5})
    assert judge(predictions, {"x": five}, "macs").verdict[0] == "holds"


def test_the_map_s_figure_tells_few_seeds_from_enough():
    fewer = {**THREE, "reefl": [50.0, 51.0]}
    frame = pd.concat([entries_of(fewer), entries_of(THREE, np.nan, "y")])
    table = standings(frame, {"x": rows_of(fewer), "y": rows_of(THREE)})
    ax = plot_standings(table, {v: v for v in THREE}, "a title")
    first, second = ax.figure.axes
    assert [t.get_text() for t in ax.get_yticklabels()] == ["whole", "ReeFL", "FedPer", "DepthFL"]
    assert ax.figure.get_suptitle() == "a title" and [x.get_title() for x in (first, second)] == ["x", "y"]
    dots = [[line.get_markerfacecolor() for line in x.lines if line.get_marker() == "o"] for x in (first, second)]
    assert [[c == "white" for c in of] for of in dots] == [[False, True, False, False], [False] * 4]
    assert [sum(line.get_linestyle() == "--" for line in x.lines) for x in (first, second)] == [1, 0]  # the control
    added = [line.get_xdata()[0] for line in first.lines if line.get_marker() == "+"]
    assert added == table[table.task == "x"].prior.tolist()  # the other control


def test_a_table_to_choose_by():
    table = pd.DataFrame({"memory: X": [60.0, 20.0, 40.0], "compute: X": [30.0, 10.0, None]}, index=["A", "B", "C"])
    ax = plot_choice(table, pd.Series({"compute: X": 20.0, "memory: X": 50.0}), "a title")
    assert [t.get_text() for t in ax.get_yticklabels()] == ["A", "B", "C"]  # as in the table: no ranking
    assert [t.get_text() for t in ax.texts] == ["60.0", "30.0", "20.0", "10.0", "40.0", "–"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["memory:\nX", "compute:\nX"] and "–" in ax.get_xlabel()
    points = ax.collections[0].get_array().reshape(3, 2)
    assert points.tolist() == [[10, 10], [-30, -10], [-10, 0]]  # above the majority class of the same column
    assert "majority class" in ax.figure.axes[1].get_ylabel() and ax.figure.get_suptitle() == "a title"
    assert not plot_choice(table, pd.Series(dtype=float), "none known").collections[0].get_array().any()


def test_quality_stands_against_what_is_capped():
    rows = [("whole", 60.0, 3e9, 8.0), ("whole", 62.0, 3e9, 8.0), ("smallest", 20.0, 1e9, 2.0), ("a", 40.0, 2e9, 4.0)]
    frame = pd.DataFrame(rows, columns=["method", "score", "macs", "upload MiB"]).assign(label=lambda t: t.method)
    cells = [
        SimpleNamespace(variant=m, method=of)
        for m, of in (("whole", "fedavg"), ("smallest", "fedavg"), ("a", "hetlora"))
    ]
    for caps, unit, x in (("macs", "10⁹ MACs", {1, 2, 3}), ("upload_tuned", "MiB", {2, 4, 8})):
        ax = plot_cost(frame.assign(caps=caps, majority=50.0), cells, "a title")
        control, *drawn_ = ax.get_lines()
        points = {(float(x), float(y)) for line in drawn_ for x, y in zip(*line.get_data(), strict=True)}
        assert {x for x, _ in points} == x and {y for _, y in points} == {20, 40, 61} and unit in ax.get_xlabel()
        assert set(control.get_ydata()) == {50} and "majority class" in ax.get_xlabel() and ax.get_title() == "a title"
        assert "majority" not in plot_cost(frame.assign(caps=caps, majority=np.nan), cells, "").get_xlabel()


LEADING = r"\bleads?\b|gives clients most|\bbest\b|\bfirst\b|above every"


def test_the_page_s_paragraph_claims_no_rank_that_the_stored_runs_cannot_carry():
    """Three points, at most six numbers; who leads is said only where every row has three seeds."""
    said = (OUTPUTS / "atlas/findings_small.md").read_text(encoding="utf-8")
    points = re.findall(r"^\d\. (.*)$", re.sub(r"\]\([^)]*\)|[*_]", "", said), re.MULTILINE)
    plain = " ".join(points)
    assert len(points) == 3
    assert len(re.findall(r"\d+(?:\.\d+)?", re.sub(r"CIFAR-\d+", "", plain))) <= 6
    frames = {
        name: Table("atlas", name, "small", {}, OUTPUTS / "runs").frame for name in tasks_of("macs_tuned").values()
    }
    if "not ranked" in headline(frames):
        assert not re.search(LEADING, plain), "rows of fewer than three seeds are not ranked"


def test_the_paragraph_s_majority_class_is_that_of_the_map_s_table():
    said = (OUTPUTS / "atlas/findings_small.md").read_text(encoding="utf-8")
    frame = pd.read_parquet(OUTPUTS / "atlas/tables/atlas_small.parquet")
    (percent,) = re.findall(r"majority class gives (\d+) % on CIFAR-10", said)
    known = frame[frame.task == "cifar10"].drop_duplicates("seed").majority
    assert known.notna().all() and int(percent) == round(known.mean())
    methods = {c.variant: c.method for c in load_grid("atlas", "cifar10_macs_tuned", "small", {"seeds": [1]})}
    here = frame[(frame.task == "cifar10") & (frame.caps == "macs_tuned") & (frame.method != "whole")]
    shared = here[[".personal." not in METHODS[methods[v]].__module__ for v in here.method]]
    means = shared.groupby("method")[["score", "majority", "prior"]].mean()
    assert len(means) > 10 and (means.score < means.majority).all()  # "no shared model reaches it on average"
    (percent,) = re.findall(r"counts are added, .* DepthFL (\d+)\.", said)
    assert (
        round(means.prior.depthfl) == int(percent) and means.prior.depthfl > here[here.method == "fedrod"].prior.mean()
    )
