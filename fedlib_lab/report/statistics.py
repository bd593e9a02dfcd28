"""Paired differences between methods in a table, and intervals over seeds and test examples by the bootstrap.

Two methods at one seed see the same clients, partition and test set, so their difference is taken pairwise, which
removes what they share. What it carries is ``verdicts.py``'s rule, here over seeds alone. The bootstrap is for many
test examples (``correct``): over three seeds it is their range, which chance makes exclude zero one time in four.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
import torch

from fedlib.core.rng import numpy_generator

from ..runs.identity import concern
from .tables import label_of
from .verdicts import Difference, judged

OLDER = "of an older rule"  # of the kit: no verdict


def bootstrap_interval(
    values: np.ndarray, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values``, (seeds,) or (seeds, examples).

    Rows are resampled, and for two dimensions also columns, the same for all rows (a test set is shared by the seeds).
    """
    values, rng = np.asarray(values, dtype=np.float64), numpy_generator(seed, "bootstrap")
    if values.size == 0 or values.ndim not in (1, 2):
        raise ValueError(f"bootstrap_interval: values of shape {values.shape}; expected (seeds,) or (seeds, examples)")
    n = len(values)
    rows = rng.multinomial(n, np.full(n, 1 / n), resamples) / n  # (resamples, seeds) weights
    if values.ndim == 1:
        means = rows @ values
    else:
        m, means = values.shape[1], np.empty(resamples)
        for i, weights in enumerate(rows):
            columns = rng.multinomial(m, np.full(m, 1 / m)) / m
            means[i] = weights @ values @ columns
    low, high = np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def correct(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Per test example the percentage of exits that get it right, (N,): its mean is the run's accuracy."""
    return 100 * (logits.argmax(-1) == labels).double().mean(0).cpu().numpy()


def budget_accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per run and budget b = 1..E: accuracy of the ``deepest`` exit b, and the mean over all ``held``, 1..b.

    ``frame`` as from ``tables.collect``; what a client of that strength can answer with on the global test set.
    ``tables.mean_sd(..., by=(..., "budget"))`` gives mean and SD over seeds.
    """
    rows = []
    for row in frame.dropna(subset=["accuracy"]).to_dict("records"):
        exits, where = row["exits"], {k: row[k] for k in ("finetune", "column", "variant", "label", "seed")}
        for b in range(1, len(exits) + 1):
            rows.append(where | {"budget": b, "deepest": exits[b - 1], "held": sum(exits[:b]) / b})
    return pd.DataFrame(rows, columns=["finetune", "column", "variant", "label", "seed", "budget", "deepest", "held"])


def _differences(
    frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str
) -> Iterator[tuple[str, str, str, str, np.ndarray, bool]]:
    """(mode, column, one, other, differences over common seeds, is one of an older rule?) of every pair with runs."""
    for (finetune, column), group in frame.dropna(subset=[value]).groupby(["finetune", "column"], sort=False):
        wide = group.pivot_table(index="seed", columns="variant", values=value)
        rules = group.older if "older" in group else [()] * len(group)
        stale = {v for v, old in zip(group.variant, rules, strict=True) if concern(old, value)}
        for one, other in pairs:
            if {one, other} <= set(wide.columns):
                difference = (wide[one] - wide[other]).dropna().to_numpy()
                yield finetune, column, one, other, difference, bool(stale & {one, other})


def paired_differences(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str = "accuracy") -> pd.DataFrame:
    """One row per mode, column and pair of variants: mean difference over common seeds with its 95 % interval.

    ``frame`` as from ``tables.collect``. Fewer than two common seeds have no interval: ``not testable``.
    """
    rows, labels = [], dict(zip(frame.variant, frame.label, strict=True))
    words = {"holds": "better", "contradicted": "worse"}
    for finetune, column, one, other, difference, older in _differences(frame, pairs, value):
        found = judged(Difference(difference)) | ({"verdict": OLDER} if older else {})
        names = f"{label_of(labels[one])} – {label_of(labels[other])}"
        where = {"mode": label_of(finetune), "column": column, "difference": names}
        rows.append(where | found | {"verdict": words.get(found["verdict"], found["verdict"])})
    return pd.DataFrame(rows, columns=["mode", "column", "difference", "mean", "low", "high", "seeds", "verdict"])


def orderings(
    frame: pd.DataFrame, reported: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str = "accuracy"
) -> pd.DataFrame:
    """Do pairs of variants stand to each other as the paper reports? Paired by seed.

    Judged as claims are (``verdicts.py``): ``holds``, ``contradicted``, ``tie``, ``undecided``, ``not testable`` (fewer
    than two common seeds); of runs that an older rule of the kit made (``flags.py``) nothing is said. Where the paper
    prints no numbers of a pair on a data column, the two are compared alone: ``first is higher``, or ``second is
    higher``.
    """
    rows, labels = [], dict(zip(frame.variant, frame.label.map(label_of), strict=True))
    paper = reported.set_index(["finetune", "column", "variant"])["mean"]
    for finetune, column, one, other, difference, older in _differences(frame, pairs, value):
        printed = all((finetune, column, variant) in paper.index for variant in (one, other))
        claim = paper[finetune, column, one] - paper[finetune, column, other] if printed else np.nan
        words = {} if printed else {"holds": "first is higher", "contradicted": "second is higher"}
        found = OLDER if older else judged(Difference(-difference if printed and claim <= 0 else difference))["verdict"]
        low, high = Difference(difference).interval()
        interval = f"{low:.2f} to {high:.2f}" if len(difference) >= 2 else "–"
        sign = ("> " if claim > 0 else "< ") if printed else "against "
        where = [label_of(finetune), column, f"{labels[one]} {sign}{labels[other]}"]
        means = [round(claim, 2), round(difference.mean(), 2)]
        rows.append([*where, *means, interval, len(difference), words.get(found, found)])
    columns = ["mode", "column", "claim", "reported", "obtained", "interval", "seeds", "verdict"]
    table = pd.DataFrame(rows, columns=columns)
    return table.drop(columns="reported") if len(table) and table.reported.isna().all() else table
