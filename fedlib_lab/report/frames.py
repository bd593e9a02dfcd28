"""All stored runs as one table: what was asked, what came out, and where."""

from collections.abc import Iterable

import pandas as pd

from ..runs.record import Run, without_bulk
from ..runs.run_paths import Folder
from ..runs.store import stored_runs
from ..runs.sweep import Trial

PLACE = ("device", "workers", "torch", "fedlib")  # of a run's provenance


def runs_frame(folder: Folder = None, words: Iterable[str] = (), rounds: bool = False) -> pd.DataFrame:
    """Return a row per finished run in ``folder`` (None: ``outputs/runs``), or with ``rounds`` one per evaluated round.

    Columns: ``run`` (its name), every field of its experiment (``options.zeta``: resolved, where the run says so),
    every metric (``personal.sd``: of what clients get; percent, seconds), ``day`` and what it was trained on. Of
    ``words`` the name must have every one. A run counts as it was stored, whatever is at hand now.
    """
    rows = [_row(run, m) for run in stored_runs(folder, words) for m in (run.metrics if rounds else [run.summary])]
    return pd.json_normalize(rows) if rows else pd.DataFrame(columns=["run"])


def _row(run: Run, metrics: dict) -> dict[str, object]:
    asked = run.experiment.to_dict() | {"options": run.record.get("inputs", {}).get("options", run.experiment.options)}
    where = {k: v for k, v in run.record.get("provenance", {}).items() if k in PLACE}
    return {"run": run.path.name, **asked, **without_bulk(metrics), "day": run.day, **where}


def trials_frame(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return a row per trial of a sweep: its values, and the accuracy on validation examples in percent."""
    came_out = lambda r: {"validation": r.accuracy, "status": r.summary["status"], "run": r.path.name}  # noqa: E731
    return pd.DataFrame([{"row": t.row, **t.choice, **came_out(t.run)} for t in trials])
