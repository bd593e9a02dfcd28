"""A finished run goes on: its last state is round t of a longer run, where nothing before depends on the end."""

import shutil
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.storage import write_tensors
from fedlib.engine.checks import check_experiment
from fedlib.engine.rounds import is_due
from fedlib.engine.schedules import round_rate
from fedlib.methods import Server

from .checkpoints import NEWEST, Checkpoints, last_state
from .identity import Accept
from .record import Run
from .run_paths import Folder, as_stored, check_place, run_path
from .store import find_run, run


def extend(e: Experiment, rounds: int, folder: Folder = None, accept: Accept = (), **how: Any) -> Run:
    """Return the run of ``e`` over more ``rounds``, going on from its stored run: the same numbers as from the start.

    ``how`` are further arguments of :func:`run` but ``wait``. The shorter run stays as it is; rounds of the longer one
    that are stored already are kept. ``ValueError`` says why where it cannot be: a schedule or a method that is paced
    by the number of rounds, a run that is missing, diverged, or came without its weights. A class of your own has to
    say by itself that it is not paced (``Method.paced_by``).
    """
    there, longer = run_path(e, folder), as_stored(e.replace(rounds=rounds), folder)
    if not ((path := run_path(longer, folder)) / "experiment.json").exists():
        server, state = _check(e, longer, folder, accept)
        longer = longer.replace(evaluate_every=state.experiment.looks_every)  # its curve goes on
        state.experiment, state.final = longer, {}
        state.metrics = [m for m in state.metrics if is_due(longer, m["t"])]
        check_place(path)
        path.mkdir(parents=True, exist_ok=True)
        for name in ("clients", "mirrors"):
            if (there / name).is_dir():
                shutil.copytree(there / name, path / name, dirs_exist_ok=True)
        if (best := there / "best.safetensors").is_file():
            shutil.copy(best, path)
        write_tensors(path / NEWEST, *state.contents(server))  # last: without it the rest counts nothing
    return run(longer, folder=folder, accept=accept, **how)


def _check(e: Experiment, longer: Experiment, folder: Folder, accept: Accept) -> tuple[Server, Checkpoints]:
    """Return the last state of the stored run of ``e``; ``ValueError`` if ``longer`` cannot go on from it."""
    said, method = f"{e.slug} cannot go on to rounds = {longer.rounds}: ", check_experiment(longer)
    if longer.rounds <= e.rounds:
        raise ValueError(f"{said}it has {e.rounds} already")
    if method.paced_by:
        raise ValueError(f"{said}by {method.paced_by}, {e.method} does in round t what depends on the number of rounds")
    cls = type(method)
    if not cls.__module__.startswith(("fedlib.", "fedlib_lab.")) and "paced_by" not in vars(cls):
        how = "if nothing does, say paced_by = '' in its class, and accept='method' here"
        raise ValueError(f"{said}{e.method} does not say whether round t depends on the number of rounds; {how}")
    other = next((t for t in range(1, e.rounds + 1) if round_rate(e, t) != round_rate(longer, t)), None)
    if other is not None:
        rates = f"{round_rate(e, other):.4g} in round {other} there, {round_rate(longer, other):.4g} in the longer run"
        raise ValueError(f"{said}schedule = {e.schedule!r} is paced by the number of rounds: the rate is {rates}")
    stored = find_run(e, folder, accept)
    if stored is None or stored.summary["status"] != "finished":
        raise ValueError(f"{said}its run is {stored.summary['status'] if stored else 'not stored'}; run it first")
    if (state := last_state(stored)) is None:
        raise ValueError(f"{said}{stored.path} came without its weights, which stay on the machine that trained them")
    return state
