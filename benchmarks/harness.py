"""What the engine benchmark measures: seconds a round, start-up, memory, lines of user code, agreement of the models.

Time and memory are measured in separate runs, because a sampler beside a run slows it.
Read next: ``systems.py`` (the systems as processes), ``prepare.py`` (the workloads and their shared files).
"""

import ast
import mmap
import re
import subprocess
import threading
import time
import tokenize
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import torch

from benchmarks.systems import RIVALS, Running, System, running, tree

MEMORY_HZ = 20


def time_interleaved(
    started: Sequence[Running], rounds: int, repeats: int, warm_up: int = 1, at_hand_mib: int = 64
) -> pd.DataFrame:
    """Seconds of every round: (system, repeat, round, seconds). One system at a time, A B A B.

    Each block of ``rounds`` goes on where the system's last one ended. ``warm_up`` rounds before are not reported. A
    virtual machine's host may have taken free memory back: ``at_hand_mib`` of it are fetched before each first round.
    """
    for r in started:
        fetch_pages(at_hand_mib)
        r.rounds(warm_up)
    rows = []
    for repeat in range(repeats):
        for r in started:
            first = r.rounds_done
            rows += [(r.system.name, repeat, first + i, s) for i, s in enumerate(r.rounds(rounds))]
    return pd.DataFrame(rows, columns=["system", "repeat", "round", "seconds"])


def summary(times: pd.DataFrame, against: str) -> pd.DataFrame:
    """Median and quartiles of the seconds a round, and how many times slower than ``against``.

    The ratio is taken within each repeat, between the medians of neighbouring blocks; its median and range over the
    repeats are given. Raises ``ValueError`` if ``against`` was not timed.
    """
    blocks = times.groupby(["repeat", "system"], sort=False).seconds.median().unstack()
    if against not in blocks:
        raise ValueError(f"summary: against = {against!r} was not timed; allowed: {', '.join(blocks)}")
    ratio = blocks.div(blocks[against], axis=0)
    seconds = times.groupby("system", sort=False).seconds
    return pd.DataFrame(
        {
            "seconds": seconds.median(), "seconds_q25": seconds.quantile(0.25), "seconds_q75": seconds.quantile(0.75),
            "ratio": ratio.median(), "ratio_min": ratio.min(), "ratio_max": ratio.max(),
        }
    ).loc[list(dict.fromkeys(times.system))]  # fmt: skip


def facts(started: Sequence[Running]) -> pd.DataFrame:
    """Per system: start-up seconds, lines of user code, versions, accuracy (%) after the rounds run so far.

    ``max_difference``: the largest distance of any trained parameter from the first system's.
    """
    rows, first = [], started[0].trained()
    for r in started:
        tensors = r.trained()
        same = bool(first) and tensors.keys() == first.keys()
        rows.append(
            {
                "system": r.system.name, **r.versions, "startup_seconds": r.startup_seconds,
                "lines": count_lines(RIVALS / r.system.script), "rounds": r.rounds_done, "accuracy": r.accuracy(),
                "first_round_seconds": r.first_round_seconds,
                "max_difference": max(float((tensors[n] - first[n]).abs().max()) for n in first) if same else None,
            }
        )  # fmt: skip
    return pd.DataFrame(rows).set_index("system")


def peak_memory(systems: Sequence[System], workload: Path, rounds: int = 3) -> pd.DataFrame:
    """Peak over a run of its own of the memory of each system's whole process tree, sampled 20 times a second.

    PSS (shared pages counted once, divided among their users) where the kernel tells it, else RSS; in MiB. The true
    peak is no more than ``unseen_mib`` above it: what the kernel's own peaks of the processes exceed the samples by.
    """
    rows = []
    for system in systems:
        with running([system], workload, prepare=False) as (r,), MemorySampler(r.processes) as sampler:
            r.prepare()
            r.rounds(rounds)
        rows.append((system.name, sampler.measure, sampler.peak / 2**20, sampler.unseen / 2**20, sampler.processes))
    columns = ["system", "measure", "peak_mib", "unseen_mib", "processes"]
    return pd.DataFrame(rows, columns=columns).set_index("system")


def fetch_pages(mib: int = 64) -> float:
    """Write once to every page of ``mib`` of fresh memory and let it go; returns the microseconds a page.

    A page takes many times longer on a virtual machine whose host has to find it than where it is at hand, as it is
    for a while once it was fetched.
    """
    pages = mib * 2**20 // mmap.PAGESIZE
    memory = torch.frombuffer(mmap.mmap(-1, pages * mmap.PAGESIZE), dtype=torch.uint8)
    began = time.perf_counter()
    memory[:: mmap.PAGESIZE] = 1
    return 1e6 * (time.perf_counter() - began) / pages


class MemorySampler(threading.Thread):
    """Samples the tree below ``roots`` until the block is left; a process that left the tree is still followed."""

    def __init__(self, roots: Sequence[subprocess.Popen]):
        super().__init__(daemon=True)
        self.roots, self.seen, self.done = roots, {}, threading.Event()
        self.peak, self.processes, self.measure = 0, 0, "PSS"
        self.resident: dict[int, int] = {}  # the most that a sample saw of a process
        self.highest: dict[int, int] = {}  # the most that the kernel saw of it

    def run(self) -> None:
        while not self.done.is_set():
            began = time.perf_counter()
            self.sample()
            self.done.wait(max(0, 1 / MEMORY_HZ - (time.perf_counter() - began)))

    def sample(self) -> None:
        import psutil

        self.seen |= {p.pid: p for p in tree(self.roots)}
        sizes = []
        for pid, p in list(self.seen.items()):
            try:
                info = p.memory_full_info()  # refuses a process id that was given away again
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                del self.seen[pid]
                continue
            self.measure = "PSS" if hasattr(info, "pss") else "RSS"
            sizes.append(info.pss if hasattr(info, "pss") else info.rss)
            self.resident[pid] = max(info.rss, self.resident.get(pid, 0))
            self.highest[pid] = max(_highest(pid), self.resident[pid])
        self.peak, self.processes = max(self.peak, sum(sizes)), max(self.processes, len(sizes))

    @property
    def unseen(self) -> int:
        """Bytes by which the true peak can exceed ``peak``."""
        return sum(self.highest.values()) - sum(self.resident.values())

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.join()


def _highest(pid: int) -> int:
    """The most resident memory that process ``pid`` ever had, in bytes; 0 where the kernel does not tell it."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    except OSError:
        return 0
    return 1024 * int(found[1]) if found else 0


def count_lines(path: Path) -> int:
    """Lines of user code: those with a token that is neither a comment nor part of a docstring."""
    prose = [
        n
        for n in ast.walk(ast.parse(path.read_text()))
        if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) and isinstance(n.value.value, str)
    ]
    docstrings = {line for n in prose for line in range(n.lineno, n.end_lineno + 1)}
    empty = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING,
             tokenize.ENDMARKER}  # fmt: skip
    with open(path, "rb") as f:
        tokens = [t for t in tokenize.tokenize(f.readline) if t.type not in empty]
    return len({n for t in tokens for n in range(t.start[0], t.end[0] + 1)} - docstrings)
