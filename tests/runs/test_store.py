"""Stored runs: returned at once, resumed exactly. (What can go wrong with them: ``system/test_faults.py``.)"""

import json

import pytest
import torch

from fedlib import Execution, Experiment, run, run_all
from fedlib.core.storage import DamagedFile, read_json, read_lines, read_tensors, write_json, write_lines, write_tensors
from fedlib.layers.overrides import OVERRIDES
from fedlib_lab.runs import record
from fedlib_lab.runs import store as runs_module
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import ONE, assert_same, short, small, state


def test_a_stored_run_is_returned_without_any_work(tmp_path, monkeypatch):
    e = short("reefl")
    first = run(e, ONE, tmp_path, progress=False)
    assert first.summary["status"] == "finished" and [m["t"] for m in first.metrics] == [1, 2, 3, 4]
    assert first.accuracy == first.metrics[-1]["accuracy"]
    monkeypatch.setattr(runs_module, "build_federation", lambda *a: pytest.fail("built again"))
    assert run(e, ONE, tmp_path).summary == first.summary
    assert [r.path for r in run_all([e, e], ONE, tmp_path)] == [first.path] * 2


def test_provenance_says_who_multiplied(monkeypatch):
    """OpenBLAS only where every worker has one thread: not in the one worker of a process with two, nor on a GPU."""
    monkeypatch.setattr(record, "choose_products", lambda stored: stored or "OpenBLAS")
    for threads, execution, products in [
        (1, Execution(workers=1), "OpenBLAS"), (2, Execution(workers=1), "PyTorch"), (2, Execution(workers=2), "OpenBLAS"),
        (2, Execution(workers=1, executor="processes"), "OpenBLAS"), (1, Execution("cuda", executor="ray"), "PyTorch"),
    ]:  # fmt: skip
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert record.provenance(execution)["products"] == products


def test_a_run_goes_on_with_who_multiplied_its_first_rounds(tmp_path, monkeypatch):
    """Whoever multiplies on the machine that it goes on at."""
    asked, here = [], "OpenBLAS 1"
    choose = lambda stored: asked.append(stored) or stored or here  # noqa: E731
    monkeypatch.setattr(record, "choose_products", choose)
    monkeypatch.setitem(OVERRIDES, "begin", choose)
    monkeypatch.setattr(record, "_one_thread_each", lambda _: True)
    e = small("reefl", rounds=3)
    run(e, ONE, tmp_path, progress=False, on_round=lambda r: True)
    assert asked == ["", ""]
    here = "PyTorch"
    done = run(e, ONE, tmp_path, progress=False)
    assert asked[2:] == ["OpenBLAS 1"] * 2 and done.record["resumed"][0]["products"] == "OpenBLAS 1"
    asked.clear()
    assert run(e.replace(seed=9), ONE, tmp_path, progress=False).record["provenance"]["products"] == "PyTorch"
    assert asked == ["", ""]


def test_provenance_names_the_card_and_a_run_goes_on_with_its_convolutions(tmp_path, monkeypatch):
    """How convolutions run is measured as shapes come: a record says what was found up to its last checkpoint."""
    monkeypatch.setattr(record, "CHOSEN", chosen := {})
    monkeypatch.setattr(runs_module, "CHOSEN", chosen)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91200)
    said = record.gpu()
    assert said["device"] == "NVIDIA H100 80GB HBM3" and said["cudnn"] == 91200 and said["host"]
    monkeypatch.setattr(record, "cpu", lambda: {"device": "a CPU", "convolutions": chosen})
    e = small("reefl", rounds=3)

    def measured(r):
        chosen["3 clients, 4 to 8 channels"] = "loop"
        return True

    run(e, ONE, tmp_path, progress=False, on_round=measured)
    chosen.clear()
    done = run(e, ONE, tmp_path, progress=False)
    assert chosen == {"3 clients, 4 to 8 channels": "loop"} == done.record["provenance"]["convolutions"]


def test_provenance_says_which_commit(monkeypatch):
    record.commit.cache_clear()
    monkeypatch.setenv("FEDLIB_COMMIT", "handed in")
    assert record.commit() == "handed in"
    record.commit.cache_clear()
    monkeypatch.delenv("FEDLIB_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert record.commit() == ""  # git is not there
    record.commit.cache_clear()


def test_provenance_names_hardware_and_versions(tmp_path):
    e = short("reefl", rounds=1)
    path = run(e, ONE, tmp_path, progress=False).path
    stored = json.loads((path / "experiment.json").read_text())
    facts = {
        "fedlib",
        "torch",
        "python",
        "device",
        "family",
        "instructions",
        "cores",
        "executor",
        "products",
        "workers",
        "began",
    }
    assert set(stored["provenance"]) - {"commit"} == facts  # an archive has no commit, unless it is told
    assert Experiment.from_dict(stored["experiment"]) == e


@pytest.mark.parametrize("method", ["depthfl", "inclusivefl", "reefl"])
def test_an_interrupted_run_ends_with_the_same_numbers(method, tmp_path, monkeypatch):
    """Stop after every round in turn (all server and client state goes through the files)."""
    e = short(method)
    run(e, ONE, tmp_path / "whole", progress=False)
    original = runs_module.run_rounds

    def one_round(*args):
        yield next(original(*args), None) or (_ for _ in ()).throw(AssertionError)
        raise KeyboardInterrupt

    for _ in range(e.rounds - 1):
        monkeypatch.setattr(runs_module, "run_rounds", one_round)
        with pytest.raises(KeyboardInterrupt):
            run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    monkeypatch.setattr(runs_module, "run_rounds", original)
    run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "parts"))


def test_a_held_experiment_is_left_alone(tmp_path):
    from filelock import FileLock

    e = short("reefl", rounds=1)
    path = run_path(e, tmp_path)
    path.mkdir(parents=True)
    with FileLock(path / ".lock"):
        with pytest.raises(TimeoutError, match=f"{e.slug} is being run by another process"):
            run(e, ONE, tmp_path, progress=False, wait=False)
    assert run(e, ONE, tmp_path, progress=False, wait=False).summary["status"] == "finished"


def test_bad_input_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="exceeds the 10 training examples"):
        run(short("reefl", num_train=10, num_clients=20), ONE, tmp_path)
    assert not list(tmp_path.iterdir())


def test_divergence_is_a_result(tmp_path):
    e = short("fedavg", finetune="full", lr=1e30, clip_value=None, rounds=5)
    found = run(e, ONE, tmp_path, progress=False)
    assert found.summary["status"] == "diverged" and found.summary["t"] < 5
    assert 0 <= found.accuracy <= 100
    assert run(e, ONE, tmp_path, progress=False).summary == found.summary  # stored like any other


def test_another_experiment_under_the_same_name_is_refused(tmp_path):
    e = short("reefl", rounds=1)
    path = run(e, ONE, tmp_path, progress=False).path
    stored = read_json(path / "experiment.json")
    stored["experiment"]["lr"] = 0.04
    write_json(path / "experiment.json", stored)
    with pytest.raises(ValueError, match="holds another experiment of the same name"):
        find_run(e, tmp_path)


def test_nothing_is_unpickled(tmp_path):
    """A pickle renamed to .safetensors is refused, not executed."""
    import pickle

    file = tmp_path / "evil.safetensors"
    file.write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ValueError, match="evil.safetensors is damaged"):
        read_tensors(file)
    write_tensors(file, {"x": torch.ones(2)}, {"t": 1})
    assert read_tensors(file)[1] == {"t": 1}


def test_a_run_says_which_test_examples_every_exit_got_right(tmp_path):
    """The shares of right answers are the accuracies; the rounds before the last keep numbers alone."""
    from fedlib_lab.runs.record import unpack_bits

    found = run(short("reefl", rounds=2), ONE, tmp_path, progress=False)
    right = unpack_bits(found.summary["right"], found.summary["num_test"])
    assert right.shape == (len(found.summary["exits"]) + 1, 40)
    assert (100 * right.mean(1)).tolist() == pytest.approx([*found.summary["exits"], found.summary["ensemble"]])
    assert all("right" not in m for m in found.metrics)


def rounds_of(e, folder):
    return [m["t"] for m in find_run(e, folder).metrics]


def test_how_often_one_looks_is_no_part_of_a_run(tmp_path):
    """The stored run answers with the curve that it has, and an interrupted one goes on as it was begun."""
    twice, often = short("reefl", evaluate_every=2), short("reefl", evaluate_every=1)
    assert twice == often and twice.slug == often.slug and hash(twice) == hash(often)
    assert "evaluate_every" not in twice.identity()
    run(twice, ONE, tmp_path / "a", progress=False, on_round=lambda r: r.t == 3)
    again = run(often, ONE, tmp_path / "a", progress=False)
    assert [m["t"] for m in again.metrics] == rounds_of(twice, tmp_path / "a") == [2, 4]
    run(often, ONE, tmp_path / "b", progress=False)
    a, b = (state(e, tmp_path / x) for e, x in ((twice, "a"), (often, "b")))
    assert a[3] == b[3] and a[2] == [m for m in b[2] if m["t"] in (2, 4)]


def test_a_run_has_a_curve_unless_none_is_asked_for(tmp_path):
    """And what is stored says how often was looked, whatever the default will be."""
    e = short("reefl", rounds=6, evaluate_every=None)
    assert [m["t"] for m in run(e, ONE, tmp_path, progress=False).metrics] == rounds_of(e, tmp_path) == [5, 6]
    assert find_run(e, tmp_path).experiment.evaluate_every == 5


def test_a_run_whose_name_says_how_often_one_looked_is_found_and_goes_on(tmp_path, capsys):
    """As all runs were named before: whatever is asked now, finished or not; one of another experiment is not taken."""
    e, other = short("reefl", evaluate_every=2), short("reefl", evaluate_every=1)
    run(e, ONE, tmp_path, progress=False, on_round=lambda r: r.t == 3)
    (tmp_path / e.slug).rename(former := tmp_path / e.former_slug)
    assert run_path(other, tmp_path) == run_path(e, tmp_path) == former
    found = run(other, ONE, tmp_path, progress=False)
    assert found.path == former and rounds_of(other, tmp_path) == [2, 4] and len(list(tmp_path.iterdir())) == 1
    assert find_run(other.replace(lr=0.01), tmp_path) is None
    whole = (former / "experiment.json").read_text()
    (former / "experiment.json").write_text("{")
    assert run_path(e, tmp_path) == former and find_run(other.replace(seed=9), tmp_path) is None
    (former / "experiment.json").write_text(whole)
    capsys.readouterr()
    run(e, ONE, tmp_path, again=True)
    assert capsys.readouterr().out.startswith(f"forgotten, and run anew: {former.name}\n")


def test_a_run_is_a_card_in_a_notebook(tmp_path):
    """Numbers, what was asked, what trained it; what a name holds is text, not markup."""
    e = short("reefl", test_split="like_train", evaluate_every=2)
    done = run(e, ONE, tmp_path, progress=False)
    card = done._repr_html_()
    for text in (e.slug, f"{done.accuracy:.2f} %", "finished after 4 of 4 rounds", done.day, "like_train"):
        assert text in card
    own = done.summary["personal"]
    assert f"{own['accuracy']:.2f} ± {own['sd']:.2f} % over 8" in card
    strange = record.Run(e.replace(dataset="<b>"), tmp_path / "<b>", done.summary, [], {})._repr_html_()
    assert "<b>" not in strange
    said = done.summary | {"status": "<b>", "personal": own | {"clients": "<b>"}}
    there = {"stored": "<b>", "provenance": {"device": "<b>", "torch": "<b>"}}
    edited = record.Run(e, done.path, said, [], there)._repr_html_()
    assert "<b>" not in edited and "&lt;b&gt; after 4 of 4" in edited


def test_files_of_two_runs_are_no_run(tmp_path):
    """Each file is intact and the rounds are those that are due: the numbers of the last round tell."""
    e = small("reefl", rounds=2, test_split="like_train")
    one = run(e, ONE, tmp_path / "one", progress=False).path
    for key in ("accuracy", "exits", "personal"):
        lines = read_lines(one / "metrics.jsonl")
        lines[-1][key] = {**lines[-1][key], "sd": 0.5} if key == "personal" else 12.5
        write_lines(one / "metrics.jsonl", lines)
        for file in one.glob("*.safetensors"):
            file.rename(file.with_suffix(".kept"))
        with pytest.raises(DamagedFile, match=f"its last {key} are not those of summary.json"):
            find_run(e, tmp_path / "one")
        with pytest.warns(UserWarning, match=f"is left out: .*its last {key}"):
            assert not list(runs_module.stored_runs(tmp_path / "one"))
        for file in one.glob("*.kept"):
            file.rename(file.with_suffix(".safetensors"))
        with pytest.warns(UserWarning, match="rebuilding it from the checkpoint"):
            assert run(e, ONE, tmp_path / "one", progress=False).metrics == read_lines(one / "metrics.jsonl")


@pytest.mark.parametrize("t", [10**9, -1, 3, True, "2", None])
def test_a_round_that_the_experiment_does_not_have_is_damage_at_once(t, tmp_path):
    e = small("reefl", rounds=2)
    path = run(e, ONE, tmp_path, progress=False).path
    write_json(path / "summary.json", read_json(path / "summary.json") | {"t": t})
    with pytest.raises(DamagedFile, match=r"summary.json is damaged \(it ends after round .* of 2\)"):
        find_run(e, tmp_path)
