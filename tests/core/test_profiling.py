"""Where a round's time goes."""

import time

import pytest

from fedlib import Execution, Experiment, run
from fedlib.core.profiling import PHASES, phase, profile


def test_an_inner_phase_is_taken_out_of_the_outer_one(monkeypatch):
    clock = iter([0.0, 1.0, 4.0, 6.0])  # outer 0..6, inner 1..4
    monkeypatch.setattr("fedlib.core.profiling._now", lambda: next(clock))
    with profile() as seconds:
        with phase("outer"), phase("inner"):
            pass
    assert seconds == {"outer": 3.0, "inner": 3.0}


def test_nothing_is_measured_outside_a_profile_and_only_one_measures():
    with phase("unseen"), profile() as seconds:
        with pytest.raises(RuntimeError, match="being measured already"), profile():
            pass
    with phase("unseen"):
        pass
    assert not seconds


def test_the_phases_of_a_run_cover_its_time(tmp_path):
    e = Experiment(method="depthfl", finetune="full", pretrained=False, num_train=200, num_test=40, num_clients=4,
                   clients_per_round=4, rounds=10, evaluate_every=1)  # fmt: skip
    run(e.replace(seed=2), Execution(workers=1), tmp_path, progress=False)  # imports and caches
    with profile() as seconds:
        began = time.perf_counter()
        run(e, Execution(workers=1), tmp_path, progress=False, checkpoint_seconds=0)
        elapsed = time.perf_counter() - began
    assert set(seconds) == set(PHASES) and all(s > 0 for s in seconds.values())
    assert 0.5 * elapsed < sum(seconds.values()) <= elapsed
