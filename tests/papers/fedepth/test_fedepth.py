"""FeDepth's params, published numbers and claims; measured memory, local networks, and figures of them."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import Execution, Experiment, build_federation
from fedlib.papers.fedepth import EXACT
from fedlib.papers.fedepth.local_networks import local_features, similarities
from fedlib.papers.fedepth.memory_plots import plot_memory, plot_parts, plot_plans, plot_similarities
from fedlib.papers.fedepth.training_memory import memory_of_stages, peak_mib, peaks_mib, seconds_of_stages
from fedlib.report.claims import Published, Stored, compared, load_all_claims
from fedlib.report.table import Table
from fedlib.report.tables import compute_table, load_reported
from fedlib.runs.params import load_grid, load_spec
from fedlib.runs.prices import training_macs

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
    assert EXACT[CLAIMS[name]["exact"]](Stored("fedepth", "small"))[0]


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


def test_a_peak_by_hand():
    def work():
        a = torch.zeros(2**18)  # 1 MiB
        b = torch.zeros(2**19)  # 2 MiB: 3 at once
        del a
        return torch.zeros(2**17) + b.sum()

    assert peak_mib(work) == pytest.approx(3.0, abs=0.1)
    stays = []
    works = [lambda: stays.append(torch.zeros(2**18)), lambda: torch.zeros(2**19), lambda: stays.clear()]
    assert peaks_mib(works) == pytest.approx([1.0, 3.0, 1.0], abs=0.1)


@pytest.fixture(scope="module")
def small_net():
    return Experiment(
        method="fedepth", backbone="preresnet20", pretrained=False, finetune="full", num_exits=1, dataset="mnist",
        momentum=0.9, clip_value=None, options={"scenario": "own", "ratios": [1 / 6, 1.0]}, num_train=128,
        num_clients=2, clients_per_round=1, batch_size=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def measured(small_net):
    return memory_of_stages(small_net)


def test_a_staged_client_holds_less_than_the_whole_net(measured):
    """Of 64 examples in steps of 16: a third of the whole net's peak in every stage, where the share is a sixth."""
    poor, whole = measured[measured.r == "0.167"], measured[measured.r == "all"].iloc[0]
    assert poor.blocks.tolist() == ["1", "2", "3", "4", "5-6", "7-9"] and whole.blocks == "1-9"
    assert (poor.measured_mib < 0.35 * whole.measured_mib).all() and (poor.measured_mib > 4).all()
    assert (poor.kept_mib == 0).all()  # z of 64 examples is 4 MiB; a sixth of the estimate at batch 16 is 9.7
    assert poor.budget_mib.tolist() == pytest.approx([whole.measured_mib / 6] * 6)
    assert measured[measured.r == "1"].measured_mib.item() == pytest.approx(whole.measured_mib, rel=0.02)


def test_what_is_kept_is_measured_with_the_stage(small_net):
    """Of 8 examples z is kept: 8/16 MiB beside blocks 2 to 4, 8/32 later; the chain holds two of them at a time."""
    e = small_net.replace(num_train=8, num_clients=1)
    kept, anew = (memory_of_stages(e.replace(options={**e.options, "buffered": b})).head(6) for b in (True, False))
    assert kept.kept_mib.tolist() == [0, 0.5, 0.5, 0.5, 0.25, 0.25] and not anew.kept_mib.any()
    assert ((kept.estimate_mib - anew.estimate_mib).round(6) == kept.kept_mib).all()
    assert kept.measured_mib[1] - anew.measured_mib[1] > 0.4 * 0.5
    assert kept.measured_mib[0] == pytest.approx(anew.measured_mib[0], abs=0.3)


def test_stages_are_timed_against_the_whole_net(small_net):
    e = small_net.replace(num_clients=1, clients_per_round=1, num_train=32, num_test=10, partition="iid",
                          augment="none", options={"scenario": "fair"})  # fmt: skip
    stages, staged, once = seconds_of_stages(e, 1 / 3, 1)
    assert stages == 3 and 0.2 * once < staged < 6 * once  # what a busy machine leaves of 1.2


def test_local_networks_start_alike_and_grow_apart():
    e = Experiment(method="fedavg", backbone="resnet8", pretrained=False, finetune="full", num_exits=1, clip_value=None,
                   partition="dealt", classes_per_client=2, num_train=120, num_test=60, num_clients=6,
                   clients_per_round=3, rounds=2, augment="none", batch_size=10, local_epochs=2, lr=0.1)  # fmt: skip
    f = build_federation(e)
    features = local_features(f, f.server, [4, 0], 50)
    assert sorted(features) == [0, 4] and [x.shape for x in features[0]] == [(50, 16), (50, 32), (50, 64)]
    tables = similarities(features)
    for table in tables.values():
        assert table.shape == (3, 3) and (table >= 0).all() and (table <= 1).all()
        assert table == pytest.approx(table.T)  # mean over both orders of a pair
    same = similarities({0: features[0], 1: features[0]})
    assert np.allclose(same["CKA"].diagonal(), 1) and np.allclose(same["CCA"].diagonal(), 1)
    assert (tables["CKA"].diagonal() < 0.999).any()
    frozen = local_features(build_federation(e.replace(lr=1e-9, min_lr=0)), f.server, [4, 0], 50)
    assert similarities(frozen)["CKA"].diagonal() == pytest.approx(1, abs=1e-3)


def test_figures(measured):
    axes = plot_plans([3, 2, 1, 0.5, 0.5, 0.5], {"k": 3, "l": 5, "m": 2}, 0.0, "plans", "GB")
    tops = [[round(p.get_y() + p.get_height(), 2) for p in ax.patches] for ax in axes]
    assert tops == [[3, 2, 3, 0.5, 1, 1.5], [3, 5, 1, 1.5, 2, 2.5], [3, 2, 1, 1.5, 2, 0.5]]
    colors = [len({p.get_facecolor() for p in ax.patches}) for ax in axes]
    assert colors == [3, 2, 4]  # stages; of 2 GB the first layer is left out, in grey
    assert max(max(t) for t, ax in zip(tops[:2], axes, strict=False)) <= 5
    drawn = plot_memory(measured)
    (lines,) = drawn.collections
    assert [segment[0][1] for segment in lines.get_segments()] == pytest.approx(measured.budget_mib.tolist())
    bars = drawn.patches
    assert {round(p.get_height(), 3) for p in bars} >= set(measured.measured_mib.round(3))
    drawn = plot_similarities({"CKA": np.eye(3), "CCA": np.ones((3, 3))}, "alike")
    assert [ax.images[0].get_array().sum() for ax in drawn] == [3, 9]
    parts = pd.DataFrame({"net": ["a", "b"], "parameters": [1.0, 2.0], "activations": [3.0, 2.0]})
    assert [round(p.get_width()) for p in plot_parts(parts, "parts").patches] == [25, 50, 75, 50]
