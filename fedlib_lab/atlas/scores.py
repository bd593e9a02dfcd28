"""Which system gives clients of unequal devices most: scores over tasks, with what seeds and clients leave open.

A client's score is that of the best sub-model that its class of devices affords, on its own test examples. Within a
task 0 is the smallest level trained by everybody and 1 the whole model trained by everybody, which the caps forbid.
Over tasks and seeds: interquartile mean, intervals by a bootstrap stratified by task, probability of improvement
(Agarwal et al., NeurIPS 2021). Seeds are drawn anew within each task, and clients within each seed, the same for all
methods, whose clients see the same data. Read next: ``atlas/fitting.py``, ``params/atlas``.
"""

import runpy
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from scipy.stats import trim_mean

from fedlib.core.rng import numpy_generator
from fedlib.methods import METHODS

from ..report.flags import flags_of
from ..report.style import title_of
from ..report.tables import collect, label_of
from ..runs.params import Cell
from ..runs.params_files import grids
from ..runs.store import shown_run

BINDS = {"macs": "compute", "memory": "memory", "upload": "traffic"}  # what tables cap, in words
LOW, HIGH = "smallest", "whole"  # rows of every task: the smallest level for all, and the whole model for all
WORST = 0.1  # of the clients
UNTRAINED = 5.0  # points by which a capped method's whole net may be above the one trained whole by everybody
RESAMPLES, CONFIDENCE = 2_000, 0.95
NOISE = 3.0  # points of held-out accuracy: another value of a method's own parameter must gain more to be taken
RANKING = [
    "variant", "label", "method", "score", "low", "high", "worst tenth", "best rank", "worst rank", "tasks", "flags",
]  # fmt: skip


@dataclass(frozen=True)
class Entries:
    """``clients``: by task and row the scores in percent, (seeds, clients); ``flags`` of a row's runs by task.

    ``names``: of a row its label and its method.
    """

    clients: Mapping[str, Mapping[str, np.ndarray]]
    flags: Mapping[tuple[str, str], tuple[str, ...]]
    names: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    one: Callable = np.mean  # makes one number of the clients'

    @property
    def methods(self) -> list[str]:
        """Of any task, but for the two that scores are measured by."""
        found = dict.fromkeys(m for task in self.clients.values() for m in task)
        return [m for m in found if m not in (LOW, HIGH)]

    def of(self, method: str) -> dict[str, np.ndarray]:
        """Return, by task where ``method`` has runs, the normalised score of each seed."""
        return {task: normalised(by, method, self.one) for task, by in self.clients.items() if method in by}


def normalised(task: Mapping[str, np.ndarray], method: str, of: Callable = np.mean) -> np.ndarray:
    """Return a method's score by seed, (seeds,): 0 is the smallest level's mean, 1 the whole model's.

    ``of`` makes one number of the clients'. ``ValueError`` if the task lacks one of the two, or the whole model is not
    above the smallest level: then it says nothing of what lies between.
    """
    if lacking := {LOW, HIGH} - set(task):
        raise ValueError(f"atlas: scores are measured by {LOW!r} and {HIGH!r}; no runs of {sorted(lacking)}")
    low, high = (np.mean([of(seed) for seed in task[name]]) for name in (LOW, HIGH))
    if high <= low:
        raise ValueError(f"atlas: the whole model ({high:.2f}) is not above the smallest level ({low:.2f})")
    return (np.array([of(seed) for seed in task[method]]) - low) / (high - low)


def worst(scores: np.ndarray) -> float:
    """Return the mean of the worst tenth of the clients, at least one."""
    return float(np.sort(scores)[: max(1, round(WORST * len(scores)))].mean())


def interquartile_mean(by_task: Mapping[str, np.ndarray]) -> float:
    """Return the mean of the middle half of all tasks' seeds."""
    return float(trim_mean(np.concatenate(list(by_task.values())), 0.25))


def improvement(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """Return how often a run of ``one`` is above one of ``other`` on shared tasks, ties half; mean over tasks."""
    shared = [task for task in one if task in other]
    above = [[(a > b) + 0.5 * (a == b) for a, b in product(one[t], other[t])] for t in shared]
    return float(np.mean([np.mean(pairs) for pairs in above])) if shared else float("nan")


def resampled(entries: Entries, rng: np.random.Generator) -> Entries:
    """Draw seeds anew within each task, and within each seed its clients; the same draws for all methods."""
    out = {}
    for task, by in entries.clients.items():
        seeds, clients = next(iter(by.values())).shape
        rows = rng.integers(seeds, size=seeds)
        columns = rng.integers(clients, size=(seeds, clients))
        out[task] = {m: scores[rows[:, None], columns] for m, scores in by.items()}
    return replace(entries, clients=out)


def ranking(entries: Entries, resamples: int = RESAMPLES, seed: int = 0) -> pd.DataFrame:
    """Rank the methods, a row each, best first: ``score`` (interquartile mean) with ``low`` and ``high``, and ranks.

    ``best rank`` and ``worst rank`` are the interval of its rank. ``worst tenth``: the score of each task's worst tenth
    of clients. ``tasks`` says of how many it is: one that a net cannot carry is absent there. ``flags`` of its runs, by
    task. Resamples in which the whole model is not above the smallest level say nothing and do not count.
    """
    methods, rng = entries.methods, numpy_generator(seed, "atlas")
    drawn = []
    for _ in range(resamples):
        again = resampled(entries, rng)
        with suppress(ValueError):
            drawn.append([interquartile_mean(again.of(m)) for m in methods])
    if not drawn or not methods:
        return pd.DataFrame(columns=RANKING)
    scores = np.array(drawn)
    ends = np.quantile(scores, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    ranks = (-scores).argsort(1).argsort(1) + 1
    best, last = np.quantile(ranks, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0, method="nearest")
    names = [entries.names.get(m, (label_of(m), m)) for m in methods]
    frame = pd.DataFrame({
        "variant": methods, "label": [label for label, _ in names], "method": [method for _, method in names],
        "score": [interquartile_mean(entries.of(m)) for m in methods], "low": ends[0], "high": ends[1],
        "worst tenth": _worst_tenth(entries, methods),
        "best rank": best, "worst rank": last, "tasks": [len(entries.of(m)) for m in methods],
        "flags": ["; ".join(f"{t}: {', '.join(f)}" for (t, n), f in entries.flags.items() if n == m and f)
                  for m in methods],
    })  # fmt: skip
    return frame.sort_values("score", ascending=False, ignore_index=True)


def _worst_tenth(entries: Entries, methods: Sequence[str]) -> list[float]:
    """Return the methods' scores by ``worst``; NaN if the whole model's worst are not above the smallest level's."""
    least = replace(entries, one=worst)
    with suppress(ValueError):
        return [interquartile_mean(least.of(m)) for m in methods]
    return [float("nan")] * len(methods)


def headline(order: pd.DataFrame, entries: Entries, binds: str, rates: str) -> str:
    """Write a ranking's title: who leads and with what score, where what binds, on which tasks, of how many seeds."""
    if order.empty:
        return f"No task can be scored yet where {binds} binds"
    seeds = sorted({len(scores) for by in entries.clients.values() for scores in by.values()})
    said = f"{seeds[0]}{f'–{seeds[-1]}' * (len(seeds) > 1)} seed{'s' * (seeds[-1] > 1)}"
    first, tasks = order.iloc[0], ", ".join(map(title_of, entries.clients))
    after = "\n" if len(entries.clients) > 1 else ", "  # one word is no line
    return f"{first.label} leads where {binds} binds: score {first.score:.2f}\n{tasks}{after}{said}, {rates}"


def wins(entries: Entries) -> pd.DataFrame:
    """Return the probability of improvement of the row's method over the column's on shared tasks; NaN where none."""
    of = {m: entries.of(m) for m in entries.methods}
    return pd.DataFrame([[improvement(of[a], of[b]) for b in of] for a in of], index=list(of), columns=list(of))


def tasks_of(caps: str) -> dict[str, str]:
    """Return the tables of ``params/atlas`` in which ``caps`` (of ``BINDS``; macs_tuned) binds, by task.

    Such a table is called ``<task>_<caps>``.
    """
    return {t.removesuffix(f"_{caps}"): t for t in grids("atlas") if t.endswith(f"_{caps}")}


def own_methods(path: Path) -> list[str]:
    """List the methods, by name, that the file ``path`` registers; ``ValueError`` if it registers none."""
    known = set(METHODS)
    runpy.run_path(str(path), run_name=path.stem)
    own = [name for name in METHODS if name not in known or METHODS[name].__module__ == path.stem]
    if not own:
        raise ValueError(f"atlas: {path} registers no method; a class under @fedlib.methods.register is one")
    return own


def best_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method of a table of rates (``Table.frame``, a column per rate): its held-out scores, the best.

    Scores are in percent. ``best``: the column of the highest, the smaller rate where two are equal; None where one is
    missing. ``minutes``: what its search took.
    """
    rows = frame.groupby(["label", "column"], sort=False)[["local", "seconds"]].mean().unstack()
    scores = rows["local"][list(dict.fromkeys(frame.column))]
    best = scores.fillna(-1).idxmax(axis=1).where(scores.notna().all(axis=1))
    found = scores.assign(best=best, minutes=rows["seconds"].sum(axis=1) / 60).round(2).reset_index()
    return found.assign(label=found.label.map(label_of))


def own_parameters(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per value of a table of methods' own parameters (``Table.frame``): its held-out score in percent.

    ``gain``: points above the method's first row, its default. ``taken``: of a method the value that gains most, if
    that is over ``NOISE``; the task's tuned tables have it.
    """
    scores = frame.groupby(["method", "variant", "label"], sort=False).local.mean().reset_index()
    gain = scores.local - scores.groupby("method").local.transform(lambda values: values.iloc[0])  # NaN: not run yet
    taken = (gain > NOISE) & (gain == gain.groupby(scores.method).transform("max"))
    return scores.assign(label=scores.label.map(label_of), gain=gain, taken=taken).round(2)


def at_best_rate(cells: Sequence[Cell], tried: Sequence[Cell], folder: Path | None = None) -> list[Cell]:
    """Return one method's ``cells`` at the rate that the stored runs of ``tried``, a column a rate, found best.

    A rate whose run has no score, as one that diverged at once, is none of them; ``ValueError`` where no run has.
    """
    scored = collect(tried, folder).dropna(subset=["local"])
    if scored.empty:
        raise ValueError(f"atlas: no rate of {tried[0].variant!r} has a score; looked at {[c.column for c in tried]}")
    column = best_rates(scored).best[0]
    lr = next(c.experiment.lr for c in tried if c.column == column)
    return [replace(c, experiment=c.experiment.replace(lr=lr)) for c in cells]


def load_entries(cells: Mapping[str, Sequence[Cell]], folder=None) -> Entries:
    """Load what is stored of each task's cells; of a method the seeds that all of its task's methods have.

    A task without the two rows that scores are measured by, or with these alone, is left out. So is, with a warning, a
    task whose whole model is not above its smallest level, or on all test examples far below the whole net of a method
    under caps: it did not train, and what lies between the two says nothing.
    """
    clients: dict[str, dict[str, np.ndarray]] = {}
    flags: dict[tuple[str, str], tuple[str, ...]] = {}
    for task, grid in cells.items():
        runs = {(c.variant, c.seed): run for c in grid if (run := shown_run(c.experiment, folder)) is not None}
        by = {v: {s for u, s in runs if u == v} for v in dict.fromkeys(v for v, _ in runs)}
        if not {LOW, HIGH} < set(by):
            continue
        seeds = sorted(set.intersection(*(by[v] for v in (LOW, HIGH))))
        whole = {v: [s for s in seeds if s in found] for v, found in by.items()}
        shared = [s for s in seeds if all(s in own for own in whole.values())] or seeds[:1]
        level = {v: np.mean([scores_of(runs[v, s].summary) for s in shared]) for v in (LOW, HIGH)}
        if level[HIGH] <= level[LOW]:
            warnings.warn(f"atlas: {task} is left out: its whole model is not above its smallest level", stacklevel=2)
            continue
        nets = {v: np.mean([runs[v, s].summary["exits"][-1] for s in shared if (v, s) in runs]) for v in by}
        best = max(nets, key=lambda v: nets[v])
        if nets[best] > nets[HIGH] + UNTRAINED:
            said = f"{nets[HIGH]:.2f} on all test examples, where {best}'s has {nets[best]:.2f}"
            warnings.warn(f"atlas: {task} is left out: its whole model did not train ({said})", stacklevel=2)
            continue
        for variant, own in whole.items():
            if set(shared) <= set(own):
                clients.setdefault(task, {})[variant] = np.array([scores_of(runs[variant, s].summary) for s in shared])
                flags[task, variant] = tuple(sorted({f for s in shared for f in flags_of(runs[variant, s], "local")}))
    return Entries(clients, flags, {c.variant: (label_of(c.label), c.method) for grid in cells.values() for c in grid})


def scores_of(summary: Mapping) -> list[float]:
    """Return each client's score, by the deepest exit that it holds."""
    personal = summary["personal"]
    found = personal.get("last_by_client", personal["by_client"])
    return [found[client] for client in sorted(found, key=int)]


def judge(predictions: Mapping[str, Mapping], entries: Entries, caps: str, resamples: int = RESAMPLES) -> pd.DataFrame:
    """Judge, a row each, the predictions that speak of ``caps``: whether the pair's first is above its second.

    Of its tasks those count that the prediction names. ``difference``: of the two interquartile means, with the
    bootstrap's interval. With fewer than five seeds a verdict is indicative.
    """
    rows, rng = [], numpy_generator(0, "atlas predictions")
    for name, told in predictions.items():
        if caps not in told.get("caps", [caps]):
            continue
        tasks = {
            t: by for t, by in entries.clients.items() if t in told.get("tasks", [t]) and set(told["pair"]) <= set(by)
        }
        row = {"prediction": name, "says": told["says"], "source": told["source"]}
        if not tasks:
            rows.append(row | {"verdict": "not testable"})
            continue
        of = replace(entries, clients=tasks)
        drawn = []
        for again in (of, *(resampled(of, rng) for _ in range(resamples))):
            with suppress(ValueError):  # a draw in which the whole model is not above the smallest level
                one, other = (interquartile_mean(again.of(m)) for m in told["pair"])
                drawn.append(one - other)
        low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        verdict = "holds" if low > 0 else "contradicted" if high < 0 else "undecided"
        seeds = min(len(scores) for by in tasks.values() for scores in by.values())
        indicative = ", indicative" if seeds < 5 and verdict != "undecided" else ""
        rows.append(row | {"difference": drawn[0], "low": low, "high": high, "verdict": verdict + indicative})
    columns = ["prediction", "says", "source", "difference", "low", "high", "verdict"]
    return pd.DataFrame(rows, columns=columns)
