"""Tables beside the published numbers, and the data that stand in for lacking ones."""

import numpy as np
import pandas as pd
import pytest

from fedlib.data.federated import load_federated
from fedlib.report.tables import load_cells
from fedlib.runs.params import load_grid

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


def test_tables_name_the_data_that_were_used():
    from fedlib.report.tables import beside_reported

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
