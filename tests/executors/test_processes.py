"""Forked workers: the numbers of threads, whatever happens to a worker or to the process that forked it.

Each check runs in a process of its own, which it may spoil.
"""

import multiprocessing
import os
import pickle
import platform
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import psutil
import pytest
import torch

from fedlib import Execution, build_federation, run, run_rounds
from fedlib.core.storage import read_tensors
from fedlib.methods import METHODS
from fedlib.methods.sliced.reefl import ReeFL
from fedlib_lab.executors.processes import Unforkable
from fedlib_lab.executors.workers import become_worker
from fedlib_lab.rivals.ranks import Ranks
from fedlib_lab.runs.store import run_path
from tests.helpers.granted import few_blocks, granted
from tests.helpers.stored import assert_same, assert_same_rounds, short, small, state

pytestmark = pytest.mark.system

TWO = Execution(workers=2, executor="processes")
THREADS = Execution(workers=2, executor="threads")
ALONE = Execution(workers=1, cohort_size=1)


@pytest.fixture(scope="module")
def context():
    """Clean processes, quickly: forks of one that has only imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["fedlib_lab.runs.store", "fedlib_lab.executors.processes", "peft", "filelock", "tqdm.auto"]
    )
    return context


@pytest.fixture
def alone(context):
    """Call a function of this module in a process of its own; what it raises is raised here."""

    def call(function, *args):
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            return pool.submit(function, *args).result()

    return call


def train_as(change):
    """Let ``change(cohort)`` run before every local training."""
    original = ReeFL.local_update

    def local_update(self, cohort):
        change(cohort)
        original(self, cohort)

    ReeFL.local_update = local_update


# --- the same numbers ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method, finetune",
    [("reefl", "lora"), ("depthfl", "full"), ("inclusivefl", "frozen"), ("scalefl_vit", "full"), ("flora", "lora")],
)
def test_processes_give_the_numbers_of_threads(method, finetune, alone):
    alone(compare, method, finetune)


def compare(method, finetune):
    f = build_federation(small(method, finetune=finetune, finetune_options={}, augment="none"))
    there = list(run_rounds(f, TWO))
    if method == "inclusivefl":
        assert f.train_cache._ready.any()  # what a worker has cached, all have
    assert_same_rounds(list(run_rounds(f, THREADS)), there)


@pytest.mark.parametrize("method", METHODS)
def test_threads_processes_and_one_at_a_time_give_the_same_bytes(method, alone):
    """Two cohorts at once, of every method: nothing that one puts into a model is in another's."""
    alone(compare_bytes, method)


@pytest.mark.parametrize("policy", ["batch", "tracked", "local"])
@pytest.mark.parametrize("method", ["cafedistill", "fedrod", "splitmix"])
def test_threads_processes_and_one_at_a_time_give_the_same_bytes_of_convnets(method, policy, alone):
    net = dict(backbone="resnet8", num_exits=1 if method == "splitmix" else 3, batch_norm=policy)
    alone(compare_bytes, method, net)


def compare_bytes(method, net=None):
    with pytest.MonkeyPatch.context() as m:
        mode = "lora" if issubclass(METHODS[method], Ranks) else "full"
        values = dict(num_train=96, num_test=20, num_clients=6, clients_per_round=6, rounds=2, finetune_options={})
        net = net or {"backbone": few_blocks(m, method), **granted(method)}
        f = build_federation(short(method, finetune=mode, augment="none", test_split="like_train", **values | net))
        alone = list(run_rounds(f, ALONE))
        for executor in ("threads", "processes"):
            assert_same_rounds(list(run_rounds(f, replace(ALONE, workers=2, executor=executor))), alone)


def test_a_worker_that_does_not_begin_is_said(alone):
    alone(begin_slowly)


def begin_slowly():
    from fedlib_lab.executors import processes

    original = processes._in_a_fork
    processes.SLOW, processes._in_a_fork = 0.3, lambda *args: time.sleep(1) or original(*args)
    with pytest.warns(UserWarning, match=r"worker process \d+ has not begun for 0.3 s; kill -9 \d+ ends it"):
        next(run_rounds(build_federation(small("reefl")), TWO))


# --- what can go wrong -----------------------------------------------------------------------------------------------


def test_a_killed_worker_is_replaced_and_changes_nothing(alone, tmp_path):
    alone(lose_workers, tmp_path)


def lose_workers(folder):
    f = build_federation(small("reefl"))
    marks = [folder / "first", folder / "second"]

    def die_twice(cohort):
        if cohort.t == 2 and (left := [m for m in marks if not m.exists()]):
            left[0].touch()
            os.kill(os.getpid(), signal.SIGKILL)

    train_as(die_twice)
    there = list(run_rounds(f, TWO))
    assert all(m.exists() for m in marks)
    assert_same_rounds(list(run_rounds(f, THREADS)), there)


def test_a_deadly_cohort_is_named(alone):
    alone(always_die)


def always_die():
    train_as(lambda cohort: os.kill(os.getpid(), signal.SIGKILL))
    f = build_federation(small("reefl"))
    with pytest.raises(RuntimeError, match=r"cohort of clients \[.*\] lost its worker process 4 times in round 1 .*-9"):
        list(run_rounds(f, TWO))
    assert not multiprocessing.active_children()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_a_worker_keeps_what_it_frees(alone):
    before, after = alone(page_faults_of_taking_memory_again)
    assert before > 10_000 and after < 100  # 64 MiB are 16,384 pages


def page_faults_of_taking_memory_again():
    def take():
        began = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        blocks = [torch.ones(2**21) for _ in range(8)]
        del blocks
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - began

    before = [take(), take()][1]
    become_worker()
    return before, min([take() for _ in range(5)][1:])  # the host may take pages back in between


def test_a_mistake_arrives_as_itself_and_ends_all_workers(alone):
    alone(make_a_mistake)


class Demanding(Exception):
    def __init__(self, a, b):
        super().__init__(a)
        self.b = b


def make_a_mistake():
    f = build_federation(small("reefl"))

    def mistake(cohort):
        raise ArithmeticError("as planned")

    train_as(mistake)
    with pytest.raises(ArithmeticError, match="as planned") as caught:
        list(run_rounds(f, TWO))
    assert "in a worker process" in caught.value.__notes__[0] and "mistake" in caught.value.__notes__[0]
    assert not multiprocessing.active_children()

    def raising(b):
        def mistake(cohort):
            raise Demanding("as planned", b)

        return mistake

    train_as(raising("b"))  # of its class, though that asks for more than the sentence
    with pytest.raises(Demanding, match="^as planned") as caught:
        list(run_rounds(f, TWO))
    assert caught.value.b == "b"
    train_as(raising(lambda: 0))
    with pytest.raises(RuntimeError, match="Demanding: as planned"):
        list(run_rounds(f, TWO))


def test_an_answer_that_cannot_be_sent_is_told_as_such(alone):
    alone(remember_a_function)


def remember_a_function():
    train_as(lambda cohort: cohort.new_memories.setdefault(cohort.clients[0].id, {"f": lambda: 0}))
    with pytest.raises((AttributeError, pickle.PicklingError), match="(?i)pickle"):
        list(run_rounds(build_federation(small("reefl")), TWO))


def test_threads_take_over_where_a_fork_cannot_train(alone):
    alone(forbid_forks)


def forbid_forks():
    f, here, original = build_federation(small("reefl")), os.getpid(), torch.autograd.grad

    def refuse(*args, **kwargs):  # as PyTorch does in forks of a process that has used a GPU
        if os.getpid() != here:
            raise RuntimeError("Unable to handle autograd's threading in combination with fork-based multiprocessing")
        return original(*args, **kwargs)

    torch.autograd.grad = refuse
    with pytest.raises(Unforkable, match="Unable to handle .* use executor = 'threads'"):
        list(run_rounds(f, TWO))
    assert len(list(run_rounds(f, Execution(workers=2)))) == 4
    assert not multiprocessing.active_children()


def test_threads_take_over_where_no_process_may_be_forked(alone):
    alone(may_not_fork)


def may_not_fork():
    f = build_federation(small("reefl"))
    with pytest.MonkeyPatch.context() as m:
        m.setitem(multiprocessing.current_process()._config, "daemon", True)
        with pytest.raises(Unforkable, match="daemonic process"):
            list(run_rounds(f, TWO))
        assert len(list(run_rounds(f, Execution(workers=2)))) == 4
    with pytest.MonkeyPatch.context() as m:
        m.setattr(os, "fork", lambda: (_ for _ in ()).throw(BlockingIOError(11, "Resource temporarily unavailable")))
        with pytest.raises(Unforkable, match="no process could be forked: .*temporarily unavailable"):
            list(run_rounds(f, TWO))
    with pytest.MonkeyPatch.context() as m:
        fork, forked = os.fork, []

        def fork_once():
            forked.append(os.getpid())
            if len(forked) == 2:
                raise BlockingIOError(11, "Resource temporarily unavailable")
            return fork()

        m.setattr(os, "fork", fork_once)
        with pytest.raises(Unforkable, match="no process could be forked"):
            list(run_rounds(f, TWO))
        assert not multiprocessing.active_children()


def test_gradients_of_this_process_do_not_forbid_forks(alone):
    alone(compute_a_gradient)


def compute_a_gradient():
    f = build_federation(small("reefl"))
    assert_same_rounds(list(run_rounds(f, THREADS)), list(run_rounds(f, TWO)))


def test_ctrl_c_ends_all_workers_and_loses_one_round_at_most(alone, tmp_path):
    alone(interrupt, tmp_path)


def interrupt(folder):
    from fedlib_lab.runs import store as runs

    e, training = small("reefl"), multiprocessing.get_context("fork").Event()
    os.environ["FEDLIB_ACCEPT"] = "method"  # what stands in the kit's place is part of a run
    runs.time.monotonic = iter(range(0, 10**6, 100)).__next__  # a checkpoint every round

    def hang(cohort):
        if cohort.t == 3 and not (folder / "resumed").exists():
            training.set()
            time.sleep(600)

    def ctrl_c(*_):
        if training.is_set():
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    train_as(hang)
    signal.signal(signal.SIGALRM, ctrl_c)
    signal.setitimer(signal.ITIMER_REAL, 0.1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        run(e, TWO, folder / "parts", progress=False)
    assert not multiprocessing.active_children()
    assert read_tensors(run_path(e, folder / "parts") / "checkpoint.safetensors")[1]["t"] == 2
    (folder / "resumed").touch()
    run(e, TWO, folder / "parts", progress=False)
    run(e, THREADS, folder / "whole", progress=False)
    assert_same(state(e, folder / "whole"), state(e, folder / "parts"))


def test_kill_9_of_the_parent_ends_its_workers_and_frees_the_run(context, alone, tmp_path):
    parent = context.Process(target=train_until_killed, args=(tmp_path,))
    parent.start()
    deadline = time.monotonic() + 60
    while len(pids := list(tmp_path.glob("worker-*"))) < 2:
        assert time.monotonic() < deadline and parent.is_alive()
        time.sleep(0.05)
    parent.kill()
    parent.join()
    workers = [int(p.name.split("-")[1]) for p in pids]
    while any(psutil.pid_exists(w) and psutil.Process(w).status() != psutil.STATUS_ZOMBIE for w in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    alone(finish, tmp_path)


def train_until_killed(folder):
    def train_on(cohort):
        (folder / f"worker-{os.getpid()}").touch()
        while cohort.t == 2:
            torch.ones(200, 200) @ torch.ones(200, 200)  # at work, whatever becomes of its parent

    train_as(train_on)
    run(small("reefl"), TWO, folder, progress=False)


def finish(folder):
    e = small("reefl")
    assert run(e, TWO, folder, progress=False, wait=False).summary["status"] == "finished"
    run(e, THREADS, folder / "whole", progress=False)
    assert_same(state(e, folder / "whole"), state(e, folder))


# --- several GPUs, of which the CPU plays two -----------------------------------------------------------------------


@pytest.mark.parametrize("method, finetune", [("inclusivefl", "frozen"), ("flora", "lora"), ("ditto", "full")])
def test_processes_on_two_devices_give_the_numbers_of_threads(method, finetune, alone):
    alone(compare_devices, method, finetune)


def compare_devices(method, finetune):
    Execution.devices = lambda self: ["cpu", "cpu"]
    f = build_federation(small(method, finetune=finetune, finetune_options={}, augment="none"))
    there = list(run_rounds(f, TWO))
    assert_same_rounds(list(run_rounds(f, THREADS)), there)
    assert not multiprocessing.active_children()


SCRIPT = """
import multiprocessing, os, signal
from pathlib import Path
import pytest
from fedlib import Execution, build_federation, run_rounds
from fedlib.methods import METHODS, register
from tests.helpers.stored import assert_same_rounds, small

Execution.devices = lambda self: ["cpu", "cpu"]
DRIVER, two, here = os.getpid(), Execution(workers=2), Execution(workers=2, executor="threads")

@register("mortal")
class Mortal(METHODS["reefl"]):
    def local_update(self, cohort):
        mark = Path("mark")
        if os.getpid() != DRIVER and cohort.t == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if cohort.t == 3:
            raise ArithmeticError("as planned")
        super().local_update(cohort)

f = build_federation(small("mortal"))
there, threads = run_rounds(f, two), run_rounds(f, here)
assert_same_rounds([next(threads), next(threads)], [next(there), next(there)])
assert Path("mark").exists()
with pytest.raises(ArithmeticError, match="as planned") as caught:
    next(there)
assert "in a worker process" in caught.value.__notes__[0]
assert not multiprocessing.active_children()
print("done")
"""


def test_workers_on_devices_know_a_scripts_methods_and_are_replaced_and_its_mistakes_arrive(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)  # without a guard around what it does
    done = subprocess.run([sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.stdout == "done\n", done.stderr
