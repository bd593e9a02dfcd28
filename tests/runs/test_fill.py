"""The queue of missing runs: its order, its deadline, and what is killed, fails, or is run elsewhere."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import yaml
from filelock import FileLock

import fedlib
from fedlib import Execution
from fedlib.core.paths import params_dir, use_outputs_of
from fedlib.core.storage import read_json, write_json, write_lines
from fedlib_lab import cli
from fedlib_lab.runs import fill as queue_runs
from fedlib_lab.runs.fill import Job, core_hours, fill, named, queue
from fedlib_lab.runs.params import Cell
from fedlib_lab.runs.progress import Watch
from fedlib_lab.runs.side_by_side import A_GPU, Fork, hand_out, here, run_stack
from fedlib_lab.runs.store import find_run, run_path
from tests.helpers.stored import assert_nothing_left_over, assert_same, small, state


def job(e, name="reefl"):
    return Job("a/b", Cell(e.finetune, name, e.method, name, "column", e.seed, e), 60.0)


def endless(**changes):
    """A run that nobody waits for: a round of it takes a tenth of a second."""
    return small("depthfl", rounds=5000, evaluate_every=0, **changes)


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Params of one paper's tables a, b and c, which extend one another's grid."""
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))

    def write(**files):
        for name, spec in files.items():
            spec = {"axes": {"finetune": ["frozen"], "method": ["reefl"]}, "columns": {"one": {}}} | spec
            (tmp_path / f"params/reefl/{name}.yaml").write_text(yaml.safe_dump(spec))
        return [("reefl", name) for name in files]

    return write


def test_the_queue_begins_with_the_most_telling_table_and_takes_seeds_in_turn(tables):
    both = {"axes": {"finetune": ["frozen"], "method": ["depthfl", "reefl"]}}
    wanted = tables(
        a={"smoke": {"seeds": [1, 2]}},
        b=both | {"priority": 1, "smoke": {"seeds": [1, 2]}},
        c={"priority": 0, "smoke": {"seeds": [3]}},
    )
    found = [(j.grid[-1], j.cell.method, j.cell.seed) for j in queue(wanted, "smoke").jobs]
    assert found == [("c", "reefl", 3), ("b", "depthfl", 1), ("b", "reefl", 1), ("b", "depthfl", 2), ("b", "reefl", 2)]
    # a's two runs are b's too, and are asked for once


def test_a_table_whose_data_are_absent_is_skipped_in_one_sentence(tables, monkeypatch):
    monkeypatch.setattr("fedlib_lab.runs.fill.is_available", lambda name, tokenizer: name == "mnist")
    there, absent = {"columns": {"one": {}}}, {"columns": {"one": {}, "two": {"smoke": {"dataset": "femnist"}}}}
    found = queue(tables(a=there, b=absent | {"smoke": {"seeds": [1, 2]}}), "smoke")
    assert {j.cell.column for j in found.jobs} == {"one"}
    assert found.skipped == ["reefl/b: 2 runs wait for 'femnist', which is not at hand (see FEDLIB_DATA)"]


def test_of_columns_that_are_named_alone_something_is_missing(tables):
    wanted = tables(a={"columns": {"one": {}, "two": {"lr": 0.2}}})
    assert [j.cell.column for j in queue(wanted, "smoke", columns=["two"]).jobs] == ["two"]
    assert len(queue(wanted, "smoke").jobs) == 2


def test_what_is_left_is_priced_by_stored_runs(tables):
    """Two seeds of one cell: the stored one took 120 s on one core; the other is half done."""
    wanted = tables(a={"smoke": {"seeds": [1, 2]}})
    jobs = queue(wanted, "smoke").jobs
    assert len(fill(jobs[:1], workers=1, tell=lambda _: None).done) == 1
    path = run_path(jobs[0].cell.experiment)
    write_json(path / "summary.json", read_json(path / "summary.json") | {"seconds": 120.0})
    (left,) = queue(wanted, "smoke").jobs
    assert left.cell.seed == 2 and left.seconds == pytest.approx(120)
    run_path(left.cell.experiment).mkdir()
    write_lines(run_path(left.cell.experiment) / "metrics.jsonl", [{"t": 1}])
    (left,) = queue(wanted, "smoke").jobs
    assert left.seconds == pytest.approx(60) and core_hours([left]) == "1 core-minutes"


def test_runs_without_a_pace_are_not_priced_once_their_time_is_over(tables, monkeypatch):
    monkeypatch.setattr("fedlib_lab.runs.costs.training_macs", lambda e: pytest.fail("counted"))
    jobs = queue(tables(a={"smoke": {"seeds": [1, 2]}}), "smoke", until=time.monotonic() - 1).jobs
    assert [j.plain()["seconds"] for j in jobs] == [None, None]
    assert core_hours(jobs) == "0 core-minutes and 2 runs that were not priced"
    assert core_hours([*jobs, Job("p/t", None, 90)]) == "2 core-minutes and 2 runs that were not priced"


def test_names_are_checked_before_anything(tables):
    assert named(["reefl/table4", "reefl/table4"]) == [("reefl", "table4")]
    assert {("raffm", "table1"), ("reefl", "why")} <= set(named())
    with pytest.raises(ValueError, match="did you mean 'table4'"):
        named(["reefl/tabel4"])
    with pytest.raises(ValueError, match="did you mean 'reefl'"):
        named(["refl"])


def test_a_deadline_and_a_stop_leave_runs_that_go_on_to_the_same_numbers(tmp_path):
    jobs = [job(small("reefl", seed=s, rounds=12, evaluate_every=4)) for s in (1, 2)]
    whole = fill(jobs, workers=2, folder=tmp_path / "whole", tell=lambda _: None)
    assert whole.done and not whole.left
    jobs.append(job(endless()))
    began = time.monotonic()
    late = fill(jobs[-1:], minutes=0.05, workers=1, folder=tmp_path / "parts", checkpoint_seconds=0)
    assert late.left == jobs[-1:] and time.monotonic() - began < 3 + 3  # also while it still imports
    over = fill(jobs[-1:], minutes=-0.1, workers=1, folder=tmp_path / "parts")  # looking took all of it
    assert over.left == jobs[-1:] and not over.done and not over.failed
    stop, interrupted = threading.Event(), job(small("reefl", seed=1, rounds=12, evaluate_every=4))

    def watch():
        while not (run_path(interrupted.cell.experiment, tmp_path / "parts") / "checkpoint.safetensors").exists():
            time.sleep(0.01)
        stop.set()

    threading.Thread(target=watch, daemon=True).start()
    fill(jobs, workers=1, folder=tmp_path / "parts", stop=stop, checkpoint_seconds=0)
    assert find_run(jobs[1].cell.experiment, tmp_path / "parts") is None
    rest = fill(jobs[:2], workers=1, folder=tmp_path / "parts", checkpoint_seconds=0)
    assert rest.done == jobs[:2]
    for j in jobs[:2]:
        assert_same(state(j.cell.experiment, tmp_path / "whole"), state(j.cell.experiment, tmp_path / "parts"))
    assert_nothing_left_over(tmp_path / "whole")


KILLED = """
import sys, json
from fedlib import Experiment
from fedlib_lab.runs.fill import Job, fill
from fedlib_lab.runs.params import Cell
e = Experiment.from_dict(json.loads(sys.argv[1]))
fill([Job("a/b", Cell(e.finetune, "v", e.method, "v", "c", e.seed, e), 1.0)], workers=1, folder=sys.argv[2], checkpoint_seconds=0)
"""


def test_kill_9_of_the_queue_ends_its_processes_and_frees_their_runs(tmp_path):
    e = endless()
    path = run_path(e, tmp_path)
    parent = subprocess.Popen([sys.executable, "-c", KILLED, json.dumps(e.to_dict()), tmp_path])
    while not (path / "checkpoint.safetensors").exists():
        assert parent.poll() is None
        time.sleep(0.02)
    parent.kill()
    parent.wait()
    with FileLock(path / ".lock", timeout=30):  # held as long as its process lives
        assert not (path / "summary.json").exists()


def test_a_run_that_fails_or_kills_its_process_does_not_stop_the_queue(tmp_path, monkeypatch):
    good, bad = job(small("reefl", rounds=1)), job(small("reefl", num_train=5))
    deadly, unlucky = job(small("depthfl", rounds=1)), job(small("depthfl", rounds=2))
    original, sent = Fork.send, []

    def send(self, job, cores):
        original(self, job, cores)
        e = job[0].cell.experiment
        if e == deadly.cell.experiment or (e == unlucky.cell.experiment and e not in sent):
            self.process.kill()
        sent.append(e)

    monkeypatch.setattr(Fork, "send", send)
    said = []
    filled = fill([bad, deadly, unlucky, good], workers=2, folder=tmp_path, tell=said.append)
    assert set(filled.done) == {good, unlucky} and len(said) == 4
    reasons = dict(filled.failed)
    assert "5 training examples" in reasons[bad]
    assert reasons[deadly].startswith("its process died 2 times") and sent.count(deadly.cell.experiment) == 2
    assert filled.left == [bad, deadly]


def test_what_another_process_runs_is_left_to_it(tmp_path):
    held, free = job(small("reefl", rounds=1)), job(small("depthfl", rounds=1))
    path = run_path(held.cell.experiment, tmp_path)
    path.mkdir(parents=True)
    with FileLock(path / ".lock"):
        filled = fill([held, free], workers=1, folder=tmp_path)
    assert filled.done == [free] and filled.left == [held] and not filled.failed


def test_each_run_has_a_core_and_the_last_one_all_that_are_free(tmp_path, monkeypatch):
    jobs, shares = [job(small("reefl", seed=s, rounds=1)) for s in (1, 2, 3)], []
    original = Fork.send

    def send(self, job, cores):
        shares.append(cores)
        original(self, job, cores)

    monkeypatch.setattr(Fork, "send", send)
    assert fill(jobs, workers=2, folder=tmp_path).done
    assert shares[:2] == [1, 1]
    fill([job(small("reefl", seed=4, rounds=1))], workers=2, folder=tmp_path)
    assert shares[3] == 2
    found = [find_run(j.cell.experiment, tmp_path).record["provenance"]["workers"] for j in jobs[:2]]
    assert found == [1, 1]


@pytest.fixture
def as_before():
    """The command leaves its handlers of signals and its profile's folder, as its process ends with it."""
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    yield
    use_outputs_of("small")
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_the_command_says_what_is_missing_runs_it_and_says_what_is_left(tables, capsys, as_before):
    tables(a={"smoke": {"seeds": [1]}})
    assert cli.main(["fill", "reefl/a", "--profile", "smoke", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("1 runs are missing, about ") and "reefl/a, one, reefl, frozen, seed 1" in said
    assert cli.main(["fill", "reefl/a", "--profile", "smoke"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 runs done; left: 0 runs, about 0 core-minutes"
    assert cli.main(["fill", "reefl/tabel1"]) == 2 and "did you mean 'table1'" in capsys.readouterr().err


def test_the_end_of_a_slot_stops_the_command_cleanly(tables, tmp_path):
    tables(a={"smoke": {"seeds": [1], "rounds": 5000, "evaluate_every": 0}})
    command = [sys.executable, "-m", "fedlib_lab", "fill", "reefl/a", "--profile", "smoke", "--workers", "1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    while not list(tmp_path.glob("outputs/runs/*/experiment.json")):
        assert running.poll() is None
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    said, _ = running.communicate(timeout=60)
    assert running.returncode == 0 and "0 runs done; left: 1 runs" in said


@pytest.mark.parametrize("started", ["in Python", "by the command"])
def test_files_of_the_working_folder_are_not_imported_in_place_of_pythons(started, tmp_path, tables):
    """Someone's own ``queue.py`` lies where the command is called: in the processes that it starts, Python's counts."""
    tables(a={"smoke": {"seeds": [1]}})
    (tmp_path / "mine").mkdir()
    for name in ("json", "queue", "random", "logging", "numpy"):
        (tmp_path / "mine" / f"{name}.py").write_text("raise SystemExit('the wrong one')")
    command = [sys.executable, "-P", "-m", "fedlib_lab", "fill", "reefl/a", "--profile", "smoke", "--workers", "1"]
    root = str(Path(fedlib.__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": root}
    if started == "in Python":  # the script lies elsewhere
        (tmp_path / "script.py").write_text(
            f"import sys; from fedlib_lab.cli import main; sys.exit(main({command[4:]}))"
        )
        command = [sys.executable, tmp_path / "script.py"]
    done = subprocess.run(command, cwd=tmp_path / "mine", env=environment, capture_output=True, text=True)
    assert "1 runs done" in done.stdout and "the wrong one" not in done.stderr, done.stderr


def test_where_cuda_has_begun_processes_are_new_ones(tmp_path, monkeypatch):
    """A fork cannot use CUDA that its parent has begun; a new process knows the job and nothing else."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    jobs = [job(small("reefl", seed=s, rounds=1)) for s in (1, 2)]
    assert fill(jobs, workers=2, folder=tmp_path).done and all(find_run(j.cell.experiment, tmp_path) for j in jobs)


def test_on_gpus_each_run_has_a_new_process_and_the_next_gpu(tmp_path, monkeypatch):
    """No GPU is at hand: what is asked of processes, and what one would train on."""
    with pytest.raises(ValueError, match="device = 'tpu'"):
        fill([], device="tpu")
    began = []

    def handed(jobs, workers, answer, watch, seconds_left, grace, new):
        began.append((workers, answer.args[2].devices(), new))
        yield from ()

    monkeypatch.setattr(queue_runs, "hand_out", handed)
    monkeypatch.setattr("fedlib.engine.executors.check_device", lambda device: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    cards = ["cuda:0", "cuda:1"]
    for device, workers in (("cuda", None), ("cuda", 5), ("cuda:1", None)):
        fill([job(small("reefl"))], workers=workers, folder=tmp_path, device=device)
    assert began == [(2 * A_GPU, cards, True), (5, cards, True), (A_GPU, ["cuda:1"], True)]
    taken = []
    for name in ("SpawnProcess-1", "SpawnProcess-2", "SpawnProcess-1:3"):
        monkeypatch.setattr(multiprocessing.current_process(), "_name", name)
        taken.append(here(Execution("cuda"), 1).device)
    assert taken == ["cuda:1", "cuda:0", "cuda:1"] and here(Execution(), 3) == Execution(workers=3)


def test_new_processes_run_jobs_as_forks_do(tmp_path):
    """As on a GPU: on a CPU they are asked for by hand."""
    jobs = [job(small("reefl", seed=s, rounds=1)) for s in (1, 2)]
    answer = partial(queue_runs._answer, str(tmp_path), 20.0, Execution())
    answers = list(hand_out([(j,) for j in jobs], 2, answer, Watch([], False), new=True))
    assert {j for (j,), _ in answers} == set(jobs)
    assert all(a[0]["accuracy"] >= 0 for _, a in answers)


def test_on_gpus_what_differs_in_seed_rate_or_split_is_one_job(tmp_path, monkeypatch):
    """Such runs train together, when the first of them is due, and each is told of; on CPUs each is a job."""
    given, told = [], []

    def handed(groups, *_):
        given.append([[j.cell.experiment for j in group] for group in groups])
        for group in groups:
            yield group, [{"accuracy": 1.0, "seconds": 1.0} for _ in group]

    monkeypatch.setattr(queue_runs, "hand_out", handed)
    monkeypatch.setattr("fedlib.engine.executors.check_device", lambda device: None)
    grid = [small("reefl", seed=1), small("fedavg", seed=1), small("reefl", seed=2, lr=0.2), small("fedavg", rounds=9)]
    jobs = [job(e, e.method) for e in grid]
    for device in ("cuda:0", "cpu"):
        assert fill(jobs, 1, folder=tmp_path, device=device, tell=told.append).done and len(told) == 4
        told.clear()
    assert given == [[[grid[0], grid[2]], [grid[1]], [grid[3]]], [[e] for e in grid]]


def test_of_those_that_train_together_each_has_its_own_answer(tmp_path, monkeypatch):
    """A run that is refused, and one that another process holds, stop none of the others; all have the numbers of one alone."""
    met = []
    monkeypatch.setattr(
        queue_runs, "run_stack", lambda one, stack, *a: met.append(len(stack)) or run_stack(one, stack, *a)
    )
    grid = [small("fedavg", seed=s, rounds=2) for s in (1, 2, 3)]
    refused, elsewhere = grid[0].replace(partition="natural", seed=4), grid[0].replace(seed=5)
    jobs = [job(e) for e in (*grid, refused, elsewhere)]
    path = Path(run_path(elsewhere, tmp_path))
    path.mkdir(parents=True)
    with FileLock(path / ".lock"):
        answers = queue_runs._answer(str(tmp_path), 20.0, Execution(stack=8), tuple(jobs), 1, Watch([], False))
    assert met == [5] and answers[4] == {} and "partition" in str(answers[3])
    for e, answer in zip(grid, answers[:3], strict=True):
        alone = fedlib.run(e, Execution(workers=1), tmp_path / "alone", progress=False)
        assert answer["accuracy"] == alone.accuracy == find_run(e, tmp_path).accuracy
