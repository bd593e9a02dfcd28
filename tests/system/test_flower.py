"""A real SuperLink and two SuperNodes on loopback: the numbers of threads, and a SuperNode that is killed in mid-round."""

import signal
import threading

import pytest

pytest.importorskip("flwr", reason="the extra 'flower' is not installed")

from fedlib import Execution, build_federation, run_rounds  # noqa: E402
from fedlib_lab.executors.flower import FlowerExecutor, Link  # noqa: E402
from tests.helpers.stored import assert_same_rounds, small  # noqa: E402

TWO = Execution(workers=2, executor="threads")


def test_a_supernode_killed_in_mid_round_changes_nothing(monkeypatch):
    """Round 1 on two SuperNodes; in round 2 one of them is killed when both have a cohort."""
    f = build_federation(small("depthfl", rounds=2))
    nodes, give, started = [], FlowerExecutor.give, Link._start

    def start(self, n):
        address = started(self, n)
        nodes.extend(self.processes[1:])
        return address

    def kill(self, worker, i, download, task):
        give(self, worker, i, download, task)
        if task[1].t == 2 and len(self.running) == 2 and nodes[0].poll() is None:
            threading.Timer(4.0, nodes[0].send_signal, [signal.SIGKILL]).start()

    monkeypatch.setattr(Link, "_start", start)
    monkeypatch.setattr(FlowerExecutor, "give", kill)
    there = list(run_rounds(f, Execution(workers=2, executor="flower", patience_seconds=300)))
    assert nodes[0].wait() == -signal.SIGKILL
    assert_same_rounds(list(run_rounds(f, TWO)), there)
    assert all(node.poll() is not None for node in nodes)
