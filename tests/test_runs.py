"""Stored runs: returned at once, resumed exactly, never half-believed."""

import json
import random
import subprocess
import sys
import time

import pytest
import torch

from fedlib import Execution, Experiment, run, run_all
from fedlib import runs as runs_module
from fedlib.runs import find_run, run_path
from fedlib.storage import read_tensors, write_tensors

ONE = Execution(workers=1)
FINETUNE = {"depthfl": "lora", "inclusivefl": "lora", "reefl": "frozen"}


def short(method, **changes):
    finetune = FINETUNE.get(method, "frozen")
    values = dict(
        method=method, finetune=finetune, finetune_options={"r": 4} if finetune == "lora" else {}, pretrained=False,
        num_train=200, num_test=40, num_clients=8, clients_per_round=4, rounds=4, evaluate_every=1, seed=3,
    )  # fmt: skip
    return Experiment(**(values | changes))


def state(e, folder):
    """Everything a run leaves behind that must not depend on interruptions."""
    path = run_path(e, folder)
    tensors, metadata = read_tensors(path / "checkpoint.safetensors")
    memories = {c: read_tensors(path / "clients" / f"{c}-{t}.safetensors")[0] for c, t in metadata["memories"].items()}
    found = find_run(e, folder)
    timeless = [{k: v for k, v in m.items() if k != "seconds"} for m in found.metrics]
    summary = {k: v for k, v in found.summary.items() if k != "seconds"}
    return tensors, memories, timeless, summary


def assert_same(a, b):
    for x, y in zip(a[:2], b[:2], strict=True):
        assert x.keys() == y.keys()
    assert all(torch.equal(a[0][k], b[0][k]) for k in a[0])
    assert all(torch.equal(m[k], b[1][c][k]) for c, m in a[1].items() for k in m)
    assert a[2:] == b[2:]


def test_a_stored_run_is_returned_without_any_work(tmp_path, monkeypatch):
    e = short("reefl")
    first = run(e, ONE, tmp_path, progress=False)
    assert first.summary["status"] == "finished" and [m["t"] for m in first.metrics] == [1, 2, 3, 4]
    assert first.accuracy == first.metrics[-1]["accuracy"]
    monkeypatch.setattr(runs_module, "build_federation", lambda *a: pytest.fail("built again"))
    assert run(e, ONE, tmp_path).summary == first.summary
    assert [r.path for r in run_all([e, e], ONE, tmp_path)] == [first.path] * 2


def test_provenance_names_hardware_and_versions(tmp_path):
    e = short("reefl", rounds=1)
    path = run(e, ONE, tmp_path, progress=False).path
    stored = json.loads((path / "experiment.json").read_text())
    assert set(stored["provenance"]) == {"fedlib", "torch", "python", "device", "cores", "executor", "workers"}
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


SCRIPT = """
import sys, json
from pathlib import Path
import torch
torch.set_num_threads(1)
from fedlib import Execution, Experiment, build_federation, run_all
folder, experiments = Path(sys.argv[1]), [Experiment.from_dict(e) for e in json.loads(sys.argv[2])]
build_federation(experiments[0])  # imports and data: what follows is the run itself
print("ready", flush=True)
run_all(experiments, Execution(workers=1), folder, False, checkpoint_seconds=0)
"""


def script(folder, grid):
    """The command of another process that runs ``grid``."""
    return [sys.executable, "-c", SCRIPT, str(folder), json.dumps([e.to_dict() for e in grid])]


def started(command):
    """The process, once its run begins."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    process.stdout.readline()
    return process


def test_kill_9_at_random_moments_loses_nothing(tmp_path):
    """Ten kills spread over the run of FedDyn's, InclusiveFL's and ReeFL's states; then the same final files."""
    grid = [short(m, rounds=8) for m in FINETUNE]
    whole = started(script(tmp_path / "whole", grid))
    began = time.monotonic()
    assert whole.wait() == 0
    seconds = time.monotonic() - began
    rng, reached = random.Random(0), set()
    for _ in range(10):
        process = started(script(tmp_path / "parts", grid))
        time.sleep(rng.uniform(0.02, seconds / 4))
        process.kill()  # SIGKILL
        process.wait()
        reached |= {p.read_bytes() for p in (tmp_path / "parts").rglob("checkpoint.safetensors")}
    assert len(reached) > 3  # the kills really fell between checkpoints
    subprocess.run(script(tmp_path / "parts", grid), check=True, stdout=subprocess.DEVNULL)
    for e in grid:
        assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "parts"))


def test_two_processes_share_a_list_and_never_run_one_experiment_twice(tmp_path):
    grid = [short("reefl", seed=s, rounds=2) for s in range(4)]
    both = [subprocess.Popen(script(tmp_path, grid), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait() for p in both] == [0, 0]
    for e in grid:
        found = find_run(e, tmp_path)
        assert [m["t"] for m in found.metrics] == [1, 2]  # one line a round: nobody ran it twice


def test_a_held_experiment_is_left_alone(tmp_path):
    from filelock import FileLock

    e = short("reefl", rounds=1)
    path = run_path(e, tmp_path)
    path.mkdir(parents=True)
    with FileLock(path / ".lock"):
        assert run(e, ONE, tmp_path, progress=False, wait=False) is None
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


@pytest.mark.parametrize("name", ["checkpoint.safetensors", "summary.json", "experiment.json"])
def test_damaged_files_are_named_not_believed(name, tmp_path):
    e = short("reefl", rounds=1)
    path = run(e, ONE, tmp_path, progress=False).path
    if name == "checkpoint.safetensors":
        (path / "summary.json").unlink()
    (path / name).write_bytes((path / name).read_bytes()[:20])
    with pytest.raises(ValueError, match=f"{name} is damaged"):
        run(e, ONE, tmp_path, progress=False)


def test_a_line_cut_short_by_a_kill_is_not_a_measurement(tmp_path):
    e = short("reefl", rounds=2)
    path = run(e, ONE, tmp_path, progress=False).path
    with open(path / "metrics.jsonl", "a") as f:
        f.write('{"t": 3, "accur')
    assert [m["t"] for m in find_run(e, tmp_path).metrics] == [1, 2]


def test_another_experiment_under_the_same_name_is_refused(tmp_path):
    e = short("reefl", rounds=1)
    path = run(e, ONE, tmp_path, progress=False).path
    stored = json.loads((path / "experiment.json").read_text())
    stored["experiment"]["lr"] = 0.04
    (path / "experiment.json").write_text(json.dumps(stored))
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
