"""Evaluation: accuracies by hand, and threads that share a model without changing its answers."""

import base64
import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.engine import evaluation as module
from fedlib.engine.evaluation import evaluate, exit_logits, served_parts

TINY = Experiment(pretrained=False, num_train=160, num_test=101, num_clients=10, augment="none", seed=5)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def parts(monkeypatch):
    """How many examples the model was given at a time, and in which thread."""
    seen, original = [], module.map_in_threads

    def record(work, parts, threads):
        def recorded(examples):
            seen.append((len(examples), threading.get_ident(), torch.get_num_threads()))
            return work(examples)

        return original(recorded, parts, threads)

    monkeypatch.setattr(module, "map_in_threads", record)
    return seen


@pytest.mark.parametrize(
    "changes",
    [
        dict(method="reefl"),
        dict(method="depthfl", finetune="frozen"),  # from cached class tokens
        dict(method="inclusivefl", finetune="lora", finetune_options={"r": 4, "layers_to_transform": (8, 9, 10, 11)}),
        dict(method="depthfl", finetune="loha"),  # peft's own layers
        dict(method="depthfl", finetune="oft"),
        dict(method="depthfl", backbone="vim_micro"),
    ],
    ids=lambda c: "-".join(str(v) for v in c.values() if isinstance(v, str)),
)
def test_threads_share_the_model_and_change_no_answer(changes, two_threads, parts, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 50)
    f = build_federation(TINY.replace(**changes))
    part = served_parts(f, f.server)[-1]
    side_by_side = exit_logits(f, f.server, part)
    assert sorted(n for n, *_ in parts) == [1, 50, 50] and {t for *_, t in parts} == {1}
    assert torch.get_num_threads() == 2 and threading.get_ident() not in {i for _, i, _ in parts}
    torch.set_num_threads(1)
    f = replace(f, test_cache=build_federation(TINY.replace(**changes)).test_cache)  # an empty one
    alone = exit_logits(f, f.server, part)
    assert [n for n, *_ in parts[3:]] == [50, 50, 1]  # the same batches, whatever the threads
    assert alone.abs().max() > 0.01
    torch.testing.assert_close(side_by_side, alone, rtol=1e-4, atol=1e-5)


def unpacked(text, n):
    """The stored bits, row by row, as text of zeros and ones."""
    bits = "".join(f"{byte:08b}" for byte in base64.b64decode(text))
    rows = [bits[i : i + 8 * -(-n // 8)] for i in range(0, len(bits), 8 * -(-n // 8))]
    return np.array([[c == "1" for c in row[:n]] for row in rows])


def test_one_batch_needs_no_thread(two_threads, parts):
    f = build_federation(TINY.replace(num_test=50))
    exit_logits(f, f.server, served_parts(f, f.server)[3])
    assert parts == [(50, threading.get_ident(), 2)]


def test_an_error_in_a_thread_is_raised(two_threads, monkeypatch):
    f = build_federation(TINY)
    monkeypatch.setattr(f.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        evaluate(f, f.server)


def test_accuracies_by_hand(monkeypatch):
    f = build_federation(TINY.replace(num_exits=2, num_test=50))
    labels = f.data.test_labels
    right = torch.nn.functional.one_hot(labels, 10).float()
    wrong = right.roll(1, -1)
    # Exit 1 errs on the first 10 of 50 (80 %), by 3 to 0; exit 2 on the first 30 (40 %), by 2 to 0. The mean of
    # logits: of the first 10 both err; of the next 20 exit 1 has 3 for the truth and exit 2 has 2 against it, so
    # the ensemble is right as often as exit 1: 80 %. The mean over exits is 60 %.
    first, second = 3 * right, 2 * right
    first[:10], second[:30] = 3 * wrong[:10], 2 * wrong[:30]
    monkeypatch.setattr(module, "exit_logits", lambda *_: torch.stack([first, second]))
    found = dict(evaluate(f, f.server))
    wanted = np.array([[False] * k + [True] * (50 - k) for k in (10, 30, 10)])
    assert np.array_equal(unpacked(found.pop("right"), 50), wanted)
    assert found == {"accuracy": 60.0, "exits": [80.0, 40.0], "ensemble": 80.0}
    second *= 4  # 8 against 3: now exit 2 decides
    second[10:30] = 8 * wrong[10:30]
    found = dict(evaluate(f, f.server))
    assert unpacked(found.pop("right"), 50)[2].tolist() == [False] * 30 + [True] * 20
    assert found == {"accuracy": 60.0, "exits": [80.0, 40.0], "ensemble": 40.0}


def test_each_exit_is_taken_from_the_model_that_the_method_evaluates_it_with(monkeypatch):
    f = build_federation(TINY.replace(method="inclusivefl", num_exits=2, num_test=50))
    right = torch.nn.functional.one_hot(f.data.test_labels, 10).float()
    asked = []

    def answer(federation, server, part):
        asked.append(part)
        return torch.stack([right, right]) if len(asked) == 1 else torch.stack([right, right.roll(1, -1)])

    monkeypatch.setattr(module, "exit_logits", answer)
    bits = module.pack_bits(torch.tensor([[True] * 50, [False] * 50]))
    assert evaluate(f, f.server) == {"accuracy": 50.0, "exits": [100.0, 0.0], "right": bits}
    assert asked == served_parts(f, f.server) and asked[0] != asked[1]
    assert np.array_equal([p.depth for p in asked], sorted(p.depth for p in asked))


def test_a_gpu_answers_as_many_examples_at_once_as_keep_it_busy_and_a_cpu_as_many_maps_as_fit_its_cache():
    f = build_federation(TINY)
    widest = f.model.backbone.spec.numbers(1)[0]
    assert module.at_once(f) == module.BATCH
    there = SimpleNamespace(model=f.model, device=torch.device("cuda"))
    assert module.at_once(there) == module.AT_ONCE // widest > 1000
    maps = SimpleNamespace(numbers=lambda n: (2**30, 0), feature=lambda unit: (64, 8, 8))
    there.model = SimpleNamespace(backbone=SimpleNamespace(spec=maps))
    assert module.at_once(there) == module.BATCH
    there.device = torch.device("cpu")
    assert module.at_once(there) == module.OF_MAPS


def test_no_answer_depends_on_how_many_are_answered_at_once(monkeypatch):
    f = build_federation(TINY)
    expected = exit_logits(f, f.server, served_parts(f, f.server)[-1])
    for size in (1000, 7):
        monkeypatch.setattr(module, "at_once", lambda f, size=size: size)
        assert torch.allclose(exit_logits(f, f.server, served_parts(f, f.server)[-1]), expected, atol=1e-6)
