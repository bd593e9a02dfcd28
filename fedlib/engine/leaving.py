"""Early leaving: an example takes the answer of the first exit that is confident enough (BranchyNet, MSDNet).

Read next: ``report/clients.py`` (tables, and curves with costs), ``serving.py`` (every client's).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ..data.tasks import Task

THRESHOLDS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)  # of the confidence; recorded of every evaluation


def first_confident(confidence: torch.Tensor, threshold: float, strict: bool = False) -> torch.Tensor:
    """Return the exit (N,) where each example leaves: the first of confidence (E, N) >= ``threshold`` (strict: >).

    An example that never is confident enough leaves at the last exit.
    """
    enough = confidence > threshold if strict else confidence >= threshold
    enough[-1] = True
    return enough.int().argmax(0)  # the first maximum


def leave_at(
    task: Task, answers: torch.Tensor, confidence: torch.Tensor, labels: torch.Tensor
) -> dict[float, tuple[float, list[float]]]:
    """Return by threshold, exceeded strictly, the metric in percent and the share of examples leaving at each exit.

    Answers (E, N, *label) and their confidence (E, N), labels (N, *label). The exits after the one where an example
    leaves are not computed.
    """
    every, found = torch.arange(len(labels), device=labels.device), {}
    for threshold in THRESHOLDS:
        exits = first_confident(confidence, threshold, strict=True)
        share = torch.bincount(exits, minlength=len(answers)) / len(labels)
        found[threshold] = task.score(answers[exits, every], labels)[task.metric], share.tolist()
    return found


def mean_over_clients(clients: Sequence[Mapping[float, tuple[float, list[float]]]]) -> dict[str, dict[str, object]]:
    """Return by threshold ``accuracy`` and ``sd`` over clients, and the mean ``share`` leaving at each exit."""
    out = {}
    for threshold in THRESHOLDS:
        scores, shares = zip(*(c[threshold] for c in clients), strict=True)
        numbers = {"accuracy": round(float(np.mean(scores)), 4), "sd": round(float(np.std(scores)), 4)}
        out[str(threshold)] = numbers | {"share": np.round(np.mean(shares, 0), 5).tolist()}
    return out
