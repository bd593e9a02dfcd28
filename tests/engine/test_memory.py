"""The memory that a training needs, and what is free."""

import pytest

from fedlib import Experiment, build_federation
from fedlib.engine import memory
from fedlib.engine.checks import check_experiment

# --- memory ------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_refused_with_needed_and_free(monkeypatch):
    e = Experiment(method="fedavg", num_exits=1, finetune="full", num_train=200, num_test=50)
    monkeypatch.setattr(memory, "free_memory", lambda device: 2**20)
    with pytest.raises(ValueError, match=r"need about 0\.0 GiB and 0\.0 GiB are free on cpu"):
        build_federation(e)
    monkeypatch.undo()
    build_federation(e)
    huge = e.replace(method="reefl", num_exits=4, options={"ree_width": 8 * 10**9})
    with pytest.raises(ValueError, match=r"need about [\d.]+ GiB and [\d.]+ GiB are free"):
        build_federation(huge)


def test_needed_bytes_are_what_the_tensors_take():
    from fedlib.engine.federation import build_model

    e = Experiment(method="fedavg", num_exits=1, finetune="full", batch_size=8)
    shapes = build_model(e, check_experiment(e), 10, meta=True)
    size = sum(p.numel() for p in shapes.parameters())
    needed = lambda **changes: memory.bytes_to_train(e.replace(**changes), shapes, 10**9)  # noqa: E731
    assert needed() == 4 * 6 * size + 10**9
    assert needed(momentum=0.5) - needed() == 4 * size and needed(optimiser="adamw") - needed() == 4 * 3 * size
    assert needed(clip_norm=1.0, weight_decay=0.1) - needed() == 4 * 2 * size
    assert needed(optimiser="adamw", weight_decay=0.1) == needed(optimiser="adamw")
    assert memory.bytes_to_train(e, shapes, 0) == 4 * 8 * size
