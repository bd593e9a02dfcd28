"""The systems of the engine benchmark as processes: each in its own interpreter, driven line by line through pipes.

Between two commands a system waits for its next line of standard input and uses no processor.
Read next: ``rivals/workload.py`` (the protocol's other end), ``harness.py`` (what is measured).
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from fedlib.core.paths import root

HERE = Path(__file__).parent
RIVALS = HERE / "rivals"
VENVS = root() / ".venv-bench"  # made by setup_rivals.py


# Rivals that are no packages: an environment's name, by which a user's checkout is named, and what is cloned without
CHECKOUTS = {
    "PFLLIB": ("https://github.com/TsingZ0/PFLlib", "d832e76f6a23b833038949ec1e4fdefe63a4d350"),
    "FLBENCH": ("https://github.com/KarhouTam/FL-bench", "06e658bca5af6ce732e25bb7c0f8be321e14a85e"),
}


def checkout(name: str) -> Path:
    """The folder of a rival's code: what the environment variable ``name`` says, else what setup_rivals.py cloned."""
    return Path(os.environ.get(name) or VENVS / name.lower())


@dataclass(frozen=True)
class System:
    """How a system is started. ``venv`` names its environment; None is the interpreter of the caller (fedlib's own)."""

    name: str
    script: str  # in rivals/
    venv: str | None = None
    package: str = "torch"  # whose version is reported
    processes: int = 1  # started side by side by the harness; the first one's answers count
    threads: int = 1  # intra-op, each process
    checkout: str = ""  # of CHECKOUTS: the code of a rival that is no package
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        return Path(sys.executable) if self.venv is None else VENVS / self.venv / "bin" / "python"

    def missing(self) -> str | None:
        """Why it cannot run here, in one sentence; None if it can."""
        if not (RIVALS / self.script).exists():
            return f"rivals/{self.script} does not exist"
        if self.checkout and not checkout(self.checkout).exists():
            return f"no checkout of {self.checkout}: run python -m benchmarks.setup_rivals checkouts"
        if not self.python.exists():
            return f"no environment .venv-bench/{self.venv}: run python -m benchmarks.setup_rivals {self.venv}"
        return None


QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
SYSTEMS = {
    s.name: s
    for s in (
        System("fedlib", "../ours.py", package="fedlib-kit", threads=2),
        System(
            "fedlib, one client at a time",
            "../ours.py",
            package="fedlib-kit",
            env={"BENCH_COHORT": "1", "BENCH_WORKERS": "1"},
        ),
        System(
            "fedlib, one at a time on 2 threads",
            "../ours.py",
            package="fedlib-kit",
            threads=2,
            env={"BENCH_COHORT": "1", "BENCH_EXECUTOR": "threads"},
        ),
        System("bare loop", "bare_loop.py"),
        System("bare loop, 2 threads", "bare_loop.py", threads=2),
        System("two processes", "two_processes.py"),
        System("two processes, channels last", "two_processes.py", env={"BENCH_CHANNELS_LAST": "1"}),
        System("Flower", "flower.py", "flower", "flwr", env=QUIET),
        System("pfl", "pfl_simulation.py", "pfl", "pfl", processes=2),
        System("BlazeFL", "blazefl_simulation.py", "blazefl", "blazefl"),
        System("BlazeFL, threads", "blazefl_threads.py", "blazefl", "blazefl"),
        System("PFLlib", "pfllib.py", "checkouts", threads=2, checkout="PFLLIB"),
        System("FL-bench", "flbench.py", "checkouts", checkout="FLBENCH", env=QUIET),
    )
}


class Running:
    """A started system; ``prepare`` before anything else."""

    def __init__(self, system: System, workload: Path):
        self.system, self.rounds_done, self.began = system, 0, time.perf_counter()
        self.log = tempfile.TemporaryFile("w+")  # standard error: a pipe nobody reads would fill up
        self.processes = [self._start(workload, env) for env in _environments(system)]

    def _start(self, workload: Path, env: Mapping[str, str]) -> subprocess.Popen:
        foreign = {"OMP_WAIT_POLICY"} if self.system.venv is None else {"OMP_WAIT_POLICY", "PYTHONPATH"}
        inherited = {k: v for k, v in os.environ.items() if k not in foreign}
        if self.system.venv is None:  # ours.py imports this package, which is not installed
            inherited["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE.parent), os.environ.get("PYTHONPATH"))))
        threads = str(self.system.threads)
        own = {"OMP_NUM_THREADS": threads, "BENCH_THREADS": threads, "BENCH_PACKAGE": self.system.package}
        if name := self.system.checkout:
            own |= {name: str(checkout(name)), "BENCH_VERSION": f"{self.system.name} {CHECKOUTS[name][1][:8]}"}
        return subprocess.Popen(
            [self.system.python, RIVALS / self.system.script, workload], text=True, env=inherited | own | dict(env),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
        )  # fmt: skip

    def ask(self, command: str, processes: Sequence[subprocess.Popen] | None = None) -> dict:
        """Send one command and wait for the answer; ``RuntimeError`` with the end of its log if the system died."""
        processes = self.processes if processes is None else processes
        try:
            for p in processes:
                print(command, file=p.stdin, flush=True)
            lines = [p.stdout.readline() for p in processes]
        except BrokenPipeError:
            lines = [""]
        if not all(lines):
            self.log.seek(0)
            raise RuntimeError(f"{self.system.name} died at {command!r}:\n{self.log.read()[-6000:]}")
        return json.loads(lines[0])

    def prepare(self) -> float:
        """Seconds from the start of the process until it is ready for the first round."""
        self.versions = self.ask("prepare")
        self.startup_seconds = time.perf_counter() - self.began
        return self.startup_seconds

    def rounds(self, n: int) -> list[float]:
        """Run ``n`` further rounds; seconds of each, taken by the system itself."""
        seconds = self.ask(f"rounds {n}")["seconds"]
        if not self.rounds_done:
            self.first_round_seconds = seconds[0]
        self.rounds_done += n
        return seconds

    def accuracy(self) -> float:
        """Test accuracy of the global model in percent."""
        return self.ask("accuracy", self.processes[:1])["accuracy"]

    def trained(self) -> dict:
        """The global model's trained tensors."""
        from safetensors.torch import load_file

        with tempfile.TemporaryDirectory() as folder:
            self.ask(f"save {folder}/trained", self.processes[:1])
            return load_file(f"{folder}/trained")

    def quit(self) -> None:
        """Let the system end by itself, then end what is left."""
        try:
            self.ask("quit")
            for p in self.processes:
                p.wait(30)
        finally:
            self.kill()

    def kill(self) -> None:
        for p in tree(self.processes):
            p.kill()
        for p in self.processes:
            p.communicate()
        self.log.close()


def _environments(system: System) -> list[dict[str, str]]:
    """One environment a process; several find each other as pfl's documentation says."""
    if system.processes == 1:
        return [dict(system.env)]
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(system.processes)]
        addresses = ",".join(f"127.0.0.1:{s.getsockname()[1]}" for s in sockets)
    ranks = range(system.processes)
    return [{**system.env, "PFL_WORKER_ADDRESSES": addresses, "PFL_WORKER_RANK": str(rank)} for rank in ranks]


def tree(processes: Iterable[subprocess.Popen]) -> list:
    """The processes and all their descendants that still live."""
    import psutil

    out = []
    for p in processes:
        try:
            root = psutil.Process(p.pid)
            out += [*root.children(recursive=True), root]
        except psutil.NoSuchProcess:
            continue
    return out


def select(names: Iterable[str] | None = None) -> tuple[list[System], pd.DataFrame]:
    """The systems that can run here, and a table (system, reason) of those that cannot; None: all of ``SYSTEMS``."""
    names = list(SYSTEMS) if names is None else list(names)
    if unknown := [n for n in names if n not in SYSTEMS]:
        raise ValueError(f"systems: {unknown[0]!r} is unknown; allowed: {', '.join(SYSTEMS)}")
    reasons = {n: SYSTEMS[n].missing() for n in names}
    missing = pd.DataFrame([(n, r) for n, r in reasons.items() if r], columns=["system", "reason"])
    return [SYSTEMS[n] for n in names if reasons[n] is None], missing


@contextmanager
def running(systems: Sequence[System], workload: Path, prepare: bool = True) -> Iterator[list[Running]]:
    """Start the systems one after the other; whatever happens, none outlives the block."""
    with ExitStack() as stack:
        started = []
        for system in systems:
            started.append(Running(system, workload))
            stack.callback(started[-1].kill)
            if prepare:
                started[-1].prepare()
        yield started
        for r in started:
            r.quit()
