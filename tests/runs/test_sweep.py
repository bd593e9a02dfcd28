"""Values are chosen on validation examples, by as many trials for every row, which are stored runs."""

import shlex
from types import SimpleNamespace

import pandas as pd
import pytest

from fedlib import run, sweep
from fedlib.core.paths import use_outputs_of
from fedlib_lab import cli
from fedlib_lab.report.frames import trials_frame
from fedlib_lab.runs.store import find_run
from fedlib_lab.runs.sweep import Trial, best, changed
from tests.helpers.stored import ONE, small

ROWS = {m: small(m, rounds=2, num_train=100) for m in ("reefl", "depthfl")}
RATES = {"lr": [0.01, 0.1], "batch_size": (8, 16)}


def test_a_grid_tries_the_same_choices_for_every_row_and_never_reads_the_test_set(tmp_path):
    trials = sweep(ROWS, RATES, execution=ONE, folder=tmp_path, progress=False)
    choices = [{"lr": lr, "batch_size": b} for lr in (0.01, 0.1) for b in (8, 16)]
    assert [(t.row, t.choice) for t in trials] == [(m, c) for m in ROWS for c in choices]
    for t in trials:
        e = t.run.experiment
        assert (e.evaluate_on, e.validation_fraction, e.lr, e.method) == ("validation", 0.2, t.choice["lr"], t.row)
        assert t.run.summary["num_test"] == 20  # a fifth of 100, whatever num_test says
        assert find_run(changed(ROWS[t.row], t.choice), tmp_path) is None  # nothing ran on test examples
    told = trials_frame(trials)
    assert list(told.columns) == ["row", "lr", "batch_size", "validation", "status", "run"] and len(told) == 8
    listed = sweep(ROWS, choices, execution=ONE, folder=tmp_path, progress=False)
    assert [t.run.path for t in listed] == [t.run.path for t in trials] and len(list(tmp_path.iterdir())) == 8


def test_the_best_of_a_row_is_the_first_of_the_highest_and_never_one_that_diverged(tmp_path):
    kept = run(ROWS["reefl"], ONE, tmp_path, progress=False)
    of = lambda row, n, accuracy, status="finished": Trial(row, {"lr": n}, type(kept)(kept.experiment, kept.path, {"accuracy": accuracy, "status": status}, []))  # fmt: skip # noqa: E731
    trials = [of("a", 1, 50.0), of("a", 2, 60.0), of("b", 3, 99.0, "diverged"), of("a", 4, 60.0), of("b", 5, 10.0)]
    assert {row: t.choice["lr"] for row, t in best(trials).items()} == {"a": 2, "b": 5}


@pytest.mark.parametrize(
    "over, sentence",
    [
        ({"lr": 0.1}, "sweep: lr = 0.1; allowed: a list"),
        ({"lr": []}, "sweep: lr = []; allowed: a list"),
        ({}, "sweep: over = {}; allowed: lists by field, or a list of choices"),
        ("lr", "sweep: over = 'lr'; allowed: lists by field, or a list of choices"),
        ({"lr": [0.1], "rate": [1]}, "unknown key 'rate'"),
        ({"lr": [0.1, -1.0]}, "lr = -1.0 must be above 0"),
        ({"options.zeta": [0.1]}, "unknown key 'zeta'"),  # of DepthFL
        ({"evaluate_on": ["test"]}, "sweep: 'evaluate_on' cannot be chosen, nor can evaluate_on, validation_fraction"),
    ],
)
def test_what_cannot_be_tried_is_refused_before_any_compute(over, sentence, tmp_path):
    with pytest.raises(ValueError) as refused:
        sweep(ROWS, over, execution=ONE, folder=tmp_path, progress=False)
    assert sentence in str(refused.value) and not list(tmp_path.iterdir())


def test_a_shell_sweeps_the_rows_of_a_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    words = [
        "sweep",
        "reefl/table1",
        "--profile",
        "smoke",
        "--set",
        "rounds=1",
        "method=[reefl, depthfl]",
        "--workers",
        "1",
    ]
    assert cli.main([*words, "--over", "lr=[0.01, 0.1]"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[1:5]] == [
        [m, lr] for m in ("reefl", "depthfl") for lr in ("0.01", "0.10")
    ]
    assert said[5].startswith("best of reefl: --set lr=0.") and said[6].startswith("best of depthfl: --set lr=0.")
    use_outputs_of("small")
    with pytest.raises(ValueError, match="--over lr: expected KEY=VALUE"):
        cli.values_of(["lr"], "--over")
    with pytest.raises(ValueError, match="--set lr=0.2: expected KEY=VALUE, e.g. rounds=20, each key once"):
        cli.values_of(["lr=0.1", "rounds=2", "lr=0.2"])


def test_the_best_choice_is_printed_as_a_shell_and_yaml_read_it(monkeypatch, capsys):
    """``clip_value=None`` is a word in YAML, and a shell splits a list at its space."""
    choice = {"clip_value": None, "milestones": (0.5, 0.75), "schedule": "step", "pretrained": False}
    monkeypatch.setattr("fedlib_lab.runs.sweep.sweep", lambda *_: [])
    monkeypatch.setattr("fedlib_lab.runs.sweep.best", lambda _: {"reefl": SimpleNamespace(choice=choice)})
    monkeypatch.setattr("fedlib_lab.report.frames.trials_frame", lambda _: pd.DataFrame())
    assert cli.main(["sweep", "reefl/table1", "--profile", "smoke", "--over", "lr=[0.1]"]) == 0
    use_outputs_of("small")
    _, _, said = capsys.readouterr().out.partition("best of reefl: --set ")
    assert cli.overrides_of(shlex.split(said)) == {**choice, "milestones": [0.5, 0.75]}
