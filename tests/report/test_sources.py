"""What a claim compares: exits, and answers example by example."""

import numpy as np
import pytest

from fedlib_lab.report.flags import right_of
from fedlib_lab.report.verdicts import Measured, differences
from fedlib_lab.runs.store import Run


def run_of(e, exits, evaluations, status="finished", **summary):
    metrics = [{"t": t, "accuracy": float(np.mean(x)), "exits": x} for t, x in evaluations]
    summary = {"accuracy": float(np.mean(exits)), "exits": exits, "status": status, **summary}
    return Run(e, None, summary, metrics)


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

    from fedlib.engine.evaluation import pack_bits

    text = pack_bits(torch.tensor([[True, True, False], [False, True, False], [True, False, False]]))
    r = run_of(tiny, [66.7, 33.3], [], right=text, num_test=3)
    assert right_of(r, "accuracy").tolist() == [[50, 100, 0]] and right_of(r, "last").tolist() == [[0, 100, 0]]
    assert right_of(r, "exits").tolist() == [[100, 100, 0], [0, 100, 0]]
    assert right_of(r, "ensemble").tolist() == [[100, 0, 0]] and right_of(r, "local") is None
