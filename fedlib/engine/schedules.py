"""The learning rate of round t = 1..rounds, and of every step of a local training."""

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..core.experiment import Experiment


def round_rate(e: Experiment, t: int) -> float:
    """Return the rate of round t: the schedule's, times t / (w + 1) in the w first rounds if there is a warm-up."""
    rate, w = _scheduled(e, t), _in_rounds(e.warmup_rounds, e.rounds)
    return rate * t / (w + 1) if t <= w else rate


def _scheduled(e: Experiment, t: int) -> float:
    match e.schedule:
        case "cosine":  # to zero after the last round, with a floor
            return max(e.min_lr, 0.5 * e.lr * (1 + math.cos(math.pi * t / e.rounds)))
        case "step":
            assert e.decay is not None and e.milestones is not None  # see check_schedule
            return e.lr * e.decay ** sum(_in_rounds(m, e.rounds) < t for m in e.milestones)
        case "exponential":
            assert e.decay is not None
            return e.lr * e.decay ** ((t - 1) // e.decay_every)
        case "constant":
            return e.lr


def step_rates(
    e: Experiment, rate: float | torch.Tensor, steps: np.ndarray, device: torch.device | str = "cpu"
) -> Sequence[float | torch.Tensor] | torch.Tensor:
    """Return the rates of steps 0, 1, ... of a local training, from the round's ``rate``, one or each member's (M,).

    linear: rate (1 - step / steps) for each member, (S, M) in float64 on ``device``, as members have unequal numbers of
    ``steps`` (M,); the last step's rate is not yet zero. constant: ``rate``, S times.
    """
    if e.local_schedule == "constant":
        return [rate] * int(steps.max())
    left = np.clip(1 - np.arange(steps.max())[:, None] / np.maximum(steps, 1), 0.0, None)
    return torch.from_numpy(left).to(device) * rate


def _in_rounds(value: float, rounds: int) -> int:
    """Convert a share of all rounds (below 1) to rounds, rounded up; return rounds as they are."""
    return math.ceil(value * rounds - 1e-9) if value < 1 else int(value)


def check_schedule(e: Experiment) -> None:
    """Raise ``ValueError`` where an option of the schedule is missing, out of range, or without effect."""
    for key, of, need in (
        ("decay", ("step", "exponential"), "a factor in (0, 1]"), ("milestones", ("step",), "rounds, or shares of them")
    ):  # fmt: skip
        if e.schedule in of and not getattr(e, key):
            raise e.refused(key, f"with schedule = {e.schedule!r}", need)
    _check_rounds("milestones", e.milestones or (), e.rounds)
    _check_rounds("warmup_rounds", (e.warmup_rounds,) if e.warmup_rounds else (), e.rounds)


def _check_rounds(key: str, values: tuple[float, ...], rounds: int) -> None:
    """Raise ``ValueError`` unless values increase and are whole rounds before the last, or shares of all rounds."""
    shares = all(0 < v < 1 for v in values)
    whole = all(1 <= v < rounds and v == int(v) for v in values)
    if not (shares or whole) or list(values) != sorted(set(values)):
        shown = ", ".join(f"{v:g}" for v in values)
        need = f"increasing whole rounds in 1..{rounds - 1}, or increasing shares of all rounds between 0 and 1"
        raise ValueError(f"experiment: {key} = {shown} with rounds = {rounds}; allowed: {need}")
