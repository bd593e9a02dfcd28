"""Threads that wait sleep."""

import os
import subprocess
import sys
import threading

import pytest

from fedlib.core import threads


@pytest.mark.parametrize(
    "torch_first, policy, expected",
    [(False, None, "PASSIVE False"), (True, None, "PASSIVE True"), (False, "ACTIVE", "ACTIVE False"),
     (True, "PASSIVE", "PASSIVE False")],
)  # fmt: skip
def test_waiting_threads_sleep_where_fedlib_comes_first(torch_first, policy, expected):
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | (
        {"OMP_WAIT_POLICY": policy} if policy else {}
    )
    there = "sys.modules['torch'] = object(); " if torch_first else ""
    code = f"import os, sys; {there}import fedlib; print(os.environ['OMP_WAIT_POLICY'], fedlib.core.threads._too_late)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert done.stdout.strip() == expected


def test_spinning_threads_are_told_where_one_worker_uses_several(monkeypatch, recwarn):
    monkeypatch.setattr(threads, "_too_late", True)
    threads.warn_if_spinning(1)
    assert not recwarn.list
    with pytest.warns(UserWarning, match="torch was imported before fedlib, so its 4 threads spin"):
        threads.warn_if_spinning(4)


@pytest.mark.parametrize("count", [1, 2])
def test_parts_come_in_order_few_ahead_and_none_is_left_out(count):
    begun = []

    def work(part):
        begun.append(part)
        return part if part >= 0 else next(iter([]))

    came = threads.map_in_threads(work, range(10), count)
    assert next(came) == 0 and len(begun) <= 2 * count  # the rest wait until somebody takes what is done
    assert list(came) == list(range(1, 10))
    with pytest.raises((RuntimeError, StopIteration)):  # is no end
        list(threads.map_in_threads(work, [1, -1, 3], count))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process is forked")
def test_no_thread_is_left_when_a_process_may_be_forked():
    """A fork copies the locks of a thread that is ending: it may hold MKL's, and then the child spins for ever."""
    import torch

    def work(part):
        torch.randn(64, 64) @ torch.randn(64, 64)
        return threading.get_native_id()

    for _ in range(300):
        used = set(threads.map_in_threads(work, range(4), 2))
        assert not used & set(map(int, os.listdir("/proc/self/task")))
