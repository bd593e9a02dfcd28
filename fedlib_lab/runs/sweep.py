"""Values are chosen on validation examples: lists and ranges, as many trials for every row, each one a stored run.

The same sweep again reads what is stored and goes on: samplers draw by a seed, and are told the same scores again.
``report/frames.py`` (``trials_frame``) shows trials as a table.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from annotated_types import Ge, Lt

from fedlib.core.annotations import Natural
from fedlib.core.experiment import Experiment
from fedlib.core.validation import check_known, check_type, convert, shown
from fedlib.engine.executors import Execution

from .params import make_experiment
from .record import Run
from .run_paths import Folder
from .store import run, run_all

SAMPLERS = {"random": "RandomSampler", "tpe": "TPESampler"}  # Optuna's
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
    rows: Mapping[str, Experiment], over: Mapping[str, Any] | Sequence[Mapping[str, object]],
    sampler: str = "grid", trials: int = 0, seed: int = 1,
    execution: Execution = Execution(), folder: Folder = None, progress: bool = True,
) -> list[Trial]:  # fmt: skip
    """Try values of ``over`` on every row, an experiment by name; the test set is not read.

    ``sampler="grid"`` tries all combinations of the lists in ``over`` by field (``lr``, ``options.zeta``), or the
    choices that it lists itself. Optuna's random and tpe (extra ``sweep``) draw ``trials`` choices for each row by
    ``seed``, from lists and from ``optuna.distributions``. Where an experiment says no ``validation_fraction``, a fifth
    of the training examples is held out. ``ValueError`` before any compute names what cannot be tried.
    """
    check_type(rows, Mapping, "sweep: rows")
    for row, e in rows.items():
        check_type(e, Experiment, f"sweep: row {shown(row)}")
    trials = convert(trials, Natural, "sweep: trials")
    seed = convert(seed, Annotated[int, Ge(0), Lt(2**32)], "sweep: seed")
    check_known([sampler], ("grid", *SAMPLERS), "sweep: sampler = {} is unknown")
    if (sampler == "grid") != (trials == 0):
        allowed = "0 with grid, which tries all combinations; 1, 2, … with random and tpe"
        raise ValueError(f"sweep: trials = {trials}, sampler = {sampler!r}; allowed: {allowed}")
    share = {row: e.validation_fraction or 0.2 for row, e in rows.items()}
    rows = {row: e.replace(evaluate_on="validation", validation_fraction=share[row]) for row, e in rows.items()}
    how = execution, folder, progress
    listed = sampler == "grid" and isinstance(over, list | tuple)
    for x in over if listed and over else [over]:
        if not isinstance(x, Mapping) or not x or not all(isinstance(k, str) for k in x):
            allowed = "lists by field, or a list of choices" if sampler == "grid" else "lists and ranges by field"
            raise ValueError(f"sweep: over = {shown(over)}; allowed with {sampler!r}: {allowed}")
        for key, values in x.items():
            is_range = sampler != "grid" and hasattr(values, "low")
            if not (listed or is_range or isinstance(values, list | tuple) and values):
                raise ValueError(f"sweep: {key} = {shown(values)}; allowed: a list, or with random and tpe a range")
    if sampler != "grid":
        assert isinstance(over, Mapping)
        for e, (key, values) in product(rows.values(), over.items()):
            for value in values if isinstance(values, (list, tuple)) else (values.low, values.high):
                changed(e, {key: value})
        return [trial for row, e in rows.items() for trial in _drawn(row, e, over, sampler, trials, seed, how)]
    if isinstance(over, Mapping):
        over = [dict(zip(over, x, strict=True)) for x in product(*over.values())]
    asked = [(row, choice, changed(e, choice)) for row, e in rows.items() for choice in over]
    done = run_all([e for *_, e in asked], *how)
    return [Trial(row, choice, r) for (row, choice, _), r in zip(asked, done, strict=True)]


def changed(e: Experiment, choice: Mapping[str, object]) -> Experiment:
    """Return ``e`` with the values of ``choice``, fully checked."""
    check_known([k for k in choice if k in KEPT], (), f"sweep: {{}} cannot be chosen, nor can {', '.join(KEPT)}")
    parts = [(key.partition("."), value) for key, value in choice.items()]
    return make_experiment(e.to_dict(), *({k: {inner: v} if inner else v} for (k, _, inner), v in parts))


def best(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return, for every row, the first of its best trials, whose ``choice`` is what to run on the test set."""
    trials = list(trials)
    rows = dict.fromkeys(t.row for t in trials)
    return {row: max((t for t in trials if t.row == row), key=lambda t: t.score) for row in rows}


def _drawn(
    row: str, e: Experiment, over: Any, sampler: str, trials: int, seed: int, how: tuple[Execution, Folder, bool]
) -> Iterator[Trial]:
    optuna = optuna_for(f"sampler = {sampler!r}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(sampler=getattr(optuna.samplers, SAMPLERS[sampler])(seed=seed), direction="maximize")
    listed = optuna.distributions.CategoricalDistribution
    lists = {k: listed(v) for k, v in over.items() if isinstance(v, list | tuple)}
    for _ in range(trials):
        asked = study.ask({**over, **lists})
        trial = Trial(row, asked.params, run(changed(e, asked.params), *how))
        study.tell(asked, trial.score)
        yield trial


def optuna_for(what: str) -> Any:
    """Return Optuna; ``ImportError`` says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError(f"{what} needs Optuna; install fedlib with its extra 'sweep'") from error
    return optuna
