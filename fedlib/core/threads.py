"""How PyTorch's OpenMP threads wait for their next piece of work: read from the environment once, as they are loaded.

By default they spin, which takes the cores from whoever works: small local steps then run several times slower.
"""

import os
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Part = TypeVar("Part")
Done = TypeVar("Done")

_too_late = False


def wait_passively() -> None:
    """Let waiting threads sleep, unless the environment says otherwise or PyTorch is there already."""
    global _too_late
    _too_late = "torch" in sys.modules and "OMP_WAIT_POLICY" not in os.environ
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # of other processes it holds all the same


def warn_if_spinning(threads: int) -> None:
    """Say how to go faster where local training is about to use several ``threads`` that spin."""
    if _too_late and threads > 1:
        warnings.warn(
            f"torch was imported before fedlib, so its {threads} threads spin while they wait, and training with one "
            "worker can take several times as long: import fedlib first, set OMP_WAIT_POLICY=PASSIVE, or leave "
            "Execution(workers=...) out",
            stacklevel=2,
        )


def repeatable(train: Callable) -> Callable:
    """``train`` on one intra-op thread: on several, oneDNN's backward of convolutions does not repeat its numbers."""

    def alone(*arguments: Any) -> Any:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train(*arguments)
        finally:
            torch.set_num_threads(threads)

    return alone


def side_by_side(work: Callable[[Part], Done], parts: Iterable[Part], threads: int) -> Iterator[Done]:
    """``work`` of every part, in order, few of them ahead of who takes them.

    PyTorch's threads take a part each: together on one part they wait more.
    """
    import torch

    if threads < 2:
        for part in parts:  # not by ``map``, which would take a StopIteration of ``work`` for its end
            yield work(part)
        return
    own, running = max(1, torch.get_num_threads() // threads), deque()
    pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(own,))
    try:
        for part in parts:
            running.append(pool.submit(work, part))
            if len(running) > threads:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        close(pool)


def close(pool: ThreadPoolExecutor) -> None:
    """Shut ``pool`` down and, on Linux, where processes are forked, wait until the system has ended its threads.

    Python says that a thread has ended before its native part has freed MKL's buffers. A process that is forked in
    between copies the lock of these, held by nobody there, and spins in its first product of matrices.
    """
    pool.shutdown(cancel_futures=True)
    for thread in pool._threads:
        until = time.monotonic() + 10
        while os.path.exists(f"/proc/self/task/{thread.native_id}") and time.monotonic() < until:
            time.sleep(1e-4)
