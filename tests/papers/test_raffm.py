"""RaFFM: the published numbers, its claims, its grids, and what its clients hold."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from fedlib.engine.executors import Execution
from fedlib_lab.papers.raffm import (
    acceleration,
    by_variant,
    client_resources,
    dose_of,
    local_scores,
    plot_dose,
    plot_traffic,
    runs_of,
    traffic_curves,
    traffic_to,
)
from fedlib_lab.report.claims import Published, compared, load_all_claims
from fedlib_lab.report.table import Table
from fedlib_lab.report.tables import load_reported, obtained, reported_beside, with_further
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.store import run
from fedlib_lab.runs.trained import load_trained

CLAIMS = load_all_claims("raffm")
ROWS = {"table1": 8 * 11, "table2": 12 * 8, "table3": 2 * 9, "table4": 14 * 3, "table5": 2 * 3}
SPOTS = [
    ("table1", "bert_large_fl", "qqp", 89.01), ("table1", "raffm", "qnli", 88.41), ("table1", "raffm", "parameters_m", 60),
    ("table1", "roberta_raffm", "rte", 65.34), ("table1", "distilbert_raffm", "average", 75.10),
    ("table1", "bert_large_raffm", "acceleration", 6.13), ("table2", "bert_large_raffm", "squad", 90.87),
    ("table2", "raffm", "squad_exact_match", 72.37), ("table2", "flan_t5_base_raffm", "squad_v2_parameters_m", 164),
    ("table2", "roberta_raffm", "squad_v2_acceleration", 1.64), ("table3", "raffm", "cifar100_f1", 90.39),
    ("table3", "fl", "traffic_mb", 360.87), ("table4", "flan_t5_base_fl", "squad_v2_total_gb", 547.70),
    ("table4", "bert_large_raffm", "squad_client_mb", 398), ("table5", "raffm", "svamp", 52.80),
    ("table5", "fl", "parameters_m", 262.41),
]  # fmt: skip


@pytest.mark.parametrize("table", ROWS)
def test_every_printed_number_is_there_once(table):
    frame = load_reported("raffm", table)
    assert len(frame) == ROWS[table] and not frame.duplicated(["variant", "column"]).any()
    assert frame["mean"].notna().all() and frame.sd.isna().all()
    assert set(frame.variant) <= set(load_spec("raffm", table)["variants"])


@pytest.mark.parametrize("table, variant, column, mean", SPOTS)
def test_spot_values(table, variant, column, mean):
    assert load_reported("raffm", table).set_index(["variant", "column"]).loc[(variant, column), "mean"] == mean


def test_printed_averages_are_those_of_the_printed_scores():
    frame = load_reported("raffm", "table1").pivot(index="variant", columns="column", values="mean")
    scores = frame[["qqp", "qnli", "sst2", "cola", "stsb", "mrpc", "rte", "mnli"]].mean(axis=1)
    assert (scores - frame.average).abs().max() < 0.01


@pytest.mark.parametrize("name", CLAIMS)
def test_every_claim_is_the_papers(name):
    claim = CLAIMS[name]
    for table in claim["table"] if isinstance(claim["table"], list) else [claim["table"]]:
        spec = load_spec("raffm", table)
        assert {v for pair in claim["pairs"] for v in pair} <= set(spec["variants"])
        assert set(claim.get("columns", [])) <= set(spec["columns"])
    signs = [d.mean + claim.get("margin", 0) > 0 for _, d in compared(claim, Published("raffm")) if len(d.points)]
    if name in ("prioritisation_helps", "budgets_do_not_matter"):
        assert not signs  # figures: no numbers in print
    else:
        assert np.mean(signs) > (0.5 if claim.get("need") == "most" else 0.98)


def test_paper_size_is_the_papers_setting():
    cells = {
        c.variant: c.experiment for c in load_grid("raffm", "table1", "paper") if c.column == "sst2" and c.seed == 1
    }
    e = cells["raffm"]
    assert (e.num_clients, e.clients_per_round, e.backbone, e.optimiser, e.local_schedule) == (100, 10, "bert_base", "adamw", "linear")  # fmt: skip
    assert e.options == {"shares": (0.4, 0.45, 0.5, 0.55, 1.0)} and cells["unranked"].options["rank"] == ()


@pytest.mark.parametrize("table, column, variant, whole, printed", [
    ("table1", "sst2", "raffm", 109_483_778, 60), ("table1", "sst2", "roberta_raffm", None, 53),
    ("table1", "sst2", "distilbert_raffm", 66_955_010, 50), ("table2", "squad", "raffm", None, 70),
    ("table2", "squad", "distilbert_raffm", None, 34), ("table2", "squad", "roberta_raffm", None, 90),
    ("table3", "cifar10", "raffm", None, 59),
])  # fmt: skip
def test_clients_hold_what_the_tables_print(table, column, variant, whole, printed):
    """Million parameters on average; RoBERTa's clients held 75 M, DistilBERT's 40 M with the shares of BERT-base."""
    wanted = {"columns": [column], "seeds": [1], "variant": [variant]}
    (e,) = [c.experiment for c in load_grid("raffm", table, "paper", wanted)]
    held = client_resources(e, macs=False)
    assert held.parameters.mean() / 1e6 == pytest.approx(printed, rel=0.09)
    if whole is not None:
        assert held.parameters.max() == whole and held.upload_mib.max() == pytest.approx(whole * 4 / 2**20)


def test_a_mild_cut_leaves_clients_97_percent():
    cells = {
        c.variant: c.experiment for c in load_grid("raffm", "table1", "small") if (c.column, c.seed) == ("stsb", 1)
    }
    held = {v: client_resources(cells[v], macs=False).parameters.mean() for v in ("fl", "mild", "raffm")}
    assert held["mild"] / held["fl"] == pytest.approx(0.97, abs=0.01) and held["raffm"] / held["fl"] < 0.75


def test_what_runs_sent_until_a_target(tmp_path):
    cells = load_grid("raffm", "table3", "smoke", {"variant": ["fl", "raffm"]})
    for c in cells:
        run(c.experiment, Execution(workers=1), tmp_path)
    ((column, runs),) = runs_of(cells, tmp_path)
    assert column == "cifar10" and len(runs) == 2
    resources = {cell.variant: client_resources(cell.experiment) for cell, _ in runs}
    assert resources["raffm"].macs.mean() < resources["fl"].macs.mean()
    assert resources["raffm"].training_mib.mean() < resources["fl"].training_mib.mean()
    (_, full), _ = runs
    spent = traffic_to(full, 0.0, pd.DataFrame({"upload_mib": [512.0]}))
    assert spent == {"rounds": 1, "MiB a client": 512.0, "total GiB": 2 * 1 * 4 * 0.5}
    assert np.isnan(traffic_to(full, 101.0, resources["fl"])["total GiB"])
    curves = traffic_curves(cells, client_resources, tmp_path)
    assert set(curves.variant) == {"fl", "raffm"} and (curves.groupby("variant").gib.diff().dropna() > 0).all()
    none = traffic_curves(cells, client_resources, tmp_path / "nothing")
    assert none.empty and list(none) == list(curves)
    sizes = by_variant(cells, lambda e: client_resources(e).mean())
    assert list(sizes.variant) == ["fl", "raffm"] and sizes.parameters[1] < sizes.parameters[0]
    other = dataclasses.replace(cells[0], variant="other", experiment=cells[0].experiment.replace(num_exits=2))
    asked = by_variant([*cells, dataclasses.replace(cells[0], seed=2), other], lambda e: {"exits": e.num_exits})
    assert dict(zip(asked.variant, asked.exits, strict=True)) == {"fl": 1, "raffm": 1, "other": 2}
    speed = acceleration(cells[1].experiment, clients=2, batch=4)
    assert speed["by MACs"] > 1 and speed["by time"] > 0


def test_local_models_are_parts_of_the_global_one_and_training_moves_them(tmp_path):
    (cell,) = load_grid("raffm", "table3", "smoke", {"variant": ["raffm"]})
    f, server = load_trained(cell.experiment, Execution(workers=1), tmp_path)
    deployed, trained = (local_scores(f, server, [0, 1, 4], train) for train in (False, True))
    assert list(deployed.parameters) == list(trained.parameters) and deployed.parameters.nunique() > 1
    assert deployed.score.between(0, 100).all() and list(deployed.client) == [0, 1, 4]


@pytest.mark.parametrize("column, least", [("cola", -100), ("stsb", -100), ("sst2", 0), ("mrpc", 0)])
def test_a_correlation_may_be_negative_and_an_accuracy_not(column, least):
    table = Table("raffm", "table1", "small", {"columns": [column], "variant": ["fl"], "seeds": [1]})
    table.frame = table.frame.assign(status="missing", accuracy=None)
    assert table.check().startswith("0 of 1 runs")
    for score in (least, 100, least - 0.5, 100.5):
        table.frame = table.frame.assign(status="finished", accuracy=score, exits=[[score]], ensemble=None)
        if least <= score <= 100:
            assert table.check().startswith("1 of 1 runs")
        else:
            with pytest.raises(AssertionError, match="no percentages"):
                table.check()


def test_exact_match_f1_and_the_average_stand_beside_the_headline():
    """As Tables 2, 3 and 1 print them: of the same answers, and of seeds that have every column."""
    frame = pd.DataFrame({
        "finetune": "full", "variant": ["fl", "fl", "raffm"], "label": ["fl", "fl", "raffm"], "seed": 1,
        "column": ["squad", "squad_v2", "squad"], "dataset": ["xquad_en", "squad_v2", "xquad_en"],
        "accuracy": [60.0, 40.0, None], "others": [{"exact_match": [50.0, 30.0]}, None, {"exact_match": [20.0]}],
    })  # fmt: skip
    found = with_further(frame, {"also": {"exact_match": "exact_match"}, "average": ["squad", "squad_v2"]})
    new = [tuple(r) for r in found[["variant", "column", "dataset", "accuracy"]].iloc[3:].to_numpy()]
    assert new == [
        ("fl", "squad_exact_match", "xquad_en", 40.0), ("raffm", "squad_exact_match", "xquad_en", 20.0),
        ("fl", "average", "XQuAD, SQuAD v2", 50.0),
    ]  # fmt: skip
    assert with_further(frame, {}).equals(frame)
    table = obtained(found, reported_beside("raffm", "table2")).set_index(["column", "method"])
    assert tuple(table.loc[("squad_exact_match", "fl"), ["obtained", "reported"]]) == ("40.00", "73.68")
    for name, key in ("table1", "average"), ("table2", "also"), ("table3", "also"):
        assert key in load_spec("raffm", name)


def test_what_a_cut_costs_is_paired_by_seed():
    rows = [("fl", "fedavg", 1, 80.0), ("fl", "fedavg", 2, 90.0), ("ffn", "raffm", 1, 78.0), ("ffn", "raffm", 2, 87.0)]
    frame = pd.DataFrame([*rows, ("all", "raffm", 1, 60.0)], columns=["variant", "method", "seed", "accuracy"])
    frame["label"] = frame.variant
    shares = pd.DataFrame({"variant": ["fl", "all", "ffn"], "parameters": [10.0, 5.0, 9.0]})
    lost = dose_of(frame, shares)
    assert list(lost.variant) == ["ffn", "all"] and list(lost.share) == [0.9, 0.5]
    assert list(lost.lost) == [2.5, 20.0] and list(lost.seeds) == [2, 1]
    assert lost.sd[0] == 0.71 and np.isnan(lost.sd[1])  # of 2 and 3
    ax = plot_dose(lost, "a title")
    assert ax.get_title().startswith("Lost: all 20.0 points at 50 %; ffn 2.5 points at 90 %") and {
        t.get_text() for t in ax.texts
    } == {"ffn", "all"}
    assert "not ranked" not in ax.get_title() and (
        plot_dose(lost[1:], "").get_title().split() == "Lost: all 20.0 points at 50 % (one seed: not ranked)".split()
    )


def test_the_study_of_cuts_leaves_a_group_whole_and_cuts_the_others():
    cells = load_grid("raffm", "dose", "smoke", {"seeds": [1], "variant": ["fl", "ffn", "attention", "all"]})
    held = by_variant(cells, lambda e: {"n": client_resources(e, macs=False).parameters.mean()}).set_index("variant").n
    assert held.fl > held.ffn > held["all"] and held.fl > held.attention > held["all"]


def test_a_difference_that_seeds_make_is_no_finding_of_a_title():
    """By seed -6, +4 and +8 points: 2 on average, with an SD of 7.2; then 1, 2 and 3."""

    def title(*points):
        rows = [("fl", s, 2.0, 50.0) for s in range(3)] + [("raffm", s, 1.0, 50.0 + p) for s, p in enumerate(points)]
        frame = pd.DataFrame(rows, columns=["variant", "seed", "gib", "accuracy"])
        frame = frame.assign(method=frame.variant, label=frame.variant)
        return plot_traffic(frame, frame, "accuracy (%)", "digits").get_title(loc="center").replace("\n", " ")

    sent = "RaFFM sends 50 % of full-size FL's traffic; "
    assert title(-6, 4, 8).startswith(f"{sent}RaFFM is 2.0 points above fl (undecided)")
    assert title(1.9, 2, 2.1).startswith(f"{sent}RaFFM leads fl by 2.0 points")
