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

from fedlib.core.annotations import Count, NotNegative
from fedlib.core.validation import check_type, convert
from fedlib.engine.executors import Execution

from . import store
from .identity import KINDS, differences
from .record import Run, recorded

TOLERANCE = 1.0  # points of accuracy
# of a provenance: with equal ones, bytes are equal
ALIKE = ("device", "torch", "commit", "products", "workers", "stack")


@dataclass(frozen=True)
class Verified:
    """What came out: ``curve`` has the accuracy by round, stored and again, in percent.

    ``differing``: what trained otherwise than when it was stored; empty on a like machine, by the same code.
    ``passed``: ``identical``, or trained otherwise and nowhere more than ``tolerance`` points ``apart``.
    """

    run: str
    curve: list[dict[str, float]]
    differing: Mapping[str, object]
    identical: bool
    apart: float
    tolerance: float
    passed: bool

    def __str__(self) -> str:
        import pandas as pd

        others = "; ".join(f"{k}: {v}" for k, v in self.differing.items())
        where = f"elsewhere ({others}; {self.tolerance:g} points are allowed)" if others else "alike"
        same = "every byte is the same" if self.identical else f"accuracies are up to {self.apart:.4f} points apart"
        told = f"{pd.DataFrame(self.curve).to_string(index=False)}\n{'passed' if self.passed else 'failed'}: {same}"
        return f"{self.run} trained again {where}\n{told}"


def verify(
    run: Run, rounds: int | None = None, execution: Execution | None = None, tolerance: float = TOLERANCE
) -> Verified:
    """Train ``run`` again up to its last evaluated round, of the first ``rounds`` (None: all), in a temporary folder.

    ``execution``: None, as it was stored. Nothing is stored, and what is stored is not touched. ``ValueError`` where
    none of these rounds was evaluated.
    """
    e, tolerance = check_type(run, Run, "verify: run").experiment, convert(tolerance, NotNegative, "verify: tolerance")
    last = e.rounds if rounds is None else convert(rounds, Count, "verify: rounds")
    if not (told := [m for m in run.metrics if m["t"] <= last]):
        first = next((m["t"] for m in run.metrics), None)
        raise ValueError(f"verify: rounds = {rounds}: the first round that {run.path.name} evaluated is {first}")
    goes = [run.record.get("provenance", {}), *run.record.get("resumed", [])]
    on_gpu = "cuda" in goes[0] and torch.cuda.is_available()
    execution = execution or Execution("cuda" if on_gpu else "cpu", goes[0].get("workers"))
    with TemporaryDirectory(prefix="fedlib-verify-") as folder:
        again = store.run(e, execution, folder, accept=KINDS, on_round=lambda r: r.t >= told[-1]["t"])
    here, found = again.record["provenance"], again.metrics
    differing: dict[str, Any] = {k: [[go.get(k) for go in goes], here.get(k)] for k in ALIKE}
    differing = {k: v for k, v in differing.items() if {*v[0]} != {v[1]} or str(v[1]).endswith("-dirty")}
    differing |= differences(e, recorded(run.record)[-1], again.record["inputs"])
    both = [(m, n) for m, n in zip(told, found, strict=False) if m["t"] == n["t"]]
    apart = max(abs(m["accuracy"] - n["accuracy"]) for m, n in both) if len(both) == len(told) else float("inf")
    identical = list(map(_plain, told)) == list(map(_plain, found))
    curve = [{"t": m["t"], "stored": m["accuracy"], "again": n["accuracy"]} for m, n in both]
    passed = identical or (bool(differing) and apart <= tolerance)
    return Verified(run.path.name, curve, differing, identical, apart, tolerance, passed)


def _plain(metrics: Mapping[str, Any]) -> str:
    """Return the bytes of a line of the curve, but for its seconds."""
    return json.dumps({k: v for k, v in metrics.items() if k != "seconds"}, sort_keys=True)
