"""Exits that answer at every token: spans, next tokens and numbers train in a federation."""

import math
from dataclasses import replace

import pytest
import torch
from datasets import Dataset

from fedlib import Experiment, build_federation, run_rounds
from fedlib.data.federated import vocabulary_positions
from fedlib.data.tasks import IGNORED
from fedlib.engine.evaluation import exit_logits
from fedlib.engine.executors import Execution
from fedlib.models.bert import BertSpec
from fedlib.models.exits import Classifiers, EveryToken
from fedlib.models.ree import Ree
from fedlib.models.registry import OWN
from fedlib_lab.zoo.foreign_specs import ForeignSpec

ONE = Execution(workers=1)
WORDS = "red blue green black white".split()


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def base(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    monkeypatch.setitem(OWN, "bert_words", BertSpec(length=24, dim=32, depth=2, heads=2, ffn_dim=32, centred=False))
    monkeypatch.setitem(OWN, "centred_tiny", BertSpec(length=24, dim=32, depth=2, heads=2, ffn_dim=32))
    monkeypatch.setitem(OWN, "llama_small", ForeignSpec("llama", length=24, dim=32, depth=2, heads=2, ffn_dim=48))
    return Experiment(
        method="fedavg", backbone="bert_words", pretrained=False, augment="none", partition="iid", finetune="full",
        num_exits=1, num_clients=4, clients_per_round=4, rounds=12, batch_size=8, lr=0.003, min_lr=0.0,
        schedule="constant", optimiser="adamw", clip_value=None,
    )  # fmt: skip


def write(folder, rows):
    folder.mkdir()
    Dataset.from_list(rows).to_parquet(folder / "train.parquet")
    Dataset.from_list(rows[: len(rows) // 2]).to_parquet(folder / "validation.parquet")


def squad(tmp_path, n=48):
    """Which colour stands after the word "is"?"""
    rows = []
    for i in range(n):
        before, colour = " ".join(WORDS[(i + k) % 5] for k in range(i % 3)), WORDS[i % 5]
        context = f"{before} it is {colour} now"
        start = context.index(" is ") + 4
        rows.append({"question": "which colour?", "context": context, "answers": {"text": [colour], "answer_start": [start]}})  # fmt: skip
    write(tmp_path / "squad", rows)


def svamp(tmp_path, n=48):
    rows = [{"question": f"add {WORDS[i % 5]} to {WORDS[i % 3]}", "equation": f"+ {WORDS[i % 5]} {WORDS[i % 3]}"} for i in range(n)]  # fmt: skip
    write(tmp_path / "svamp", rows)


def last(e):
    f = build_federation(e)
    *_, done = run_rounds(f, ONE)
    return f, done


@pytest.mark.parametrize("backbone", ["bert_words", "centred_tiny"])
def test_spans_are_learned(base, tmp_path, backbone):
    squad(tmp_path)
    f, done = last(base.replace(dataset="squad", backbone=backbone, rounds=20))
    assert done.metrics["accuracy"] > 80  # F1; chance is below 15
    assert done.metrics["others"]["exact_match"][0] > 70
    outputs = exit_logits(f, done.server, f.setting.full())  # (1, N, T, 2)
    assert outputs.shape == (1, 24, 24, 2)
    padding = f.data.test_inputs[:, :24] == 0
    assert outputs[0][padding].eq(-math.inf).all() and outputs[0][~padding].isfinite().all()


def test_next_tokens_are_learned_by_a_causal_model(base, tmp_path):
    svamp(tmp_path)
    f, done = last(base.replace(dataset="svamp", backbone="llama_small", rounds=25, lr=0.01))
    assert f.data.num_outputs == 1 + 5 + 1  # the sign, five colours, the end
    assert done.metrics["accuracy"] > 80  # whole equations
    assert f.model.head.each.exits[0].linear.weight.shape[0] == 7


def test_raffm_trains_on_every_task(base, tmp_path):
    squad(tmp_path)
    svamp(tmp_path)
    options = {"shares": [0.8, 0.9]}
    _, done = last(base.replace(dataset="squad", method="raffm", options=options, rounds=2))
    assert math.isfinite(sum(done.losses.values()))
    cut = {"rank": ["ffn"], "attention": [1.0], "shares": [0.8, 1.0]}
    _, done = last(base.replace(dataset="svamp", method="raffm", backbone="llama_small", options=cut, rounds=2))
    assert math.isfinite(sum(done.losses.values()))


def test_a_cohort_of_spans_is_its_members_one_by_one(base, tmp_path):
    squad(tmp_path)
    e = base.replace(dataset="squad", rounds=1, optimiser="sgd", lr=0.1)
    states = []
    for size in (1, 4):
        (done,) = run_rounds(build_federation(e), Execution(workers=1, cohort_size=size))
        states.append(done.server.params)
    for n, p in states[0].items():
        torch.testing.assert_close(p, states[1][n], rtol=0, atol=1e-5, msg=n)


def test_numbers_are_learned(base, tmp_path):
    rows = [{"sentence1": WORDS[i % 5], "sentence2": WORDS[i % 4], "label": float(i % 5)} for i in range(60)]
    write(tmp_path / "stsb", rows)
    _, done = last(base.replace(dataset="stsb", rounds=20))
    assert done.metrics["accuracy"] > 80  # Pearson


def test_tokens_that_never_answered_are_nobodys_prediction():
    vocabulary = torch.tensor([3, 7, 9])
    found = vocabulary_positions(vocabulary, torch.tensor([[9, 3, IGNORED], [8, 100, 1]]))
    assert found.tolist() == [[2, 0, IGNORED], [3, 3, 3]]


def test_every_token_answers_as_it_would_alone():
    head = EveryToken(Classifiers(4, 3, (1,)).init_(generator()), length=5, compete=False)
    feature = torch.randn(2, 3, 4, 4, generator=generator(1))
    feature[:, 0, 2:] = 0  # padding
    assert head.step(0, feature, []) == (None, None)
    out, none = head.step(1, feature, [])
    assert out.shape == (2, 3, 5, 3) and none is None
    torch.testing.assert_close(out[:, :, 1], head.each.step(1, feature[:, :, 1], [])[0])
    assert not out[:, 0, 2:].any() and not out[:, :, 4].any()
    with pytest.raises(ValueError, match=r"exits that hand the class token back \(Ree\) cannot answer at every token"):
        EveryToken(Ree(4, 2, 3, (1,)), 5, True)


def test_who_cannot_answer_at_every_token_is_told_before_any_compute(base, tmp_path):
    squad(tmp_path)
    svamp(tmp_path)
    for changes, message in [
        (
            {"dataset": "svamp"},
            "asks for the next token, and backbone = 'bert_words' sees what follows; allowed: a causal",
        ),
        ({"dataset": "svamp", "backbone": "flan_t5_small"}, "asks for the next token"),
        ({"dataset": "squad", "backbone": "vit_b16"}, "cannot read dataset = 'squad'"),
        ({"dataset": "squad", "method": "reefl"}, "cannot answer at every token"),
        ({"dataset": "squad", "partition": "dirichlet"}, "divides by class"),
    ]:
        with pytest.raises(ValueError) as error:
            build_federation(base.replace(**changes))
        assert message in str(error.value), changes


def test_labels_of_the_wrong_type_are_named(base, tmp_path):
    rows = [{"sentence": WORDS[i % 5], "label": i % 2} for i in range(20)]
    write(tmp_path / "squad", rows)
    with pytest.raises(ValueError, match="dataset = 'squad' is taken for a Span, but each of its labels is a class"):
        build_federation(base.replace(dataset="squad"))


def test_a_backbone_without_tokens_is_refused(base, monkeypatch):
    monkeypatch.setitem(OWN, "odd", replace(OWN["bert_words"]))
    monkeypatch.setattr(type(OWN["odd"]), "state", lambda self, unit: (3, 4, 4))
    with pytest.raises(ValueError, match="asks for an answer at every token, and backbone = 'odd' has none"):
        build_federation(base.replace(dataset="squad", backbone="odd"))


def test_a_twin_has_the_same_tensors_and_what_is_put_into_one_is_not_in_the_other():
    f = build_federation(Experiment(pretrained=False, num_train=100, num_test=20, augment="none"))
    model = f.model
    twin = model.twin()
    assert all(p is dict(twin.named_parameters())[n] for n, p in model.named_parameters())
    name, tensor = next(iter(f.server.params.items()))
    before = dict(model.named_parameters())[name]
    twin.put_({name: tensor + 1})
    assert dict(model.named_parameters())[name] is before and twin.context is not model.context
    slots, leaf = twin._slots[name]
    assert torch.equal(slots[leaf], tensor + 1)
