"""Tables beside the published numbers, and the data that stand in for lacking ones."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedlib import Experiment, run_all
from fedlib.data.federated import load_federated
from fedlib_lab.report.table import Table
from fedlib_lab.report.tables import (
    best_runs,
    budget_accuracies,
    collect,
    exit_table,
    load_cells,
    markdown_table,
    mean_curves,
    mean_sd,
    obtained,
    with_controls,
)
from fedlib_lab.runs.params import Cell, load_grid

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("profile", ["smoke", "small"])
def test_without_the_data_digits_stand_in_and_load(profile, tmp_path):
    cells = load_cells("reefl", "table1", profile, {"columns": ["femnist", "speech_commands"], "seeds": [1]}, tmp_path)
    assert {c.experiment.dataset for c in cells} == {"mnist"} and not any(c.experiment.label_groups for c in cells)
    for e in {c.column: c.experiment for c in cells}.values():
        assert load_federated(e).num_clients == e.num_clients == ({"smoke": 16, "small": e.num_clients}[profile])
    if profile == "small":  # still two different experiments
        assert {c.experiment.num_clients for c in cells} == {60, 160}


def test_only_the_lacking_data_set_is_replaced(monkeypatch, tmp_path):
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "fsdd").mkdir()
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    cells = load_cells("reefl", "table1", "small", {"seeds": [1], "rounds": 7}, tmp_path / "runs")
    found = {c.column: (c.experiment.dataset, c.experiment.rounds) for c in cells}
    assert found == {
        "cifar100_alpha1000": ("mnist", 7), "cifar100_alpha1": ("mnist", 7), "cifar100_alpha0.1": ("mnist", 7),
        "femnist": ("mnist", 7), "speech_commands": ("fsdd", 7), "cifar10_alpha1": ("cifar10", 7),
        "cifar10_alpha0.1": ("cifar10", 7),
    }  # fmt: skip
    kept = load_cells("reefl", "table1", "small", {"columns": ["femnist"], "num_train": 2000}, tmp_path / "runs")
    assert {c.experiment.num_train for c in kept} == {2000}  # overrides win over the fallback


@pytest.mark.parametrize(
    "name, given, message",
    [
        (
            "why",
            {"rounds": 100},
            "rounds = 100 makes one run of 'depthfl' in 'rounds_100' and 'depthfl' in 'rounds_400'",
        ),
        (
            "table1",
            {"dirichlet_alpha": 1.0},
            "in 'cifar100_alpha1000' and 'exclusivefl' in 'cifar100_alpha1', which differ",
        ),
        ("table3", {"method": "reefl", "options": {"distill": "none"}}, "makes one run of 'ReeFL, no KD, FedAvg' in"),
    ],
)
def test_a_label_never_stands_beside_a_run_of_other_settings(name, given, message, tmp_path):
    """With ``rounds`` = 100 the stored runs of 100 rounds stood in ``rounds 1000``, with a verdict."""
    with pytest.raises(ValueError, match=message):
        Table("reefl", name, "small", given, tmp_path)
    fine = {"rounds": 100, "columns": "rounds_1000"} if name == "why" else {"dataset": "mnist", "lr": 0.07}
    assert Table("reefl", name, "small", fine, tmp_path).cells


def test_tables_name_the_data_that_were_used():
    from fedlib_lab.report.tables import beside_reported

    row = {"finetune": "lora", "column": "femnist", "dataset": "omniglot", "variant": "reefl", "label": "reefl"}
    frame = pd.DataFrame([row | {"accuracy": a, "seed": s} for s, a in enumerate((30.0, 32.0))])
    reported = pd.DataFrame([{"finetune": "lora", "column": "femnist", "variant": "reefl", "mean": 84.69, "sd": 0.03}])
    table = beside_reported(frame, reported)
    assert table.iloc[0].tolist() == ["LoRA", "femnist", "omniglot", "ReeFL", "31.00 ± 1.41", 2, "84.69 ± 0.03"]


def test_real_stand_ins(shared_data, monkeypatch):
    """Ten digits by six speakers in sixty clients; 160 writers of eight alphabets, each of one."""
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    grid = load_grid("reefl", "table1", "small", {"columns": ["femnist", "speech_commands"]})
    of = {c.column: c.experiment for c in grid}
    speech, writers = load_federated(of["speech_commands"]), load_federated(of["femnist"])
    assert speech.num_examples.tolist() == [40] * 60 and np.bincount(speech.client_owners()).tolist() == [10] * 6
    assert np.bincount(speech.test_owners).tolist() == [100] * 6
    assert len(writers.classes) == 8 and sorted(writers.client_owners().tolist()) == list(range(160))
    assert ((writers.label_counts() > 0).sum(1) == 1).all() and set(writers.test_owners.tolist()) == set(range(160))


def test_small_has_no_stand_in_for_sst2(monkeypatch, tmp_path):
    """Digits, which stand in for CIFAR-10 at this profile, are not text."""
    monkeypatch.setattr("fedlib_lab.report.tables.is_available", lambda *_: False)
    assert {c.experiment.dataset for c in load_cells("extensions", "text", "small", folder=tmp_path)} == {"sst2"}
    assert {c.experiment.dataset for c in load_cells("reefl", "table1", "small", folder=tmp_path)} == {"mnist"}


def frame_of(**accuracies):
    rows = [
        {"finetune": "lora", "column": "a", "variant": v, "label": v, "seed": s, "accuracy": a, "ensemble": a + 1}
        for v, values in accuracies.items() for s, a in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_best_runs_and_mean_sd():
    frame = frame_of(reefl=[50.0, 60.0, 58.0])
    assert best_runs(frame).ensemble.tolist() == [61.0]
    two = pd.concat([frame, frame.assign(column="b", accuracy=[9.0, 8.0, 7.0])])  # of two tables: an index stands twice
    assert best_runs(two).accuracy.tolist() == [60.0, 9.0]
    row = mean_sd(frame).iloc[0]  # mean 56, SD sqrt((36 + 16 + 4) / 2) = 5.2915
    assert (row["mean"], round(row.sd, 4), row.seeds) == (56.0, 5.2915, 3)


def test_a_mean_curve_has_the_rounds_that_all_seeds_have(monkeypatch):
    """Where one diverged the mean of the others went on, and rose by what was left out."""
    curves = {1: [10.0, 20.0, 90.0], 2: [30.0, 40.0]}
    runs = {
        s: SimpleNamespace(metrics=[{"t": t, "accuracy": a} for t, a in enumerate(c, 1)]) for s, c in curves.items()
    }
    monkeypatch.setattr("fedlib_lab.report.tables.shown_run", lambda e, folder: runs[e.seed])
    cells = [Cell("full", "reefl", "reefl", "ReeFL", "a", s, Experiment(seed=s)) for s in runs]
    assert mean_curves(cells, "a") == {"ReeFL": [{"t": 1, "accuracy": 20.0}, {"t": 2, "accuracy": 30.0}]}


def test_mean_curves_are_of_the_seeds_that_all_have(monkeypatch):
    """A title compares pair by pair; a curve with a seed more than its rival's drew a difference that no pair has."""
    level = {("reefl", 1): 10.0, ("reefl", 2): 40.0, ("scalefl", 1): 12.0, ("depthfl", 3): 50.0}
    run = lambda e, folder: SimpleNamespace(metrics=[{"t": 1, "accuracy": level[e.method, e.seed]}])  # noqa: E731
    monkeypatch.setattr("fedlib_lab.report.tables.shown_run", run)
    cells = [Cell("full", m, m, m, "a", s, Experiment(method=m, seed=s)) for m, s in level]
    of = lambda cells: {v: c[0]["accuracy"] for v, c in mean_curves(cells, "a").items()}  # noqa: E731
    assert of(cells[:3]) == {"reefl": 10.0, "scalefl": 12.0} and of(cells[:2]) == {"reefl": 25.0}
    assert of(cells) == {"reefl": 25.0, "scalefl": 12.0, "depthfl": 50.0}  # no seed in common: each its own


def test_a_seed_counts_once_in_a_mean():
    """Two tables with a run in common, or two data columns as one group: the mean would count more runs than seeds."""
    frame = frame_of(reefl=[50.0, 60.0])
    for twice, by in ((pd.concat([frame, frame[:1]]), {}), (pd.concat([frame, frame.assign(column="b")]), {"by": ["variant"]})):  # fmt: skip
        with pytest.raises(ValueError, match="^seed 0 stands twice where accuracy is averaged; allowed: a row a seed$"):
            mean_sd(twice, **by)
    with pytest.raises(ValueError, match="^seed 0 stands twice where accuracy is averaged"):
        exit_table([], pd.concat([frame, frame[:1]]))
    lost = pd.concat([frame, frame[:1].assign(accuracy=np.nan)])  # a run that is missing counts nowhere
    assert mean_sd(lost).seeds.tolist() == [2]


def test_a_group_without_a_name_is_a_group():
    frame = pd.concat([frame_of(reefl=[50.0, 60.0]), frame_of(reefl=[70.0, 90.0]).assign(finetune=None)])
    assert mean_sd(frame)["mean"].tolist() == [55.0, 80.0]


def test_accuracies_per_budget_by_hand():
    row = {"finetune": "lora", "column": "a", "variant": "reefl", "label": "ReeFL"}
    exits = [[10.0, 20.0, 60.0], [20.0, 40.0, 60.0]]
    frame = pd.DataFrame([row | {"seed": s, "exits": x, "accuracy": sum(x) / 3} for s, x in enumerate(exits)])
    table = budget_accuracies(pd.concat([frame, pd.DataFrame([row | {"seed": 9, "accuracy": np.nan}])]))
    assert table.budget.tolist() == [1, 2, 3, 1, 2, 3]
    assert table.deepest.tolist() == exits[0] + exits[1]
    assert table.held.tolist() == [10.0, 15.0, 30.0, 20.0, 30.0, 40.0]
    means = mean_sd(table, "held", ("variant", "budget"))
    assert means["mean"].tolist() == [15.0, 22.5, 35.0] and means.seeds.tolist() == [2, 2, 2]


def test_markdown_tables():
    import pandas as pd

    assert (
        markdown_table(pd.DataFrame({"a": [1, 2], "b": ["x", "y"]})) == "| a | b |\n| --- | --- |\n| 1 | x |\n| 2 | y |"
    )
    strange = pd.DataFrame({"a": ["x | y", "<img src=x>", "one\ntwo", "p < q"]})
    rows = markdown_table(strange).splitlines()[2:]
    assert rows == [r"| x \| y |", "| &lt;img src=x> |", "| one two |", "| p < q |"]


def test_controls_stand_below_what_clients_get(tmp_path):
    """Of runs that measured them; a personalised method has heads that know its labels."""
    net = dict(
        backbone="convnet3_slim",
        pretrained=False,
        finetune="full",
        augment="none",
        test_split="like_train",
        num_clients=4,
        clients_per_round=4,
    )
    base = Experiment(dataset="mnist", num_train=80, num_test=40, rounds=1, num_exits=1, evaluate_every=0, **net)
    cells = [
        Cell("full", m, m, m, "mnist", 1, base.replace(method=m)) for m in ("fedavg", "heterofl", "fedper", "local")
    ]
    run_all([c.experiment for c in cells], folder=tmp_path)
    frame = collect(cells, tmp_path)
    table = with_controls(frame)
    assert table.label.tolist()[4:] == ["FedAvg + label prior", "HeteroFL + label prior", "Own majority class"]
    own = [row.found.summary["personal"] for row in frame.itertuples()]
    assert table.clients.tolist()[4:] == [own[0]["prior"], own[1]["prior"], own[0]["majority"]]
    nothing = pd.DataFrame(columns=["finetune", "column", "variant", "mean", "sd"])
    shown = obtained(frame, nothing, "clients")
    assert shown.method.tolist()[-1] == "Own majority class"
    before = frame.assign(found=[replace(r, summary={**r.summary, "personal": {}}) for r in frame.found])
    assert len(with_controls(before)) == 4 and len(with_controls(frame.assign(found=None))) == 4
