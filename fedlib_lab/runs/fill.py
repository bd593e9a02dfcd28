"""The queue of missing runs: what the grids of ``params/`` lack, most telling first, run until a deadline.

:func:`queue` lists them: tables in order of their ``priority``, and of equal ones the first seed of all before the
second. :func:`fill` runs them, several at once with a core each, in processes of lowest priority. A run is stored by
``store.py``: killed at any moment it goes on from its checkpoint, and its lock lets other processes share the queue.
Read next: ``runs/params.py``, ``runs/store.py``.
"""

import contextlib
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.core.storage import DamagedFile, read_lines
from fedlib.core.validation import check_known
from fedlib.data.datasets import is_available
from fedlib.engine.executors import Execution
from fedlib.models.registry import tokenizer_of

from ..executors.processes import sendable_error
from .costs import about, each_seconds
from .identity import OtherInputs
from .params import Cell, load_grid, load_spec
from .params_files import grids, papers, profiles
from .progress import Watch
from .side_by_side import A_GPU, DIED, GRACE_SECONDS, at_once, hand_out, here, likeness, run_stack, stacks
from .store import Folder, Run, find_run, run, run_path, stored_pace

ONE_CORE = Execution(workers=1)


@dataclass(frozen=True)
class Job:
    """A missing run: the table that asks for it first, its place there, and the core-seconds left (nan: not priced)."""

    grid: str
    cell: Cell
    seconds: float

    def __str__(self) -> str:
        return f"{self.grid}, {self.cell.column}, {self.cell.label}, {self.cell.finetune}, seed {self.cell.seed}"

    def plain(self) -> dict[str, object]:
        """Return it as JSON holds it, with the name of its run."""
        place = {k: getattr(self.cell, k) for k in ("column", "variant", "finetune", "seed")}
        seconds = None if math.isnan(self.seconds) else round(self.seconds, 1)
        return {"table": self.grid, **place, "run": run_path(self.cell.experiment).name, "seconds": seconds}


@dataclass(frozen=True)
class Queue:
    """``jobs`` in the order in which they are run, ``skipped`` a sentence on each grid that cannot be run here."""

    jobs: list[Job]
    skipped: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Filled:
    """What became of a queue: runs done, ``failed`` with their sentences, ``left`` for the next time."""

    done: list[Job]
    failed: list[tuple[Job, str]]
    left: list[Job]


def named(names: Iterable[str] = ()) -> list[tuple[str, str]]:
    """List the (paper, table) of each ``PAPER`` or ``PAPER/TABLE``, by default of all ``params/``.

    ``ValueError`` names a typo.
    """
    out = []
    for name in list(names) or papers():
        paper, _, table = name.partition("/")
        out += [(paper, t) for t in ([table] if table else grids(paper))]
    for paper, table in out:
        load_spec(paper, table)
    return list(dict.fromkeys(out))


def queue(
    wanted: Sequence[tuple[str, str]], profile: str = "small", folder: Folder = None, columns: Collection[str] = (),
    until: float = math.inf,
) -> Queue:  # fmt: skip
    """List the missing runs of the tables ``wanted`` whose data are at hand, in ``columns`` (none named: all of them).

    Nothing is run, nothing is written. From ``until`` on (``time.monotonic``) no more of them are priced by counting.
    ``ValueError`` names a column that no table has.
    """
    known = {c: None for paper, table in wanted for c in load_spec(paper, table)["columns"]}
    check_known(columns, known, "columns = {} is in none of these tables")
    check_known([profile], profiles(), "profile = {} is unknown")
    found, missing, skipped = list[Run](), list[tuple[int, str, Cell]](), list[str]()
    for paper, table in wanted:
        grid, absent, refused = f"{paper}/{table}", Counter(), []
        try:
            cells, priority = load_grid(paper, table, profile), load_spec(paper, table).get("priority", 9)  # the last
        except ValueError as error:
            skipped.append(f"{grid}: {error}")
            continue
        for cell in (c for c in cells if not columns or c.column in columns):
            try:
                stored = find_run(cell.experiment, folder)
            except OtherInputs as error:
                refused.append(str(error))
                continue
            except DamagedFile:  # rebuilt from its checkpoint, or said why not, by who runs it
                stored = None
            if stored is not None:
                found.append(stored)
            elif is_available(cell.experiment.dataset, tokenizer_of(cell.experiment.backbone)):
                missing.append((priority, grid, cell))
            else:
                absent[cell.experiment.dataset] += 1
        skipped += [f"{grid}: {absent[d]} runs wait for {d!r}, which is not at hand (see FEDLIB_DATA)" for d in absent]
        if refused:
            skipped.append(f"{grid}: {len(refused)} stored runs are not believed; {refused[0]}")
    first: dict[Experiment, tuple[str, Cell]] = {}
    for _, grid, cell in sorted(missing, key=lambda job: (job[0], job[2].seed)):
        first.setdefault(cell.experiment, (grid, cell))
    seconds = each_seconds(list(first), stored_pace(found, ONE_CORE, elsewhere=True), ONE_CORE, until)
    left = [s * _share_left(e, folder) for e, s in zip(first, seconds, strict=True)]
    return Queue([Job(*place, s) for place, s in zip(first.values(), left, strict=True)], skipped)


def _share_left(e: Experiment, folder: Folder) -> float:
    """Return the share of ``e`` left after its last evaluated round (an interrupted run may be further)."""
    with contextlib.suppress(DamagedFile, IndexError):
        return 1 - read_lines(run_path(e, folder) / "metrics.jsonl")[-1]["t"] / e.rounds
    return 1.0


def core_hours(jobs: Iterable[Job]) -> str:
    """Say in core-hours, or core-minutes, what ``jobs`` still take."""
    every = np.array([j.seconds for j in jobs])
    seconds, unknown = np.nansum(every), int(np.isnan(every).sum())
    told = f"{seconds / 3600:.1f} core-hours" if seconds >= 3600 else f"{math.ceil(seconds / 60)} core-minutes"
    return told + f" and {unknown} runs that were not priced" * (unknown > 0)


def fill(
    jobs: Sequence[Job], minutes: float | None = None, workers: int | None = None, folder: Folder = None,
    stop: threading.Event | None = None, tell: Callable[[str], None] = partial(print, flush=True),
    checkpoint_seconds: float = 20.0, device: str = "cpu",
) -> Filled:  # fmt: skip
    """Run ``jobs`` in their order on ``workers`` cores (None: all), for so many ``minutes``, or until ``stop`` is set.

    Each run has a core; the last one has all that are free. On GPUs (``device`` as of :class:`Execution`) ``workers``
    new processes take turns over the GPUs (None: as ``side_by_side.at_once`` says), and those that differ in seed, rate
    or split alone train together in one, when the first of them is due. What runs towards the end is asked to stop a
    sixth of the minutes before it (at most a minute), is killed at it, and goes on from its checkpoint the next time.
    A run that fails is told of and does not stop the others; one whose process dies is tried once more; one that
    another process holds is left to it.
    """
    execution, began, stop = Execution(device), time.monotonic(), stop or threading.Event()
    workers = workers or (_cores() if device == "cpu" else at_once(execution))
    filled, grace = Filled([], [], list(jobs)), GRACE_SECONDS if minutes is None else min(GRACE_SECONDS, 10 * minutes)

    def seconds_left() -> float:
        left = math.inf if minutes is None else 60 * minutes - grace - (time.monotonic() - began)
        return 0.0 if stop.is_set() else left

    answer = partial(_answer, str(folder or outputs_dir() / "runs"), checkpoint_seconds, execution)
    new, groups = device != "cpu", dict[object, list[Job]]()
    for job in jobs:
        groups.setdefault(likeness(job.cell.experiment) if new else job, []).append(job)
    todo = [*map(tuple, groups.values())]
    with contextlib.closing(hand_out(todo, workers, answer, Watch([], False), seconds_left, grace, new)) as answers:
        for group, each in answers:
            for job, answer in zip(group, each if isinstance(each, list) else [each] * len(group), strict=True):
                words = _note(filled, job, answer)
                tell(f"{len(filled.done)} of {len(jobs)} done, about {core_hours(filled.left)} left: {words}")
    return filled


def _note(filled: Filled, job: Job, answer: dict | Exception | None) -> str:
    """Record in ``filled`` what became of ``job``; return a sentence on it."""
    if not isinstance(answer, dict):
        filled.failed.append((job, DIED if answer is None else str(answer) or type(answer).__name__))
        return f"{job} failed"
    if not answer:
        return f"{job} is being run by another process"
    filled.done.append(job)
    filled.left.remove(job)
    return f"{job}: {answer['accuracy']:.1f} %, {about(answer['seconds'])}"


def _cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _answer(folder: str, seconds: float, execution: Execution, group: Sequence[Job], cores: int, watch: Watch) -> list:
    """Run ``group``, together as far as ``side_by_side.stacks`` says; return what :func:`_run_job` says of each."""
    every, how, answers = [job.cell.experiment for job in group], here(execution, cores), {}
    run_one = partial(_run_job, folder, seconds, answers)
    with contextlib.suppress(Exception):  # what is refused is so in its turn
        for stack in stacks(every, how, A_GPU):
            run_stack(run_one, stack, how, watch)
    for e in [e for e in every if e not in answers]:
        run_one(e, watch, how)
    return [answers[e] for e in every]


def _run_job(folder: str, seconds: float, answers: dict, e: Experiment, _: Watch, how: Execution) -> None:
    """Run ``e`` at the lowest priority; answer: accuracy and seconds, its error, or {} if another process has it."""
    with contextlib.suppress(AttributeError, OSError):  # not on every system
        os.nice(19)
        Path("/proc/self/autogroup").write_text("19")  # Linux weighs a session's processes as one group
    try:
        done = run(e, how, folder, False, seconds, wait=False)
        answers[e] = {k: done.summary[k] for k in ("accuracy", "seconds")}
    except TimeoutError:
        answers[e] = {}
    except Exception as error:
        answers[e] = sendable_error(error)
