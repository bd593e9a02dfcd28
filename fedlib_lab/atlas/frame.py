"""The atlas as one table, a row a run: what clients got, and what it took on devices that have names.

Read next: ``atlas/scores.py`` (scores), ``atlas/fitting.py`` (prices), ``params/atlas/devices.yaml``.
"""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.paths import params_dir

from ..report.flags import flags_of
from ..report.style import title_of
from ..runs.costs import examples_per_client, load_shapes
from ..runs.params import Cell
from ..runs.params_files import load_yaml
from ..runs.store import shown_run
from .fitting import price
from .scores import BINDS, HIGH, scores_of, worst

TARGET = 0.5  # of the way from the smallest level for all to the whole model for all


def devices() -> pd.DataFrame:
    """Read a row per class of devices, poorest first: tera_macs a second, utilisation, megabits a second each way."""
    return pd.DataFrame.from_dict(load_yaml(params_dir() / "atlas" / "devices.yaml"), orient="index")


@lru_cache(maxsize=1024)
def costs(e: Experiment) -> pd.DataFrame:
    """Return a row per class of devices: macs of a round with backward, peak MiB of training, MiB up and down, seconds.

    Before them what it holds: ``blocks`` that run, ``exits``, and the ``width`` of its narrowest axis (channels, heads,
    ranks) as a share of the whole. ``e.budgets`` has a budget for each class; where it names none, all hold the whole.
    Seconds are of a client's round on its device: training at the device's sustained rate, then what travels at its
    link's.
    """
    found, shapes = devices(), load_shapes(e)
    budgets = e.budgets if isinstance(e.budgets, tuple) else (shapes.budgets - 1,) * len(found)
    macs, peak, up = (price(e, of, shapes) for of in ("macs", "memory", "upload"))
    down = [shapes.traffic_mib(part, b)[0] for b, part in enumerate(shapes.slices)]
    axes, slices = shapes.setting.axes, shapes.slices
    table = pd.DataFrame({
        "blocks": [part.depth for part in slices], "exits": [len(part.exits) for part in slices],
        "width": [min((len(i) / axes[a].size for a, i in part.index.items()), default=1.0) for part in slices],
        "macs": macs, "peak": peak, "up": up, "down": down,
    }).iloc[list(budgets)]  # fmt: skip
    table = table.set_axis(found.index[: len(table)])
    table["macs"] *= examples_per_client(e)
    training = table.macs / (found.tera_macs * found.utilisation * 1e12)
    return table.assign(seconds=training + (table.up + table.down) * 2**23 / 1e6 / found.megabits)


def shares_of(e: Experiment, whole: Experiment) -> pd.DataFrame:
    """Return a row per class of devices: what it holds; its macs, memory (peak), upload as shares of ``whole``'s."""
    own, kinds = costs(e), {"macs": "macs", "peak": "memory", "up": "upload"}
    takes = own[[*kinds]] / costs(whole)[[*kinds]].iloc[-1].astype(float)
    return own[["blocks", "exits", "width"]].join(takes.rename(columns=kinds))


def holdings(grids: Mapping[str, Mapping[str, Sequence[Cell]]], row: str) -> pd.DataFrame:
    """Return the ``shares_of`` the whole for each of ``grids`` (by what is capped, by task) with ``row``.

    Classes of devices are told poorest first.
    """
    found = []
    for caps, by_task in grids.items():
        for task, cells in by_task.items():
            of = {c.variant: c.experiment.replace(seed=1, lr=1.0) for c in cells}
            if row in of:
                told = shares_of(of[row], of[HIGH]).map(lambda x: f"{x:.2f}" if isinstance(x, float) else str(x))
                found.append({"what binds": BINDS[caps], "task": title_of(task), **told.agg(", ".join)})
    return pd.DataFrame(found)


def entries_frame(tables: Mapping[str, Mapping[str, Sequence[Cell]]], folder: Path | None = None) -> pd.DataFrame:
    """Return a row per stored run of ``tables`` (by what is capped, task): scores in percent, costs of a round, flags.

    ``score``: mean over clients of the best sub-model that each affords; ``worst``: the worst tenth of them;
    ``class 1`` ...: by class of devices. Costs are the slowest or largest class's, ``macs`` the mean's. ``to target``:
    rounds until the score is half way from the smallest level's to the whole model's, and the seconds of as many;
    None where it never is.
    """
    rows = []
    for caps, by_task in tables.items():
        for task, cells in by_task.items():
            runs = {
                (c.variant, c.seed): (c, run) for c in cells if (run := shown_run(c.experiment, folder)) is not None
            }
            for (variant, seed), (cell, run) in runs.items():
                e, scores = cell.experiment, np.array(scores_of(run.summary))
                took = costs(e.replace(seed=1, lr=1.0))  # neither changes it: a search of rates is priced once
                needed = _rounds_to(run, *(runs.get((end, seed)) for end in ("smallest", "whole")))
                rows.append({
                    "task": task, "caps": caps, "method": variant, "label": cell.label, "seed": seed,
                    "run": run.path.name, "backbone": e.backbone, "options": json.dumps(dict(e.options)),
                    "score": scores.mean(),
                    "worst": worst(scores), **_by_class(scores, len(took)), "central": run.summary["exits"][-1],
                    "macs": took.macs.mean(), "peak MiB": took.peak.max(), "upload MiB": took.up.mean(),
                    "download MiB": took.down.mean(), "seconds a round": took.seconds.max(), "rounds": e.rounds,
                    "rounds to target": needed,
                    "seconds to target": None if needed is None else needed * took.seconds.max(),
                    "flags": ", ".join(flags_of(run, "local")),
                })  # fmt: skip
    return pd.DataFrame(rows)


def _by_class(scores: np.ndarray, classes: int) -> dict[str, float]:
    """Return the mean score by class of devices; client i is of class i mod their number."""
    return {f"class {k + 1}": float(scores[k::classes].mean()) for k in range(classes)}


def _rounds_to(run, smallest, whole) -> int | None:
    """Return the first evaluated round whose score is half way between the ends of the two; None if there is none."""
    if smallest is None or whole is None:
        return None
    low, high = (np.mean(scores_of(end[1].summary)) for end in (smallest, whole))
    target = low + TARGET * (high - low)
    reached = (m["t"] for m in run.metrics if "personal" in m and np.mean(scores_of(m)) >= target)
    return next(reached, None)
