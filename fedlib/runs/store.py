"""Stored runs: asking for a stored experiment returns it at once, an interrupted one goes on from its checkpoint.

``outputs/runs/<slug>/`` holds ``experiment.json`` (with provenance), ``metrics.jsonl`` (a line per evaluated round),
the checkpoints and ``clients/`` (``checkpoints.py``), and ``summary.json``, written last: its existence means done.
"""

import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..core.experiment import Experiment
from ..core.paths import outputs_dir
from ..core.profiling import phase
from ..core.storage import DamagedFile, read_json, read_lines, write_json
from ..engine.checks import check_experiment
from ..engine.executors import Execution, become_worker
from ..engine.federation import Federation, build_federation
from ..engine.privacy import privacy_spent
from ..engine.rounds import Finished, is_due, measure, run_rounds
from ..layers.matmul import choose_products
from ..methods import METHODS
from .checkpoints import Checkpoints


@dataclass(frozen=True)
class Run:
    """A stored result. ``summary`` has status, accuracy, exits, seconds; ``metrics`` a record per evaluated round."""

    experiment: Experiment
    path: Path
    summary: dict
    metrics: list[dict]

    @property
    def accuracy(self) -> float:
        """Mean over exits after the last round, percent."""
        return self.summary["accuracy"]


def run_path(e: Experiment, folder: Path | None = None) -> Path:
    """Where ``e`` is stored."""
    return (folder or outputs_dir() / "runs") / e.slug


def find_run(e: Experiment, folder: Path | None = None) -> Run | None:
    """The stored run of ``e``, or None if it is missing or unfinished; ``DamagedFile`` names a file not to believe."""
    path = run_path(e, folder)
    if not (path / "summary.json").exists():
        return None
    stored = Experiment.from_dict(read_json(path / "experiment.json")["experiment"], str(path / "experiment.json"))
    if stored.to_dict() != e.to_dict():
        raise ValueError(f"{path} holds another experiment of the same name; move it away")
    summary, metrics = read_json(path / "summary.json"), read_lines(path / "metrics.jsonl")
    found, due = [m["t"] for m in metrics], [t for t in range(1, summary["t"] + 1) if is_due(e, t)]
    if found != due:
        raise DamagedFile(path / "metrics.jsonl", f"it holds rounds {found} instead of {due}")
    return Run(e, path, summary, metrics)


def _find_good(e: Experiment, folder: Path | None) -> Run | None:
    """:func:`find_run`, but None if a file is damaged that the run's checkpoint can rebuild."""
    try:
        return find_run(e, folder)
    except DamagedFile as error:
        if not Checkpoints(run_path(e, folder), e).exists():
            raise
        warnings.warn(f"{error.path} is damaged ({error.reason}): rebuilding it from the checkpoint", stacklevel=3)
        return None


def run(
    e: Experiment,
    execution: Execution = Execution(),
    folder: Path | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 20.0,
    wait: bool = True,
) -> Run | None:
    """Return the run of ``e``: from the store, resumed, or from the start.

    If another process is running it, wait for that one (or return None with ``wait=False``). A run whose loss or update
    becomes infinite or NaN ends with status ``diverged``: a result like any other (see ``Experiment.nonfinite``).
    """
    from filelock import FileLock, Timeout

    if (stored := _find_good(e, folder)) is not None:
        return stored
    path = run_path(e, folder)
    _check_folder(path)
    federation = build_federation(e, execution.home)  # refuses bad input before the folder exists
    privacy_spent(federation, e.rounds)  # and noise without an accountant
    path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path / ".lock", timeout=-1 if wait else 0):
            if (stored := _find_good(e, folder)) is None:
                _continue(federation, execution, path, progress, checkpoint_seconds)
                stored = find_run(e, folder)
    except Timeout:
        return None
    return stored


def run_all(
    experiments: Iterable[Experiment],
    execution: Execution = Execution(),
    folder: Path | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 20.0,
    executor: str | None = None,
) -> list[Run]:
    """Run what is missing and return all runs in order. Processes working on the same list share it by locks.

    ``executor`` stands for ``execution.executor``. With ``ray``, whole experiments are spread over the cluster, each on
    one core or on a share of a GPU; its nodes must see ``folder`` under the same path.
    """
    from tqdm.auto import tqdm

    execution = execution if executor is None else replace(execution, executor=executor)
    experiments = list(experiments)
    missing = [e for e in experiments if _find_good(e, folder) is None]
    if execution.executor == "ray":
        _spread(list(dict.fromkeys(missing)), execution, folder or outputs_dir() / "runs", progress, checkpoint_seconds)
        return [find_run(e, folder) for e in experiments]
    bar = tqdm(missing, desc="runs", disable=not progress or not missing)
    busy = [e for e in bar if run(e, execution, folder, progress, checkpoint_seconds, wait=False) is None]
    for e in busy:
        run(e, execution, folder, progress, checkpoint_seconds)
    return [find_run(e, folder) for e in experiments]


def _check_folder(path: Path) -> None:
    """Raise, before any compute, if ``path`` could not be written or leads elsewhere."""
    for own in (path, path / "clients"):
        if own.is_symlink():
            raise ValueError(
                f"{own} is a symbolic link; a run has folders of its own: put what it points to in its place"
            )
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{nearest} cannot be written, so no run can be stored in it; set FEDLIB_OUTPUTS to a folder that can"
        )


def _spread(missing: list[Experiment], execution: Execution, folder: Path, progress: bool, seconds: float) -> None:
    """Run ``missing`` on a Ray cluster: first what no other process holds, then wait for the rest."""
    from tqdm.auto import tqdm

    from .grid_on_cluster import spread

    methods = {e.method: type(check_experiment(e)) for e in missing}
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as probe:
        for wait in (False, True):
            done = spread(_run_there, missing, execution, Path(probe.name).resolve(), methods, seconds, wait)
            bar = tqdm(done, total=len(missing), desc="runs", disable=not progress or not missing)
            missing = [e for e, found in bar if not found]


def _run_there(e: Experiment, execution: Execution, probe: Path, methods: dict, seconds: float, wait: bool) -> bool:
    """Run ``e`` in a process of the cluster, which learns the methods registered elsewhere. Is it done?"""
    if not probe.exists():
        raise RuntimeError(
            f"node {platform.node()} does not see {probe.parent}: let FEDLIB_OUTPUTS be a folder that all nodes share, "
            "or run one experiment after the other, run(e, Execution(executor='ray')), where only the driver writes"
        )
    become_worker()
    METHODS.update(methods)
    alone = replace(execution, executor="threads", address=None, workers=1)
    return run(e, alone, probe.parent, False, seconds, wait) is not None


def _continue(f: Federation, execution: Execution, path: Path, progress: bool, checkpoint_seconds: float) -> None:
    """Run the rounds that are not in the checkpoint and write the summary."""
    from tqdm.auto import tqdm

    store = Checkpoints(path, f.experiment)
    server = store.restore(f)
    write_json(path / "experiment.json", {"experiment": f.experiment.to_dict(), "provenance": provenance(execution)})
    bar = tqdm(
        total=f.experiment.rounds, initial=server.t, desc=f.experiment.slug, disable=not progress, leave=False,
        mininterval=0.5,
    )  # fmt: skip
    saved, record = time.monotonic(), None
    with bar:
        for r in run_rounds(f, execution, server, store.memories, store.mirrors):
            store.note(r)
            if r.metrics is not None:
                bar.set_postfix(accuracy=f"{r.metrics['accuracy']:.1f}%", refresh=False)
            bar.update()
            if r.diverged or r.t == f.experiment.rounds:
                record = r
                break
            if time.monotonic() - saved >= checkpoint_seconds:
                with phase("files"):
                    store.save(r.server)
                saved = time.monotonic()
    _finish(f, store, record, path)


def _finish(f: Federation, store: Checkpoints, last: Finished | None, path: Path) -> None:
    """Write the last checkpoint, then the summary."""
    if last is not None:
        metrics = last.metrics if last.metrics is not None else measure(f, last.server, store.memories)
        status = "diverged" if last.diverged else "finished"
        with phase("files"):
            store.save(last.server, {"t": last.t, "status": status, **metrics, **store.drops()})
    summary = dict(store.final, seconds=round(store.seconds, 2), num_examples=int(f.data.num_examples.sum()))
    write_json(path / "summary.json", summary)


def provenance(execution: Execution) -> dict:
    """Versions and hardware that produced a run (not part of the experiment)."""
    from .. import __version__

    on_cluster = execution.executor == "ray"
    device = torch.cuda.get_device_name() if execution.home.startswith("cuda") else _cpu_name()
    return {
        "fedlib": __version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "device": device,
        "cores": os.cpu_count(),
        "products": choose_products() if _one_thread_each(execution) else "PyTorch",
        "executor": execution.executor,
        "workers": execution.workers if on_cluster else execution.side_by_side(),  # None: all of a cluster
    }


def _one_thread_each(execution: Execution) -> bool:
    """Do cohorts train on CPU threads that multiply alone? Not a single worker in a process of several threads."""
    apart = execution.executor in ("processes", "ray") or execution.side_by_side() > 1
    return execution.device == "cpu" and (apart or torch.get_num_threads() == 1)


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
