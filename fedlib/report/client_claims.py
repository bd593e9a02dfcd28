"""Claims on curves of personalised runs: accuracy at equal MACs, exits over rounds, thresholds of the exit policy.

Every function gives (where, difference) as ``claims.compared`` does, from the stored runs of the claim's ``table``;
``curves`` in ``claims.yaml`` names one. Read next: ``clients.py``, ``sources.py``.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from ..runs.store import Run, find_run
from .clients import leaving_curve, macs_of
from .sources import Measured, Stored, differences
from .tables import label_of
from .verdicts import Difference

Rows = list[tuple[dict, Difference]]
SHOWN = ("0.4", "0.6", "0.8", "0.9")  # thresholds whose cost figure 10 follows


def equal_macs(claim: dict, stored: Stored) -> Rows:
    """Accuracy of the first of a pair less the second's, mean over the MACs that both can spend."""
    rows = []
    for column, runs in _by_column(claim, stored).items():
        for pair in claim["pairs"]:
            one, other = (runs.get(variant, {}) for variant in pair)
            found = [_apart(one[seed], other[seed]) for seed in sorted(one.keys() & other.keys())]
            text = " – ".join(stored.label(claim["table"], v) for v in pair) + ", at equal MACs"
            rows.append(_row(claim, stored, column, text, found))
    return rows


def _apart(one: Run, other: Run) -> Measured:
    """Mean difference of two runs' curves, where both are defined."""
    curves = [_leaving(run) for run in (one, other)]
    at = np.linspace(max(c[0].min() for c in curves), min(c[0].max() for c in curves), 50)
    means = [np.array([np.interp(at, *c).mean()]) for c in curves]
    first, second = (Measured.of(run, "clients", mean) for run, mean in zip((one, other), means, strict=True))
    return first - second


def _leaving(run: Run) -> np.ndarray:
    """(2, thresholds): MACs and accuracy, by increasing MACs."""
    curve = leaving_curve(run.experiment, run.metrics[-1]["personal"]["leaving"])
    return np.array(sorted((point["macs"], point["accuracy"]) for point in curve)).T


def exits_over_rounds(claim: dict, stored: Stored) -> Rows:
    """The last exit less each other, at its worst round; at first the first less middle ones, at last the reverse."""
    return _of_runs(claim, stored, _exits_of)


def _exits_of(run: Run) -> dict[str, Measured]:
    told = np.array([m["personal"]["exits"] for m in run.metrics])  # (rounds, exits)
    found, last = {}, told.shape[1]
    for j in range(last - 1):
        worst = int((told[:, -1] - told[:, j]).argmin())
        found[f"exit {last} – exit {j + 1}, at its worst round"] = _between(run, told[worst], last - 1, j)
        if j:
            found[f"exit 1 – exit {j + 1}, at the first evaluated round"] = _between(run, told[0], 0, j)
        if j < last - 2:
            found[f"exit {last - 1} – exit {j + 1}, at the last round"] = _between(run, told[-1], last - 2, j)
    return found


def _between(run: Run, exits: np.ndarray, i: int, j: int) -> Measured:
    """Exit ``i`` less exit ``j`` of one run."""
    one, other = (Measured.of(run, "client_exits", exits[[k]]) for k in (i, j))
    return one - other


def thresholds(claim: dict, stored: Stored) -> Rows:
    """What the highest threshold adds to the lowest's accuracy, what 0.6 costs and saves, how answers get cheaper."""
    return _of_runs(claim, stored, _thresholds_of)


def _thresholds_of(run: Run) -> dict[str, Measured]:
    macs, (first, last) = np.array(macs_of(run.experiment)), (run.metrics[i]["personal"] for i in (0, -1))
    accuracy = [at["accuracy"] for at in last["leaving"].values()]  # by rising threshold
    cost = {t: [100 * (macs @ x["leaving"][t]["share"]) / macs[-1] for x in (first, last)] for t in SHOWN}
    lost = last["exits"][-1] - last["leaving"]["0.6"]["accuracy"]
    numbers = {
        "accuracy at the highest threshold – at the lowest": accuracy[-1] - accuracy[0],
        "2.01 points – what threshold 0.6 costs": 2.01 - lost,
        "% of MACs that threshold 0.6 saves – 37.15": 100 - cost["0.6"][1] - 37.15,
    }
    numbers |= {f"% of MACs at threshold {t}: first evaluated round – last": a - b for t, (a, b) in cost.items()}
    flags = Measured.of(run, "clients", np.zeros(1)).flags
    return {text: Measured(np.array([x]), np.zeros(1), None, flags) for text, x in numbers.items()}


CURVES: dict[str, Callable[[dict, Stored], Rows]] = {
    "equal_macs": equal_macs, "exits_over_rounds": exits_over_rounds, "thresholds": thresholds,
}  # fmt: skip


def _of_runs(claim: dict, stored: Stored, numbers_of: Callable[[Run], Mapping[str, Measured]]) -> Rows:
    """What ``numbers_of`` tells of every run, paired by seed."""
    rows = []
    for column, runs in _by_column(claim, stored).items():
        for variant, by_seed in runs.items():
            told, label = [numbers_of(by_seed[seed]) for seed in sorted(by_seed)], stored.label(claim["table"], variant)
            rows += [_row(claim, stored, column, f"{label}: {text}", [x[text] for x in told]) for text in told[0]]
    return rows


def _by_column(claim: dict, stored: Stored) -> dict[str, dict[str, dict[int, Run]]]:
    """column -> variant -> seed -> the stored run of the claim's variants; only runs that tell of leaving early."""
    wanted = {v for pair in claim["pairs"] for v in pair}
    out: dict[str, dict[str, dict[int, Run]]] = {c: {} for c in claim["columns"]}
    for cell in stored.read(claim["table"])[0]:
        if cell.variant in wanted and cell.column in out:
            run = find_run(cell.experiment, stored.outputs / "runs")
            if run is not None and run.metrics and run.metrics[-1].get("personal", {}).get("leaving"):
                out[cell.column].setdefault(cell.variant, {})[cell.seed] = run
    return out


def _row(claim: dict, stored: Stored, column: str, text: str, found: Sequence[Measured]) -> tuple[dict, Difference]:
    where = {"table": claim["table"], "mode": label_of("full"), "column": column, "comparison": text}
    difference = differences(list(found))[0] if found else Difference(np.array([]))
    return where | {"data": stored.data(claim["table"], column)}, difference
