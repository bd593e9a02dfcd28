"""What is shown of personalised methods and of early leaving: numbers of clients, curves of accuracy against MACs.

Tables of personalised methods print every client on its own test set, mean over clients and SD over clients. A table's
``value`` says what: ``clients`` (the mean exit), ``client_exits`` (every exit, a data column each), ``left`` (the exit
at which an example leaves, at the ``thresholds`` of its data column; of a single exit, that exit).

Who leaves early pays for less: a curve has a point per threshold of the confidence, the largest softmax probability,
which is the criterion of BranchyNet (Teerapittayanon et al. 2016) in the form of MSDNet (Huang et al. 2018).
Read next: ``engine/leaving.py``, ``engine/serving.py`` (what is recorded), ``models/measure.py`` (what a part costs).
"""

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from fedlib.core.annotations import Fraction
from fedlib.core.experiment import Experiment
from fedlib.core.slices import STEM, Slice
from fedlib.core.validation import convert
from fedlib.data.tasks import Classification, task_of
from fedlib.engine.evaluation import served_parts
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation
from fedlib.engine.leaving import THRESHOLDS, first_confident
from fedlib.methods import Server, Setting

from ..runs.costs import load_shapes
from ..runs.params import Cell
from ..runs.trained import all_logits, load_trained

VALUES = ("clients", "client_exits", "left")
SD = {"clients": "clients_sd"}  # where ± is the SD over clients, the column that has it

# --- numbers of clients


def numbers_of(summary: Mapping) -> dict[str, object]:
    """Return the columns of ``tables.collect`` that come from clients; none where these have no tests of their own."""
    if not (own := summary.get("personal")):
        return {}
    columns = {"clients": "accuracy", "clients_sd": "sd", "client_exits": "exits", "client_exits_sd": "exits_sd"}
    rest = {"leaving": own.get("leaving", {}), "local": own.get("last", own["accuracy"])}
    return {c: own[k] for c, k in columns.items()} | rest


def client_numbers(summary: Mapping, value: str = "local") -> np.ndarray:
    """Return what each client gets (K,), by the deepest exit that it holds, or ``clients``, by the mean one.

    Nothing where the run does not say.
    """
    own = summary.get("personal", {})
    found = own.get("last_by_client" if value == "local" else "by_client", own.get("by_client", {}))
    return np.array([found[client] for client in sorted(found, key=int)])


def spread_out(frame: pd.DataFrame, value: str, thresholds: Mapping[str, float] | None = None) -> pd.DataFrame:
    """Return ``frame`` with what ``value`` asks for in ``clients`` and ``clients_sd``; if every exit, a row each."""
    rows = frame.to_dict("records")
    if value == "client_exits":
        rows = [
            row | {"column": f"{row['column']}, exit {j}", "clients": accuracy, "clients_sd": sd}
            for row in frame.dropna(subset=["clients"]).to_dict("records")
            for j, (accuracy, sd) in enumerate(zip(row["client_exits"], row["client_exits_sd"], strict=True), 1)
        ]
    elif value == "left":
        rows = [row | left_at(row, thresholds) for row in rows]
    return frame if value == "clients" else pd.DataFrame(rows, columns=frame.columns)


def left_at(row: Mapping, thresholds: Mapping[str, float]) -> dict:
    """Return what clients get at their column's threshold: ``clients``, ``clients_sd``, ``share`` leaving at each exit.

    Return {} for a single exit, NaN where clients hold different exits, so that of nobody's leaving anything is known.
    Raise ``ValueError`` for a threshold that was not kept.
    """
    if not isinstance(row["leaving"], dict) or not row["leaving"]:
        several = isinstance(exits := row.get("client_exits"), list) and len(exits) > 1
        return {"clients": np.nan, "clients_sd": np.nan} if several else {}
    threshold = str(thresholds[row["column"]])
    if (at := row["leaving"].get(threshold)) is None:
        raise ValueError(f"thresholds: {row['column']} = {threshold} was not recorded; allowed: {list(THRESHOLDS)}")
    return {"clients": at["accuracy"], "clients_sd": at["sd"], "share": at["share"]}


def as_exits(frame: pd.DataFrame) -> pd.DataFrame:
    """Return ``frame`` with the clients' numbers where figures look for accuracies: ``accuracy`` and ``exits``."""
    return frame.assign(accuracy=frame.clients, exits=frame.client_exits)


# --- what it costs to leave


def macs_of(e: Experiment) -> list[int]:
    """Return the MACs of one example up to each exit, this and all before it included: what it costs to leave there."""
    setting = load_shapes(e).setting
    return _macs(setting, [setting.full()])


def served_macs(f: Federation, server: Server) -> list[int]:
    """Return the MACs of an example that leaves at each exit of what answers on the central test set.

    Of one model its units and exits up to this one. Where every exit has a sub-model of its own (InclusiveFL, ReeFL's
    form of ScaleFL), an example that goes on starts again with the next one, so the costs of all of them add up.
    """
    parts = [p if isinstance(p, tuple) else (p,) for p in served_parts(f, server)]
    if all(p == parts[0] for p in parts):
        return _macs(f.setting, parts[0])
    return np.cumsum([sum(map(f.setting.measure.macs, p)) for p in parts]).tolist()


def _macs(setting: Setting, held: Sequence[Slice]) -> list[int]:
    ends, price = enumerate(setting.exit_units), setting.measure.macs
    return [sum(price(p.only(range(STEM, unit + 1), range(j + 1))) for p in held) for j, unit in ends]


def inference_costs(cells: Sequence[Cell], frame: pd.DataFrame, thresholds: Mapping[str, float]) -> pd.DataFrame:
    """Return per run the mean MACs of an example, in millions, at its column's threshold.

    Beside it stands how much less that is than the MACs of its whole model, in percent.
    """
    rows = []
    for cell, row in zip(cells, frame.to_dict("records"), strict=True):
        if pd.notna(row["clients"]):
            macs, at = macs_of(cell.experiment), left_at(row, thresholds)
            spent = float(np.dot(macs, at["share"])) if "share" in at else np.nan if at else macs[-1]
            where, saved = {k: row[k] for k in ("column", "variant", "method", "label", "seed")}, 1 - spent / macs[-1]
            rows.append(where | {"macs_millions": round(spent / 1e6, 2), "saved_percent": round(100 * saved, 2)})
    return pd.DataFrame(rows)


def correct(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return per test example the percentage of exits that get it right, (N,): its mean is the run's accuracy."""
    return 100 * (logits.argmax(-1) == labels).double().mean(0).cpu().numpy()


# --- curves: a record per threshold


def leaving_curve(e: Experiment, leaving: Mapping[str, Mapping]) -> list[dict]:
    """Return per threshold ``accuracy`` (mean over clients), mean ``macs``, and ``share`` leaving at each exit."""
    macs = macs_of(e)
    return [{"threshold": float(t), **at, "macs": float(np.dot(macs, at["share"]))} for t, at in leaving.items()]


def adaptive_inference(
    e: Experiment, thresholds: Sequence[float] = (), execution: Execution = Execution()
) -> list[dict]:
    """Return the :func:`adaptive_curve` of a run (trained if missing) on its central test set; (): at 0, 0.05, …, 1."""
    if not isinstance(task_of(e.dataset), Classification):
        raise e.refused("dataset", ": its labels are no classes, so no example leaves by its confidence")
    thresholds = convert(thresholds, tuple[Fraction, ...], "thresholds") or [k / 20 for k in range(21)]
    f, server = load_trained(e, execution)
    return adaptive_curve(all_logits(f, server), f.data.test_labels, served_macs(f, server), thresholds)


def adaptive_curve(
    logits: torch.Tensor, labels: torch.Tensor, macs: Sequence[float], thresholds: Sequence[float]
) -> list[dict]:
    """Return per threshold of the confidence ``accuracy`` (percent), mean ``macs`` and ``share`` leaving at each exit.

    The confidence has to reach the threshold. Then per ``exit``, from 1, ``accuracy`` and ``macs`` if every example
    leaves there. Of logits (E, N, C); ``macs[j]`` is all that an example spends that leaves at exit j: ``ValueError``
    where it does not increase.
    """
    if (np.diff(macs) <= 0).any():
        raise ValueError(f"a later exit must cost more: {list(macs)}")
    right, confidence = (logits.argmax(-1) == labels).double(), logits.softmax(-1).amax(-1)  # (E, N)
    spent, rows = torch.tensor(macs, dtype=torch.float64, device=logits.device), []
    for threshold in thresholds:
        exits = first_confident(confidence, threshold)
        share = (torch.bincount(exits, minlength=len(logits)) / len(labels)).tolist()
        accuracy, cost = 100 * right.gather(0, exits[None]).mean().item(), spent[exits].mean().item()
        rows.append({"threshold": threshold, "accuracy": accuracy, "macs": cost, "share": share})
    alone = zip((100 * right.mean(-1)).tolist(), spent.tolist(), strict=True)
    return rows + [{"exit": j, "accuracy": accuracy, "macs": cost} for j, (accuracy, cost) in enumerate(alone, 1)]
