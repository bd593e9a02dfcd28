"""What all workers have in common: what a round gives them, and cohorts that are lost with them.

A worker has what never changes; a round gives it the trained parameters, and its cohorts one by one. It keeps nothing
of a client or a round, so any worker can train any cohort, again if need be. Partial sums are merged in the plan's
order: a run that lost workers ends with the numbers of one that did not.
Read next: ``processes.py``, ``cluster.py``.
"""

import copy
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch

from fedlib.core.threads import keep_freed_memory
from fedlib.engine.executors import Cohorts, Execution, Memories, Trained, automatic_cohort_size, train_cohort
from fedlib.engine.federation import Federation, label_counts
from fedlib.methods import Member, Round, Server
from fedlib.methods.mixtures import under

TRIES = 4  # of one cohort before a lost worker is taken for a sign
Finished = tuple[int, Trained | None, Exception | None]  # a place in the plan, what came back, or how it was lost


def become_worker() -> None:
    """Set this process up to train cohorts: one intra-op thread, and what a step frees is kept for the next one."""
    torch.set_num_threads(1)
    keep_freed_memory()


def as_bytes(t: torch.Tensor) -> tuple[np.ndarray | None, torch.dtype, torch.Size]:
    """Return a tensor as (bytes, type, shape) for another process; no bytes where it is a shape alone."""
    if t.is_meta:
        return None, t.dtype, t.shape
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), t.dtype, t.shape


def of_bytes(data: np.ndarray | None, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
    """Build a CPU tensor over the memory of ``data``, which may be shared: it is never written to."""
    if data is None:
        return torch.empty(shape, dtype=dtype, device="meta")
    return torch.from_numpy(data).view(dtype).view(shape)


def kit(f: Federation) -> tuple[Federation, int]:
    """Return what a worker that is no fork needs of ``f``, without weights and test set, and the units it caches."""
    empty = torch.nn.Parameter(torch.empty(0), requires_grad=False)
    model = copy.deepcopy(f.model, {id(p): empty for p in f.model.parameters()})
    data = replace(f.data, test_inputs=f.data.test_inputs[:0], test_labels=f.data.test_labels[:0], answers=None)
    counts = partial(label_counts, data)
    setting = replace(f.setting, label_counts=counts, frozen=f.frozen, lab=None)  # the lab is the server's
    start = Server(0, f.server.params, {})  # what a member that is fresh starts from
    units = f.train_cache.units if f.train_cache is not None else 0
    return replace(f, model=model, data=data, setting=setting, server=start, train_cache=None, test_cache=None), units


def train_task(f: Federation, server: Server, members: Sequence[Member], r: Round, memories: Memories) -> Trained:
    """Train one cohort inside a worker. What both sides have does not travel."""
    trained = train_cohort(f, f.model, server, replace(r, setting=f.setting), members, memories)
    trained.mean.infos = {}
    return trained


def versions() -> tuple[str, str]:
    """Return the versions of fedlib and torch, which this process and its workers must have in common."""
    from fedlib import __version__

    return __version__, torch.__version__.split("+")[0]


def move(tensors: Mapping[str, torch.Tensor], device: torch.device | str) -> dict[str, torch.Tensor]:
    """Copy to ``device``, even from there: what came through an object store must not keep it full."""
    return {n: t.to(device, copy=True) for n, t in tensors.items()}


def moved(trained: Trained, device: torch.device) -> Trained:
    """Move ``trained`` to where the server is."""
    trained.mean.move_(device)
    kinds = {k: {c: move(m, device) for c, m in getattr(trained, k).items()} for k in ("memories", "extras", "models")}
    return replace(trained, **kinds)


class Workers(ABC):
    """An executor whose cohorts train on workers that may be lost; what these are is its subclass's matter.

    Raises ``RuntimeError`` if one cohort loses ``TRIES`` workers, and whatever a worker's training raised.
    """

    kind: ClassVar[str]  # in an error's words

    def __init__(self, federation: Federation, execution: Execution, workers: int):
        self.federation, self.execution, self.workers = federation, execution, workers
        self.cohort_size = execution.cohort_size or automatic_cohort_size(federation)

    def train(self, server: Server, cohorts: Cohorts, r: Round, memories: Memories) -> Iterator[Trained]:
        # the server's memory is the server's, but for what it changed of the frozen tensors
        download = self.download(Server(server.t, server.params, under("frozen", server.changed)))
        r = replace(r, setting=None)  # which the workers have
        todo, lost = deque(range(len(cohorts))), [0] * len(cohorts)
        done: dict[int, Trained] = {}
        for turn in range(len(cohorts)):
            while turn not in done:
                while todo and (worker := self.idle()) is not None:
                    i = todo.popleft()
                    mine = {m.client.id: memories[m.client.id] for m in cohorts[i] if m.client.id in memories}
                    self.give(worker, i, download, (list(cohorts[i]), r, mine))
                for i, trained, error in self.finished():
                    if trained is not None:
                        done[i] = trained
                        continue
                    todo.appendleft(i)
                    lost[i] += 1
                    if lost[i] == TRIES:
                        ids = list(dict.fromkeys(m.client.id for m in cohorts[i]))
                        why = f"the cohort of clients {ids} lost its {self.kind} {TRIES} times in round {r.t}"
                        how = "if memory is short, set Execution(cohort_size=...)"
                        raise RuntimeError(f"{why} (the last time: {error}); {how}") from error
            yield self.home(done.pop(turn))

    def home(self, trained: Trained) -> Trained:
        """Return what a worker brought back as if it had been trained here."""
        trained.mean.infos = self.federation.setting.infos
        return trained

    @abstractmethod
    def download(self, server: Server) -> Any:
        """Return a round's server as workers take it."""

    @abstractmethod
    def idle(self) -> Any | None:
        """Return a worker that trains nothing; None if all are busy."""

    @abstractmethod
    def give(self, worker: Any, i: int, download: Any, task: tuple[list[Member], Round, Memories]) -> None:
        """Let ``worker`` train cohort i: the arguments of :func:`train_task` behind the server."""

    @abstractmethod
    def finished(self) -> Iterator[Finished]:
        """Wait until something ends; a worker that was lost is replaced."""
