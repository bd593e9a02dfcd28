"""Disks that fill up, files that get damaged, clocks that go backwards: named, never silently wrong."""

import contextlib
import errno
import os
import random
import resource
import shutil
import subprocess
import time
import warnings

import pytest
import torch

from fedlib import Execution, build_federation, run, run_all, run_rounds
from fedlib.core.storage import DamagedFile, read_json, read_lines, read_tensors
from fedlib.engine import rounds as rounds_module
from fedlib.engine.executors import InProcess
from fedlib.methods.sliced.depthfl import DepthFL
from fedlib.methods.sliced.fedavg import FedAvg
from fedlib_lab.runs import checkpoints as checkpoints_module
from fedlib_lab.runs import store as runs_module
from fedlib_lab.runs.checkpoints import Checkpoints
from fedlib_lab.runs.packed import listed
from fedlib_lab.runs.store import find_run, run_path, shown_run
from tests.helpers.stored import ONE, assert_nothing_left_over, assert_same, small, state
from tests.helpers.tracked import OUTPUTS

ADVICE = "is damaged .*; restore it from a copy, or delete the run's folder to run it again"


# --- disks -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def tiny_disk(folder, kib):
    """A tmpfs of so many KiB; yields a function that gives it more room."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("disk", ["tmpfs", "file size limit"])
def test_disk_full_while_checkpointing(disk, depthfl, tmp_path):
    """The failed write is named, the state before it is good, nothing is left over, a later run ends the same."""
    e, folder = depthfl
    tiny, (soft, hard) = tmp_path / "tiny", resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.ExitStack() as stack:
        if disk == "tmpfs":  # two checkpoints of 139 kB and some client memories
            remount = stack.enter_context(tiny_disk(tiny, 560))
        else:  # a checkpoint grows with its metrics: the fourth is too large
            third = run_path(e, folder / "parts") / "previous.safetensors"
            resource.setrlimit(resource.RLIMIT_FSIZE, (third.stat().st_size, hard))
            stack.callback(resource.setrlimit, resource.RLIMIT_FSIZE, (soft, hard))
        untouched = r"untouched, run again to go on: '.*/(clients/\d+-\d+|checkpoint).safetensors'"
        with pytest.raises(OSError, match=untouched):
            run(e, ONE, tiny, progress=False, checkpoint_seconds=0)
        assert find_run(e, tiny) is None and not list(tiny.rglob("*.part"))
        assert 0 < read_tensors(run_path(e, tiny) / "checkpoint.safetensors")[1]["t"] < e.rounds
        if disk == "tmpfs":
            remount("size=20m")
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        run(e, ONE, tiny, progress=False, checkpoint_seconds=0)
        assert_same(state(e, folder / "whole"), state(e, tiny))


def test_read_only_outputs_are_told_before_any_compute(tmp_path, monkeypatch):
    e = small("reefl", rounds=1)
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setattr(runs_module, "build_federation", lambda *a: pytest.fail("computed"))
    with pytest.raises(
        PermissionError, match="file cannot be written, so no run can be stored in it; set FEDLIB_OUTPUTS"
    ):
        run(e, ONE, tmp_path / "file" / "runs")
    with tiny_disk(tmp_path / "disk", 100) as remount:
        remount("ro")
        with pytest.raises(PermissionError, match="disk cannot be written"):
            run_all([e], ONE, tmp_path / "disk" / "runs")


def test_a_stored_run_is_read_from_a_read_only_disk(tmp_path):
    e = small("reefl", rounds=1)
    with tiny_disk(tmp_path / "disk", 4000) as remount:
        first = run(e, ONE, tmp_path / "disk", progress=False)
        remount("ro")
        assert run(e, ONE, tmp_path / "disk", progress=False).summary == first.summary


# --- damage ------------------------------------------------------------------------------------------------------


def stop_after(e, rounds, folder):
    """Interrupt ``e`` after so many rounds, each of them a checkpoint."""
    original = runs_module.run_rounds

    def some(*args):
        for r in original(*args):
            if r.t > rounds:
                raise KeyboardInterrupt
            yield r

    runs_module.run_rounds = some
    try:
        with pytest.raises(KeyboardInterrupt):
            run(e, ONE, folder, progress=False, checkpoint_seconds=0)
    finally:
        runs_module.run_rounds = original
    return run_path(e, folder)


def cut(file):
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def flip(file, bit=None):
    bit = 8 * (file.stat().st_size - 5) if bit is None else bit  # in the last tensor
    with open(file, "r+b") as f:
        f.seek(bit // 8)
        (byte,) = f.read(1)
        f.seek(bit // 8)
        f.write(bytes([byte ^ 1 << bit % 8]))


def empty(file):
    file.write_bytes(b"")


@pytest.fixture(scope="module")
def depthfl(tmp_path_factory):
    """A run with client memories: its experiment, where it is finished, where it stopped after four of five rounds."""
    folder, e = tmp_path_factory.mktemp("runs"), small("depthfl", rounds=5)
    run(e, ONE, folder / "whole", progress=False, checkpoint_seconds=0)
    stop_after(e, 4, folder / "parts")
    return e, folder


@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(damage, depthfl, tmp_path):
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "parts", tmp_path / "parts"))
    damage(path / "checkpoint.safetensors")
    with pytest.warns(UserWarning, match=r"checkpoint.safetensors is damaged .*: going on from round 3"):
        run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    assert_same(state(e, folder / "whole"), state(e, tmp_path / "parts"))
    assert_nothing_left_over(tmp_path / "parts")


def test_two_damaged_checkpoints_are_an_error(depthfl, tmp_path):
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "parts", tmp_path / "parts"))
    flip(path / "checkpoint.safetensors")
    flip(path / "previous.safetensors")
    with pytest.raises(DamagedFile, match=f"previous.safetensors {ADVICE}"):
        run(e, ONE, tmp_path / "parts", progress=False)


@pytest.mark.parametrize("damage", [cut, flip, empty, os.unlink])
def test_a_damaged_client_memory_is_named_and_the_checkpoint_before_it_used(damage, depthfl, tmp_path):
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "parts", tmp_path / "parts"))
    newest = read_tensors(path / "checkpoint.safetensors")[1]["memories"]
    damage(path / "clients" / f"{next(c for c, t in newest.items() if t == 4)}-4.safetensors")
    with pytest.warns(UserWarning, match=r"clients/\d-4.safetensors is damaged .*: going on from round 3"):
        run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    assert_same(state(e, folder / "whole"), state(e, tmp_path / "parts"))


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "experiment.json"])
@pytest.mark.parametrize("damage", [cut, flip, empty])
def test_damaged_results_are_named_and_rebuilt_from_the_checkpoint(damage, name, depthfl, tmp_path, monkeypatch):
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "whole", tmp_path / "whole"))
    damage(path / name)
    with pytest.raises(DamagedFile, match=f"{name} {ADVICE}"):  # looking on changes nothing
        find_run(e, tmp_path / "whole")
    monkeypatch.setattr(runs_module, "run_rounds", lambda *_: iter(()))  # no round is run again
    with pytest.warns(UserWarning, match=f"{name} is damaged .*: rebuilding it from the checkpoint"):
        run_all([e], ONE, tmp_path / "whole", progress=False)
    assert_same(state(e, folder / "whole"), state(e, tmp_path / "whole"))


def test_damaged_results_without_a_checkpoint_are_an_error(depthfl, tmp_path):
    """Committed runs hold no checkpoints: what to do is said, and nothing is done behind one's back."""
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "whole", tmp_path / "whole"))
    for file in path.glob("*.safetensors"):
        file.unlink()
    flip(path / "metrics.jsonl", 100)
    with pytest.raises(DamagedFile, match=f"metrics.jsonl {ADVICE}"):
        run_all([e], ONE, tmp_path / "whole", progress=False)


def test_lost_lines_of_metrics_are_missed(depthfl, tmp_path):
    """Every line left is intact: what is missing follows from the experiment."""
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "whole", tmp_path / "whole"))
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (path / "metrics.jsonl").write_text("".join(lines[:-1]))
    with pytest.raises(DamagedFile, match=r"holds rounds \[1, 2, 3, 4\] instead of \[1, 2, 3, 4, 5\]"):
        find_run(e, tmp_path / "whole")


@pytest.mark.parametrize("name", ["summary.json", "metrics.jsonl", "experiment.json"])
def test_no_flipped_bit_changes_a_result(name, depthfl, tmp_path):
    """Hundreds of bits, one after the other: either the file is refused by name, or its content is the same."""
    e, folder = depthfl
    path = run_path(e, shutil.copytree(folder / "whole", tmp_path / "whole"))
    read = read_lines if name.endswith("l") else read_json
    good, refused = read(path / name), 0
    for bit in random.Random(0).sample(range(8 * (path / name).stat().st_size), 500):
        flip(path / name, bit)
        try:
            assert read(path / name) == good
        except DamagedFile as error:
            refused += name in str(error)
        flip(path / name, bit)  # and back
    assert refused > 250


def test_a_checkpoint_of_another_experiment_is_refused(depthfl, tmp_path):
    e, folder = depthfl
    other = e.replace(lr=0.04)
    shutil.copytree(run_path(e, folder / "parts"), run_path(other, tmp_path))
    with pytest.raises(ValueError, match="holds another experiment of the same name; move it away"):
        run(other, ONE, tmp_path, progress=False)


def test_a_damaged_data_cache_is_decoded_again(tmp_path, monkeypatch):
    from fedlib.data import cache

    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path))
    made = {"train_images": torch.ones(2, 1, 4, 4, dtype=torch.uint8)}
    for _ in range(2):
        assert cache.cached({"k": 1}, lambda: (made, ["a"]))[1] == ["a"]
    flip(next(tmp_path.glob("*.safetensors")))
    with pytest.warns(UserWarning, match="is damaged .*: decoding the data again"):
        tensors, _ = cache.cached({"k": 1}, lambda: (made, ["a"]))
    assert torch.equal(tensors["train_images"], made["train_images"])


def test_every_committed_run_is_intact():
    from fedlib import Experiment

    folder = OUTPUTS / "runs"
    paths = list(listed(folder, "*", "experiment.json"))
    assert len(paths) > 700
    for path in paths:
        e = Experiment.from_dict(read_json(path / "experiment.json")["experiment"])
        assert path.name in (e.slug, e.former_slug) and shown_run(e, folder).summary["status"] in (
            "finished",
            "diverged",
        )


def test_a_disk_that_locks_no_files_is_named(tmp_path, monkeypatch):
    import fcntl

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="No locks available: files cannot be locked here, so two processes .*/.lock'"):
        run(small("fedavg"), ONE, tmp_path, progress=False)


# --- Ctrl-C --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("owner, name, round_of, at, stored", [
    (DepthFL, "local_update", lambda method, cohort: cohort.t, 3, 2),
    (rounds_module, "measure", lambda f, server, memories: server.t, 3, 2),
    (rounds_module, "measure", lambda f, server, memories: server.t, 5, 4),
    (Checkpoints, "drops", lambda store: len(store.metrics) + 1, 3, 2),
    (checkpoints_module, "write_tensors", lambda *_: 5, 5, 0),
], ids=["training", "evaluation", "last evaluation", "noting", "writing"])  # fmt: skip
def test_ctrl_c_stores_the_last_whole_round_at_once(owner, name, round_of, at, stored, depthfl, tmp_path, monkeypatch):
    """Also where half of the next round's state is in place; gone on with, it ends with the same numbers."""
    (e, folder), original = depthfl, getattr(owner, name)
    monkeypatch.setenv("FEDLIB_ACCEPT", "method")  # what stands in the kit's place is part of a run

    def interrupted(*arguments):
        if round_of(*arguments) == at:
            raise KeyboardInterrupt
        return original(*arguments)

    with monkeypatch.context() as m:
        m.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt, match=f"is stored up to round {stored} of 5; run the same again"):
            run(e, ONE, tmp_path, progress=False)
    assert find_run(e, tmp_path) is None
    run(e, ONE, tmp_path, progress=False)
    assert_same(state(e, folder / "whole"), state(e, tmp_path))


# --- a round that loses cohorts ------------------------------------------------------------------------------------


@pytest.mark.parametrize("execution", [
    Execution(workers=1, cohort_size=1), Execution(workers=2, cohort_size=1, executor="threads"),
    Execution(workers=2, cohort_size=1, executor="processes"),
], ids=["alone", "threads", "processes"])  # fmt: skip
def test_a_method_that_raises_stop_iteration_is_an_error_and_not_a_shorter_round(execution, tmp_path, monkeypatch):
    """``next()`` of an exhausted iterator, forgotten in a method: what ends a loop must not end the round."""
    e, original = small("fedavg", rounds=2), FedAvg.local_update

    def local_update(self, cohort):
        if cohort.t == 2 and cohort.clients[0].id == last:
            next(iter([]))
        original(self, cohort)

    last = max(c.id for c in build_federation(e).sample_clients(2))
    monkeypatch.setattr(FedAvg, "local_update", local_update)
    with pytest.raises((RuntimeError, StopIteration)):
        run(e, execution, tmp_path, progress=False, checkpoint_seconds=0)
    assert find_run(e, tmp_path) is None
    assert read_tensors(run_path(e, tmp_path) / "checkpoint.safetensors")[1]["t"] == 1


@pytest.mark.parametrize("lost", ["last", "twice"])
def test_as_many_cohorts_come_back_as_were_planned(lost, monkeypatch):
    def train(self, *arguments):
        back = list(original(self, *arguments))
        return iter(back[:-1] if lost == "last" else [*back, back[0]])

    original = InProcess.train
    monkeypatch.setattr(InProcess, "train", train)
    with pytest.raises(RuntimeError, match=rf"round 1: 3 cohorts were planned and {2 if lost == 'last' else 4} came"):
        list(run_rounds(build_federation(small("fedavg")), Execution(workers=1, cohort_size=1)))


# --- clocks ------------------------------------------------------------------------------------------------------


def test_clocks_going_backwards_change_nothing(tmp_path, monkeypatch):
    e = small("depthfl")
    run(e, ONE, tmp_path / "whole", progress=False, checkpoint_seconds=0)
    now = iter(range(2**31, 0, -3600))
    for name, scale in {"time": 1, "time_ns": 10**9}.items():
        monkeypatch.setattr(time, name, lambda scale=scale: next(now) * scale)
    run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "parts"))


def test_warnings_are_only_about_damage(depthfl, tmp_path):
    """An undisturbed resume is silent."""
    e, folder = depthfl
    shutil.copytree(folder / "parts", tmp_path / "parts")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(e, ONE, tmp_path / "parts", progress=False, checkpoint_seconds=0)
    assert Checkpoints(run_path(e, tmp_path / "parts"), e).exists()
