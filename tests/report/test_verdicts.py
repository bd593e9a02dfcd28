"""The rule behind every verdict: by hand, and on simulated claims where nothing differs."""

import numpy as np
import pytest
from scipy.stats import norm, t

from fedlib.report.flags import bound_on_variance, flags_of, right_of
from fedlib.report.sources import Measured, differences
from fedlib.report.verdicts import Difference, grade, judged
from fedlib.runs.costs import load_shapes
from fedlib.runs.store import Run

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


def run_of(e, exits, evaluations, status="finished", **summary):
    metrics = [{"t": t, "accuracy": float(np.mean(x)), "exits": x} for t, x in evaluations]
    summary = {"accuracy": float(np.mean(exits)), "exits": exits, "status": status, **summary}
    return Run(e, None, summary, metrics)


def test_flags_follow_the_curve(tiny):
    def flags(*evaluations, **changes):
        return flags_of(run_of(tiny.replace(**changes), evaluations[-1][1], evaluations))

    assert flags((25, [40.0]), (50, [50.0]), (75, [52.0]), (100, [52.5])) == ()
    assert flags((25, [40.0]), (50, [50.0]), (75, [52.0]), (100, [55.0])) == ("rising",)  # 3 > 2.75
    assert flags((75, [80.0]), (100, [83.0])) == ()  # 3 < 4.15
    assert flags((75, [10.0, 10.0]), (100, [10.0, 10.0])) == ("constant",)  # one of ten classes
    assert flags((75, [84.0]), (100, [84.0])) == ()  # the same, but far from chance
    assert flags((25, [60.0]), (75, [50.0]), (100, [40.0])) == ("collapsed",)  # 20 > 15
    assert flags((25, [60.0]), (75, [50.0]), (100, [46.0])) == ()
    assert flags((100, [40.0])) == ()
    assert flags_of(run_of(tiny, [1.0], [(2, [1.0])], status="diverged")) == ("diverged",)


def test_flags_look_at_what_is_compared(tiny):
    """A method that keeps the server's model at its start may serve clients well."""
    r = run_of(tiny, [10.0], [])
    own = [{"t": t, "accuracy": 10.0, "exits": [10.0], "personal": {"accuracy": a, "sd": 1.0, "exits": [a], "exits_sd": [1.0]}} for t, a in ((1, 50.0), (2, 50.5))]  # fmt: skip
    r = Run(r.experiment, None, r.summary, own)
    assert flags_of(r, "accuracy") == ("constant",) and flags_of(r, "clients") == ()


def test_a_level_over_its_share_is_over_budget(tiny, monkeypatch):
    """Level 1 for all costs an eighth for everybody; asked to cost a twelfth, it is over budget."""
    from fedlib.methods import METHODS
    from fedlib.report.flags import over_budget
    from fedlib.runs.params import load_grid

    (e,) = (c.experiment for c in load_grid("scalefl", "resnet110", "smoke", {"method": "fedavg_level1"}))
    assert not over_budget(tiny) and not over_budget(e)
    original, shapes = METHODS[e.method].ratios_of, load_shapes(e, 10)
    over_budget.cache_clear()
    monkeypatch.setattr(METHODS[e.method], "ratios_of", lambda self, n: tuple(0.66 * x for x in original(self, n)))
    monkeypatch.setattr("fedlib.report.flags.load_shapes", lambda *_: shapes)
    assert over_budget(e)
    over_budget.cache_clear()


def test_the_test_examples_leave_what_their_number_says(tiny):
    e = tiny.replace(num_test=5000)
    (bound,) = bound_on_variance(run_of(e, [50.0], []), np.array([50.0]))
    assert bound == pytest.approx(100**2 * 0.25 / 5000)  # half a point squared, nearly: 0.5
    (bound,) = bound_on_variance(
        run_of(e.replace(dataset="cola", backbone="bert_micro", augment="none"), [30.0], []), np.array([30.0])
    )
    assert bound == pytest.approx(100**2 * (1 - 0.09) / 5000)  # of a correlation


def test_answers_that_are_known_are_compared_example_by_example():
    """Two methods that err on nearly the same examples differ by less than independent ones would."""
    one, other = np.zeros((1, 100)), np.zeros((1, 100))
    one[0, :60], other[0, :57] = 100, 100
    m = [Measured(np.array([x.mean()]), np.array([24.0]), x) for x in (one, other)]
    (found,) = differences([m[0] - m[1]] * 3)
    assert found.mean == 3 and found.variance == pytest.approx(100**2 * 0.03 * 0.97 / 99)  # three discordant of 100
    (bound,) = differences([m[0] - Measured(m[1].points, m[1].variances)] * 3)
    assert bound.variance == 48
    half = Measured(np.array([40.0, 60.0]), np.array([1.0, 3.0]), np.vstack([one, other])).at(
        np.array([1, 3]), np.array([2])
    )
    assert (half.points, half.variances) == (50.0, 2.0) and half.right[0, 58] == 50


def test_which_answers_a_value_counts(tiny):
    import torch

    from fedlib.engine.evaluation import packed

    text = packed(torch.tensor([[True, True, False], [False, True, False], [True, False, False]]))
    r = run_of(tiny, [66.7, 33.3], [], right=text, num_test=3)
    assert right_of(r, "accuracy").tolist() == [[50, 100, 0]] and right_of(r, "last").tolist() == [[0, 100, 0]]
    assert right_of(r, "exits").tolist() == [[100, 100, 0], [0, 100, 0]]
    assert right_of(r, "ensemble").tolist() == [[100, 0, 0]] and right_of(r, "local") is None
