"""Runs of a list side by side: when, with the same numbers, and what an error, a kill or a Ctrl-C leaves."""

import contextlib
import io
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import warnings
from functools import partial

import pytest
import torch
from filelock import FileLock

from fedlib import Execution, run_all
from fedlib.core import paths
from fedlib.core.storage import DamagedFile, read_tensors
from fedlib.engine.rounds import Finished
from fedlib_lab.runs import side_by_side, store
from fedlib_lab.runs.callbacks import Callback, Together
from fedlib_lab.runs.checkpoints import NEWEST
from fedlib_lab.runs.progress import Terminal, Watch
from fedlib_lab.runs.side_by_side import choose
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import ONE, assert_nothing_left_over, assert_same, small, state
from tests.runs.test_progress import Screen


@pytest.fixture
def two_cores():
    """This process has two threads, as on two cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


def grid_of(count=4, **changes):
    return [small("own", rounds=2, seed=s, **changes) for s in range(count)]


def test_only_where_nobody_asked_for_something_else(two_cores, own, monkeypatch):
    grid = grid_of()
    assert choose(grid, Execution()) == grid
    for asked in (Execution(workers=2), Execution(executor="threads"), Execution(executor="processes")):
        assert choose(grid, asked) == []
    assert choose(grid[:1], Execution()) == []
    with monkeypatch.context() as m:
        m.setattr(side_by_side, "free_memory", lambda device: 2**20)
        assert choose(grid, Execution()) == []
    torch.set_num_threads(1)
    assert choose(grid, Execution()) == []


def test_as_many_as_fill_all_cores_are_run_side_by_side_and_the_rest_has_all_cores(two_cores, own):
    grid = grid_of(5)
    assert choose(grid, Execution()) == grid[:4] and choose(grid[:3], Execution()) == grid[:2]
    wide = small("own", seed=9, batch_size=4096)  # what one needs is what the largest needs
    assert choose([*grid[:3], wide], Execution()) == [*grid[:3], wide]


def test_callbacks_see_their_rounds_here(two_cores, own, tmp_path, monkeypatch):
    monkeypatch.setattr(side_by_side, "run_apart", lambda *_: pytest.fail("elsewhere"))
    assert len(run_all(grid_of(2), Execution(), tmp_path, False, callbacks=[Callback()])) == 2


def test_numbers_and_order_are_those_of_one_after_the_other(two_cores, own, tmp_path):
    grid = grid_of(3)
    asked = [grid[2], grid[0], grid[1], grid[2]]
    done = run_all(asked, Execution(), tmp_path / "both", progress=False)
    assert [r.experiment for r in done] == asked
    assert sorted(r.record["provenance"]["workers"] for r in done[:3]) == [1, 1, 2]  # the last has both cores
    for e in grid:
        if find_run(e, tmp_path / "both").record["provenance"]["workers"] == 1:
            torch.set_num_threads(1)
            run_all([e], ONE, tmp_path / "one", progress=False)
            assert_same(state(e, tmp_path / "one"), state(e, tmp_path / "both"))
    assert_nothing_left_over(tmp_path / "both")
    assert multiprocessing.active_children() == []


def test_what_another_process_runs_is_waited_for(two_cores, own, tmp_path, monkeypatch):
    grid = grid_of(4)
    path = run_path(grid[1], tmp_path)
    path.mkdir(parents=True)
    lock, others = FileLock(path / ".lock", thread_local=False), []

    def say(self, text):
        others.append([(run_path(e, tmp_path) / "summary.json").exists() for e in grid])
        lock.release()

    monkeypatch.setattr(Watch, "say", say)
    with lock:
        assert len(run_all(grid, Execution(), tmp_path)) == 4
    assert others == [[True, False, True, True]]  # first all that nobody else has


def test_an_error_is_raised_here_and_the_others_go_on_later(two_cores, own, tmp_path):
    grid = [small("own", rounds=r) for r in (3, 400)]

    def fail(cohort):
        if cohort.setting.rounds == 3 and cohort.t == 2:
            raise DamagedFile("a file", "as planned")  # an error that asks for more than a sentence

    own.does = staticmethod(fail)
    with pytest.raises(DamagedFile, match="^a file is damaged .as planned.") as error:
        side_by_side.run_apart(runner(tmp_path), grid, Execution(), Watch(grid, False))
    assert error.value.path == "a file" and "in a worker process" in error.value.__notes__[0]
    assert multiprocessing.active_children() == []
    if (file := run_path(grid[1], tmp_path) / "checkpoint.safetensors").exists():  # it had begun
        assert read_tensors(file)[1]["t"] >= 1


def runner(folder):
    return partial(store._run_one, folder=folder, seconds=20.0, accept=(), callback=Together())


def test_bad_input_is_one_sentence(two_cores, own, tmp_path):
    with pytest.raises(ValueError, match="5 training examples"):
        run_all([*grid_of(2), small("own", num_train=5)], Execution(), tmp_path, progress=False)


def test_a_run_whose_process_is_killed_goes_on_in_another(two_cores, own, tmp_path):
    grid, marker = grid_of(2), tmp_path / "killed"

    def kill_once(cohort):
        with contextlib.suppress(FileExistsError):
            marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)

    own.does = staticmethod(kill_once)
    done = run_all(grid, Execution(), tmp_path / "runs", progress=False)
    assert marker.exists() and [r.summary["status"] for r in done] == ["finished"] * 2


def test_a_run_that_kills_every_process_is_named(two_cores, own, tmp_path):
    here = os.getpid()

    def kill(cohort):
        if os.getpid() != here:
            os.kill(os.getpid(), signal.SIGKILL)

    own.does = staticmethod(kill)
    with pytest.raises(RuntimeError, match="^own-.* its process died 2 times, often a sign that memory is short"):
        run_all(grid_of(2), Execution(), tmp_path, progress=False)
    assert multiprocessing.active_children() == []


def test_where_a_fork_cannot_train_they_are_run_here(two_cores, own, tmp_path, monkeypatch):
    def refuse():
        raise side_by_side.Unforkable("as planned")

    monkeypatch.setattr(side_by_side, "check_fork", refuse)
    done = run_all(grid_of(2), Execution(), tmp_path, progress=False)
    assert [r.record["provenance"]["workers"] for r in done] == [2, 2]


def test_what_a_run_says_is_said_here(two_cores, own, tmp_path, capsys):
    def speak(cohort):
        print("as printed")
        warnings.warn("as warned", stacklevel=1)

    own.does = staticmethod(speak)
    with pytest.warns(UserWarning, match="as warned"):
        run_all(grid_of(2), Execution(), tmp_path, progress=False)
    assert capsys.readouterr().out.startswith("as printed\n")


def test_both_runs_are_told_of(monkeypatch):
    a, b, c = (small("reefl", seed=s, rounds=100) for s in (1, 2, 3))
    with Watch([a, b, c], shown=False) as watch:
        watch.terminal, watch.abreast = Terminal(Screen()), 2
        monkeypatch.setattr("fedlib_lab.runs.progress.LINE_SECONDS", 0)
        watch.begin(a, 98)
        watch.begin(b, 40)
        watch.round(b, Finished(41, None, {}, {}, None, 6.0))
        watch.end(a)
        lines = watch.terminal.file.getvalue().splitlines()
    assert lines[-2:] == [
        # 2, 59 and 100 rounds of 6 s on two cores are 8.05 minutes, the longest alone 10
        f"0 of 3 runs done, about 10 minutes left, round 98 of 100 of {a.slug} and round 41 of 100 of {b.slug}",
        f"1 of 3 runs done, about 10 minutes left, round 41 of 100 of {b.slug}",
    ]


SCRIPT = """
import sys, json, signal
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
from fedlib import Execution, Experiment, run_all
import torch
torch.set_num_threads(2)
run_all([Experiment.from_dict(e) for e in json.loads(sys.argv[1])], Execution(), sys.argv[2], checkpoint_seconds=0)
"""


def start(grid, folder):
    """A process that runs ``grid`` side by side, when both have stored a round."""
    command = [sys.executable, "-c", SCRIPT, json.dumps([e.to_dict() for e in grid]), folder]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    files = [run_path(e, folder) / "checkpoint.safetensors" for e in grid]
    while not all(f.exists() for f in files):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    return process


def endless(count):
    return [small("depthfl", rounds=5000, evaluate_every=0, seed=s) for s in range(count)]


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_ctrl_c_and_kill_9_end_all_and_free_the_runs(sent, tmp_path):
    grid = endless(2)
    process = start(grid, tmp_path)
    os.killpg(process.pid, sent)  # as a terminal, which sends it to all of a group
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -sent
    if sent == signal.SIGINT:
        assert said.splitlines()[-1] == (
            "interrupted: 0 of 2 runs are done, 2 are stored up to their last rounds; "
            "run the same again, and they go on from there"
        )
    for e in grid:
        path = run_path(e, tmp_path)
        with FileLock(path / ".lock", timeout=30):
            file = next(
                f for f in (path / NEWEST, path / "previous.safetensors") if f.exists()
            )  # killed between two renames
            assert read_tensors(file)[1]["t"] >= 1 and not (path / "summary.json").exists()


def test_lines_of_several_are_whole_and_what_ends_in_no_line_is_said_too():
    said = []
    stream = io.TextIOWrapper(side_by_side._Stream("stdout", said.append), "utf-8", line_buffering=True)
    print("äs", "printed", file=stream)
    print("half", end="", file=stream)
    assert [news.arguments for news in said] == [("äs printed\n",)]
    stream.flush()
    assert said[1].arguments == ("half",)


def test_on_gpus_the_kits_runs_have_new_processes_and_one_of_your_own_stays(own, monkeypatch):
    """No GPU is at hand: who is chosen."""
    monkeypatch.setattr("fedlib.engine.executors.check_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    grid = [small("reefl", seed=s) for s in range(5)]
    assert choose([small("own"), *grid], Execution("cuda")) == grid[:4]
    assert choose([small("own"), *grid], Execution("cuda:1")) == grid[:4]
    assert choose(grid[:3], Execution("cuda")) == choose(grid, Execution("cuda", workers=1)) == []
    assert choose(grid[:1], Execution("cuda:0")) == []


def test_a_new_process_stores_where_this_one_does(two_cores, own, tmp_path, monkeypatch):
    """A smoke table's go to scratch, which only this process knows."""
    monkeypatch.setattr(paths, "_trial", False)
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    monkeypatch.delenv("FEDLIB_OUTPUTS", raising=False)
    paths.use_outputs_of("smoke")
    told = []
    monkeypatch.setattr(side_by_side, "run_apart", lambda one, *_: told.append(one.keywords["folder"]))
    run_all(grid_of(2), Execution(), progress=False)
    assert told == [tmp_path / "outputs/scratch/runs"] and len(list(told[0].glob("*/summary.json"))) == 2


def test_what_a_new_process_cannot_do_is_left_to_this_one(own, tmp_path, monkeypatch):
    """Here there is no GPU, and a method of one's own is not known there."""
    grid = [small("own", rounds=1), small("reefl", rounds=1)]
    monkeypatch.setattr("fedlib.engine.executors.check_device", lambda device: None)
    watch = Watch(grid, False)
    side_by_side.run_apart(runner(tmp_path), grid, Execution("cuda:0"), watch)
    assert list(watch.left) == grid and watch.abreast == 1 and multiprocessing.active_children() == []


UNGUARDED = """
import sys
from functools import partial
import torch
from fedlib import Execution
from fedlib_lab.runs import side_by_side, store
from fedlib_lab.runs.callbacks import Together
from fedlib_lab.runs.progress import Watch
from tests.helpers.stored import small

print("begun")
torch.cuda.is_initialized = lambda: True
torch.set_num_threads(2)
grid = [small("reefl", rounds=1, seed=s) for s in (0, 1)]
watch = Watch(grid, False)
one = partial(store._run_one, folder="runs", seconds=20.0, accept=(), callback=Together())
side_by_side.run_apart(one, grid, Execution(), watch)
print(len(watch.left))
"""


def test_new_processes_do_not_run_an_unguarded_script_again(tmp_path):
    """As where CUDA has begun."""
    (tmp_path / "script.py").write_text(UNGUARDED)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "FEDLIB_OUTPUTS": str(tmp_path)}
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout == "begun\n0\n", done.stderr
    assert len(list((tmp_path / "runs").glob("*/summary.json"))) == 2
