"""The atlas as one table, a row a run: what clients got, and what it took on devices that have names.

Read next: ``atlas/scores.py`` (scores), ``atlas/fitting.py`` (prices), ``params/atlas/devices.yaml``.
"""

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.paths import params_dir
from fedlib.data.datasets import is_available
from fedlib.data.federated import load_federated
from fedlib.models.registry import backbone_spec, tokenizer_of

from ..report.clients import client_numbers
from ..report.flags import OVER, flags_of
from ..report.style import title_of
from ..runs.costs import examples_per_client, load_shapes
from ..runs.params import Cell
from ..runs.params_files import load_yaml
from ..runs.store import Run
from .fitting import plain, price
from .scores import BINDS, HIGH, worst

PRICES = ["macs", "peak MiB", "upload MiB", "download MiB", "seconds a round"]  # of a run's round
BELOW = "below own majority class"  # the flag of a run whose clients get less than by answering one class


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
    }).iloc[list(budgets)].set_axis(found.index[: len(budgets)])  # fmt: skip
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


@lru_cache(maxsize=256)
def _majority_of(e: Experiment) -> float:
    if not is_available(e.dataset, tokenizer := tokenizer_of(e.backbone)):
        return float("nan")
    with warnings.catch_warnings(action="ignore"):  # that texts are cut is no matter
        data = load_federated(e, size=backbone_spec(e.backbone).input_shape[-1], tokenizer=tokenizer)
    top, labels = data.label_counts().argmax(1), data.test_labels.numpy()
    own = [np.mean(labels[rows] == top[i]) for i in range(data.num_clients) if len(rows := data.client_test(i))]
    return float(100 * np.mean(own))


def majority_of(e: Experiment) -> float:
    """Return in percent what clients get that always answer their own most frequent training label, mean over clients.

    Of the split alone: nothing is trained. NaN where the data are not at hand.
    """
    return _majority_of(plain(e).replace(lr=1.0))


def entries_frame(frames: Mapping[str, Mapping[str, pd.DataFrame]], known: Path | None = None) -> pd.DataFrame:
    """Return a row per stored run of ``frames`` (``Table.frame`` by what is capped, by task): scores, costs, flags.

    In percent. ``score``: mean over clients of the best sub-model that each affords; ``worst``: of the worst tenth;
    ``class 1`` ...: by class of devices; ``central``: of the whole net on all test examples. Two controls:
    ``majority`` (:func:`majority_of`) and ``prior``, the score with the client's own shares of labels added to what is
    answered; NaN where a run does not say. Costs are the slowest or largest class's, ``macs`` the mean's. Of runs that
    the Parquet file ``known`` has, which this function made, costs and majority are those in it: counting takes time.
    """
    stored = pd.read_parquet(known).to_dict("records") if known and known.is_file() else ()
    before, rows, classes = {row["run"]: row for row in stored}, [], len(devices())
    places = [(caps, task, frame) for caps, by_task in frames.items() for task, frame in by_task.items()]
    for caps, task, row in ((*place, row) for *place, frame in places for row in frame.to_dict("records")):
        if not isinstance(run := row["found"], Run):
            continue
        e, scores, own = run.experiment, client_numbers(run.summary), run.summary["personal"]
        if told := before.get(run.path.name):
            said = re.search("over budget: (.*?are said)", told["flags"])
            OVER.setdefault(e.replace(seed=1), said[1] if said else "")
        prices = {k: told[k] for k in PRICES} if told else _prices(e.replace(seed=1, lr=1.0))  # of any seed and rate
        majority = own.get("majority", told["majority"] if told else np.nan)
        majority = majority_of(e) if np.isnan(majority) else majority  # of data that need not be at hand
        rows.append({
            "task": task, "caps": caps, "method": row["variant"], "label": row["label"], "seed": row["seed"],
            "run": run.path.name, "backbone": e.backbone, "options": json.dumps(dict(e.options)),
            "score": scores.mean(), "worst": worst(scores),
            **{f"class {k + 1}": float(scores[k::classes].mean()) for k in range(classes)},  # of client i: i mod these
            "central": run.summary["exits"][-1], "majority": majority,
            "prior": own.get("last_prior", own.get("prior", np.nan) if len(own["exits"]) == 1 else np.nan), **prices,
            "rounds": e.rounds,
            "flags": ", ".join([*flags_of(run, "local"), *([BELOW] if scores.mean() < majority else [])]),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _prices(e: Experiment) -> dict[str, float]:
    took = costs(e)
    found = took.macs.mean(), took.peak.max(), took.up.mean(), took.down.mean(), took.seconds.max()
    return dict(zip(PRICES, map(float, found), strict=True))
