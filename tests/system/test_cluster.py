"""A real Ray cluster of two node processes: same numbers as in-process, nothing constant travels twice, deaths survived.

The tests run in order on one cluster; the last one kills a node.
"""

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_memory_monitor_refresh_ms": "0"}
ray = pytest.importorskip("ray", reason="the extra 'cluster' is not installed")

from fedlib import Execution, Experiment, build_federation, run_rounds  # noqa: E402
from fedlib.engine.executors import plan_round  # noqa: E402
from fedlib.methods import METHODS, Round  # noqa: E402
from fedlib_lab.executors import cluster as cluster_module  # noqa: E402
from fedlib_lab.executors.cluster import RayExecutor, connect  # noqa: E402
from tests.helpers.stored import assert_same_rounds  # noqa: E402

SMALL = dict(pretrained=False, num_train=80, num_test=20, num_clients=5, clients_per_round=4, rounds=2, batch_size=16)
TWO = Execution(workers=2, executor="threads")


@pytest.fixture(scope="module")
def cluster():
    """Two nodes of one CPU each; deaths are noticed within seconds."""
    from ray.cluster_utils import Cluster

    config = {"health_check_initial_delay_ms": 0, "health_check_period_ms": 1000, "health_check_failure_threshold": 3}
    lean = dict(num_cpus=1, object_store_memory=100 * 2**20, include_dashboard=False, include_log_monitor=False)
    for attempt in (1, 2, 3):  # on a busy machine, Ray gives its own processes up after 30 s
        made = Cluster()
        try:
            made.add_node(**lean, no_monitor=True, _system_config=config)  # the head
            made.add_node(**lean)
            break
        except Exception:
            made.shutdown()
            if attempt == 3:
                raise
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture
def on_two(cluster):
    return Execution(workers=2, executor="ray", address=cluster.address)


@pytest.fixture
def slow(monkeypatch):
    """A method as a notebook registers it: workers cannot import it. It notes every training in a folder."""

    @dataclass(frozen=True)
    class Slow(METHODS["depthfl"]):
        folder: str = ""
        what: str = "sleep"

        def local_update(self, cohort) -> None:
            Path(self.folder, f"{cohort.experiment.seed}-{cohort.t}-{os.getpid()}-{time.time_ns()}").touch()
            if self.what == "raise":
                raise ArithmeticError("a mistake in a notebook")
            if self.what == "stop":
                next(iter([]))
            if self.what == "die" and cohort.t == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1.5 if cohort.t == 2 else 0.1 * cohort.clients[0].budget)
            super().local_update(cohort)

    monkeypatch.setitem(METHODS, "slow", Slow)


def notes(folder, t):
    """(seed, process) of every training of round ``t``."""
    return [(int(p.name.split("-")[0]), int(p.name.split("-")[2])) for p in Path(folder).glob(f"*-{t}-*-*")]


@pytest.mark.parametrize(
    "method, finetune", [("reefl", "frozen"), ("depthfl", "lora"), ("inclusivefl", "frozen"), ("ditto", "full")]
)
def test_workers_give_the_numbers_of_threads_and_constants_travel_once(method, finetune, on_two, monkeypatch):
    f = build_federation(Experiment(method=method, finetune=finetune, **SMALL))
    here = list(run_rounds(f, TWO))
    sent, original = [], cluster_module.as_bytes
    monkeypatch.setattr(
        cluster_module, "as_bytes", lambda t: (sent.append(0 if t.is_meta else t.nbytes), original(t))[1]
    )
    there = list(run_rounds(f, on_two))
    assert_same_rounds(here, there)

    def size(tensors):
        return sum(t.nbytes for t in tensors.values())

    data = sum(t.nbytes for t in (f.data.inputs, f.data.labels, f.data.mean, f.data.std))
    again = here[0].memories.keys() & here[1].memories.keys()  # clients of both rounds: their memory goes out again
    memories = sum(size(here[0].memories[c]) for c in again)
    assert (memories > 0) == (method in ("depthfl", "ditto"))
    assert sum(sent) == data + size(f.frozen) + 2 * size(f.server.params) + size(here[0].server.params) + memories


def test_a_mistake_arrives_as_itself_and_a_deadly_cohort_is_named(slow, on_two, tmp_path, monkeypatch):
    monkeypatch.setattr("fedlib_lab.executors.workers.TRIES", 1)
    options = {"folder": str(tmp_path), "what": "raise"}
    f = build_federation(Experiment(method="slow", options=options, finetune="frozen", **SMALL))
    with pytest.raises(ArithmeticError, match="a mistake in a notebook"):
        list(run_rounds(f, on_two))
    f = build_federation(Experiment(method="slow", options=options | {"what": "stop"}, finetune="frozen", **SMALL))
    with pytest.raises((RuntimeError, StopIteration)):
        list(run_rounds(f, on_two))
    f = build_federation(Experiment(method="slow", options=options | {"what": "die"}, finetune="frozen", **SMALL))
    with pytest.raises(RuntimeError, match=r"cohort of clients \[.*\] lost its Ray worker 1 times in round 2"):
        list(run_rounds(f, on_two))


def test_waiting_for_a_worker_is_bounded(on_two, monkeypatch):
    monkeypatch.setattr(cluster_module, "total", lambda *a: 1)  # pretend there was a GPU
    f = build_federation(Experiment(finetune="frozen", **SMALL))
    execution = Execution("cuda", 1, executor="ray", address=on_two.address, patience_seconds=1)
    executor = RayExecutor(f, execution)
    with pytest.raises(RuntimeError, match="no Ray worker was to be had for 1 s: each needs .*num_gpus"):
        r = Round(1, tuple(f.sample_clients(1)), f.setting)
        list(executor.train(f.server, plan_round(f, f.server, r, 1, None), r, {}))
    executor.close()


def test_a_node_killed_in_mid_round_changes_nothing(slow, on_two, cluster, tmp_path):
    f = build_federation(Experiment(method="slow", options={"folder": str(tmp_path)}, finetune="frozen", **SMALL))
    here = list(run_rounds(f, replace(TWO, cohort_size=1)))
    (node,) = cluster.worker_nodes
    mine = {os.getpid()}

    def kill():
        while len({pid for _, pid in notes(tmp_path, 2)} - mine) < 2 and threading.main_thread().is_alive():
            time.sleep(0.02)
        cluster.remove_node(node, allow_graceful=False)  # SIGKILL, while both workers train round 2

    killer = threading.Thread(target=kill)
    killer.start()
    there = list(run_rounds(f, replace(on_two, cohort_size=1)))
    killer.join()
    pids = [pid for _, pid in notes(tmp_path, 2) if pid not in mine]
    # four cohorts, one of them twice: by the lost worker and the survivor
    assert len(pids) == 5 and len(set(pids)) == 2
    assert_same_rounds(here, there)


@pytest.mark.parametrize(
    "bad, message",
    [
        (dict(executor="rays"), "executor = 'rays' is not possible; did you mean 'ray'"),
        (dict(address="auto"), "address = 'auto' needs executor = 'ray'"),
        (dict(executor="ray", address="head"), "address = 'head'; allowed: auto, local, host:port"),
        (dict(executor="ray", device="cuda:1"), "device = 'cuda:1' with executor = 'ray'; allowed: cpu, cuda"),
        (dict(workers=0), "workers = 0 must be at least 1"),
        (dict(cohort_size=2.5), "cohort_size = 2.5"),
    ],
)
def test_bad_executions_are_refused_in_words(bad, message):
    with pytest.raises(ValueError, match=message):
        Execution(**bad)


def test_a_local_ray_lets_nobody_in_without_its_token(monkeypatch):
    """It listens on all addresses of the machine, whatever it is told, and has no dashboard."""
    asked = {}
    local = SimpleNamespace(
        is_initialized=lambda: False, init=lambda address, **how: asked.update(how, address=address)
    )
    monkeypatch.setitem(sys.modules, "ray", local)
    for name in ("RAY_AUTH_MODE", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    connect(Execution(executor="ray"))
    assert (asked["address"], asked["include_dashboard"], os.environ["RAY_AUTH_MODE"]) == ("local", False, "token")
