"""All stored runs as one table: what was asked, what came out, and where."""

from collections.abc import Iterable

import pandas as pd

from ..runs.store import Folder, Run, stored_runs

BULKY = ("right", "digest", "by_client", "others")  # of a summary: an entry a client, or a text of thousands of digits
PLACE = ("device", "workers", "torch", "fedlib")  # of a run's provenance


def runs_frame(folder: Folder = None, words: Iterable[str] = (), rounds: bool = False) -> pd.DataFrame:
    """A row per finished run in ``folder`` (None: ``outputs/runs``), or with ``rounds`` one per evaluated round.

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


def without_bulk(metrics: dict) -> dict[str, object]:
    """A summary, or a round's metrics, as a page holds it: what has an entry a client or an example is left out."""
    inner = {k: without_bulk(v) if isinstance(v, dict) else v for k, v in metrics.items()}
    return {k: v for k, v in inner.items() if k not in BULKY}
