"""The rule behind every verdict: what paired differences over few seeds can carry, and how many of them make a claim.

Two methods at one seed see the same clients, partition and test set, so they are subtracted seed by seed, which removes
what they share. A comparison is the mean of such differences, in points. Its 95 % interval adds two half-widths in
quadrature: Student's t over the n seeds, and a normal one for the test examples, which seeds share and therefore do not
average out (MOVER: Zou and Donner, Statistics in Medicine 27, 2008). Where runs of a seed say which examples they got
right, the second variance is that of the difference, example by example, of the mean over these seeds: with fewer of
them it is larger, never too small in the mean. Where clients are tested on examples of their own alone, it is at most
that of the difference over clients divided by their number, mean over seeds. Elsewhere it is at most
(a (1 - a) + b (1 - b)) / N, that of independent answers of accuracies a and b on N examples. (Welch's and
Satterthwaite's degrees of freedom would make it up to 13 % false verdicts instead of 5.)

A comparison ``holds`` above zero, is ``contradicted`` below -0.5 points (the margin: less is a tie and no loss), is a
``tie`` inside the margin, else ``undecided``. A claim needs u of its n comparisons: all, or ``most`` (over half). It
holds if u of them do at the level 2.5 % / (n - u + 1), and is contradicted if n - u + 1 are at 2.5 % / u: Holm's step
at that place, Bonferroni's test of a partial conjunction (Benjamini and Heller, Biometrics 64, 2008). Where no
difference is real, a claim without a margin of its own gets a false verdict at most 5 % of the time: each claim, not
all together. A claim about all holds only if none was left out: no comparison by a flag, no rival where others ran.
With fewer than five seeds it is ``indicative``.

The rows of a table are judged at once, by all of Holm's steps. Two or three seeds hardly tell how much a difference
varies: of ``POOLED`` comparisons or more each has at least the median of all variances over seeds, and with it twice
the degrees of freedom. Simulated: of 4 to 17 rows of 3 and 5 seeds that differ in nothing but how much they vary (by
e^0 to e^1.2 a standard deviation), at most 6 % of tables had a false verdict, and 9 % at worst, where all but two rows
that vary five times as much surely differ; of 17 rows of 3 seeds two SDs apart 60 % of pairs were told apart, each by
its own variance 11 %.
Read next: ``claims.py``, ``flags.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import pandas as pd

from ..runs.store import Run
from .flags import bound_on_variance, clients_of, flags_of, right_of
from .printed import RANKED, heading
from .tables import label_of

LEVEL = 0.025  # of a false verdict on either side
MARGIN = 0.5  # points: less is no loss
ENOUGH = 5  # seeds of a verdict that is more than indicative
POOLED = 4  # comparisons that tell one another how much differences vary
FEW = ("no seed in common", "one seed", "two seeds")
TESTED = ("holds", "tie", "undecided", "contradicted")
COLUMNS = ["table", "mode", "column", "data", "comparison", "mean", "low", "high", "seeds", "flags", "verdict"]
REASONS = {"rising": "still rising", "over budget": "over budget", "older rule": "of an older rule"}  # other: untrained


# --- a comparison ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One run's numbers in points, (1,) or (exits,), with its flags, or a difference of such.

    ``variances`` bounds what the test examples leave of each; ``right`` is what each example gives, (1 or exits, N);
    ``clients`` what each client gets, (K,), of examples that no other has.
    """

    points: np.ndarray
    variances: np.ndarray
    right: np.ndarray | None = None
    flags: tuple[str, ...] = ()
    clients: np.ndarray | None = None

    @classmethod
    def of(cls, run: Run, value: str, points: np.ndarray) -> "Measured":
        told = right_of(run, value), flags_of(run, value), clients_of(run, value, points)
        return cls(points, bound_on_variance(run, points), *told)

    def __sub__(self, other: "Measured") -> "Measured":
        pairs = (self.right, other.right), (self.clients, other.clients)
        right, own = (a - b if a is not None and np.shape(a) == np.shape(b) else None for a, b in pairs)
        variances, flags = self.variances + other.variances, tuple(dict.fromkeys([*self.flags, *other.flags]))
        variances = variances if own is None else np.minimum(variances, own.var(ddof=1) / len(own))
        return Measured(self.points - other.points, variances, right, flags, own)

    def at(self, have: np.ndarray, want: np.ndarray) -> "Measured":
        """Interpolate between exits that cost ``have`` to where ``want`` is spent."""
        mix = np.array([np.interp(want, have, row) for row in np.eye(len(have))]).T  # (wanted, exits)
        right = None if self.right is None else mix @ self.right
        return Measured(mix @ self.points, mix @ self.variances, right, self.flags)


BySeed = Mapping[int, Measured]


def measured(rows: Iterable[Mapping], value: str) -> BySeed:
    """Return ``value`` of ``rows`` (of ``tables.collect``) by seed; of rows without a run (``found``), points alone.

    ``ValueError`` if a seed stands twice.
    """
    found = {}
    for row in rows:
        run, points = row.get("found"), np.atleast_1d(row[value])
        if (seed := row["seed"]) in found:
            raise ValueError(f"seed {seed} stands twice where {value} is compared; allowed: a row a seed")
        found[seed] = Measured.of(run, value, points) if isinstance(run, Run) else Measured(points, 0.0 * points)
    return found


def paired(one: BySeed, other: BySeed) -> BySeed:
    """Subtract ``other`` from ``one`` at every seed that both have."""
    return {seed: one[seed] - other[seed] for seed in sorted(one) if seed in other}


@dataclass(frozen=True)
class Difference:
    """Paired differences (seeds,) in points, the variance of their mean that the test examples leave, and ``flags``.

    ``bound``: that variance is a bound, as no seed's runs say which test examples they got right. ``common``: the SD
    over seeds that the comparisons judged with it have in common, 0 of one that stands alone.
    """

    points: np.ndarray
    variance: float = 0.0
    flags: tuple[str, ...] = ()
    bound: bool = False
    common: float = 0.0

    @property
    def mean(self) -> float:
        return float(self.points.mean()) if len(self.points) else np.nan

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return what a true mean lies below, and above, with probability ``level`` each; infinite for one seed."""
        n, half = len(self.points), np.inf
        if n > 1:
            student, normal = _quantiles(level, (n - 1) * (2 if self.common else 1))
            spread = max(self.points.std(ddof=1), self.common)
            half = float(np.hypot(student * spread / n**0.5, normal * self.variance**0.5))
        return self.mean - half, self.mean + half


def differences(by_seed: Sequence[Measured]) -> list[Difference]:
    """Return a :class:`Difference` over all seeds per number, with flags of most seeds and any ``older rule``."""
    if not by_seed:
        return [Difference(np.array([]))]
    flags = [f for m in by_seed for f in m.flags]
    kept = tuple(f for f in dict.fromkeys(flags) if f == "older rule" or 2 * flags.count(f) > len(by_seed))
    points, variances = np.array([m.points for m in by_seed]).T, np.mean([m.variances for m in by_seed], 0)
    bound = any(m.clients is None for m in by_seed)
    if told := [m.right for m in by_seed if m.right is not None]:
        mean, bound = np.mean(told, 0), False  # (1 or exits, N): examples are the same for every seed
        variances = mean.var(1, ddof=1) / mean.shape[1]
    return [Difference(x, float(v), kept, bound and v > 0) for x, v in zip(points, variances, strict=True)]


@lru_cache(maxsize=4096)
def _quantiles(level: float, freedom: int) -> tuple[float, float]:
    """Return what Student's t of so many degrees of freedom, and a normal number, exceed with probability ``level``."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes half a second to import

    return -float(stdtrit(freedom, level)), -float(ndtri(level))


def side(d: Difference, level: float = LEVEL, margin: float = 0.0) -> int:
    """Return 1 above -``margin``, -1 below it or below -``MARGIN`` if that is less, 0 where neither is sure."""
    low, high = d.interval(level)
    return int(low > -margin) - int(high < -max(margin, MARGIN))


def judged(d: Difference, margin: float = 0.0, level: float = LEVEL) -> dict:
    """Judge one comparison: mean, interval, number of seeds and verdict; rounded after judging."""
    n = len(d.points)
    row = {"mean": round(d.mean, 2), "low": np.nan, "high": np.nan, "seeds": n}
    row |= {"flags": ", ".join(dict.fromkeys(f.partition(":")[0] for f in d.flags)), "bound": d.bound}
    if n < 2:
        return row | {"verdict": "not testable"}
    low, high = d.interval(level)
    open_ = "tie" if -MARGIN <= low and high <= MARGIN else "undecided"
    found = {1: "holds", -1: "contradicted"}.get(side(d, level, margin), open_)
    return row | {"low": round(low, 2), "high": round(high, 2), "verdict": found}


def not_ranked(seeds: Iterable[int]) -> str:
    """Say why rows of so many ``seeds`` each are not ranked, ``two seeds: not ranked``; empty where all have enough."""
    counts = list(seeds)
    if not (few := [n for n in counts if n < RANKED]):
        return ""
    many = f"{len(few)} of {len(counts)} rows have fewer than three seeds"
    return f"{FEW[few[0]] if len(set(counts)) == 1 else many}: not ranked"


def reason(d: Difference) -> str:
    """Say why a flagged comparison does not count; empty for one without flags."""
    return REASONS.get(d.flags[0].partition(":")[0], "did not train") if d.flags else ""


# --- a claim ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grade:
    """What stands of a claim: ``holds``, ``contradicted``, ``tie``, ``undecided`` or ``not testable``, and why."""

    verdict: str
    numbers: str
    indicative: bool = False


def grade(differences: list[Difference], claim: Mapping, where: Sequence[Mapping] = ()) -> Grade:
    """Grade the claim over its comparisons; flagged ones are counted apart, and both counts are told.

    ``where`` says of each its ``table``, ``mode``, ``column`` and what is compared: no rival may be left out there.
    """
    if not (tested := [d for d in differences if len(d.points) > 1]):
        return Grade("not testable", "one seed only" if any(len(d.points) for d in differences) else missing(claim))
    clean = [d for d in tested if not d.flags]
    numbers = counts(clean, claim)
    if len(tested) > len(clean):
        flags = [reason(d) for d in tested if d.flags]
        why = dict.fromkeys(f.partition(": ")[2] for d in tested for f in d.flags if ": " in f)
        told = ", ".join(f"{flags.count(f)} {f}" for f in dict.fromkeys(flags)) + f" ({'; '.join(why)})" * bool(why)
        if not clean:
            return Grade("not testable", f"{told}; counted all the same: {counts(tested, claim)}")
        numbers += f"; {told}, with them {counts(tested, claim).replace(' comparisons', '')}"
    numbers += f"; {untested} not testable" if (untested := len(differences) - len(tested)) else ""
    found, rows = _decide(clean, claim), list(zip(where or [{}] * len(differences), differences, strict=True))
    place = lambda w: (w.get("table"), w.get("mode"), w.get("column"))  # noqa: E731
    ran = {place(w) for w, d in rows if len(d.points) > 1}
    left_out = [w.get("comparison", "") for w, d in rows if place(w) in ran and (d.flags or len(d.points) < 2)]
    if left_out and found in ("holds", "tie") and claim.get("need", "all") == "all":
        found = "undecided"
        numbers += f"; all would have to count, left out: {', '.join(filter(None, dict.fromkeys(left_out)))}"
    return Grade(found, numbers, min(len(d.points) for d in clean) < ENOUGH)


def counts(differences: list[Difference], claim: Mapping) -> str:
    """Say how many comparisons there are, and how many went which way."""
    found = [judged(d, claim.get("margin", 0.0))["verdict"] for d in differences]
    plural = {"holds": ("holds", "hold"), "tie": ("tie", "ties")}
    words = [f"{k} {plural.get(v, (v, v))[k > 1]}" for v in TESTED if (k := found.count(v))]
    return f"{len(found)} comparison{'s' * (len(found) != 1)}: {', '.join(words)}"


def _decide(differences: list[Difference], claim: Mapping) -> str:
    n, margin = len(differences), claim.get("margin", 0.0)
    u = n // 2 + 1 if claim.get("need", "all") == "most" else n
    if sum(side(d, LEVEL / (n - u + 1), margin) > 0 for d in differences) >= u:
        return "holds"
    if sum(side(d, LEVEL / u, margin) < 0 for d in differences) >= n - u + 1:
        return "contradicted"
    return "tie" if all(judged(d, margin)["verdict"] == "tie" for d in differences) else "undecided"


def missing(claim: Mapping) -> str:
    """Say what a claim without stored evidence would need."""
    needs = [f"{k} = {v}" for k, v in claim.get("only", {}).items()]
    needs += [*claim.get("finetune", []), *claim.get("of", claim.get("columns", []))]
    source = claim.get("counts", claim.get("table"))
    source = source if isinstance(source, str) else ", ".join(source)
    return f"no runs on its data here ({source}{': ' if needs else ''}{', '.join(needs)})"


def as_rows(where: list[dict], differences: list[Difference], claim: Mapping) -> pd.DataFrame:
    """Return a row per comparison, as the page prints them, with ``bound`` beside."""
    rows = [w | judged(d, claim.get("margin", 0.0)) for w, d in zip(where, differences, strict=True)]
    return pd.DataFrame(rows, columns=[*COLUMNS, "bound"])


# --- a table ---------------------------------------------------------------------------------------------------------


def at_once(differences: list[Difference]) -> list[dict]:
    """Judge all comparisons together, by Holm's steps; the interval of each is that of the last step.

    A flagged one does not count and is told of by its :func:`reason`.
    """
    counted = [d for d in differences if not d.flags and len(d.points) > 1]
    if len(counted) >= POOLED:
        common = float(np.median([d.points.std(ddof=1) for d in counted]))
        differences = [replace(d, common=common) for d in differences]
    sure, before = 0, -1
    while sure > before:
        level = LEVEL / max(1, len(counted) - sure)
        found = [judged(d, level=level) | ({"verdict": reason(d)} if d.flags else {}) for d in differences]
        sure, before = sum(row["verdict"] in ("holds", "contradicted") for row in found), sure
    return found


def paired_differences(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str = "accuracy") -> pd.DataFrame:
    """Return :func:`orderings` of pairs of which the paper prints nothing."""
    return orderings(frame, pd.DataFrame(columns=["finetune", "column", "variant", "mean"]), pairs, value)


def orderings(
    frame: pd.DataFrame, reported: pd.DataFrame, pairs: Sequence[tuple[str, str]], value: str = "accuracy"
) -> pd.DataFrame:
    """Judge :func:`at_once`, paired by seed, whether pairs of variants stand to each other as the paper reports.

    One row per mode, column and pair with runs; ``frame`` as from ``tables.collect``. Where the paper prints no numbers
    of a pair on a data column, the two are compared alone: ``first is higher``, or ``second is higher``.
    """
    paper, compared, rows = reported.set_index(["finetune", "column", "variant"])["mean"], [], []
    labels = dict(zip(frame.variant, frame.label.map(label_of), strict=True))
    for (mode, column), group in frame.dropna(subset=[value]).groupby(["finetune", "column"], sort=False):
        own = group.filter(items=["variant", "seed", "found", value]).groupby("variant")
        runs = {v: measured(its.to_dict("records"), value) for v, its in own}
        for pair in (pair for pair in pairs if set(pair) <= runs.keys()):
            printed = float(np.subtract(*(paper.get((mode, column, v), np.nan) for v in pair)))
            found = differences([*paired(*(runs[v] for v in pair)).values()])[0]
            where = label_of(mode), heading(column, group.dataset.iloc[0]) if "dataset" in group else column
            compared.append((*where, [labels[v] for v in pair], printed, found))
    judged_all = at_once([replace(d, points=-d.points) if x <= 0 else d for *_, x, d in compared])
    for (mode, column, names, printed, d), found in zip(compared, judged_all, strict=True):
        words = {"holds": "first is higher", "contradicted": "second is higher"} if np.isnan(printed) else {}
        low, high = (-found["high"], -found["low"]) if printed <= 0 else (found["low"], found["high"])
        sign = " against " if np.isnan(printed) else " > " if printed > 0 else " < "
        numbers = [round(printed, 2), round(d.mean, 2), "–" if np.isnan(low) else f"{low:.2f} to {high:.2f}"]
        rows.append([mode, column, sign.join(names), *numbers, len(d.points), words.get(v := found["verdict"], v)])
    columns = ["mode", "column", "claim", "reported", "obtained", "interval", "seeds", "verdict"]
    table = pd.DataFrame(rows, columns=columns)
    return table.drop(columns="reported") if table.reported.isna().all() else table
