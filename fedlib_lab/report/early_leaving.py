"""Adaptive inference: an example leaves at the first exit that is confident enough, so easy examples cost less.

Confidence is the largest softmax probability, the criterion of BranchyNet (Teerapittayanon et al. 2016) in the form
of MSDNet (Huang et al. 2018). Read next: ``models/measure.py`` for what a part of a model costs.
"""

from collections.abc import Sequence

import numpy as np
import torch

from fedlib.core.experiment import Experiment
from fedlib.core.slices import STEM, Slice
from fedlib.engine.evaluation import served_parts
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation
from fedlib.engine.leaving import first_confident
from fedlib.methods import Server

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

    ``macs[j]`` is the total spent by an example that leaves at exit j; ``ValueError`` where it does not increase.
    """
    if (np.diff(macs) <= 0).any():
        raise ValueError(f"a later exit must cost more: {list(macs)}")
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


def single_exits(logits: torch.Tensor, labels: torch.Tensor, macs: Sequence[float]) -> list[dict]:
    """Per ``exit``, from 1: ``accuracy`` (percent) and ``macs`` if every example leaves there."""
    right = 100 * (logits.argmax(-1) == labels).double().mean(-1)  # (E,)
    pairs = zip(right.tolist(), macs, strict=True)
    return [{"exit": j, "accuracy": accuracy, "macs": float(cost)} for j, (accuracy, cost) in enumerate(pairs, 1)]


def served_macs(f: Federation, server: Server) -> np.ndarray:
    """MACs (E,) of an example that leaves at each exit of what answers on the central test set.

    Of one model its units and exits up to this one. Where every exit has a sub-model of its own (InclusiveFL, ReeFL's
    form of ScaleFL), an example that goes on starts again with the next one, so the costs of all of them add up.
    """
    parts, price = served_parts(f, server), f.setting.measure.macs
    if any(p != parts[0] for p in parts):
        return np.cumsum([_total(price, p) for p in parts])
    held = parts[0] if isinstance(parts[0], tuple) else (parts[0],)
    ends = enumerate(f.setting.exit_units)
    return np.array([sum(price(p.only(range(STEM, unit + 1), range(j + 1))) for p in held) for j, unit in ends])


def _total(price, part: Slice | tuple[Slice, ...]) -> int:
    return sum(map(price, part)) if isinstance(part, tuple) else price(part)


def adaptive_inference(
    e: Experiment, thresholds: Sequence[float] = THRESHOLDS, execution: Execution = Execution()
) -> list[dict]:
    """:func:`adaptive_curve` of a run on its test set (trained if it is missing), then its :func:`single_exits`."""
    f, server = load_trained(e, execution)
    logits, labels, macs = all_logits(f, server), f.data.test_labels, served_macs(f, server).tolist()
    return adaptive_curve(logits, labels, macs, thresholds) + single_exits(logits, labels, macs)
