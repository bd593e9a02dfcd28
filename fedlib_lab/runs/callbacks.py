"""Looking at a run while it goes on: ``run(e, callbacks=[Tracker("tensorboard"), EarlyStopping(patience=5)])``.

Callbacks are no part of an experiment: what they see is stored under the same name with and without them. One that
stops a run leaves it unfinished: its state is stored, its numbers are returned with status ``stopped``, and without
the callback it goes on from there. Trackers are accelerate's.
Read next: ``engine/rounds.py`` (``Finished``), ``runs/store.py``.
"""

import json
import math
import os
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from typing import Any, Literal

from fedlib.core.annotations import Count
from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.core.storage import read_tensors, write_tensors
from fedlib.core.validation import check_known, check_type, convert
from fedlib.engine.rounds import Finished
from fedlib.methods.mixtures import under

from .record import Run, without_bulk
from .run_paths import run_path

OnRound = Callable[[Finished], bool | None] | None


class Callback:
    """What a run tells. Every hook may be left out. Only ``True`` stops a run, not another value that counts as true.

    Numbers and mappings are copies: changing them changes nothing that is stored. Tensors and mirrors are the run's
    own, to be read and not written in place: copies of them would cost as much as a checkpoint every round.
    A callback is told of one run after the other. Of a run that is read from the store nothing is told.
    """

    def check(self, e: Experiment) -> None:
        """Refuse ``e`` before any compute (``ValueError``), or that a package is missing (``ImportError``)."""

    def begin(self, e: Experiment, t: int, metrics: Sequence[dict]) -> bool | None:
        """Handle a run that begins (``t`` = 0) or goes on after round ``t``; return True to stop it at once.

        ``metrics`` are those of the rounds before.
        """

    def round(self, r: Finished) -> bool | None:
        """Handle the end of round ``r``; return True to stop the run here."""

    def end(self, run: Run | None) -> None:
        """Handle the end of the run that began, also if stopped; ``run`` is None if it was interrupted, or failed."""


class Together(Callback):
    """Several callbacks as one, and ``on_round``, a function of the finished round; each is told, whoever stops."""

    def __init__(self, callbacks: Iterable[Callback] = (), on_round: OnRound = None):
        check_type(callbacks, Iterable, "callbacks")
        if on_round is not None:
            check_type(on_round, Callable, "on_round")
        self.each, self.on_round, self.begun = list(callbacks), on_round, []

    def check(self, e: Experiment) -> None:
        for c in self.each:
            check_type(c, Callback, "callbacks: one of them")
            c.check(e)

    def begin(self, e: Experiment, t: int, metrics: Sequence[dict]) -> bool:
        self.begun, stops = [], []
        for c in self.each:
            stops.append(c.begin(e, t, deepcopy(metrics)) is True)
            self.begun.append(c)
        return any(stops)

    def round(self, r: Finished) -> bool:
        told = [c.round for c in self.begun] + ([self.on_round] if self.on_round is not None else [])
        return any([tell(_apart(r)) is True for tell in told])

    def end(self, run: Run | None) -> None:
        while self.begun:
            self.begun.pop().end(run)


def _apart(r: Finished) -> Finished:
    """Copy what ``r`` holds, down to the numbers, but neither tensors nor mirrors."""
    server = replace(r.server, params=dict(r.server.params), memory=dict(r.server.memory))
    memories = {c: dict(x) for c, x in r.memories.items()}
    return replace(r, server=server, memories=memories, losses=dict(r.losses), metrics=deepcopy(r.metrics))


class EarlyStopping(Callback):
    """Stop after ``patience`` evaluations in a row without a ``metric`` above the best before them by over ``least``.

    It looks at validation examples, never at the test set: ``check`` refuses ``evaluate_on = "test"``.
    """

    def __init__(self, patience: int = 5, metric: str = "accuracy", least: float = 0.0):
        self.patience: int = convert(patience, Count, "EarlyStopping: patience")
        self.metric: str = convert(metric, Literal["accuracy", "ensemble"], "EarlyStopping: metric")
        self.least: float = convert(least, float, "EarlyStopping: least")

    def check(self, e: Experiment) -> None:
        why = f"evaluate_on = {e.evaluate_on!r} would choose by test examples; use validation"
        if e.evaluate_on == "validation":
            why = "" if e.looks_every else "evaluate_every = 0 evaluates after the last round alone; allowed: 1, 2, …"
        if why:
            raise ValueError(f"{type(self).__name__}: {why}")

    def begin(self, e: Experiment, t: int, metrics: Sequence[dict]) -> bool | None:
        self.best, self.since = -math.inf, 0
        return any([self._look(m) for m in metrics])

    def round(self, r: Finished) -> bool | None:
        return r.metrics is not None and self._look(r.metrics)

    def _look(self, metrics: Any) -> bool:
        check_known([self.metric], metrics, "EarlyStopping: metric = {} is not measured")
        better = metrics[self.metric] is not None and metrics[self.metric] > self.best + self.least
        self.best, self.since = (metrics[self.metric], 0) if better else (self.best, self.since + 1)
        return self.since >= self.patience


class KeepBest(EarlyStopping):
    """Keep the server's tensors of the best evaluated round beside the last, in the run's ``best.safetensors``.

    By validation examples, as early stopping. What is reported stays what the last round gave; the file's metadata say
    its round and what was measured. ``folder`` is that of the run, None: ``outputs/runs``.
    """

    def __init__(self, metric: str = "accuracy", folder: str | os.PathLike | None = None):
        super().__init__(metric=metric)
        self.folder = folder

    def begin(self, e: Experiment, t: int, metrics: Sequence[dict]) -> None:
        self.file = run_path(e, self.folder) / "best.safetensors"
        said = read_tensors(self.file)[1] if self.file.exists() else {}
        self.best = said.get(self.metric, -math.inf) if said.get("t", 0) <= t else -math.inf  # else another training's

    def round(self, r: Finished) -> None:
        now = (r.metrics or {}).get(self.metric)
        if now is not None and now > self.best and not r.diverged:
            self.best, tensors = now, under("params", r.server.params) | under("memory", r.server.memory)
            write_tensors(self.file, tensors, {"t": r.t, self.metric: now})


def scalars(r: Finished) -> dict[str, float]:
    """Return ``r`` in numbers: ``accuracy``, ``exits/1``, ``personal/sd`` (percent), ``train_loss``, ``seconds``."""
    losses = [x for x in r.losses.values() if math.isfinite(x)]
    found = {"train_loss": sum(losses) / len(losses)} if losses else {}
    return found | {"seconds": r.seconds} | dict(_numbers("", without_bulk(r.metrics or {})))


def _numbers(name: str, value: Any):
    of = value.items() if isinstance(value, dict) else enumerate(value, 1) if isinstance(value, (list, tuple)) else ()
    for k, v in of:
        yield from _numbers(f"{name}/{k}" if name else str(k), v)
    if isinstance(value, (int, float)) and math.isfinite(value):
        yield name, float(value)


NAMES = {"clearml": "task_name", "mlflow": "run_name", "swanlab": "experiment_name", "trackio": "name", "wandb": "name"}


class Tracker(Callback):
    """Hand :func:`scalars` to ``name``, one of accelerate's trackers: tensorboard, mlflow, wandb, trackio, aim, ….

    Each needs its own package. ``project`` is what runs are gathered under, of tensorboard and aim their folder (None:
    ``outputs/<name>``); ``options`` are those of accelerate's class. MLflow's address is ``MLFLOW_TRACKING_URI``.
    """

    def __init__(self, name: str, project: str | os.PathLike | None = None, **options: object):
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        check_known([name], LOGGER_TYPE_TO_CLASS, "Tracker: name = {} is not possible")
        self.name, self.kind, self.project, self.options = name, LOGGER_TYPE_TO_CLASS[name], project, options

    def check(self, e: Experiment) -> None:
        from accelerate import PartialState
        from accelerate.tracking import LoggerType, get_available_trackers

        if self.name in {*LoggerType.list()} - {*map(str, get_available_trackers())}:
            raise ImportError(f"Tracker: {self.name} needs a package: pip install {self.name}")
        PartialState()  # for accelerate's own logger
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")  # else minutes where nobody answers

    def begin(self, e: Experiment, t: int, metrics: Sequence[dict]) -> None:
        in_folder = self.kind.requires_logging_directory  # and named after the run
        where = (e.slug, self.project or outputs_dir() / self.name) if in_folder else (self.project or "fedlib",)
        named = {NAMES[self.name]: e.slug} if self.name in NAMES else {}
        named |= {"purge_step": t + 1} if self.name == "tensorboard" else {}  # rounds that a kill undid
        self.tracker = self.kind(*where, **named | self.options)
        self.tracker.start()
        fields = {k: v if isinstance(v, str | int | float) else json.dumps(v) for k, v in e.to_dict().items()}
        self.tracker.store_init_configuration(fields)

    def round(self, r: Finished) -> None:
        self.tracker.log(scalars(r), step=r.t)

    def end(self, run: Run | None) -> None:
        if run is None and self.name == "mlflow":  # accelerate would say FINISHED
            import_module("mlflow").end_run("KILLED")
        self.tracker.finish()
