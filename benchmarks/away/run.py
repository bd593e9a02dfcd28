"""Run: facts of the machine, the device's tests, two measurements, then the plan's runs, until the time is up.

Every part is a process with a time limit, in a group of its own: what fails or hangs ends with it and stops nothing.
This file needs the standard library alone. What comes back lies in one folder, at most 8 files of at most 16 MiB:

  machine.json       card, driver, PyTorch, CUDA, flags of precision, CPU, memory, the commit that was handed in
  report.json        each part and run: how it ended, its seconds, what was predicted
  methods.jsonl      of each method how far the device's numbers are from the CPU's, from the tests
  speed.json, goals.json   what ``benchmarks.gpu`` measured
  runs.tar           finished runs, for ``home``; written anew after each
  checkpoint.tar     the runs that the time interrupted, for ``pack --go-on``, as many as are small enough
  logs.tar           what each process printed
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.away import KEPT, MIB, ROOT
from benchmarks.away.tars import lay_out, of_folder, unpacked, write_tar

OF, FACTS, MEASURING = 560, 5, 230  # seconds of ``OF`` after which the tests begin at the latest, and the runs
MEASURED = {"tests": 100, "speed": 150, "goals": MEASURING}  # in this order, each until so many seconds of ``OF``
SUITE = ["-m", "pytest", "-o", "addopts=", "-v", "--tb=short", "-p", "no:cacheprovider", "tests/system/test_gpu.py"]
SPREAD = ["-p", "xdist.plugin", "-n"]  # tests over processes, where the machine has pytest-xdist
MEASURE = ["-m", "benchmarks.gpu"]
CHILD = ["-m", "benchmarks.away.child"]
FIRST_GUESS = {"cuda": 3e12, "cpu": 5e9}  # training MACs a second, until a run has ended; an H100's of a ConvNet
LARGEST, CHECKPOINT, LOG = 16 * MIB, 14 * MIB, MIB
BROKEN_OFF = 3  # the exit status


@dataclass
class Clock:
    """When what has to have ended."""

    seconds: float
    began: float = field(default_factory=time.monotonic)
    cut: bool = False

    def at(self, second: float) -> float:
        """The moment that a run of ``OF`` seconds reaches at ``second``, here."""
        return self.began + second * self.seconds / OF

    @property
    def reserve(self) -> float:
        """Seconds for interrupting what goes on and for packing."""
        return max(2.5, 0.03 * self.seconds)

    @property
    def left(self) -> float:
        """Seconds until everything is interrupted."""
        return 0.0 if self.cut else self.began + self.seconds - self.reserve - time.monotonic()

    @property
    def last(self) -> float:
        """The moment after which nothing goes on; :meth:`Part.wait` gives up by ``left`` before."""
        return self.began + self.seconds

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.began


class Part:
    """One process, with what it prints in a file, in a session of its own."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str]):
        self.name, self.log, self.began, self.interrupted = name, log, time.monotonic(), ""
        with open(log, "w") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=env,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def wait(self, until: float, clock: Clock) -> bool:
        """Has it ended by the moment ``until``, or by the clock's last?"""
        while self.process.poll() is None:
            if time.monotonic() >= until or clock.left <= 0:
                return False
            time.sleep(0.02)
        return True

    def interrupt(self, grace: float) -> None:
        """Ask it to stop, as Ctrl-C does; after ``grace`` seconds it and what it started are killed."""
        if self.process.poll() is None:
            self.ask_to_stop()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(max(0.05, grace))
        self.kill()

    def ask_to_stop(self) -> None:
        """Do as Ctrl-C does, once."""
        if self.process.poll() is None and not self.interrupted:
            self.interrupted = f" after {self.seconds:.1f} s"
            self.signal(signal.SIGINT)

    def signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End its group and what has left the group, the latter as far as the system tells whose children they are."""
        others = list(_offspring(self.process.pid))
        self.signal(signal.SIGKILL)
        for pid in others:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    @property
    def ended(self) -> str:
        """How it ended, in words."""
        code = self.process.poll()
        if self.interrupted:
            return f"stopped at its limit{self.interrupted}"
        return "done" if code == 0 else f"failed with {code}"


def _offspring(pid: int) -> Iterator[int]:
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, file.read_text().split()):
                yield child
                yield from _offspring(child)


class Turn:
    """One turn on the machine: its clock, its folders, the parts that go on, the report."""

    def __init__(
        self, device: str, seconds: float, out: Path, plan: Path, skip: Collection[str] = (), together: int = 1
    ):
        self.clock, self.device, self.together = Clock(seconds), device, together
        self.out, self.file, self.folder = out.resolve(), plan.resolve(), plan.resolve().parent
        self.plan, self.report, self.parts, self.skip = json.loads(plan.read_text()), [], [], skip
        self.out.mkdir(parents=True, exist_ok=True)
        self.work = Path(tempfile.mkdtemp(prefix="away-"))
        self.runs, self.logs, self.env = self.work / "outputs" / "runs", self.work / "logs", self._environment()
        self.logs.mkdir()
        self.runs.mkdir(parents=True)
        self.rate = FIRST_GUESS[device.split(":")[0]] * (_cores() if device == "cpu" else 1) / together
        self.rate_of = "a first guess"
        self.status = BROKEN_OFF

    def _environment(self) -> dict[str, str]:
        """Packages that this machine lacks come first, data and weights from the folder, nothing from a network."""
        lacking = [n for n, module in self.plan.get("packages", {}).items() if find_spec(module) is None]
        self.lacking = [n for n in lacking if (self.folder / "site-packages" / n).is_dir()]
        paths = [ROOT, *(self.folder / "site-packages" / n for n in self.lacking), os.environ.get("PYTHONPATH", "")]
        return os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, map(str, paths))), "FEDLIB_ROOT": str(ROOT), "TQDM_DISABLE": "1",
            "FEDLIB_DATA": str(self.folder / "data"), "FEDLIB_CACHE": str(self.work / "cache"), "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": str(self.work / "hf"), "FEDLIB_OUTPUTS": str(self.work / "outputs"),
            "FEDLIB_TEST_DEVICE": self.device, "FEDLIB_TEST_REPORT": str(self.out / "methods.jsonl"),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "MPLBACKEND": "agg",
        }  # fmt: skip

    def start(self, name: str, command: Sequence[object]) -> Part:
        part = Part(name, list(map(str, command)), self.logs / f"{name}.log", self.env)
        self.parts.append(part)
        return part

    def end(self, part: Part, until: float, grace: float | None = None, **more: Any) -> bool:
        """Wait for ``part``, end it at its limit and report; did it end by itself, and well?"""
        if not part.wait(until, self.clock):
            part.interrupt(self.clock.reserve / 3 if grace is None else grace)
        part.kill()  # what it left behind
        self.parts.remove(part)
        self.note(part.name, part.ended, seconds=round(part.seconds, 1), **more, says=last_line(part.log))
        return part.ended == "done"

    def note(self, name: str, ended: str, **more: Any) -> None:
        entry = {"part": name, "ended": ended, **more, "at": round(self.clock.elapsed, 1)}
        self.report.append(entry)
        words = [f"{k} {v}" for k, v in more.items() if v != ""]
        print(f"{entry['at']:6.1f} s  {', '.join([f'{name}: {ended}', *words])}", flush=True)
        write(self.out / "report.json", self.report)

    # --- what comes back ----------------------------------------------------------------------------------------------

    def pack_runs(self) -> None:
        """All finished runs, as many as the largest file may hold."""
        members, size = [], 0
        for path in sorted(p.parent for p in self.runs.glob("*/summary.json")):
            found = of_folder(path, KEPT)
            size += sum(len(content) + 2048 for _, content in found)
            if len(found) == len(KEPT) and size < LARGEST - 20_480:
                members += found
        write_tar(self.out / "runs.tar", members)

    def pack_logs(self) -> None:
        each = max(1, min(LOG, LARGEST // 2 // max(1, len(list(self.logs.iterdir())))))
        found = [(f"logs/{p.name}", p.read_bytes()[-each:]) for p in sorted(self.logs.iterdir())]
        write_tar(self.out / "logs.tar", found)

    def pack_checkpoints(self, names: Sequence[str]) -> None:
        """What the interrupted runs ``names`` go on from, of as many as are small enough."""
        members, packed = [], 0
        for path in (self.runs / name for name in names):
            files = [p for p in path.rglob("*") if p.is_file() and p.name not in (".lock", "previous.safetensors")]
            size = sum(p.stat().st_size for p in files)
            if (path / "summary.json").is_file():
                continue
            if not (path / "checkpoint.safetensors").is_file():
                self.note("checkpoint", f"none of {path.name}: no round was finished")
            elif packed + size > CHECKPOINT:
                self.note(
                    "checkpoint", f"{path.name} left behind: {(packed + size) / MIB:.1f} MiB > {CHECKPOINT // MIB}"
                )
            else:
                packed += size
                members += of_folder(path, [str(p.relative_to(path)) for p in files])
                self.note("checkpoint", f"packed: {size / MIB:.1f} MiB of {path.name}")
        if members:
            write_tar(self.out / "checkpoint.tar", members)

    # --- the parts ----------------------------------------------------------------------------------------------------

    def measure(self) -> None:
        """Facts, tests and decoding beside one another, then the two measurements."""
        at = self.clock.at
        write(self.out / "machine.json", machine(self))
        facts = self.start("facts", [*CHILD, "facts", self.out / "machine.json"])
        decoding = self.start("decoding", [*CHILD, "decode", self.file])
        facts.wait(at(FACTS), self.clock)
        for name, until in MEASURED.items():
            told = [*MEASURE, name, "--device", self.device, "--json", self.out / f"{name}.json"]
            if name not in self.skip:
                self.end(self.start(name, suite() if name == "tests" else told), at(until), 0.01 * self.clock.seconds)
                self.pack_logs()
        self.end(facts, at(MEASURING), grace=0.01 * self.clock.seconds)
        self.end(decoding, at(MEASURING), grace=0.01 * self.clock.seconds)

    def beside(self) -> None:
        """Runs for the spare cores of the CPU."""
        spare = _cores() - 2 * self.together
        if spare > 0 and self.plan.get("beside") and self.clock.left > 0:
            minutes = max(0.01, self.clock.left / 60)
            self.start("beside", [*CHILD, "fill", self.file, minutes, spare])

    def macs(self, r: Mapping[str, Any]) -> float:
        """What a run still takes after its last evaluated round."""
        done = 0.0
        with contextlib.suppress(IndexError, KeyError, TypeError, ValueError):  # none yet, or damaged
            done = json.loads(_lines(self.runs / r["name"] / "metrics.jsonl")[-1])["t"] / r["experiment"]["rounds"]
        return r["macs"] * (1 - done)

    def train(self) -> list[str]:
        """The plan's runs, so many ``together``, each time the first that fits; the names of those the end interrupted.

        Where none fits and none goes on the first begins all the same: what it reached is packed as a checkpoint.
        """
        todo, going = list(enumerate(self.plan["runs"])), {}
        while (todo or going) and self.clock.left > 0:
            while todo and len(going) < self.together and (next_one := self._next(todo, bool(going))) is not None:
                todo.remove(next_one)
                (i, r), macs = next_one, self.macs(next_one[1])
                said = {"predicted": round(macs / self.rate, 1), "from": self.rate_of}
                going[self.start(r["name"], [*CHILD, "train", self.file, i, self.device])] = macs, said
            if not going:
                break
            time.sleep(0.02)
            for part in [p for p in going if p.process.poll() is not None]:
                macs, said = going.pop(part)
                if self.end(part, self.clock.last, **said):
                    self.rate, self.rate_of = macs / part.seconds, part.name
                    self.pack_runs()
                self.pack_logs()
        for part in going:
            part.ask_to_stop()
        for part, (_, said) in going.items():
            self.end(part, 0, grace=self.clock.reserve / 3 / len(going), **said)
        return [part.name for part in going]

    def _next(self, todo: list, others: bool) -> Any:
        """What is started next: the first that fits, else the first of all unless ``others`` go on."""
        if self.clock.left <= 0.04 * self.clock.seconds:
            return None
        fits = (p for p in todo if self.macs(p[1]) / self.rate <= self.clock.left)
        return next(fits, None if others else todo[0])


def suite() -> list[str]:
    """The command of the device's tests, over half the cores where pytest can."""
    return SUITE + ([*SPREAD, str(_cores() // 2)] if SUITE[:2] == ["-m", "pytest"] and find_spec("xdist") else [])


def run(
    device: str, seconds: float, out: Path, plan: Path = Path(".away/plan.json"), skip: Collection[str] = (),
    together: int = 1,
) -> int:  # fmt: skip
    """Work through a turn, which ends before ``seconds`` are over; 0 if a run was finished, else 1, 3 if broken off."""
    if not seconds >= 5:
        raise ValueError(f"--seconds {seconds:g}: expected at least 5")
    if device.split(":")[0] not in FIRST_GUESS:
        raise ValueError(f"--device {device}: expected cpu, cuda or cuda:<number>")
    if not plan.is_file():
        raise ValueError(f"{plan} is not there: python -m benchmarks.away pack")
    if not together >= 1:
        raise ValueError(f"--together {together}: expected at least 1")
    turn = Turn(device, seconds, out, plan, skip, together)
    before = {n: signal.getsignal(n) for n in (signal.SIGALRM, signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGALRM, lambda *_: _break_off(turn))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: setattr(turn.clock, "cut", True))
    signal.setitimer(signal.ITIMER_REAL, seconds - max(0.5, 0.005 * seconds) - turn.clock.elapsed)
    try:
        turn.status = _worked(turn)
        return turn.status
    finally:
        for part in list(turn.parts):  # none, unless something unforeseen was raised
            part.kill()
        shutil.rmtree(turn.work, ignore_errors=True)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _worked(turn: Turn) -> int:
    if (turn.folder / "cache").is_dir():
        shutil.copytree(turn.folder / "cache", turn.work / "cache")
    lacking = ", ".join(turn.lacking) or "nothing"
    print(f"{turn.clock.seconds:g} s on {turn.device}; the machine lacks {lacking}", flush=True)
    if (earlier := turn.folder / "checkpoint.tar").is_file():
        try:
            lay_out(unpacked(earlier), turn.runs)
        except ValueError as error:
            turn.note("checkpoint", f"not used: {error}")
    unfinished = []
    for stage in (turn.measure, turn.beside, turn.train):
        try:
            unfinished = stage() or []
        except Exception as error:  # whatever it is, what was reached is packed
            turn.note(stage.__name__, f"failed: {error}")
    for part in list(turn.parts):  # the spare cores' runs, for which nobody waits
        turn.end(part, 0, grace=turn.clock.reserve / 6)
    turn.pack_runs()
    turn.pack_checkpoints(unfinished)
    finished = len(list(turn.runs.glob("*/summary.json")))
    turn.note("all", f"{finished} runs are finished")
    turn.pack_logs()
    for name in ("machine.json", "speed.json", "goals.json"):
        if (turn.out / name).is_file() and (turn.out / name).stat().st_size > LARGEST:
            (turn.out / name).unlink()
    return 0 if finished else 1


def _break_off(turn: Turn) -> None:
    """The hard end: whatever hangs, nothing goes on after it. What was packed before stands."""
    for part in list(turn.parts):
        part.kill()
    if turn.status == BROKEN_OFF:  # else it is the decoded data whose deletion takes too long
        print(f"{turn.clock.elapsed:6.1f} s  broken off", flush=True)
    os._exit(turn.status)


def machine(turn: Turn) -> dict[str, Any]:
    """What is known without PyTorch; ``child.facts`` adds to it."""
    cpu = [line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = [int(line.split()[1]) / MIB for line in _lines("/proc/meminfo") if line.startswith("MemTotal")]
    asked, cards = "name,driver_version,memory.total,clocks.max.sm,power.limit,mig.mode.current", []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        told = subprocess.run(command, capture_output=True, text=True, timeout=turn.clock.at(FACTS) - turn.clock.began)
        cards = [dict(zip(asked.split(","), line.split(", "), strict=False)) for line in told.stdout.splitlines()]
    return {
        "commit": turn.plan.get("commit"), "changed": turn.plan.get("changed"), "device": turn.device, "cards": cards,
        "cpu": cpu[0] if cpu else None, "cores": _cores(), "memory_gib": memory[0] if memory else None,
        "python": sys.version, "from_the_folder": turn.lacking, "seconds": turn.clock.seconds,
    }  # fmt: skip


def write(file: Path, content: Any) -> None:
    """As JSON, written beside and renamed."""
    part = file.with_name(f".{file.name}.part")
    part.write_text(json.dumps(content, indent=1))
    os.replace(part, file)


def last_line(file: Path, most: int = 160) -> str:
    """What a process said last, in short."""
    return next((line.strip()[:most] for line in reversed(_lines(file)) if line.strip()), "")


def _lines(file: str | Path) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(file).read_text(errors="replace").splitlines()
    return []


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
