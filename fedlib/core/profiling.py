"""Where time and memory go: a round's named phases, which cost nothing unless somebody measures; what autograd keeps.

``with profile() as seconds: run(...)`` fills ``seconds`` by phase. Workers add up: the sum may exceed the wall clock.
Phases do not nest: an inner one is taken out of the outer one's time.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext

import torch

PHASES = ("data", "download", "forward", "backward", "step", "aggregation", "evaluation", "files")
_active: "_Stopwatch | None" = None


class _Stopwatch(threading.local):
    """Per thread the running phases; shared the seconds."""

    def __init__(self, seconds: dict[str, float], lock: threading.Lock):
        self.seconds, self.lock = seconds, lock
        self.inner: list[float] = []  # per running phase, the seconds of phases inside it

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        began = _now()
        self.inner.append(0.0)
        try:
            yield
        finally:
            elapsed = _now() - began
            with self.lock:
                self.seconds[name] += elapsed - self.inner.pop()
            if self.inner:
                self.inner[-1] += elapsed


def _now() -> float:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # only while measuring: a phase ends when its kernels do
    return time.perf_counter()


def phase(name: str):
    """Return a context manager around a part of the round; it does nothing unless :func:`profile` is active."""
    return _active.phase(name) if _active is not None else nullcontext()


def is_measuring() -> bool:
    """Return whether a profile is being measured."""
    return _active is not None


def add_seconds(seconds: dict[str, float]) -> None:
    """Add the seconds by phase that another process measured for this one."""
    if _active is not None:
        with _active.lock:
            for name, value in seconds.items():
                _active.seconds[name] += value


def stop_measuring() -> None:
    """Drop the profile that this fork inherited: its parent measures it."""
    global _active
    _active = None


@contextmanager
def profile() -> Iterator[dict[str, float]]:
    """Measure all phases of this process inside the block. ``RuntimeError`` if one measures already."""
    global _active
    if _active is not None:
        raise RuntimeError("a profile is being measured already")
    seconds: dict[str, float] = defaultdict(float)
    _active = _Stopwatch(seconds, threading.Lock())
    try:
        yield seconds
    finally:
        _active = None


@contextmanager
def saved_for_backward(parameters: Iterable[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Record what autograd keeps beside ``parameters`` inside the block: each storage's first tensor, by address."""
    own = {p.untyped_storage()._cdata for p in parameters}
    kept: dict[int, torch.Tensor] = {}  # the tensors stay, so that no storage gets a second one's address

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()._cdata) not in own:
            kept.setdefault(storage, x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept
