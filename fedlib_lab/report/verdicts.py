"""The rule behind every verdict: what paired differences over few seeds can carry, and how many of them make a claim.

A comparison is a mean difference over seeds, in points. Its 95 % interval adds two half-widths in quadrature: Student's
t over the n seeds, and a normal one for the test examples, which seeds share and therefore do not average out
(MOVER: Zou and Donner, Statistics in Medicine 27, 2008). Where all runs say which examples they got right, the second
variance is that of the difference, example by example; elsewhere at most (a (1 - a) + b (1 - b)) / N, that of
independent answers of accuracies a and b on N examples. (Welch's and Satterthwaite's degrees of freedom would make it
up to 13 % false verdicts instead of 5.)

A comparison ``holds`` above zero, is ``contradicted`` below -0.5 points (the margin: less is a tie and no loss), is a
``tie`` inside the margin, else ``undecided``. A claim needs u of its n comparisons: all, or ``most`` (over half). It
holds if u of them do at the level 2.5 % / (n - u + 1), and is contradicted if n - u + 1 are at 2.5 % / u: Holm's step
at that place, Bonferroni's test of a partial conjunction (Benjamini and Heller, Biometrics 64, 2008). Where no
difference is real a claim gets a false verdict at most 5 % of the time. With fewer than five seeds it is
``indicative``.
Read next: ``claims.py``, ``flags.py``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pandas as pd

LEVEL = 0.025  # of a false verdict on either side
MARGIN = 0.5  # points: less is no loss
ENOUGH = 5  # seeds of a verdict that is more than indicative
TESTED = ("holds", "tie", "undecided", "contradicted")
COLUMNS = ["table", "mode", "column", "data", "comparison", "mean", "low", "high", "seeds", "flags", "verdict"]
REASONS = {"rising": "still rising", "over budget": "over budget", "older rule": "of an older rule"}  # other: untrained


@dataclass(frozen=True)
class Difference:
    """Paired differences (seeds,) in points, the variance of their mean that the test examples leave, and ``flags``."""

    points: np.ndarray
    variance: float = 0.0
    flags: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        return float(self.points.mean())

    def half_width(self, level: float = LEVEL) -> float:
        """Of the interval that a true mean lies above, or below, with probability ``level``; infinite for one seed."""
        n = len(self.points)
        if n < 2:
            return np.inf
        student, normal = _quantiles(level, n - 1)
        return float(np.hypot(student * self.points.std(ddof=1) / n**0.5, normal * self.variance**0.5))

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        return self.mean - self.half_width(level), self.mean + self.half_width(level)


@lru_cache(maxsize=4096)
def _quantiles(level: float, freedom: int) -> tuple[float, float]:
    """What Student's t of so many degrees of freedom, and a normal number, exceed with probability ``level``."""
    from scipy.special import ndtri, stdtrit  # scipy.stats takes half a second to import

    return -float(stdtrit(freedom, level)), -float(ndtri(level))


def better(d: Difference, level: float = LEVEL, margin: float = 0.0) -> bool:
    """Is it above -``margin``?"""
    return d.interval(level)[0] > -margin


def worse(d: Difference, level: float = LEVEL, margin: float = 0.0) -> bool:
    """Is it below -``margin``, or below -``MARGIN`` if that is less?"""
    return d.interval(level)[1] < -max(margin, MARGIN)


def judged(d: Difference, margin: float = 0.0) -> dict:
    """One comparison: mean, interval, number of seeds and verdict; rounded after judging."""
    n = len(d.points)
    row = {"mean": round(d.mean, 2) if n else np.nan, "low": np.nan, "high": np.nan, "seeds": n}
    row["flags"] = ", ".join(d.flags)
    if n < 2:
        return row | {"verdict": "not testable"}
    low, high = d.interval()
    tie = -MARGIN <= low and high <= MARGIN
    found = "holds" if better(d, margin=margin) else "contradicted" if worse(d, margin=margin) else "undecided"
    found = "tie" if found == "undecided" and tie else found
    return row | {"low": round(low, 2), "high": round(high, 2), "verdict": found}


@dataclass(frozen=True)
class Grade:
    """What stands of a claim: ``holds``, ``contradicted``, ``tie``, ``undecided`` or ``not testable``, and why."""

    verdict: str
    numbers: str
    indicative: bool = False


def grade(differences: list[Difference], claim: Mapping) -> Grade:
    """The claim's grade over its comparisons; flagged ones are counted apart, and both counts are told."""
    tested = [d for d in differences if len(d.points) > 1]
    if not tested:
        return Grade("not testable", "one seed only" if any(len(d.points) for d in differences) else missing(claim))
    clean = [d for d in tested if not d.flags]
    numbers = counts(clean, claim)
    if len(tested) > len(clean):
        flags = [REASONS.get(d.flags[0], "did not train") for d in tested if d.flags]
        told = ", ".join(f"{flags.count(f)} {f}" for f in dict.fromkeys(flags))
        if not clean:
            return Grade("not testable", f"{told}; counted all the same: {counts(tested, claim)}")
        numbers += f"; {told}, with them {counts(tested, claim)}"
    untested = len(differences) - len(tested)
    numbers += f"; {untested} not testable" if untested else ""
    return Grade(_decide(clean, claim), numbers, min(len(d.points) for d in clean) < ENOUGH)


def counts(differences: list[Difference], claim: Mapping) -> str:
    """How many comparisons there are, and how many went which way."""
    found = [judged(d, claim.get("margin", 0.0))["verdict"] for d in differences]
    plural = {"holds": ("holds", "hold"), "tie": ("tie", "ties")}
    words = [f"{k} {plural.get(v, (v, v))[k > 1]}" for v in TESTED if (k := found.count(v))]
    return f"{len(found)} comparison{'s' * (len(found) != 1)}: {', '.join(words)}"


def _decide(differences: list[Difference], claim: Mapping) -> str:
    n, margin = len(differences), claim.get("margin", 0.0)
    u = n // 2 + 1 if claim.get("need", "all") == "most" else n
    if sum(better(d, LEVEL / (n - u + 1), margin) for d in differences) >= u:
        return "holds"
    if sum(worse(d, LEVEL / u, margin) for d in differences) >= n - u + 1:
        return "contradicted"
    return "tie" if all(judged(d, margin)["verdict"] == "tie" for d in differences) else "undecided"


def missing(claim: Mapping) -> str:
    """What a claim without stored evidence would need."""
    needs = [*claim.get("only", {}).values(), *claim.get("finetune", []), *claim.get("columns", [])]
    source = claim.get("counts", claim.get("table"))
    source = ", ".join(source) if isinstance(source, list) else source
    return f"no runs on its data here ({source}{': ' if needs else ''}{', '.join(needs)})"


def as_rows(where: list[dict], differences: list[Difference], claim: Mapping) -> pd.DataFrame:
    """A row per comparison, as the page prints them."""
    margin = claim.get("margin", 0.0)
    return pd.DataFrame([w | judged(d, margin) for w, d in zip(where, differences, strict=True)], columns=COLUMNS)
