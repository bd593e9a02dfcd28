"""Metrics against numbers worked out by hand, and of degenerate answers."""

import math

import pytest
import torch
import torch.nn.functional as F

from fedlib.data import metrics
from fedlib.data.tasks import Classification, Regression

# --- metrics


def logits_of(predictions, classes=2):
    return F.one_hot(torch.tensor(predictions), classes).float()


def test_accuracy_f1_and_matthews_by_hand():
    predictions, labels = [1, 1, 1, 0, 0, 1], torch.tensor([1, 0, 1, 1, 0, 1])  # TP 3, FP 1, FN 1, TN 1
    got = Classification(("f1", "accuracy", "matthews")).measure(logits_of(predictions), labels)
    assert list(got) == ["f1", "accuracy", "matthews"]
    assert got["accuracy"] == pytest.approx(100 * 4 / 6)
    assert got["f1"] == pytest.approx(100 * 2 * 3 / (2 * 3 + 1 + 1))
    assert got["matthews"] == pytest.approx(100 * (3 * 1 - 1 * 1) / math.sqrt(4 * 4 * 2 * 2))  # 25


def test_macro_f1_by_hand_and_f1_is_of_two_classes():
    predictions, labels = [0, 1, 2, 2], torch.tensor([0, 1, 1, 2])  # F1: 1, 2/3, 2/3
    got = Classification(("macro_f1",)).measure(logits_of(predictions, 3), labels)
    assert got == {"macro_f1": pytest.approx(100 * (1 + 2 / 3 + 2 / 3) / 3)}
    with pytest.raises(ValueError, match="allowed for more: macro_f1"):
        Classification(("f1",)).measure(logits_of(predictions, 3), labels)


@pytest.mark.parametrize("n", [1, 6])
@pytest.mark.parametrize("predicted", [0, 1])
@pytest.mark.parametrize("true", [0, 1])
def test_of_labels_that_are_all_alike_what_is_undefined_is_no_number(n, predicted, true):
    """A correlation always; F1 where the class that it is of is nowhere."""
    got = Classification(("matthews", "f1", "macro_f1", "accuracy")).measure(
        logits_of([predicted] * n), torch.full((n,), true)
    )
    right = 100.0 * (predicted == true)
    assert math.isnan(got.pop("matthews"))
    if not (predicted or true):
        assert math.isnan(got.pop("f1"))
    assert got == {"macro_f1": right, "accuracy": right} | ({"f1": right * true} if predicted or true else {})


def test_matthews_of_constant_predictions_is_zero():
    assert metrics.matthews(torch.ones(4, dtype=torch.long), torch.tensor([0, 1, 1, 0])) == 0


def test_matthews_of_three_classes_by_hand():
    predictions, labels = (
        torch.tensor([0, 2, 1, 2, 0, 1]),
        torch.tensor([0, 1, 1, 2, 0, 2]),
    )  # 4 of 6, two of each class
    assert metrics.matthews(predictions, labels) == pytest.approx(100 * (4 * 6 - 3 * 2 * 2) / (6**2 - 3 * 2**2))  # 50


def test_correlations_by_hand():
    labels = torch.tensor([0.0, 1.0, 2.0, 5.0])  # mean 2, deviations -2 -1 0 3
    got = Regression().measure(torch.tensor([[1.0], [2.0], [0.0], [5.0]]), labels)  # mean 2, deviations -1 0 -2 3
    assert got["pearson"] == pytest.approx(100 * (2 + 9) / math.sqrt((4 + 1 + 9) * (1 + 4 + 9)))
    assert got["spearman"] == pytest.approx(100 * (1 - 6 * (1 + 1 + 4 + 0) / (4 * 15)))  # ranks 2 3 1 4 of 1 2 3 4


@pytest.mark.parametrize(
    "predictions", [[2.0, 2.0, 2.0], [math.nan, 1.0, 2.0], [math.inf, 1.0, 2.0]], ids=["constant", "nan", "infinite"]
)
def test_predictions_that_say_nothing_of_different_labels_correlate_by_zero(predictions):
    got = Regression().measure(torch.tensor(predictions)[:, None], torch.tensor([1.0, 2.0, 3.0]))
    assert got == {"pearson": 0.0, "spearman": 0.0}
    for given, labels in (([[1.0]], [1.0]), ([[1.0], [2.0]], [1.0, 1.0])):  # labels that are all alike
        assert all(map(math.isnan, Regression().measure(torch.tensor(given), torch.tensor(labels)).values()))
