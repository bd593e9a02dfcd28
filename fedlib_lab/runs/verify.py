"""A stored run is trained again, beside the store, and compared with what is stored.

On a like machine with the same PyTorch and the same code the curve comes out byte for byte, seconds left out. Elsewhere
the order of sums differs, and training makes more of it round by round: accuracies then count as the same within
``TOLERANCE`` points.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import torch

from fedlib.core.annotations import Count
from fedlib.core.validation import check_type, convert
from fedlib.engine.executors import Execution

from . import store
from .identity import KINDS, differences
from .record import Run, recorded

TOLERANCE = 1.0  # points of accuracy
ALIKE = ("device", "torch", "commit", "products", "workers")  # of a provenance: with equal ones, bytes are equal


@dataclass(frozen=True)
class Verified:
    """What came out: accuracies by round, stored and again, in percent; ``differing`` says what trained otherwise.

    ``passed``: ``identical``, or not ``alike`` and within the ``tolerance``, points of ``largest_difference``.
    """

    run: str
    rounds: int
    curve: list[dict[str, float]]
    alike: bool
    differing: Mapping[str, Any]
    identical: bool
    largest_difference: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        rows = [f"{m['t']:>6}  {m['stored']:>8.4f}  {m['again']:>8.4f}" for m in self.curve]
        others = "; ".join(f"{k}: {v}" for k, v in self.differing.items())
        where = "on a like machine, by the same code" if self.alike else f"elsewhere ({others})"
        same = "every byte of the curve" if self.identical else f"accuracies up to {self.largest_difference:.4f} points"
        allowed = "" if self.alike else f", {self.tolerance:g} are allowed"
        said = "comes out as it is stored" if self.passed else "comes out otherwise"
        head = f"{self.run}, {self.rounds} rounds trained again {where}"
        return "\n".join([head, " round    stored     again", *rows, f"It {said}: equal in {same}{allowed}."])


def verify(
    run: Run, rounds: int | None = None, execution: Execution | None = None, tolerance: float = TOLERANCE
) -> Verified:
    """Train ``run`` again up to its last evaluated round, of the first ``rounds`` (None: all), in a temporary folder.

    ``execution``: None, as it was stored. Nothing is stored, and what is stored is not touched. ``ValueError`` where
    none of these rounds was evaluated.
    """
    check_type(run, Run, "verify: run")
    last = run.experiment.rounds if rounds is None else convert(rounds, Count, "verify: rounds")
    told = [m for m in run.metrics if m["t"] <= last]
    if not told:
        first = run.metrics[0]["t"] if run.metrics else "none"
        raise ValueError(f"verify: rounds = {rounds}: the first round that {run.path.name} evaluated is {first}")
    there = run.record.get("provenance", {})
    if execution is None:
        on_gpu = "cuda" in there and torch.cuda.is_available()
        execution = Execution("cuda" if on_gpu else "cpu", there.get("workers"))
    with TemporaryDirectory(prefix="fedlib-verify-") as folder:
        stop = lambda r: r.t >= told[-1]["t"]  # noqa: E731
        again = store.run(run.experiment, execution, folder, accept=KINDS, on_round=stop)
    here, found = again.record["provenance"], {m["t"]: m for m in again.metrics}
    goes = [there, *run.record.get("resumed", [])]
    other = {
        k: [[go.get(k) for go in goes], here.get(k)] for k in ALIKE if any(go.get(k) != here.get(k) for go in goes)
    }
    inputs = differences(run.experiment, recorded(run.record)[-1], again.record["inputs"])
    alike = not other and not inputs and not str(here.get("commit", "-dirty")).endswith("-dirty")
    curve = [
        {"t": m["t"], "stored": m["accuracy"], "again": found[m["t"]]["accuracy"]} for m in told if m["t"] in found
    ]
    identical = [_plain(m) for m in told] == [_plain(found[m["t"]]) for m in told if m["t"] in found]
    most = max((abs(m["stored"] - m["again"]) for m in curve), default=float("inf"))
    passed = identical or not alike and len(curve) == len(told) and most <= tolerance
    result = told[-1]["t"], curve, alike, other | inputs, identical, most, tolerance, passed
    return Verified(run.path.name, *result)


def _plain(metrics: Mapping[str, Any]) -> str:
    """Return the bytes of a line of the curve, but for its seconds."""
    return json.dumps({k: v for k, v in metrics.items() if k != "seconds"}, sort_keys=True)
