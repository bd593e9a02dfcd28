"""Stored runs: asking for a stored experiment returns it at once, an interrupted one goes on from its checkpoint.

``outputs/runs/<slug>/`` holds ``experiment.json`` (with provenance), ``metrics.jsonl`` (a line per evaluated round),
``checkpoint.safetensors`` and ``clients/`` while it runs, and ``summary.json``, written last: its existence means done.
"""

import json
import os
import platform
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .checks import check_experiment
from .executors import Execution
from .experiment import Experiment
from .federation import Federation, build_federation
from .memories import ClientFiles
from .methods import METHODS, Server
from .project import outputs_dir
from .rounds import Round, run_rounds
from .storage import read_json, read_tensors, write_json, write_tensors


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
    """The stored run of ``e``, or None if it is missing or unfinished. ``ValueError`` if its files are damaged."""
    path = run_path(e, folder)
    if not (path / "summary.json").exists():
        return None
    stored = Experiment.from_dict(read_json(path / "experiment.json")["experiment"], str(path / "experiment.json"))
    if stored.to_dict() != e.to_dict():
        raise ValueError(f"{path} holds another experiment of the same name; move it away")
    return Run(e, path, read_json(path / "summary.json"), _read_metrics(path / "metrics.jsonl"))


def run(
    e: Experiment,
    execution: Execution = Execution(),
    folder: Path | None = None,
    progress: bool = True,
    checkpoint_seconds: float = 20.0,
    wait: bool = True,
) -> Run | None:
    """Return the run of ``e``: from the store, resumed, or from the start.

    If another process is running it, wait for that one (or return None with ``wait=False``). A run whose loss becomes
    infinite or NaN ends with status ``diverged``: a result like any other.
    """
    from filelock import FileLock, Timeout

    if (stored := find_run(e, folder)) is not None:
        return stored
    federation = build_federation(e, execution.home)  # refuses bad input before the folder exists
    path = run_path(e, folder)
    path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path / ".lock", timeout=-1 if wait else 0):
            if (stored := find_run(e, folder)) is None:
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
    missing = [e for e in experiments if find_run(e, folder) is None]
    if execution.executor == "ray":
        _spread(list(dict.fromkeys(missing)), execution, folder or outputs_dir() / "runs", progress, checkpoint_seconds)
        return [find_run(e, folder) for e in experiments]
    bar = tqdm(missing, desc="runs", disable=not progress or not missing)
    busy = [e for e in bar if run(e, execution, folder, progress, checkpoint_seconds, wait=False) is None]
    for e in busy:
        run(e, execution, folder, progress, checkpoint_seconds)
    return [find_run(e, folder) for e in experiments]


def _spread(missing: list[Experiment], execution: Execution, folder: Path, progress: bool, seconds: float) -> None:
    """Run ``missing`` on a Ray cluster: first what no other process holds, then wait for the rest."""
    from tqdm.auto import tqdm

    from .spread import spread

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
    torch.set_num_threads(1)
    METHODS.update(methods)
    alone = replace(execution, executor="threads", address=None, workers=1)
    return run(e, alone, probe.parent, False, seconds, wait) is not None


def _continue(f: Federation, execution: Execution, path: Path, progress: bool, checkpoint_seconds: float) -> None:
    """Run the rounds that are not in the checkpoint and write the summary."""
    from tqdm.auto import tqdm

    write_json(path / "experiment.json", {"experiment": f.experiment.to_dict(), "provenance": provenance(execution)})
    store = _Checkpoints(path)
    server = store.restore(f)
    bar = tqdm(
        total=f.experiment.rounds, initial=server.t, desc=f.experiment.slug, disable=not progress, leave=False,
        mininterval=0.5,
    )  # fmt: skip
    saved, record = time.monotonic(), None
    with bar:
        for r in run_rounds(f, execution, server, store.memories):
            store.note(r)
            if r.metrics is not None:
                bar.set_postfix(accuracy=f"{r.metrics['accuracy']:.1f}%", refresh=False)
            bar.update()
            if r.diverged or r.t == f.experiment.rounds:
                record = r
                break
            if time.monotonic() - saved >= checkpoint_seconds:
                store.save(r.server)
                saved = time.monotonic()
    _finish(f, store, record, path)


def _finish(f: Federation, store: "_Checkpoints", last: Round | None, path: Path) -> None:
    """Write the last checkpoint, then the summary."""
    from .evaluation import evaluate

    if last is not None:
        metrics = last.metrics if last.metrics is not None else evaluate(f, last.server)
        status = "diverged" if last.diverged else "finished"
        store.save(last.server, {"t": last.t, "status": status, **metrics})
    summary = dict(store.final, seconds=round(store.seconds, 2), num_examples=int(f.data.num_examples.sum()))
    write_json(path / "summary.json", summary)


class _Checkpoints:
    """One checkpoint, replaced atomically; client memories in files by round that the checkpoint names."""

    def __init__(self, path: Path):
        self.path = path
        self.seconds, self.final = 0.0, {}
        self.memories = ClientFiles(path / "clients")
        self.lines: list[dict] = []  # metrics not yet written

    def note(self, r: Round) -> None:
        """Remember what a round changed until the next :meth:`save`."""
        self.seconds += r.seconds
        if r.metrics is not None:
            loss = sum(r.losses.values()) / len(r.losses)
            self.lines.append({"t": r.t, **r.metrics, "train_loss": round(loss, 6), "seconds": round(self.seconds, 2)})

    def save(self, server: Server, final: dict | None = None) -> None:
        """Memories, then metrics, then the checkpoint that makes both count; then drop what nothing names."""
        self.final = final or {}
        self.memories.write(server.t)
        with open(self.path / "metrics.jsonl", "a") as f:
            f.writelines(json.dumps(line) + "\n" for line in self.lines)
            f.flush()
            os.fsync(f.fileno())
        self.lines = []
        tensors = {f"params/{k}": v for k, v in server.params.items()}
        tensors |= {f"memory/{k}": v for k, v in server.memory.items()}
        metadata = {"t": server.t, "memories": self.memories.rounds, "seconds": self.seconds, "final": self.final}
        write_tensors(self.path / "checkpoint.safetensors", tensors, metadata)
        self.memories.drop_replaced()

    def restore(self, f: Federation) -> Server:
        """The state to go on from (round 0 if there is no checkpoint); forgets metrics of rounds that did not count."""
        file, metrics = self.path / "checkpoint.safetensors", self.path / "metrics.jsonl"
        server, self.memories.device = f.server, str(f.device)
        if file.exists():
            tensors, metadata = read_tensors(file, str(f.device))
            parts = {p: {k[len(p) :]: v for k, v in tensors.items() if k.startswith(p)} for p in ("params/", "memory/")}
            server = Server(metadata["t"], parts["params/"], parts["memory/"])
            self.memories.rounds = {int(c): t for c, t in metadata["memories"].items()}
            self.seconds, self.final = metadata["seconds"], metadata["final"]
        kept = [line for line in _read_metrics(metrics) if line["t"] <= server.t]
        metrics.write_text("".join(json.dumps(line) + "\n" for line in kept))
        self.memories.drop_unnamed()
        if self.final:  # killed between the last checkpoint and the summary
            server = Server(f.experiment.rounds, server.params, server.memory)
        return server


def _read_metrics(file: Path) -> list[dict]:
    """The complete lines of a metrics file; a last line cut short by a kill is not one."""
    if not file.exists():
        return []
    lines = file.read_text().split("\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except json.JSONDecodeError as error:
        raise ValueError(f"{file} is damaged ({error}); delete the run's folder to run it again") from error


def provenance(execution: Execution) -> dict:
    """Versions and hardware that produced a run (not part of the experiment)."""
    from . import __version__

    device = torch.cuda.get_device_name() if execution.home.startswith("cuda") else _cpu_name()
    return {
        "fedlib": __version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "device": device,
        "cores": os.cpu_count(),
        "executor": execution.executor,
        "workers": execution.workers if execution.executor == "ray" else execution.threads(),  # None: all of a cluster
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
