"""Where a round's time goes."""

import time
from contextlib import nullcontext

import torch

from benchmarks.stopwatch import PHASES, Stopwatch
from fedlib import Execution, Experiment, run
from fedlib.core import profiling
from fedlib.core.profiling import phase

E = Experiment(method="depthfl", finetune="full", pretrained=False, num_train=200, num_test=40, num_clients=4,
               clients_per_round=4, rounds=10, evaluate_every=1)  # fmt: skip


def test_an_inner_phase_is_taken_out_of_the_outer_one(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0])  # outer 0..6, inner 1..4
    monkeypatch.setattr("benchmarks.stopwatch.perf_counter", lambda: next(clock))
    with Stopwatch() as watch, phase("outer"), phase("inner"):
        pass
    assert watch.seconds == {"outer": 3.0, "inner": 3.0}


def test_nothing_is_measured_outside():
    with phase("unseen"), Stopwatch() as watch:
        pass
    with phase("unseen"):
        pass
    assert not watch.seconds and profiling.timer is nullcontext


def test_the_phases_of_a_run_cover_its_time(tmp_path):
    run(E.replace(seed=2), Execution(workers=1), tmp_path, progress=False)  # imports and caches
    with Stopwatch() as watch:
        began = time.perf_counter()
        run(E, Execution(workers=1), tmp_path, progress=False, checkpoint_seconds=0)
        elapsed = time.perf_counter() - began
    assert set(watch.seconds) == set(PHASES) and all(s > 0 for s in watch.seconds.values())
    assert 0.5 * elapsed < sum(watch.seconds.values()) <= elapsed


def test_pytorchs_profiler_shows_the_phases(tmp_path, monkeypatch):
    monkeypatch.setattr(profiling, "timer", torch.profiler.record_function)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        run(E.replace(rounds=1), Execution(workers=1), tmp_path, progress=False)
    assert set(PHASES) <= {event.key for event in seen.key_averages()}
