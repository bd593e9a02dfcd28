"""Values are chosen on validation examples: the same choices for every row, each trial a stored run.

The same sweep again reads what is stored and goes on. ``report/frames.py`` (``trials_frame``) shows trials as a table.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from fedlib.core.experiment import Experiment
from fedlib.core.validation import check_type, shown
from fedlib.engine.executors import Execution

from .params import make_experiment
from .params_files import nested
from .record import Run
from .run_paths import Folder
from .store import run_all

KEPT = ("evaluate_on", "validation_fraction", "evaluate_every", "seed")  # what a sweep says itself, or must not choose


@dataclass(frozen=True)
class Trial:
    """One choice of values for one row, and its run on validation examples."""

    row: str
    choice: Mapping[str, object]
    run: Run

    @property
    def score(self) -> float:
        """Accuracy on validation examples after the last round, percent; minus infinity of a run that diverged."""
        return self.run.accuracy if self.run.summary["status"] == "finished" else -math.inf


def sweep(
    rows: Mapping[str, Experiment], over: Mapping[str, Sequence] | Sequence[Mapping[str, object]],
    execution: Execution = Execution(), folder: Folder = None, progress: bool = True,
) -> list[Trial]:  # fmt: skip
    """Try values of ``over`` on every row, an experiment by name; the test set is not read.

    Tried are all combinations of the lists in ``over`` by field (``lr``, ``options.zeta``), or the choices that it
    lists itself. Where an experiment says no ``validation_fraction``, a fifth of the training examples is held out.
    ``ValueError`` before any compute names what cannot be tried.
    """
    if isinstance(over, Mapping):
        for key, values in over.items():
            if not isinstance(values, list | tuple) or not values:
                raise ValueError(f"sweep: {key} = {shown(values)}; allowed: a list of one value or more")
        choices = [dict(zip(over, x, strict=True)) for x in product(*over.values())]
    else:
        choices = over
    listed, asked = isinstance(choices, list | tuple) and bool(choices), list[tuple]()
    if not listed or not all(isinstance(x, Mapping) and x and all(isinstance(k, str) for k in x) for x in choices):
        raise ValueError(f"sweep: over = {shown(over)}; allowed: lists by field, or a list of choices")
    for row, e in check_type(rows, Mapping, "sweep: rows").items():
        share = check_type(e, Experiment, f"sweep: row {shown(row)}").validation_fraction or 0.2
        e = e.replace(evaluate_on="validation", validation_fraction=share)
        asked += [(row, choice, changed(e, choice)) for choice in choices]
    done = run_all([e for *_, e in asked], execution, folder, progress)
    return [Trial(row, choice, r) for (row, choice, _), r in zip(asked, done, strict=True)]


def changed(e: Experiment, choice: Mapping[str, object]) -> Experiment:
    """Return ``e`` with the values of ``choice``, fully checked."""
    if kept := [k for k in choice if k in KEPT]:
        raise ValueError(f"sweep: {kept[0]!r} cannot be chosen, nor can {', '.join(KEPT)}; allowed: every other field")
    return make_experiment(e.to_dict(), nested(choice))


def best(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return, for every row, the first of its best trials, whose ``choice`` is what to run on the test set."""
    trials = list(trials)
    rows = dict.fromkeys(t.row for t in trials)
    return {row: max((t for t in trials if t.row == row), key=lambda t: t.score) for row in rows}
