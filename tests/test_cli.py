"""The command line: what it prints, what it refuses, and that it is as the library's functions say."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import yaml

import fedlib
from fedlib.core.paths import outputs_dir, params_dir, use_outputs_of
from fedlib_lab import cli
from fedlib_lab.runs.fill import Job
from fedlib_lab.runs.params import recipe, recipe_cell
from fedlib_lab.runs.run_paths import run_path
from fedlib_lab.runs.store import run
from tests.helpers.stored import ONE, small


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    yield tmp_path
    use_outputs_of("small")


def said(capsys, *words, status=0):
    assert cli.main(words) == status
    out, err = capsys.readouterr()
    return err if status else out


def test_run_runs_a_table_with_what_is_set_and_shows_it(capsys):
    words = ("reefl/table1", "--profile", "smoke", "--set", "rounds=1", "method=reefl", "--set", "finetune=frozen", "options.zeta=0.5")  # fmt: skip
    out = said(capsys, "run", *words, "--set", "columns=cifar100_alpha1", "--workers", "1")
    assert "ReeFL" in out and "obtained" in out and "reported" in out
    choices = {"rounds": 1, "method": "reefl", "finetune": "frozen", "options": {"zeta": 0.5}}
    e = recipe("reefl/table1", "smoke", columns="cifar100_alpha1", **choices)
    assert [p.parent.name for p in outputs_dir().glob("runs/*/summary.json")] == [e.slug]
    out = said(capsys, "runs", "reefl")
    assert e.slug in out and "finished" in out and "no stored run" in said(capsys, "runs", "depthfl")
    shown = yaml.safe_load(said(capsys, "show", e.hash))
    assert shown["experiment"] == e.identity() and shown["summary"]["t"] == 1 and "provenance" in shown
    assert said(capsys, "show", "xyz", status=2) == "fedlib: xyz: no stored run has it\n"


def test_what_a_trial_profile_stored_is_listed_and_shown_too(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("FEDLIB_OUTPUTS")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    use_outputs_of("smoke")
    done = run(small("reefl", rounds=1), ONE, progress=False)
    use_outputs_of("small")
    assert "scratch" in done.path.parts and done.path.name in said(capsys, "runs")
    assert done.path.name in said(capsys, "show", "reefl")


def test_what_a_row_of_a_trial_profile_lacks_is_looked_up_where_its_runs_are_stored(capsys, tmp_path, monkeypatch):
    """And a row is called what its run is stored as, however its options are spelt."""
    monkeypatch.delenv("FEDLIB_OUTPUTS")
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    words = ("reefl/table1", "--profile", "smoke", "--set", "method=reefl", "finetune=frozen", "options.zeta=0.2")
    words = (*words, "columns=cifar100_alpha1", "rounds=1", "evaluate_every=1")
    missing = lambda: document(capsys, "explain", *words, "--cost")["missing"]  # noqa: E731
    assert missing() == 1
    said(capsys, "run", *words, "--workers", "1")
    use_outputs_of("small")  # as in a new process
    (row,) = document(capsys, "runs")
    assert missing() == 0 and document(capsys, "explain", *words)["run"] == row["run"]


def test_a_name_that_several_runs_have_is_refused(capsys, folder):
    first, second = (run(small("reefl", seed=s, rounds=1), ONE, progress=False) for s in (1, 2))
    assert f"2 runs have it: {first.path.name}, {second.path.name}" in said(capsys, "show", "reefl", status=2)
    assert first.path.name in said(capsys, "show", first.path.name)


def document(capsys, *words, status=0):
    """What a command prints with ``--json``: one document that any parser reads, without NaN."""
    assert cli.main([*words, "--json"]) == status
    return json.loads(capsys.readouterr().out, parse_constant=lambda x: pytest.fail(x))


def test_commands_answer_in_one_json_document(capsys, monkeypatch):
    done = run(small("reefl", rounds=1), ONE, progress=False)
    (row,) = document(capsys, "runs", "reefl")
    assert row["run"] == done.path.name and row["accuracy"] == done.accuracy and row["options.zeta"] == 0.2
    shown = document(capsys, "show", "reefl")
    assert shown["experiment"] == done.experiment.identity() and shown["summary"]["t"] == 1
    told = document(capsys, "explain", "reefl/table1", "depthfl")
    assert told["values"]["lr"] == {"value": 0.1, "layer": "method", "over": {"base": 0.05}}
    words = ("--profile", "smoke", "--set", "finetune=frozen", "seeds=[1]")
    costs = document(capsys, "explain", "reefl/table1", "reefl", "--cost", *words)
    assert (costs["runs"], costs["missing"], costs["downloads_mb"]) == (1, 1, {}) and costs["rows"][0]["A100 h"] == 0.0
    assert document(capsys, "runs", "depthfl") == []
    diverged = done.summary | {"accuracy": float("nan"), "exits": [float("inf")]}
    monkeypatch.setattr(cli, "_stored", lambda name: dataclasses.replace(done, summary=diverged))
    assert document(capsys, "show", "reefl")["summary"]["accuracy"] is None


def test_whole_numbers_are_whole_wherever_runs_say_none_of_them(capsys, folder):
    for method in ("reefl", "depthfl"):
        run(small(method, rounds=1), ONE, progress=False)
    depthfl, reefl = document(capsys, "runs")
    assert {repr(row[key]) for row in (depthfl, reefl) for key in ("rounds", "t", "decay_every")} == {"1"}
    assert repr(reefl["options.ree_heads"]) == "8" and depthfl["options.ree_heads"] is None
    assert reefl["options.modulate"] is True and depthfl["options.modulate"] is None
    assert "1.0" not in [word for line in said(capsys, "runs").splitlines() for word in line.split()]
    said(capsys, "runs", "--save", str(folder / "runs.json"))
    assert [repr(row["options.ree_heads"]) for row in json.loads((folder / "runs.json").read_text())] == ["None", "8"]


def test_the_queue_answers_in_json_what_is_missing_and_what_became_of_it(capsys, monkeypatch):
    cell = recipe_cell("reefl/table1", "smoke", {"method": "reefl", "finetune": "frozen", "options": {"zeta": 0.2}})
    words = ("fill", "extensions/compression", "--profile", "smoke", "--workers", "1")
    told = document(capsys, *words, "--dry-run")
    assert {"table", "column", "variant", "finetune", "seed", "run", "seconds"} == told["missing"][0].keys()
    assert told["missing"][0]["table"] == "extensions/compression" and told["skipped"] == []
    stopped = document(capsys, *words, "--minutes", "0.0001")
    assert stopped["done"] == stopped["failed"] == []
    assert [job["run"] for job in stopped["left"]] == [job["run"] for job in told["missing"]]
    monkeypatch.setattr(sys.modules[Job.__module__], "load_grid", lambda *_: [cell])
    (job,) = document(capsys, *words, "--dry-run")["missing"]
    assert job["run"] == run_path(cell.experiment).name != cell.experiment.slug


def test_runs_are_filtered_by_any_column_and_told_apart_by_those_in_which_they_differ(capsys, folder):
    names = {s: run(small("reefl", rounds=r, seed=s), ONE, progress=False).path.name for s, r in ((1, 1), (2, 2))}
    found = lambda *words: [row["run"] for row in document(capsys, "runs", *words)]  # noqa: E731
    assert found("rounds=2") == found("reefl", "rounds>1", "rounds!=1") == [names[2]]
    assert found("options.kd_weight=null", "options.modulate=true", "seed<=2") == [names[1], names[2]]
    assert found("accuracy<0") == found("dataset=cifar10") == found("method>reefm") == []
    head = said(capsys, "runs").splitlines()[0].split()
    assert head == ["run", "rounds", "day", "status", "t", "accuracy", "seconds"]
    assert "rounds" not in said(capsys, "runs", "rounds=1").splitlines()[0].split()
    assert "unknown key 'roundz'; did you mean 'rounds'?" in said(capsys, "runs", "roundz=2", status=2)
    for text in ("=2", "rounds==2", "accuracy>>5"):
        assert "expected a column" in said(capsys, "runs", text, status=2)
    assert ">: expected a column" in said(capsys, "runs", "rounds", ">", "1", status=2)  # no run has these words
    assert "accuracy>50%: '50%' is a word; allowed: " in said(capsys, "runs", "accuracy>50%", status=2)
    assert "exits>1: [" in (text := said(capsys, "runs", "exits>1", status=2)) and "allowed: = and !=" in text
    assert "rounds=true: True is a word; allowed: " in said(capsys, "runs", "rounds=true", status=2)  # it was 1
    assert "pretrained=no: 'no' is a word; allowed: False and the like" in said(
        capsys, "runs", "pretrained=no", status=2
    )
    assert "profile = 'nope' is unknown" in said(
        capsys, "fill", "reefl/table1", "--profile", "nope", "--dry-run", status=2
    )
    beside = said(capsys, "explain", "reefl/table1", "depthfl", "--set", "method=reefl", status=2)
    assert "row 'depthfl' beside --set method=reefl; allowed: one of them" in beside


def test_all_columns_are_written_as_one_table_that_needs_no_kit(capsys, folder):
    done = run(small("reefl", rounds=1, budgets=[0, 1]), ONE, progress=False)
    run(small("depthfl", rounds=1), ONE, progress=False)
    frames = []
    for suffix, read in (("parquet", pd.read_parquet), ("csv", pd.read_csv), ("json", pd.read_json)):
        path = folder / "tables" / f"runs.{suffix}"
        said(capsys, "runs", "--save", str(path))
        frames.append(read(path).set_index("run"))
        row = frames[-1].loc[done.path.name]
        assert (
            row["accuracy"] == pytest.approx(done.accuracy, abs=1e-12)
            and row["rounds"] == 1
            and row["options.zeta"] == 0.2
        )
        assert frames[-1].shape == (2, frames[0].shape[1])
    assert json.loads(frames[0].loc[done.path.name, "budgets"]) == [0, 1] == frames[2].loc[done.path.name, "budgets"]
    assert "cannot end in '.xlsx'" in said(capsys, "runs", "--save", "runs.xlsx", status=2)
    assert "cannot end in ''" in said(capsys, "runs", "--save", "", status=2)
    assert "workers = 0 must be at least 1" in said(capsys, "verify", done.path.name, "--workers", "0", status=2)


def test_schemas_are_printed_or_written_a_file_each(capsys, tmp_path):
    assert json.loads(said(capsys, "schema"))["title"] == "fedlib experiment"
    said(capsys, "schema", "params", "--out", str(tmp_path / "schemas"))
    names = {p.name for p in (tmp_path / "schemas").iterdir()}
    assert names == {f"{n}.schema.json" for n in ("base", "methods", "columns", "table", "profile", "sizes")}


def test_explain_says_which_layer_set_what(capsys):
    lines = said(capsys, "explain", "reefl/table1", "depthfl").splitlines()
    assert "lr = 0.1: method (over 0.05: base)" in lines and "method = 'depthfl': row" in lines
    lines = said(capsys, "explain", "reefl/table3", "depthfl_no_kd_fedavg", "--set", "rounds=20").splitlines()
    assert "rounds = 20: overrides (over 100: profile, 1000: base)" in lines


@pytest.mark.parametrize(
    "words, sentence",
    [
        (("explain", "reefl/tabel1", "reefl"), "did you mean 'table1'"),
        (("explain", "reefl/table3"), "choose variant = "),
        (("explain", "reefl/table1", "refl"), "did you mean 'reefl'"),
        (("run", "reefl/table1", "--set", "roundz=20"), "unknown key 'roundz'; did you mean 'rounds'?"),
        (("run", "reefl/table1", "--set", "rounds"), "--set rounds: expected KEY=VALUE"),
        (("run", "reefl/table1", "--set", "rounds=[1"), "rounds=[1: not plain YAML"),
        (("run", "reefl/table1", "--workers", "0"), "workers = 0"),
        *(
            (("fill", "--workers", n), f"workers = {n} must be at least 1 and at most 1024")
            for n in ("0", "-1", "999999999")
        ),
        *(
            (("fill", "--workers", n), f"workers = {n} must be at least 1 and at most 1024")
            for n in ("0", "-1", "999999999")
        ),
        (("fill", "reefl/table1", "--columns", "cifar10"), "did you mean 'cifar10_alpha1'"),
    ],
)
def test_what_is_refused_is_refused_in_one_sentence(capsys, words, sentence):
    err = said(capsys, *words, status=2)
    assert sentence in err and err.startswith("fedlib: ")


def test_all_stored_runs_are_one_frame(folder):
    """Every field, every metric, a row a run or a row a round; one that cannot be read is left out with a warning."""
    kept = run(small("reefl", rounds=2, test_split="like_train"), ONE, progress=False)
    frame = fedlib.runs_frame()
    row = frame.iloc[0]
    assert (row["run"], row["method"], row["rounds"], row["test_split"]) == (kept.path.name, "reefl", 2, "like_train")
    assert row["options.zeta"] == 0.2 and row["accuracy"] == kept.accuracy and row["personal.sd"] == kept.summary["personal"]["sd"]  # fmt: skip
    assert row["workers"] == 1 and row["day"] == kept.day and not any("by_client" in c for c in frame.columns)
    assert list(fedlib.runs_frame(rounds=True)["t"]) == [1, 2]
    shutil.copytree(kept.path, kept.path.parent / "damaged-reefl")
    (kept.path.parent / "damaged-reefl/summary.json").write_text("{")
    with pytest.warns(UserWarning, match="damaged-reefl is left out"):
        pd.testing.assert_frame_equal(fedlib.runs_frame(), frame)
    assert len(fedlib.runs_frame(words=["depthfl"])) == 0


def test_a_terminal_of_ascii_ends_no_command(tmp_path):
    """A "±" is shown as what it can be; the command has done its work and says so."""
    code = "from fedlib_lab import cli; cli._runs = lambda given: print('50.0', chr(177), '1.2') or 0; raise SystemExit(cli.main(['runs']))"
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "FEDLIB_OUTPUTS": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **ascii_only}, check=False
    )
    assert (done.returncode, done.stdout) == (0, "50.0 \\xb1 1.2\n"), done.stderr
