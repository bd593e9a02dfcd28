"""A stored run is trained again and compared: byte for byte where all is alike, else within a tolerance."""

import json
from dataclasses import replace

import pytest

from fedlib import verify
from fedlib.core.paths import outputs_dir
from fedlib_lab import cli
from fedlib_lab.runs import record
from fedlib_lab.runs.store import run, stored_runs
from tests.helpers.stored import ONE, small


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    monkeypatch.setattr(record, "commit", lambda: "c0ffee")
    return tmp_path


def with_accuracy(r, t, changed):
    """``r`` as if it had another accuracy after round ``t``."""
    return replace(r, metrics=[m | {"accuracy": m["accuracy"] + changed} if m["t"] == t else m for m in r.metrics])


def test_a_run_comes_out_byte_for_byte_and_touches_no_store(folder):
    stored = run(small("depthfl", rounds=3), ONE, progress=False)
    before = sorted((p, p.read_bytes()) for p in folder.rglob("*") if p.is_file())
    found = verify(stored)
    assert (found.passed, found.identical, found.differing, found.apart) == (True, True, {}, 0)
    assert [m["t"] for m in found.curve] == [1, 2, 3] and "passed: every byte is the same" in str(found)
    assert [m["stored"] for m in found.curve] == [m["accuracy"] for m in stored.metrics]
    assert sorted((p, p.read_bytes()) for p in folder.rglob("*") if p.is_file()) == before


def test_on_a_like_machine_any_difference_fails_elsewhere_a_small_one_does_not(monkeypatch):
    stored = run(small("reefl", rounds=2), ONE, progress=False)
    wrong = verify(with_accuracy(stored, 2, 0.5))
    assert not wrong.differing and not wrong.passed and abs(wrong.apart - 0.5) < 1e-9
    assert "failed: accuracies are up to 0.5000 points apart" in str(wrong)
    monkeypatch.setattr(record, "commit", lambda: "beef")
    near, far = verify(with_accuracy(stored, 2, 0.5)), verify(with_accuracy(stored, 2, 1.5))
    assert near.passed and not near.identical and near.differing == {"commit": [["c0ffee"], "beef"]}
    assert not far.passed and verify(with_accuracy(stored, 2, 1.5), tolerance=2.0).passed


def test_edited_code_is_alike_to_nothing(monkeypatch):
    monkeypatch.setattr(record, "commit", lambda: "c0ffee-dirty")
    stored = run(small("reefl", rounds=1), ONE, progress=False)
    found = verify(stored)
    assert found.differing["commit"] == [["c0ffee-dirty"], "c0ffee-dirty"] and found.passed


def test_only_the_first_rounds_up_to_the_last_evaluated_of_them():
    stored = run(small("reefl", rounds=5, evaluate_every=2), ONE, progress=False)
    found = verify(stored, rounds=3)
    assert ([m["t"] for m in found.curve], found.identical) == ([2], True)
    with pytest.raises(ValueError, match="the first round that .* evaluated is 2"):
        verify(stored, rounds=1)


def test_the_command_says_it_by_its_exit_status_too(capsys, monkeypatch):
    stored = run(small("reefl", rounds=2), ONE, progress=False)
    assert cli.main(["verify", stored.path.name, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["identical"] is True and told["curve"][1]["again"] == stored.accuracy
    monkeypatch.setattr(cli, "_stored", lambda name: with_accuracy(next(stored_runs(outputs_dir() / "runs")), 1, 0.25))
    assert cli.main(["verify", "reefl", "--rounds", "1"]) == 1
    assert "failed" in capsys.readouterr().out
