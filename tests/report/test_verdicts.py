"""The rule behind every verdict: by hand, and on simulated claims where nothing differs."""

import numpy as np
import pytest
from scipy.stats import norm, t

from fedlib_lab.report.verdicts import Difference, grade, judged

ALL, MOST = {"table": "table4"}, {"table": "table4", "need": "most"}


def of(*points, variance=0.0, flags=()):
    return Difference(np.array(points, dtype=float), variance, flags)


def test_an_interval_adds_seeds_and_test_examples_in_quadrature():
    d = of(1.0, 2.0, 3.0, variance=0.25)
    seeds, examples = t.isf(0.025, 2) * 1 / 3**0.5, norm.isf(0.025) * 0.5  # SD 1 of three; 4.30 and 1.96
    assert d.interval() == pytest.approx((2 - np.hypot(seeds, examples), 2 + np.hypot(seeds, examples)))
    assert seeds == pytest.approx(2.484, abs=1e-3) and examples == pytest.approx(0.98, abs=1e-3)


@pytest.mark.parametrize(
    "d, found",
    [
        (of(1.0, 1.1, 0.9), "holds"),  # 1 ± 0.25
        (of(1.0, 2.0, 1.0), "undecided"),  # 1.33 ± 1.43: all three agree, which chance does one time in four
        (of(-1.0, -1.1, -0.9), "contradicted"),
        (of(-0.6, -0.7, -0.5), "undecided"),  # below zero, yet -0.6 ± 0.25 reaches into the margin
        (of(-0.3, -0.2, -0.25), "tie"),  # -0.25 ± 0.12: a loss within the margin is none
        (of(0.1, 0.2, 0.3), "tie"),  # 0.2 ± 0.25
        (of(2.0), "not testable"),
        (of(), "not testable"),
    ],
)
def test_one_comparison(d, found):
    assert judged(d)["verdict"] == found


def test_a_claims_own_margin_moves_both_limits():
    """ "Not more than 2 points worse": -1 holds; -1.8 does neither; -3 is contradicted."""
    found = [judged(of(m, m + 0.1, m - 0.1), 2.0)["verdict"] for m in (-1.0, -1.8, -3.0)]
    assert found == ["holds", "undecided", "contradicted"]


def test_all_of_a_claim_hold_or_one_survives_the_number_of_comparisons():
    sure, slight = of(1.0, 1.1, 0.9), of(-1.0, -1.1, -0.9)  # -1 ± 0.25 at 2.5 %; at 2.5 % / 8 a half-width of 1.03
    assert grade([sure] * 8, ALL).verdict == "holds"
    assert grade([sure] * 7 + [of(0.1, 0.9, 0.4)], ALL).verdict == "undecided"
    assert grade([slight], ALL).verdict == "contradicted"
    many = grade([sure] * 7 + [slight], ALL)
    assert (many.verdict, many.numbers) == ("undecided", "8 comparisons: 7 hold, 1 contradicted")
    assert grade([sure] * 7 + [of(-5.0, -5.1, -4.9)], ALL).verdict == "contradicted"
    assert grade([of(0.1, 0.2, 0.3)] * 2, ALL).verdict == "tie"


def test_most_needs_over_half_at_the_level_of_its_place():
    sure, no = of(5.0, 5.1, 4.9), of(-5.0, -5.1, -4.9)
    assert grade([sure] * 3 + [no], MOST).verdict == "holds"
    assert grade([sure] * 2 + [no] * 2, MOST).verdict == "contradicted"  # three of four cannot be
    assert grade([sure] * 2 + [of(-1.0, 1.0, 0.0)] * 2, MOST).verdict == "undecided"


def test_seeds_say_how_much_a_verdict_is_worth():
    assert grade([of(1.0, 1.1, 0.9)], ALL).indicative
    assert not grade([of(1.0, 1.1, 0.9, 1.0, 1.0)], ALL).indicative
    assert grade([of(1.0, 1.1, 0.9, 1.0, 1.0), of(1.0, 1.1)], ALL).indicative
    assert grade([of(1.0)], ALL).numbers == "one seed only" and grade([], ALL).numbers.startswith("no runs")


def test_flagged_comparisons_are_shown_and_not_counted():
    sure, flat = of(1.0, 1.1, 0.9), of(-9.0, -9.1, -8.9, flags=("constant",))
    found = grade([sure, flat, of(2.0)], ALL)
    assert found.verdict == "holds"
    assert found.numbers == (
        "1 comparison: 1 holds; 1 did not train, with them 2 comparisons: 1 holds, 1 contradicted; 1 not testable"
    )
    rising = grade([of(1.0, 1.1, 0.9, flags=("rising",))], ALL)
    assert rising.verdict == "not testable"
    assert rising.numbers == "1 still rising; counted all the same: 1 comparison: 1 holds"


@pytest.mark.parametrize("comparisons", [1, 4, 16])
@pytest.mark.parametrize("need", [ALL, MOST], ids=["all", "most"])
@pytest.mark.parametrize("seeds, shared", [(3, 0.0), (3, 0.05), (3, 1.0), (5, 0.3)])
def test_where_nothing_differs_at_most_one_claim_in_twenty_gets_a_verdict(comparisons, need, seeds, shared):
    """Simulated: seeds differ by a point, test examples by ``shared`` times that (the same for all seeds); the paper's
    method stands in every comparison, so that they go together."""
    rng, false, claims = np.random.default_rng(comparisons), 0, 1000
    for _ in range(claims):
        own, rivals = rng.normal(0, 0.7, seeds), rng.normal(0, 0.7, (comparisons, seeds))
        examples = rng.normal(0, shared**0.5, (comparisons, 1))
        made = [Difference(own - r + x, shared) for r, x in zip(rivals, examples, strict=True)]
        false += grade(made, need).verdict in ("holds", "contradicted")
    assert false / claims <= 0.05 + 2 * (0.05 * 0.95 / claims) ** 0.5
