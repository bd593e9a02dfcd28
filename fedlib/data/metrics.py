"""Metrics in percent, larger is better: of classes, numbers, and answers as text.

NaN where the labels leave nothing to measure: a correlation with labels that are all alike, F1 without a label or a
prediction of its class. Predictions that are all alike say nothing of labels that differ: their correlation is zero.
"""

import math
import re
import string
import warnings
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import torch

IGNORED = -100  # a label that is not there

# --- (predictions (N,), labels (N,)) -> percent


def accuracy(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    return 100 * (predictions == labels).double().mean().item()


def f1(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the F1 of class 1 (GLUE's pairs). Raises ``ValueError`` if there are classes other than 0 and 1."""
    if max(labels.max(), predictions.max()) > 1:
        raise ValueError("metric f1 is of two classes, 0 and 1; allowed for more: macro_f1")
    return 100 * float(_f1s(predictions, labels)[-1]) if max(labels.max(), predictions.max()) else math.nan


def macro_f1(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the mean F1 of the classes that occur, as labels or as predictions."""
    return 100 * float(_f1s(predictions, labels).mean())


def _f1s(predictions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the F1 (0..1) of every class that occurs, in order: 2 true positives / (predictions + labels).

    As scikit-learn's, whose import takes longer than a small run's evaluation, and whose calls 25 to 40 times as long.
    """
    n = 1 + int(max(labels.max(), predictions.max()))
    predicted, true = (x.bincount(minlength=n) for x in (predictions, labels))
    right, occurs = labels[predictions == labels].bincount(minlength=n), predicted + true > 0
    return 2 * right[occurs].double() / (predicted + true)[occurs]


def matthews(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return the Matthews correlation, scikit-learn's."""
    from sklearn.metrics import matthews_corrcoef

    return _correlation(lambda p, y: matthews_corrcoef(y, p), predictions, labels)


def pearson(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    from scipy.stats import pearsonr

    return _correlation(lambda p, y: pearsonr(p, y).statistic, predictions, labels)


def spearman(predictions: torch.Tensor, labels: torch.Tensor) -> float:
    from scipy.stats import spearmanr

    return _correlation(lambda p, y: spearmanr(p, y).statistic, predictions, labels)


def _correlation(of: Callable, predictions: torch.Tensor, labels: torch.Tensor) -> float:
    """Return 100 times ``of`` predictions and labels.

    Zero for constant or diverged predictions, NaN for constant labels.
    """
    p, y = predictions.double().cpu().numpy(), labels.double().cpu().numpy()
    if (y == y[0]).all():
        return math.nan
    if not np.isfinite(p).all() or (p == p[0]).all():
        return 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of nearly constant input
        value = float(of(p, y))
    return 100 * value if np.isfinite(value) else 0.0


# --- answers as text: SQuAD (Rajpurkar et al. 2016, 2018)


def normalise_answer(answer: str) -> str:
    """Lower the case, drop punctuation, the articles a, an and the, and superfluous blanks."""
    bare = "".join(c for c in answer.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", bare).split())


def word_f1(prediction: str, answer: str, unanswerable: bool = False) -> float:
    """Return the F1 (0..1) of the bags of normalised words. ``unanswerable``: two empty answers agree (SQuAD 2.0.

    1.1: 0).
    """
    p, a = normalise_answer(prediction).split(), normalise_answer(answer).split()
    if unanswerable and not (p and a):
        return float(p == a)
    common = sum((Counter(p) & Counter(a)).values())
    return 2 * common / (len(p) + len(a)) if common else 0.0


def answer_scores(
    predictions: Sequence[str], answers: Sequence[Sequence[str]], unanswerable: bool = False
) -> dict[str, float]:
    """Return ``f1`` and ``exact_match`` of N answers, each against its best reference; no reference is an empty one.

    Raises ``ValueError`` if there is nothing to compare or the numbers of examples differ.
    """
    if len(predictions) != len(answers) or not len(answers):
        raise ValueError(f"cannot compare {len(predictions)} predictions with the answers of {len(answers)} examples")
    f1s, matches = [], []
    for prediction, references in zip(predictions, answers, strict=True):
        references = references or [""]
        f1s.append(max(word_f1(prediction, r, unanswerable) for r in references))
        matches.append(any(normalise_answer(prediction) == normalise_answer(r) for r in references))
    return {"f1": 100 * float(np.mean(f1s)), "exact_match": 100 * float(np.mean(matches))}
