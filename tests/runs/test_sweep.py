"""Values are chosen on validation examples, by as many trials for every row, which are stored runs."""

import sys

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


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_what_is_drawn_is_drawn_again_so_a_sweep_goes_on(sampler, tmp_path):
    """Three trials a row, then the same and a fourth; by chance, every row draws the same."""
    ranges = pytest.importorskip("optuna").distributions
    over = {"lr": ranges.FloatDistribution(0.01, 1.0, log=True), "batch_size": [8, 16], "local_epochs": ranges.IntDistribution(1, 2)}  # fmt: skip
    first, more = (sweep(ROWS, over, sampler, n, execution=ONE, folder=tmp_path, progress=False) for n in (3, 4))
    assert [t.row for t in more] == ["reefl"] * 4 + ["depthfl"] * 4 and len(list(tmp_path.iterdir())) == 8
    assert [t.run.path for t in first] == [t.run.path for t in [*more[:3], *more[4:7]]]
    assert all(0.01 <= t.choice["lr"] <= 1 and t.choice["batch_size"] in (8, 16) for t in more)
    if sampler == "random":
        assert [t.choice for t in more[:4]] == [t.choice for t in more[4:]]


def test_the_best_of_a_row_is_the_first_of_the_highest_and_never_one_that_diverged(tmp_path):
    kept = run(ROWS["reefl"], ONE, tmp_path, progress=False)
    of = lambda row, n, accuracy, status="finished": Trial(row, {"lr": n}, type(kept)(kept.experiment, kept.path, {"accuracy": accuracy, "status": status}, []))  # fmt: skip # noqa: E731
    trials = [of("a", 1, 50.0), of("a", 2, 60.0), of("b", 3, 99.0, "diverged"), of("a", 4, 60.0), of("b", 5, 10.0)]
    assert {row: t.choice["lr"] for row, t in best(trials).items()} == {"a": 2, "b": 5}


@pytest.mark.parametrize(
    "over, words, sentence",
    [
        ({"lr": 0.1}, {}, "sweep: lr = 0.1; allowed: a list, or with random and tpe a range"),
        ({"lr": [0.1], "rate": [1]}, {}, "unknown key 'rate'"),
        ({"lr": [0.1, -1.0]}, {}, "lr = -1.0 must be above 0"),
        ({"options.zeta": [0.1]}, {}, "unknown key 'zeta'"),  # of DepthFL
        ({"evaluate_on": ["test"]}, {}, "sweep: 'evaluate_on' cannot be chosen, nor can evaluate_on, validation_fraction"),
        ({"lr": [0.1]}, {"sampler": "tpee", "trials": 2}, "sampler = 'tpee' is unknown; did you mean 'tpe'?"),
        ({"lr": [0.1]}, {"sampler": "tpe"}, "trials = 0, sampler = 'tpe'; allowed: 0 with grid"),
        ([{"lr": 0.1}], {"sampler": "tpe", "trials": 2}, "allowed with 'tpe': lists and ranges by field"),
        ({"lr": [0.1]}, {"trials": 3}, "trials = 3, sampler = 'grid'; allowed: 0 with grid"),
    ],
)  # fmt: skip
def test_what_cannot_be_tried_is_refused_before_any_compute(over, words, sentence, tmp_path):
    with pytest.raises(ValueError) as refused:
        sweep(ROWS, over, execution=ONE, folder=tmp_path, progress=False, **words)
    assert sentence in str(refused.value) and not list(tmp_path.iterdir())


def test_what_a_later_row_cannot_try_is_refused_before_the_first_row_runs(tmp_path):
    pytest.importorskip("optuna")
    with pytest.raises(ValueError, match="unknown key 'zeta'"):
        sweep(ROWS, {"options.zeta": [0.1]}, "random", 1, execution=ONE, folder=tmp_path, progress=False)
    assert not list(tmp_path.iterdir())


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


def test_a_shell_s_ranges():
    ranges = pytest.importorskip("optuna").distributions
    found = cli.over_of(["lr=log:0.01..1", "local_epochs=1..5", "options.zeta=0.1..0.9", "batch_size=[8, 16]"])
    assert found["lr"] == ranges.FloatDistribution(0.01, 1, log=True) and found["batch_size"] == [8, 16]
    assert found["local_epochs"] == ranges.IntDistribution(1, 5)
    assert found["options.zeta"] == ranges.FloatDistribution(0.1, 0.9)
    for text in ("lr=0.1..x", "lr=1..0.5"):
        with pytest.raises(ValueError, match="--over lr=.*: expected a range of numbers, e.g. lr=log:0.01..1"):
            cli.over_of([text])


def test_without_optuna_lists_are_swept_and_ranges_refused_in_words(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.setitem(sys.modules, "optuna.distributions", None)
    rows = {"reefl": small("reefl", rounds=1)}
    assert len(sweep(rows, {"lr": [0.1]}, execution=ONE, folder=tmp_path, progress=False)) == 1
    with pytest.raises(ImportError, match="sampler = 'tpe' needs Optuna; install fedlib with its extra 'sweep'"):
        sweep(rows, {"lr": [0.1]}, "tpe", 2, execution=ONE, folder=tmp_path, progress=False)
    with pytest.raises(ImportError, match="--over lr=0..1: a range needs Optuna"):
        cli.over_of(["lr=0..1"])
