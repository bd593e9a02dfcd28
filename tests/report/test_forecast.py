"""What a table takes: hours by hand, memory beside what was measured, disk and downloads."""

import pytest

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib_lab import cli
from fedlib_lab.papers.fedepth.training_memory import peak_mib
from fedlib_lab.report import forecast as forecast_module
from fedlib_lab.report.forecast import client_bytes, disk_bytes, downloads, forecast
from fedlib_lab.runs.params import Cell
from fedlib_lab.runs.prices import CARDS, gpu_hours, training_macs

GIB = 2**30
WHOLE = Experiment(
    method="fedavg", num_exits=1, pretrained=False, finetune="full", num_train=64, num_test=16, num_clients=2,
    clients_per_round=1, rounds=2, partition="iid", augment="none", batch_size=64,
)  # fmt: skip


def cells(*experiments):
    return [Cell(e.finetune, e.method, e.method, e.method, "column", e.seed, e) for e in experiments]


def test_hours_are_macs_over_a_share_of_the_peak_in_the_precision_asked_for():
    e = Experiment(method="depthfl", dataset="cifar100", rounds=7)
    assert gpu_hours([e, e], "A100") == pytest.approx(2 * training_macs(e) / (0.4 * 19.5e12 / 2) / 3600)
    bfloat16 = e.replace(precision="bfloat16")
    for name, card in CARDS.items():
        assert gpu_hours([e], name) / gpu_hours([bfloat16], name) == pytest.approx(card.bfloat16 / card.float32)


def measured(e):
    return peak_mib(lambda: list(run_rounds(build_federation(e), Execution(workers=1, executor="threads")))) * 2**20


@pytest.mark.parametrize("backbone", ["resnet8", "deit_micro.w32"])
def test_the_peak_of_a_round_is_what_was_told(backbone):
    e = WHOLE.replace(backbone=backbone)
    build_federation(e)  # the data are read before anything is measured
    assert client_bytes(e) == pytest.approx(measured(e), rel=0.25)


def text(backbone):
    return WHOLE.replace(
        backbone=backbone, dataset="mrpc", optimiser="adamw", batch_size=2, num_train=None, num_test=None
    )


@pytest.mark.parametrize("backbone, gigabytes", [("bert_base", 4.91), ("distilbert", 3.32)])
def test_large_models_are_told_as_they_were_measured(backbone, gigabytes):
    """Peaks of a whole process with random weights, in 10^9 bytes; 0.63 of them are the process itself."""
    assert client_bytes(text(backbone)) / 1e9 + 0.63 == pytest.approx(gigabytes, rel=0.1)


@pytest.mark.slow
def test_a_large_model_takes_what_was_told():
    e = text("distilbert").replace(dataset="docstrings", num_train=8, num_test=8)
    build_federation(e)
    assert client_bytes(e) == pytest.approx(measured(e), rel=0.1)


def test_disk_is_two_checkpoints_and_what_clients_keep():
    numbers = disk_bytes(WHOLE) / 8  # two checkpoints of four bytes each
    assert numbers == sum(p.numel() for p in build_federation(WHOLE).server.params.values())
    head = 2 * 64 + 64 * 10 + 10  # a norm and a layer
    assert disk_bytes(WHOLE.replace(method="fedper")) == 8 * numbers + 2 * 4 * head


def test_what_is_at_hand_is_not_downloaded(monkeypatch):
    monkeypatch.setattr(forecast_module, "is_available", lambda name, tokenizer: name == "mnist")
    e = Experiment(dataset="cifar10", backbone="deit_tiny")
    needed = downloads([e, e.replace(dataset="mnist", backbone="deit_micro")])
    assert set(needed) == {"deit_tiny", "cifar10"} and needed["deit_tiny"] == pytest.approx(4 * 5.5, rel=0.02)


def test_a_row_counts_its_runs_and_what_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    row = forecast(cells(WHOLE, WHOLE.replace(seed=2))).iloc[0]
    assert (row.runs, row.missing, row["row"]) == (2, 2, "fedavg")
    assert row["GiB a client"] == round(client_bytes(WHOLE) / GIB, 2)
    monkeypatch.setattr(forecast_module, "shown_run", lambda e: e.seed == 1 or None)
    assert forecast(cells(WHOLE, WHOLE.replace(seed=2))).iloc[0].missing == 1


def test_the_command_prints_every_row_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    words = ["explain", "reefl/table1", "--cost", "--profile", "smoke", "--set", "finetune=frozen", "method=[depthfl]"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "frozen depthfl" in " ".join(out.split()) and "A100 h" in out and "To download: nothing" in out
    assert "at 40% of its peak" in out and not list(tmp_path.iterdir())
