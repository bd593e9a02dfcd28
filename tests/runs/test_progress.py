"""What a user is told while waiting: stored runs and their days, other processes, minutes left, also under papermill."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from filelock import FileLock

from fedlib import run, run_all
from fedlib.core.storage import read_json, write_json
from fedlib.engine.rounds import Finished
from fedlib_lab.report import tables
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.progress import Terminal, Watch, interrupted
from fedlib_lab.runs.store import run_path
from tests.helpers.stored import ONE, short

SMALL = dict(num_train=60, num_test=10, num_clients=6, clients_per_round=3, rounds=2, evaluate_every=0)


def tiny(**changes):
    return short("reefl", **(SMALL | changes))


def date(e, folder, day):
    """Let ``e`` have been stored on ``day``."""
    file = run_path(e, folder) / "experiment.json"
    write_json(file, read_json(file) | {"stored": day})


def test_a_stored_run_is_announced_with_its_day(tmp_path, capsys):
    grid = [tiny(seed=s) for s in range(3)]
    for e in grid[:2]:
        run(e, ONE, tmp_path, progress=False)
    assert capsys.readouterr().out == ""
    for e, day in zip(grid, ("2026-10-01", "2026-11-22"), strict=False):
        date(e, tmp_path, day)
    run(grid[0], ONE, tmp_path)
    assert capsys.readouterr().out == f"stored run of 2026-10-01: {grid[0].slug}\n"
    run_all(grid, ONE, tmp_path)
    assert capsys.readouterr().out.splitlines()[0] == "2 of 3 runs stored (2026-10-01 to 2026-11-22)"
    date(grid[2], tmp_path, "")
    run_all(grid[2:], ONE, tmp_path)
    run_all(grid[:1], ONE, tmp_path)
    assert capsys.readouterr().out == "1 of 1 runs stored\n1 of 1 runs stored (2026-10-01)\n"
    run_all(grid, ONE, tmp_path, progress=False)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("ask", [lambda e, f: run(e, ONE, f), lambda e, f: run_all([e], ONE, f)])
def test_waiting_for_another_process_is_said(ask, tmp_path, capsys):
    e = tiny()
    path = run_path(e, tmp_path)
    path.mkdir(parents=True)
    lock, told = FileLock(path / ".lock", thread_local=False), threading.Event()
    original = Watch.say

    def say(self, text):
        original(self, text)
        told.set()

    with lock, pytest.MonkeyPatch.context() as m:
        m.setattr(Watch, "say", say)
        waiting = threading.Thread(target=ask, args=(e, tmp_path))
        waiting.start()
        assert told.wait(60)
        lock.release()
        waiting.join()
    assert f"waiting for another process, which runs {e.slug}\n" in capsys.readouterr().out
    assert (path / "summary.json").exists()


@pytest.mark.parametrize("lacking", ["data", "weights"])
def test_what_is_not_to_be_had_is_said_before_anything_is_timed(lacking, monkeypatch):
    def nowhere(*arguments, **kwargs):
        raise ConnectionError("nowhere")

    monkeypatch.setattr(tables, "describe_time", lambda *_: pytest.fail("timed"))
    monkeypatch.setattr(tables, "is_available", lambda *_: False)
    monkeypatch.setattr(tables, "load_dataset", nowhere if lacking == "data" else lambda *a, **k: None)
    monkeypatch.setattr(tables, "fetch_weights", nowhere if lacking == "weights" else lambda *_: None)
    cells = [c for c in load_grid("reefl", "table1", "paper") if c.seed == 1][:1]
    with pytest.raises(ConnectionError, match="nowhere"):
        tables.run_cells(cells)


class Screen(io.StringIO):
    def close(self):
        pass


def test_a_watch_tells_runs_rounds_and_time_left(monkeypatch):
    a, b = (tiny(seed=s, rounds=100) for s in (1, 2))
    with Watch([a, b], shown=False) as watch:
        watch.terminal = Terminal(Screen())
        monkeypatch.setattr("fedlib_lab.runs.progress.LINE_SECONDS", 0)
        watch.begin(a, 98)
        for t in (99, 100):
            watch.round(a, Finished(t, None, {}, {}, None, 3.0))
        watch.end(a)
        watch.begin(b, 0)
        lines = watch.terminal.file.getvalue().splitlines()
    assert lines == [
        "",
        f"0 of 2 runs done, round 98 of 100 of {a.slug}",
        f"0 of 2 runs done, about 5 minutes left, round 99 of 100 of {a.slug}",  # 101 rounds of 3 s
        f"0 of 2 runs done, about 5 minutes left, round 100 of 100 of {a.slug}",
        "1 of 2 runs done, about 5 minutes left",
        f"1 of 2 runs done, about 5 minutes left, round 0 of 100 of {b.slug}",
    ]


def test_lines_come_now_and_then():
    terminal = Terminal(Screen())
    for text, now in (("first", False), ("soon", False), ("at once", True), ("again soon", False)):
        terminal.show(text, now)
    terminal.show("said", True)
    assert terminal.file.getvalue() == "\nfirst\nat once\nsaid\n"


NOTEBOOK = """
import torch
from fedlib import Execution, Experiment, run_all
torch.set_num_threads(1)
runs = run_all([Experiment.from_dict(e) for e in grid], Execution(workers=1))
"""


def test_papermill_shows_runs_and_rounds_in_its_terminal(tmp_path):
    """Lines below its own bar; nothing of them is in the notebook."""
    grid = [tiny(seed=s) for s in (1, 2)]
    cell = {"cell_type": "code", "execution_count": None, "outputs": [], "metadata": {}, "id": "a"}
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    source = f"grid = {[e.to_dict() for e in grid]!r}\n{NOTEBOOK}"
    notebook = {"cells": [cell | {"source": source}], "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "in.ipynb").write_text(json.dumps(notebook))
    ours = ("TQDM_DISABLE", "JUPYTER_PATH")  # bars, and a kernel of its own, as a user has them
    env = {k: v for k, v in os.environ.items() if k not in ours} | {"FEDLIB_OUTPUTS": str(tmp_path)}
    screen, theirs = pty.openpty()
    command = [sys.executable, "-m", "papermill", tmp_path / "in.ipynb", tmp_path / "out.ipynb"]
    done = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            if not (some := os.read(screen, 4096)):
                break
        except OSError:  # nobody writes any more
            break
        seen += some
    text = seen.decode()
    assert done.wait() == 0, text
    for words in (
        "0 of 2 runs done, round 0 of 2 of reefl",
        "\n1 of 2 runs done",
        "\n2 of 2 runs done\r\n",
    ):
        assert words in text, text
    assert "runs done" not in (tmp_path / "out.ipynb").read_text()


def test_outside_of_papermill_there_is_no_second_terminal():
    assert Terminal.of_this_kernel() is None


def test_a_finished_bar_says_nothing_of_time_left(monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "")
    a, b = (tiny(seed=s, rounds=1) for s in (1, 2))
    with Watch([a, b]) as watch:
        for e, said in ((a, "under a minute left"), (b, "")):
            watch.begin(e, 0)
            watch.round(e, Finished(1, None, {}, {}, None, 3.0))
            watch.end(e)
            assert watch.runs.postfix == said
        assert watch.runs.n == 2


@pytest.mark.parametrize("value, shown", [("1", False), ("0", True), ("", True)])
def test_tqdms_own_switch_is_heard(value, shown, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", value)
    with Watch([tiny(seed=s) for s in (1, 2)]) as watch:
        watch.begin(tiny(), 0)
        ((_, rounds),) = watch.going.values()
        assert (watch.runs.disable, rounds.disable) == (not shown, not shown)


SCRIPT = """
import os, sys, torch
torch.set_num_threads(1)
from fedlib import Execution, Experiment, run, run_all
from fedlib.methods.sliced.reefl import ReeFL
e = Experiment.from_dict(EXPERIMENT)
"""


def script(text, e):
    return [sys.executable, "-c", SCRIPT.replace("EXPERIMENT", repr(e.to_dict())) + text]


def test_nobody_has_to_listen(tmp_path):
    """A reader that goes away, and streams that are closed: the runs end all the same."""
    grid, (there, here) = [tiny(seed=s) for s in (1, 2)], os.pipe()
    os.close(there)
    text = f"""
grid = [e.replace(seed=s) for s in (1, 2)]
run_all(grid, Execution(workers=1), {str(tmp_path)!r})
sys.stdout.close()
sys.stderr.close()
run_all(grid, Execution(workers=1), {str(tmp_path)!r})
os._exit(7)
"""
    env = {k: v for k, v in os.environ.items() if k != "TQDM_DISABLE"}
    done = subprocess.run(script(text, grid[0]), stdout=here, stderr=here, env=env)
    os.close(here)
    assert done.returncode == 7
    assert all((run_path(e, tmp_path) / "summary.json").exists() for e in grid)


def test_ctrl_c_stores_the_last_round_and_says_how_to_go_on(tmp_path):
    e = tiny(rounds=4)
    text = f"""
import signal
original = ReeFL.local_update
def local_update(self, cohort):
    if cohort.t == 3:
        os.kill(os.getpid(), signal.SIGINT)
    original(self, cohort)
ReeFL.local_update = local_update
run(e, Execution(workers=1), {str(tmp_path)!r})
"""
    done = subprocess.run(script(text, e), capture_output=True, text=True)
    said = f"interrupted: {e.slug} is stored up to round 2 of 4; run the same again, and it goes on from there\n"
    assert (done.returncode, done.stderr, done.stdout) == (-signal.SIGINT, said, "")


def test_a_second_ctrl_c_does_not_keep_the_round_from_being_stored(tmp_path):
    """It comes while the last whole round is being stored, which goes on; the lock is free afterwards."""
    e = tiny(rounds=4)
    text = f"""
import signal
from fedlib_lab.runs.checkpoints import Checkpoints
original, save = ReeFL.local_update, Checkpoints.save
def local_update(self, cohort):
    if cohort.t == 3:
        os.kill(os.getpid(), signal.SIGINT)
    original(self, cohort)
def twice(self, *args):
    os.kill(os.getpid(), signal.SIGINT)
    save(self, *args)
ReeFL.local_update, Checkpoints.save = local_update, twice
run(e, Execution(workers=1), {str(tmp_path)!r})
"""
    done = subprocess.run(script(text, e), capture_output=True, text=True)
    assert (
        done.stderr.startswith(f"interrupted: {e.slug} is stored up to round 2 of 4")
        and done.returncode == -signal.SIGINT
    )


def test_ctrl_c_in_a_notebook_shows_one_sentence():
    from IPython.core.interactiveshell import InteractiveShell

    shell, error, hook = InteractiveShell(), interrupted("as planned"), sys.excepthook
    sys.excepthook = sys.__excepthook__
    shown = []
    shell._showtraceback = lambda kind, value, lines: shown.append(lines)
    shell.showtraceback((KeyboardInterrupt, error, None))
    assert shown == [["as planned"]] and hook is not sys.__excepthook__
