"""What tables of personalised methods print: every client on its own test set, mean over clients and SD over clients.

A table's ``value`` says what: ``clients`` (the mean exit), ``client_exits`` (every exit, a data column each), ``left``
(the exit at which an example leaves, at the ``thresholds`` of its data column; of a single exit, that exit).
Read next: ``engine/serving.py`` (what is recorded), ``engine/leaving.py``.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.slices import Slice
from fedlib.engine.leaving import THRESHOLDS

from ..runs.costs import load_shapes
from ..runs.params import Cell
from ..runs.prices import num_classes

VALUES = ("clients", "client_exits", "left")
SD = {"clients": "clients_sd"}  # where ± is the SD over clients, the column that has it


def numbers_of(summary: Mapping) -> dict[str, object]:
    """The columns of ``tables.collect`` that come from a run's clients; none where they have no tests of their own."""
    found = summary.get("personal")
    if not found:
        return {}
    columns = {"clients": "accuracy", "clients_sd": "sd", "client_exits": "exits", "client_exits_sd": "exits_sd"}
    rest = {"leaving": found.get("leaving", {}), "local": found.get("last", found["accuracy"])}
    return {c: found[k] for c, k in columns.items()} | rest


def spread_out(frame: pd.DataFrame, value: str, thresholds: Mapping[str, float] | None = None) -> pd.DataFrame:
    """``frame`` with what ``value`` asks for in ``clients`` and ``clients_sd``; of every exit, a row each."""
    if value == "client_exits":
        rows = [
            {**row, "column": f"{row['column']}, exit {j}", "clients": accuracy, "clients_sd": sd}
            for row in frame.dropna(subset=["clients"]).to_dict("records")
            for j, (accuracy, sd) in enumerate(zip(row["client_exits"], row["client_exits_sd"], strict=True), 1)
        ]
        return pd.DataFrame(rows, columns=frame.columns)
    if value == "left":
        rows = [
            {**row, "clients": at["accuracy"], "clients_sd": at["sd"]} if (at := left_at(row, thresholds)) else row
            for row in frame.to_dict("records")
        ]
        return pd.DataFrame(rows, columns=frame.columns)
    return frame


def left_at(row: Mapping, thresholds: Mapping[str, float]) -> dict | None:
    """What a run's clients get at its column's threshold; None for a single exit. ``ValueError`` for one not kept."""
    if not isinstance(row["leaving"], dict) or not row["leaving"]:
        return None
    threshold = str(thresholds[row["column"]])
    if threshold not in row["leaving"]:
        raise ValueError(f"thresholds: {row['column']} = {threshold} was not recorded; allowed: {list(THRESHOLDS)}")
    return row["leaving"][threshold]


def macs_of(e: Experiment) -> list[int]:
    """MACs of one example up to and with each exit, those before it included: what it costs to leave there."""
    setting = load_shapes(e, num_classes(e)).setting
    parts = [Slice.prefix(unit + 1, range(j + 1)) for j, unit in enumerate(setting.exit_units)]
    return [setting.measure.macs(part) for part in parts]


def leaving_curve(e: Experiment, leaving: Mapping[str, Mapping]) -> list[dict]:
    """Per threshold: ``accuracy`` (mean over clients), mean ``macs`` of an example, ``share`` leaving at each exit."""
    macs = np.array(macs_of(e), dtype=float)
    return [
        {"threshold": float(t), "accuracy": at["accuracy"], "macs": float(macs @ at["share"]), "share": at["share"]}
        for t, at in leaving.items()
    ]


def inference_costs(cells: Sequence[Cell], frame: pd.DataFrame, thresholds: Mapping[str, float]) -> pd.DataFrame:
    """Per run: mean MACs per example in millions at its column's threshold, and how much less than its whole model."""
    rows = []
    for cell, row in zip(cells, frame.to_dict("records"), strict=True):
        if pd.notna(row["clients"]):
            macs, at = macs_of(cell.experiment), left_at(row, thresholds)
            spent = float(np.dot(macs, at["share"])) if at else macs[-1]
            where = {k: row[k] for k in ("column", "variant", "method", "label", "seed")}
            saved = 100 * (1 - spent / macs[-1])
            rows.append(where | {"macs_millions": round(spent / 1e6, 2), "saved_percent": round(saved, 2)})
    return pd.DataFrame(rows)


def as_exits(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with the clients' numbers where figures look for accuracies: ``accuracy`` and ``exits``."""
    return frame.assign(accuracy=frame.clients, exits=frame.client_exits)
