"""Work that is left out must not change a number: what is cached of frozen units, and the tokens that nobody reads."""

import dataclasses

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.engine.evaluation import evaluate
from fedlib.engine.frozen_cache import FrozenCache, build_frozen_cache

TINY = Experiment(
    pretrained=False, num_train=160, num_test=40, num_clients=8, clients_per_round=6, rounds=2, augment="none",
    batch_size=8, seed=5,
)  # fmt: skip
LAST_THIRD = {"r": 4, "layers_to_transform": (8, 9, 10, 11)}


@pytest.mark.parametrize(
    "blocks, changes",
    [
        (12, dict(method="depthfl", finetune="frozen")),
        (12, dict(method="reefl", finetune="frozen", options={"modulate": False})),
        (3, dict(method="reefl", finetune="frozen", options={"only_at_exits": True})),  # fed back after block 2 first
        (1, dict(method="reefl", finetune="frozen")),
        (8, dict(method="inclusivefl", finetune="lora", finetune_options=LAST_THIRD)),
        (0, dict(method="depthfl", finetune="full")),
        (0, dict(method="depthfl", finetune="ssf")),  # scales the stem
    ],
)
def test_the_prefix_ends_where_training_or_feedback_begins_and_changes_no_number(blocks, changes):
    f = build_federation(TINY.replace(**changes))
    assert (f.train_cache.units if f.train_cache else 0) == (f.test_cache.units if f.test_cache else 0) == blocks
    *_, cached = run_rounds(f, Execution(workers=1))
    plain = dataclasses.replace(build_federation(TINY.replace(**changes)), train_cache=None, test_cache=None)
    *_, computed = run_rounds(plain, Execution(workers=1))
    for name, p in computed.server.params.items():
        torch.testing.assert_close(cached.server.params[name], p, rtol=0, atol=1e-5)
    assert cached.metrics["exits"] == pytest.approx(computed.metrics["exits"], abs=2.6)  # a tie may turn on rounding


def test_augmented_training_keeps_only_the_test_set():
    f = build_federation(TINY.replace(finetune="frozen", method="depthfl", augment="crop"))
    assert f.train_cache is None and f.test_cache.units == 12


def test_every_example_is_computed_once(monkeypatch):
    f, seen = build_federation(TINY.replace(finetune="frozen", method="depthfl", rounds=4)), []
    original = f.train_cache.render
    monkeypatch.setattr(f.train_cache, "render", lambda rows: seen.extend(rows.tolist()) or original(rows))
    for _ in run_rounds(f, Execution(workers=2, executor="threads")):
        pass
    sampled = {int(r) for t in (1, 2, 3, 4) for c in f.sample_clients(t) for r in f.data.client(c.id)}
    assert sorted(seen) == sorted(sampled)


def test_evaluation_with_sub_models_of_unequal_depth_uses_the_prefix():
    f = build_federation(TINY.replace(finetune="frozen", method="inclusivefl"))
    plain = dataclasses.replace(f, test_cache=None)
    assert evaluate(f, f.server) == evaluate(plain, f.server)


def test_a_prefix_that_takes_too_much_memory_is_not_kept(monkeypatch):
    f = build_federation(TINY.replace(finetune="frozen", method="depthfl"))
    # 100 examples x 64 features x 4 bytes x (17 tokens + class tokens of the exits 2, 5); of a whole backbone only
    # those of its four exits
    assert FrozenCache.bytes_needed(f.model, 8, 100) == 100 * 64 * 4 * 19
    assert FrozenCache.bytes_needed(f.model, 12, 100) == 100 * 64 * 4 * 4
    monkeypatch.setattr("fedlib.engine.frozen_cache.free_memory", lambda device: 4 * 100 * 64 * 4 * 19 - 1)
    assert build_frozen_cache(f.model, 8, 100, None, torch.device("cpu")) is None
    assert build_frozen_cache(f.model, 12, 100, None, torch.device("cpu")) is not None
    assert build_frozen_cache(f.model, 0, 100, None, torch.device("cpu")) is None
