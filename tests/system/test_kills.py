"""Kill -9 and Ctrl-C at any moment: a run ends with the numbers it would have had."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from fedlib import Execution, run
from fedlib.core.storage import read_tensors
from fedlib_lab.runs import store as runs_module
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import FINETUNE, ONE, Forks, assert_nothing_left_over, assert_same, small, state


@pytest.fixture(scope="module")
def forks():
    with Forks() as server:
        yield server


def test_kill_9_of_a_worker_at_random_moments(forks, tmp_path):
    """16 of the 20 kills at random moments: FedDyn's, InclusiveFL's and ReeFL's states end with the same files."""
    grid, rng = [small(m, rounds=6, evaluate_every=3) for m in FINETUNE], random.Random(0)
    seconds, reached, kills, lives = forks.run(grid, tmp_path / "whole")["seconds"], set(), 0, 0
    while (kills < 16 or len(reached) <= 3) and lives < 50:
        folder = tmp_path / f"life{lives}"
        killed = forks.run(grid, folder, seconds=rng.uniform(0.02, seconds / 2))["ends"] == [-9]
        reached |= {p.read_bytes() for p in folder.rglob("checkpoint.safetensors")}
        kills, lives = kills + killed, lives + (not killed)  # once it has survived, the next one starts anew
    assert forks.run(grid, folder)["ends"] == [0]
    assert kills >= 16 and len(reached) > 3  # the kills really fell between checkpoints
    for folder in tmp_path.glob("life*"):
        for e in grid:
            assert_same(state(e, tmp_path / "whole"), state(e, folder))
        assert_nothing_left_over(folder)


def test_kill_9_at_every_file_operation_of_a_checkpoint(forks, tmp_path):
    """Each life ends at a later rename, sync or deletion than the one before, so that all of a round's are met."""
    e, life = small("depthfl", rounds=3, evaluate_every=0, clients_per_round=2, num_clients=3), 0
    forks.run([e], tmp_path / "whole")
    while forks.run([e], tmp_path / "parts", at_operation=life)["ends"] == [-9]:
        life += 1
    assert life > 10
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "parts"))
    assert_nothing_left_over(tmp_path / "parts")


NOTEBOOK = """
import os
from pathlib import Path
import torch
from fedlib import Execution, Experiment, run_all
from fedlib.core.paths import outputs_dir
torch.set_num_threads(1)
(outputs_dir() / f"kernel-{name}").write_text(str(os.getpid()))
runs = run_all([Experiment.from_dict(e) for e in grid], Execution(workers=1), checkpoint_seconds=0)
"""


def start_papermill(folder, grid, name):
    """papermill on a notebook of two cells that runs ``grid``."""
    cell = {"cell_type": "code", "execution_count": None, "outputs": []}
    cells = [
        {**cell, "id": "a", "metadata": {"tags": ["parameters"]}, "source": f"name = {name!r}\ngrid = []"},
        {**cell, "id": "b", "metadata": {}, "source": NOTEBOOK},
    ]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook, parameters = folder / f"{name}.ipynb", folder / "parameters.yaml"
    notebook.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    parameters.write_text(json.dumps({"grid": [e.to_dict() for e in grid]}))
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "-f", parameters, notebook, folder / f"{name}.out.ipynb"]  # fmt: skip
    env = {k: v for k, v in os.environ.items() if k != "JUPYTER_PATH"}  # a kernel of its own, as a user has it
    return subprocess.Popen(command, env=env | {"FEDLIB_OUTPUTS": str(folder)}, stderr=subprocess.DEVNULL)


def test_kill_9_of_kernel_and_papermill_then_two_papermills_on_one_table(forks, tmp_path):
    """The other 4 of 20 kills, 2 of the kernel and 2 of papermill; two papermills at once then finish the table."""
    grid = [
        small(m, finetune="frozen", finetune_options={}, rounds=80, evaluate_every=40) for m in ("depthfl", "reefl")
    ]
    rng, lost = random.Random(1), 0
    for i in range(4):
        papermill, pid = start_papermill(tmp_path, grid, f"life{i}"), tmp_path / f"kernel-life{i}"
        while not pid.exists() and papermill.poll() is None:
            time.sleep(0.02)
        time.sleep(rng.uniform(0.1, 0.8))
        lost += not all((run_path(e, tmp_path / "runs") / "summary.json").exists() for e in grid)
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid.read_text()), signal.SIGKILL) if i % 2 else papermill.kill()
        papermill.wait()
    assert lost > 1  # the kills fell into the work
    both = [start_papermill(tmp_path, grid, name) for name in ("one", "other")]
    assert [p.wait() for p in both] == [0, 0]
    forks.run(grid, tmp_path / "whole")
    for e in grid:
        assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "runs"))


def test_two_processes_share_a_list_and_never_run_one_experiment_twice(forks, tmp_path):
    grid = [small("reefl", seed=s, rounds=2) for s in range(4)]
    assert forks.run(grid, tmp_path, processes=2)["ends"] == [0, 0]
    for e in grid:
        assert [m["t"] for m in find_run(e, tmp_path).metrics] == [1, 2]
        workers = read_tensors(run_path(e, tmp_path) / "previous.safetensors")[1]
        assert workers["t"] == 1  # one line of checkpoints: nobody went over it again


def test_the_lock_of_a_dead_process_does_not_block(tmp_path):
    e = small("reefl", rounds=1)
    path = run_path(e, tmp_path)
    path.mkdir(parents=True)
    code = (
        "import os, sys, filelock; filelock.FileLock(sys.argv[1]).acquire(); print(flush=True); os.kill(os.getpid(), 9)"
    )
    dead = subprocess.run([sys.executable, "-c", code, path / ".lock"], stdout=subprocess.DEVNULL)
    assert dead.returncode == -9 and (path / ".lock").exists()
    assert run(e, ONE, tmp_path, progress=False, wait=False).summary["status"] == "finished"


def test_ctrl_c_stops_every_thread_and_loses_one_round_at_most(tmp_path, monkeypatch):
    from fedlib.methods.sliced.reefl import ReeFL

    e, steps, original, once = small("reefl"), [], ReeFL.local_update, threading.Lock()
    monkeypatch.setattr(runs_module.time, "monotonic", iter(range(0, 10**6, 100)).__next__)  # a checkpoint every round

    def endless(self, cohort):
        original(self, cohort)
        while cohort.t == 3:
            if once.acquire(blocking=False):  # a second alarm could come after the test, where it ends the process
                signal.setitimer(signal.ITIMER_REAL, 0.05)
            steps.append(original(self, cohort))
            assert len(steps) < 2000

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        monkeypatch.setenv("FEDLIB_ACCEPT", "method")  # what stands in the kit's place is part of a run
        monkeypatch.setattr(ReeFL, "local_update", endless)
        # the alarm of a thread's first endless step reaches the main thread, which waits for the cohorts
        with pytest.raises(KeyboardInterrupt):
            run(e, Execution(workers=2, executor="threads"), tmp_path / "parts", progress=False)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(steps) < 2000  # the other threads stopped at their next batch
    assert read_tensors(run_path(e, tmp_path / "parts") / "checkpoint.safetensors")[1]["t"] == 2
    monkeypatch.setattr(ReeFL, "local_update", original)
    run(e, Execution(workers=2, executor="threads"), tmp_path / "parts", progress=False)
    run(e, Execution(workers=2, executor="threads"), tmp_path / "whole", progress=False)
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "parts"))


def test_an_error_in_a_thread_is_told_and_keeps_no_cohort_alive(tmp_path, monkeypatch):
    import gc
    import weakref

    from fedlib.methods.sliced.reefl import ReeFL

    alive = []

    def broken(self, cohort):
        alive.append(weakref.ref(cohort))
        raise ArithmeticError("as planned")

    with monkeypatch.context() as m:
        m.setattr(ReeFL, "local_update", broken)
        with pytest.raises(ArithmeticError, match="as planned"):
            run(small("reefl"), Execution(workers=2, executor="threads"), tmp_path, progress=False)
    gc.collect()
    assert alive and not any(ref() for ref in alive)
