"""How far a run is to be trusted: what its test examples leave open, and flags.

What a flagged run says of a method is shown, and not counted in a verdict.

Each looks at the value that is compared (a client's own accuracy where that is what a table prints), round by round:

    constant   at chance (1.25 / classes at most; 0 for a correlation) and the same, exit by exit, in its last two
               evaluations: it answers one class
    collapsed  ends 5 points and a quarter of its best below its best
    rising     gained 2 points and a twentieth of its end in the last quarter of its rounds
    diverged   its loss or an update was infinite or NaN
    over budget  a level of its method costs a tenth more than the share that it is solved for
    older rule   a class of the kit, or what it does with such an experiment (``identity.kit_rules``), was otherwise
"""

from functools import partial

import numpy as np

from fedlib.core.experiment import Experiment
from fedlib.core.slices import Slice
from fedlib.data.tasks import CORRELATIONS, task_of
from fedlib.methods import METHODS

from ..runs.costs import DATA, load_shapes
from ..runs.identity import concern, older_rules
from ..runs.record import Run, unpack_bits
from .clients import client_numbers
from .tables import label_of, values_of

MANY = 20  # clients whose differences tell the variance of their mean


def bound_on_variance(run: Run, points: np.ndarray) -> np.ndarray:
    """Bound the variance, in points², that so many independent test examples leave in each of ``points`` (percent).

    p (1 - p) / N of a mean of numbers between 0 and 1, (1 - r²) / N of a correlation. 0 where N is not known.
    """
    if (n := run.summary.get("num_test") or run.experiment.num_test) is None:
        return np.zeros_like(points)
    share, correlation = np.clip(points / 100, -1, 1), task_of(run.experiment.dataset).metric in CORRELATIONS
    return 100**2 * (1 - share**2 if correlation else np.abs(share) * (1 - np.abs(share))) / n


def right_of(run: Run, value: str) -> np.ndarray | None:
    """Return which test examples ``value`` counts as right, percent (1 or exits, N); None if the run does not say."""
    if "right" not in run.summary or value not in ("accuracy", "exits", "last", "ensemble"):
        return None
    rows, exits = 100 * unpack_bits(run.summary["right"], run.summary["num_test"]), len(run.summary["exits"])
    if value == "accuracy":
        return rows[:exits].mean(0, keepdims=True)
    return rows[:exits] if value == "exits" else rows[exits - 1 : exits] if value == "last" else rows[exits:]


def clients_of(run: Run, value: str, points: np.ndarray) -> np.ndarray | None:
    """Return what each client gets (K,), percent, of which ``points`` is the mean and no test example is another's.

    None of fewer than ``MANY``, and where the run does not say.
    """
    found = client_numbers(run.summary, value)
    told = value in ("clients", "local") and run.experiment.test_split in ("like_train", "contiguous")
    return found if told and len(found) >= MANY and np.allclose(found.mean(), points, atol=0.01) else None


def flags_of(run: Run, value: str = "accuracy") -> tuple[str, ...]:
    """Return the flags of ``run`` as far as ``value`` (a column of ``tables.collect``) is concerned."""
    found = [(m["t"], np.atleast_1d(x)) for m in run.metrics if (x := values_of(m).get(value)) is not None]
    flags = ["diverged"] if run.summary["status"] == "diverged" else []
    flags += [f"over budget: {over}"] if (over := over_budget(run.experiment)) else []
    flags += ["older rule"] if concern(older_rules(run.experiment, run.record), value) else []
    if len(found) < 2:
        return tuple(flags)
    ends, means = found[-1][1], [float(x.mean()) for _, x in found]
    before = [m for (t, _), m in zip(found, means, strict=True) if t <= 0.75 * found[-1][0]]
    flags += ["constant"] if np.array_equal(ends, found[-2][1]) and means[-1] <= _chance(run.experiment) else []
    flags += ["collapsed"] if max(means) - means[-1] > max(5.0, max(means) / 4) else []
    flags += ["rising"] if before and means[-1] - before[-1] > max(2.0, means[-1] / 20) else []
    return tuple(flags)


def _chance(e: Experiment) -> float:
    """Return the percent that answering one class gets, plus a quarter for unequal classes; 0 where it is not known."""
    classes = DATA.get(e.dataset, {}).get("classes")
    return 1.25 * 100 / classes if classes and task_of(e.dataset).metric not in CORRELATIONS else 0.0


OVER: dict[Experiment, str] = {}  # of which :func:`over_budget` has been asked, or which a stored table told


def over_budget(e: Experiment) -> str:
    """Return :func:`_over_budget` of any seed, once: to solve levels takes seconds."""
    if not hasattr(METHODS[e.method], "ratios_of"):
        return ""
    return OVER[e] if (e := e.replace(seed=1)) in OVER else OVER.setdefault(e, _over_budget(e))


def _over_budget(e: Experiment) -> str:
    """Say what ``e``'s levels cost if one costs over 1.1 times the share of the whole it is solved for; else empty."""
    shapes = load_shapes(e)
    setting, cost = shapes.setting, partial(shapes.setting.measure.cost, shapes.method.cost)
    whole = cost(Slice.prefix(setting.exit_units[-1] + 1, [setting.num_exits - 1]))  # what shares are shares of
    shares = shapes.method.ratios_of(shapes.budgets)[:-1]
    costs = [cost(shapes.slice_for(b)) / whole for b in range(len(shares))]
    if all(c <= 1.1 * share for c, share in zip(costs, shares, strict=True)):
        return ""
    cost_and_share = (", ".join(f"{x:.3g}" for x in numbers) for numbers in (costs, shares))
    return f"levels of {label_of(e.method)} cost {' where '.join(cost_and_share)} of the whole are said"
