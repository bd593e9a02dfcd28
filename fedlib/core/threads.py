"""Threads: how PyTorch's wait for their next piece of work, pools of one's own, and switches that all of them share.

How OpenMP threads wait is read from the environment once, as they are loaded. By default they spin, which takes the
cores from whoever works: small local steps then run several times slower.
"""

import ctypes
import os
import platform
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

Part = TypeVar("Part")
Done = TypeVar("Done")

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
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


def one_thread(train: Callable) -> Callable:
    """Run ``train`` on one intra-op thread: on several, oneDNN's backward of convolutions is not repeatable."""

    def alone(*arguments: Any) -> Any:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return train(*arguments)
        finally:
            torch.set_num_threads(threads)

    return alone


def map_in_threads(work: Callable[[Part], Done], parts: Iterable[Part], threads: int) -> Iterator[Done]:
    """Yield ``work`` of every part in order, computed in ``threads`` threads, few parts ahead of the consumer.

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


def keep_freed_memory() -> None:
    """Let this process keep what it frees: glibc gives large blocks back to the kernel at once, and zeroed pages are
    slow to come by."""
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)
        libc.mallopt(M_TRIM_THRESHOLD, 2**30)


class Switches:
    """Switches of the whole process that are as asked while any thread is inside; the last to leave puts them back."""

    def __init__(self):
        self._lock, self._inside, self._before, self._asked = threading.Lock(), 0, [], None

    @contextmanager
    def held(self, settings: Sequence[tuple[Callable[[], Any], Callable[[Any], None], Any]]) -> Iterator[None]:
        """Set each switch, (ask, set, value), inside the block.

        ``RuntimeError`` if another thread holds other values.
        """
        values = [value for *_, value in settings]
        with self._lock:
            if not self._inside:
                self._before = [(switch, ask()) for ask, switch, _ in settings]
                for _, switch, value in settings:
                    switch(value)
                self._asked = values
            elif values != self._asked:
                raise RuntimeError(f"another thread of this process runs with {self._asked}, this one with {values}")
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                for switch, value in self._before if not self._inside else ():
                    switch(value)
