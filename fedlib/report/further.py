"""Rows that a table prints beside its headline: further metrics of the same answers, and the mean over its columns.

A grid says which: ``also`` maps what follows a column's name to a metric (SQuAD's ``exact_match``), ``average`` lists
the columns of the mean. Read next: ``report/tables.py``, ``data/tasks.py``.
"""

from collections.abc import Mapping

import pandas as pd

KEYS = ("finetune", "variant", "seed")


def with_further(frame: pd.DataFrame, spec: Mapping[str, object]) -> pd.DataFrame:
    """``frame`` as from ``tables.collect``, and below it a row per run and metric of ``also``, per seed of ``average``.

    A run that measured no such metric has no such row, nor a seed that lacks one of the grid's columns.
    """
    parts = [frame]
    for name, metric in spec.get("also", {}).items():
        scores = frame.others.map(lambda others, metric=metric: (others or {}).get(metric), na_action="ignore")
        own = frame[scores.notna()]
        means = scores.dropna().map(lambda exits: sum(exits) / len(exits))
        parts.append(own.assign(column=own.column + f"_{name}", accuracy=means))
    columns = [c for c in dict.fromkeys(frame.column) if c in spec.get("average", ())]
    done = frame[frame.column.isin(columns)].dropna(subset=["accuracy"])
    for _, group in done.groupby(list(KEYS), sort=False):
        if len(columns) > 1 and set(group.column) == set(columns):
            data = ", ".join(dict.fromkeys(group.dataset))
            parts.append(group[:1].assign(column="average", dataset=data, accuracy=group.accuracy.mean()))
    return pd.concat([p for p in parts if len(p)] or [frame], ignore_index=True)
