"""Adaptive inference: an example leaves at the first exit that is confident enough, so easy examples cost less.

Confidence is the largest softmax probability, the criterion of BranchyNet (Teerapittayanon et al. 2016) in the form
of MSDNet (Huang et al. 2018). Read next: ``costs.exit_macs`` for what an exit costs.
"""

from collections.abc import Sequence

import numpy as np
import torch

from ..core.experiment import Experiment
from ..engine.evaluation import served_parts
from ..engine.executors import Execution
from ..engine.leaving import first_confident
from ..runs.costs import exit_macs
from ..runs.trained import all_logits, load_trained

THRESHOLDS = tuple(np.round(np.linspace(0, 1, 21), 2))


def leave_early(logits: torch.Tensor, threshold: float) -> torch.Tensor:
    """The exit (N,) at which each example leaves: the first of logits (E, N, C) with confidence >= ``threshold``.

    An example that never is confident enough leaves at the last exit.
    """
    return first_confident(logits.softmax(-1).amax(-1), threshold)


def adaptive_curve(
    logits: torch.Tensor, labels: torch.Tensor, macs: Sequence[float], thresholds: Sequence[float] = THRESHOLDS
) -> list[dict]:
    """Per threshold: ``accuracy`` (percent), mean ``macs`` per image, ``share`` of the examples leaving at each exit.

    ``macs[j]`` is the total spent by an example that leaves at exit j.
    """
    macs, rows = torch.as_tensor(macs, dtype=torch.float64, device=logits.device), []
    for threshold in thresholds:
        exits = leave_early(logits, threshold)
        predictions = logits.argmax(-1).gather(0, exits[None])[0]
        rows.append(
            {
                "threshold": float(threshold),
                "accuracy": 100 * (predictions == labels).double().mean().item(),
                "macs": macs[exits].mean().item(),
                "share": (torch.bincount(exits, minlength=len(logits)) / len(labels)).tolist(),
            }
        )
    return rows


def adaptive_inference(
    e: Experiment, thresholds: Sequence[float] = THRESHOLDS, execution: Execution = Execution()
) -> list[dict]:
    """:func:`adaptive_curve` of a run on its test set (trained if it is missing).

    Where every exit has a sub-model of its own (ScaleFL, InclusiveFL), an example that goes on starts again with the
    next one, so the costs of all that it ran through add up.
    """
    f, server = load_trained(e, execution)
    macs = np.array(exit_macs(e, len(f.data.classes)), dtype=float)
    parts = served_parts(f, server)
    if any(p != parts[0] for p in parts):
        macs = macs.cumsum()
    return adaptive_curve(all_logits(f, server), f.data.test_labels, macs[: len(parts)], thresholds)
