"""What a grid's cells cost and sent, as frames: one row a variant, a client, or an evaluated round.

Costs do not depend on the data beyond the number of classes, nor on the seed: equal models are counted once.
Read next: ``report/tables.py``.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence

import pandas as pd

from ..core.experiment import Experiment
from ..runs.params import Cell
from ..runs.prices import num_classes
from ..runs.store import Run, find_run

MIB_OF_GIB = 1024
NAMES = ("column", "variant", "method", "label")  # of a cell
NOT_COSTS = ("seed", "dataset", "num_train", "num_test", "dirichlet_alpha", "rounds", "lr", "min_lr", "evaluate_every")


def by_variant(cells: Sequence[Cell], of: Callable[[Experiment], Mapping[str, float]]) -> pd.DataFrame:
    """One row per data column and variant: its names, its backbone, and what ``of`` says of its experiment."""
    first = {(c.column, c.variant): c for c in reversed(cells)}
    seen = _once(of)
    rows = [_names(c) | dict(seen(c.experiment)) for c in reversed(first.values())]
    return pd.DataFrame(rows)


def all_clients(cells: Sequence[Cell], of: Callable[[Experiment], pd.DataFrame]) -> pd.DataFrame:
    """The clients' rows (``of``) of every data column and variant, one below the other."""
    first = {(c.column, c.variant): c for c in reversed(cells)}
    seen = _once(of)
    return pd.concat([seen(c.experiment).assign(**_names(c)) for c in reversed(first.values())], ignore_index=True)


def runs_of(cells: Sequence[Cell], folder=None) -> Iterator[tuple[str, list[tuple[Cell, Run]]]]:
    """(data column, its cells with their stored runs); columns without any are left out."""
    for column in dict.fromkeys(c.column for c in cells):
        found = [(c, run) for c in cells if c.column == column and (run := find_run(c.experiment, folder)) is not None]
        if found:
            yield column, found


def traffic_curves(cells: Sequence[Cell], of: Callable[[Experiment], pd.DataFrame], folder=None) -> pd.DataFrame:
    """A row per stored run and evaluated round: ``accuracy`` and ``gib``, what all clients sent and received so far."""
    rows, seen = [], _once(lambda e: of(e).upload_mib.mean())
    for _, runs in runs_of(cells, folder):
        for cell, run in runs:
            a_round = 2 * run.experiment.clients_per_round * seen(run.experiment) / MIB_OF_GIB
            measured = [m for m in run.metrics if m.get("accuracy") is not None]
            rows += [
                _names(cell) | {"seed": cell.seed, "gib": m["t"] * a_round, "accuracy": m["accuracy"]} for m in measured
            ]
    return pd.DataFrame(rows, columns=[*NAMES, "backbone", "seed", "gib", "accuracy"])


def _names(cell: Cell) -> dict[str, str]:
    names = {k: getattr(cell, k) for k in NAMES}
    return names | {"backbone": cell.experiment.backbone}


def _once(of: Callable) -> Callable:
    """``of``, asked once for experiments whose models and clients are the same."""
    known: dict[tuple[int, str], object] = {}

    def ask(e: Experiment):
        own = {k: v for k, v in e.identity().items() if k not in NOT_COSTS}
        key = num_classes(e), json.dumps(own, sort_keys=True)
        if key not in known:
            known[key] = of(e)
        return known[key]

    return ask
