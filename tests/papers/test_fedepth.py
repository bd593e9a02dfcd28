"""FeDepth's params, published numbers and claims; measured memory, local networks, and figures of them."""

import numpy as np
import pytest

from fedlib import Execution
from fedlib_lab.papers.fedepth import EXACT
from fedlib_lab.report.claims import Published, Stored, compared, load_all_claims
from fedlib_lab.report.table import Table
from fedlib_lab.report.tables import compute_table, load_reported
from fedlib_lab.runs.costs import training_macs
from fedlib_lab.runs.params import load_grid, load_spec
from tests.helpers.tracked import OUTPUTS

CLAIMS = load_all_claims("fedepth")
ON_RUNS = [name for name, claim in CLAIMS.items() if "table" in claim]


def test_published_numbers():
    frame = load_reported("fedepth", "table2")
    assert len(frame) == 15 * 8 and frame["mean"].between(10, 70).all() and frame.sd.between(0.05, 4).all()
    assert set(frame.variant) == set(load_spec("fedepth", "table2")["variants"])
    spots = {
        ("fedavg", "cifar10_alpha0.3"): (63.44, 2.95), ("fair_splitmix", "cifar10_alpha1"): (58.7, 1.33),
        ("fair_m_fedepth", "cifar100_alpha0.3"): (30.53, 1.3), ("lack_heterofl", "cifar10_beta5"): (55.68, 3.33),
        ("lack_depthfl", "cifar100_beta10"): (21.2, 1.33), ("surplus_m_fedepth", "cifar100_beta30"): (40.42, 1.58),
        ("surplus_fedepth", "cifar10_beta2"): (33.25, 1.8), ("fair_fedavg", "cifar100_alpha1"): (16.39, 0.08),
    }  # fmt: skip
    for key, numbers in spots.items():
        assert tuple(frame.set_index(["variant", "column"]).loc[key][["mean", "sd"]]) == numbers
    memory = load_reported("fedepth", "table1").set_index("variant")["mean"]
    assert len(memory) == 14 and memory["b4"] == 14.05 and memory["x1"] == 116.04


def test_the_paper_sized_grid_is_the_papers_setting():
    cells = load_grid("fedepth", "table2", "paper")
    assert len(cells) == 15 * 8 * 5
    by = {(c.variant, c.column): c.experiment for c in cells if c.seed == 1}
    e = by["fair_fedepth", "cifar100_beta10"]
    assert (e.rounds, e.local_epochs, e.batch_size, e.lr, e.num_clients, e.clients_per_round) == (500, 10, 128, 0.1, 100, 10)  # fmt: skip
    assert (e.partition, e.classes_per_client, e.backbone) == ("dealt", 10, "preresnet20")
    assert by["fair_fedavg", "cifar10_alpha1"].options["width"] == pytest.approx(1 / 6)


def test_small_means_the_same_training_for_all():
    cells = load_grid("fedepth", "table2", "small")
    sizes = {(c.experiment.rounds, c.experiment.local_epochs, c.experiment.lr, c.experiment.backbone) for c in cells}
    assert len(sizes) == 1
    seeds = {c: {x.seed for x in cells if x.column == c} for c in {x.column for x in cells}}
    assert seeds.pop("cifar10_alpha0.3") == {1, 2, 3} and set(map(frozenset, seeds.values())) == {frozenset({1})}
    assert sum(c.column == "cifar10_alpha0.3" for c in cells) == 15 * 3
    assert {c.experiment.dataset for c in cells} == {"cifar10", "cifar100"}


@pytest.mark.parametrize("name", ON_RUNS)
def test_every_claim_is_the_papers(name):
    claim = CLAIMS[name]
    spec = load_spec("fedepth", claim["table"])
    assert {v for pair in claim["pairs"] for v in pair} <= set(spec["variants"]) and claim["value"] == spec["value"]
    signs = [d.mean + claim.get("margin", 0) > 0 for _, d in compared(claim, Published("fedepth")) if len(d.points)]
    if claim["table"] == "table2":
        assert len(signs) == len(claim["pairs"]) * len(claim.get("columns", range(8)))
        assert np.mean(signs) > (0.5 if claim.get("need") == "most" else 0.98)
    else:
        assert not signs  # a figure, an appendix: nothing printed


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if "exact" in claim])
def test_what_shapes_alone_tell_holds(name):
    assert EXACT[CLAIMS[name]["exact"]](Stored("fedepth", "smoke"))[0]


def test_a_sixth_must_be_enough_by_measurement_too(tmp_path):
    """The stored measurement, which its figure shows, says twice as much; a table where stages fit says it holds."""
    claim, stored = EXACT["a_sixth_trains_everything"], Stored("fedepth", "small", tmp_path)
    holds, said = claim(stored)
    assert holds and said == "9 of 9 blocks in 6 stages by the paper's count; not measured"
    (tmp_path / "fedepth/tables").mkdir(parents=True)
    table = Stored("fedepth", "small", OUTPUTS).table("table1_small_measured")
    for factor, expected in ((1.0, (False, "1.6 to 2.0")), (0.5, (True, "0.8 to 1.0"))):
        table.assign(measured_mib=factor * table.measured_mib).to_csv(
            tmp_path / "fedepth/tables/table1_small_measured.csv"
        )
        holds, said = claim(stored)
        assert holds == expected[0] and f"a stage takes {expected[1]} times a sixth" in said


def test_compute_counts_what_a_round_really_trains():
    cells = load_grid("fedepth", "table2", "small", {"columns": ["cifar10_alpha0.3"], "seeds": [1]})
    table = compute_table(cells).set_index("method")["TMACs a round"]
    full = table["FedAvg, ×1, unrealistic"]
    assert full == pytest.approx(3 * 10 * 100 * 41e6 / 1e12, rel=0.02)
    assert table["FedAvg, ×1/6, fair"] < 0.1 * full and table["HeteroFL, fair"] < 0.5 * full
    assert full < table["FeDepth, fair"] < 1.5 * full < 1.6 * full
    assert table["FeDepth, surplus"] == pytest.approx(table["FeDepth, fair"] + full / 4, rel=0.01)
    assert training_macs(cells[0].experiment) == pytest.approx(60 * full * 1e12, rel=0.01)


def test_a_tables_last_exit(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    table = Table("fedepth", "table2", "smoke", {"variant": ["fair_depthfl"], "rounds": 1})
    table.run(Execution(workers=1))
    assert table.frame["last"].item() == table.frame.exits.item()[-1] != table.frame.accuracy.item()
    shown = table.obtained_at_cost()
    assert shown.obtained.item() == f"{table.frame['last'].item():.2f}" and shown["TMACs a round"].item() >= 0
