"""All stored runs as one table: what was asked, what came out, and where."""

import json
import operator
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedlib.core.validation import check_known

from ..runs.params_files import field_names, parse_yaml
from ..runs.record import Run, without_bulk
from ..runs.run_paths import Folder
from ..runs.store import stored_runs
from ..runs.sweep import Trial

SIGNS = {"=": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
TOLD = {"method", "dataset", "finetune", "seed", "evaluate_every"}  # by a run's name; the last tells nothing


def runs_frame(folder: Folder = None, words: Iterable[str] = (), rounds: bool = False) -> pd.DataFrame:
    """Return a row per finished run in ``folder`` (None: ``outputs/runs``), or with ``rounds`` one per evaluated round.

    Columns: ``run`` (its name), every field of its experiment (``options.zeta``: resolved, where the run says so),
    every metric (``personal.sd``: of what clients get; percent, seconds), ``day`` and what it was trained on. Of
    ``words`` the name must have every one. A run counts as it was stored, whatever is at hand now.
    """
    rows = [_row(run, m) for run in stored_runs(folder, words) for m in (run.metrics if rounds else [run.summary])]
    return pd.json_normalize(rows) if rows else pd.DataFrame(columns=["run"])


def whole(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with whole numbers that are whole, where some runs say none too: 5000, not 5000.0."""
    return frame.astype({c: "Int64" for c in frame.select_dtypes("float") if (frame[c].dropna() % 1 == 0).all()})


def _row(run: Run, metrics: dict) -> dict[str, object]:
    asked = run.experiment.to_dict() | {"options": run.record.get("inputs", {}).get("options", run.experiment.options)}
    where = {k: v for k, v in run.record.get("provenance", {}).items() if k in ("device", "workers", "torch", "fedlib")}
    return {"run": run.path.name, **asked, **without_bulk(metrics), "day": run.day, **where}


def where(frame: pd.DataFrame, conditions: Iterable[str]) -> pd.DataFrame:
    """Return the rows of ``frame`` (:func:`runs_frame`) for which all ``conditions`` hold, as ``accuracy>50``.

    A sign is one of ``SIGNS``, a value YAML's; ``options.modulate=false`` is an option, null what a run does not say.
    ``ValueError`` names an unknown column, and what is no condition.
    """
    for text in conditions:
        if (parts := re.fullmatch(r"([\w.]+)(!=|<=|>=|=|<|>)([^=<>].*)?", text)) is None:
            raise ValueError(f"{text}: expected a column, one of {' '.join(SIGNS)}, and a value, e.g. rounds=100")
        if frame.empty:  # no run says which columns there are
            continue
        check_known([parts[1]], frame.columns, f"{text}: unknown key {{}}")
        value, holds = parse_yaml(parts[3] or "", text), SIGNS[parts[2]]
        kind, said = type(value), frame[parts[1]].dropna()
        if kind in (str, bool) and len(said) and kind not in {*map(type, said)}:
            raise ValueError(f"{text}: {value!r} is a word; allowed: {said.iloc[0]} and the like")
        if {list, dict} & {*map(type, said)} and parts[2] not in ("=", "!="):
            raise ValueError(f"{text}: {said.iloc[0]} is neither more nor less; allowed: = and !=")
        frame = frame[[_holds(holds, None if x is pd.NA or x != x else x, value) for x in frame[parts[1]]]]
    return frame


def _holds(sign: Any, x: object, value: object) -> bool:
    try:
        return bool(sign(x, value))
    except TypeError:  # a word is not above a number
        return False


def differing(frame: pd.DataFrame, most: int = 5) -> list[str]:
    """List the first ``most`` columns of what was asked in which rows differ; not those that a run's name tells.

    An option counts among the runs whose methods have it.
    """
    asked = [c for c in frame if c.partition(".")[0] in field_names() - TOLD]
    said = {c: frame[c].dropna() if c.startswith("options.") else frame[c] for c in asked}
    return [c for c, values in said.items() if values.map(str).nunique() > 1][:most]


def save_frame(frame: pd.DataFrame, path: Path | str) -> None:
    """Write ``frame`` as ``path``, .parquet, .csv or .json; in the first two, lists and mixed values are JSON texts."""
    flat, path = (frame := whole(frame)).convert_dtypes(), Path(path)
    for name in (c for c in flat if flat[c].dtype == object):
        flat[name] = [x if isinstance(x, str) or x is pd.NA else json.dumps(x) for x in flat[name]]
    writers = {".parquet": partial(flat.to_parquet, index=False), ".csv": partial(flat.to_csv, index=False)}
    writers[".json"] = partial(frame.to_json, orient="records", double_precision=15, indent=1)
    check_known([path.suffix], writers, f"{path}: a table cannot end in {{}}")
    path.parent.mkdir(parents=True, exist_ok=True)
    writers[path.suffix](path)


def trials_frame(trials: Iterable[Trial]) -> pd.DataFrame:
    """Return a row per trial of a sweep: its values, and the accuracy on validation examples in percent."""
    came_out = lambda r: {"validation": r.accuracy, "status": r.summary["status"], "run": r.path.name}  # noqa: E731
    return pd.DataFrame([{"row": t.row, **t.choice, **came_out(t.run)} for t in trials])
