"""Answers in words: compared and scored as SQuAD does."""

import pytest
import torch

from fedlib.data import metrics
from fedlib.data.answers import AnswerKey, unpack
from fedlib.data.tasks import Span

# --- answers as text


def test_texts_are_compared_as_squad_compares_them():
    assert metrics.normalised("The  Cat's (whiskers), an answer") == "cats whiskers answer"
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
