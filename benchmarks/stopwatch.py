"""The seconds of a run's phases (``core/profiling.py``), by name."""

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

from fedlib.core import profiling

PHASES = ("data", "download", "forward", "backward", "step", "aggregation", "evaluation", "files")


class Stopwatch:
    """Measures the phases of this process inside its block, on a CPU; the ``seconds`` of several threads add up.

    An inner phase is taken out of the outer one's time.
    """

    def __init__(self):
        self.seconds: dict[str, float] = defaultdict(float)
        self._lock, self._thread = threading.Lock(), threading.local()

    def __enter__(self) -> "Stopwatch":
        self._before, profiling.timer = profiling.timer, self.phase
        return self

    def __exit__(self, *_: object) -> None:
        profiling.timer = self._before

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        outer, self._thread.inner = getattr(self._thread, "inner", 0.0), 0.0
        began = perf_counter()
        try:
            yield
        finally:
            elapsed = perf_counter() - began
            with self._lock:
                self.seconds[name] += elapsed - self._thread.inner
            self._thread.inner = outer + elapsed
