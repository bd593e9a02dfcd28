"""Executors train a round's clients as cohorts, here or elsewhere. How is not part of an experiment.

``Execution`` says how to run; ``build_executor`` turns it into an executor with ``train`` and ``close``. Every executor
calls ``train_cohort`` and gives the same numbers up to float rounding.
"""

import copy
import math
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import torch

from .aggregation import Client, Sums
from .cohort import Cohort
from .federation import Federation
from .methods import Server
from .models.exit_model import ExitModel
from .slices import Slice

Memories = Mapping[int, dict[str, torch.Tensor]]  # client memories by client id


@dataclass(frozen=True)
class Trained:
    """What comes back from a cohort: weighted partial sums (not one model per client), memories, losses."""

    sums: Sums
    memories: dict[int, dict[str, torch.Tensor]]  # of the clients whose memory changed
    losses: dict[int, float]  # mean training loss per client
    nonfinite: tuple[int, ...] = ()  # clients whose loss or update holds a NaN or infinity (Experiment.nonfinite)


@dataclass(frozen=True)
class Execution:
    """How to run, which must not change the numbers beyond float rounding."""

    device: str = "cpu"
    workers: int | None = None  # threads training cohorts side by side; None: one a core on a CPU, one on a GPU
    cohort_size: int | None = None  # clients a cohort; None: as few cohorts as there are workers

    def threads(self) -> int:
        if self.workers is not None:
            return self.workers
        return torch.get_num_threads() if self.device == "cpu" else 1


class Executor(Protocol):
    """Trains the sampled clients of round ``t``; yields what each cohort brings back, in a fixed order."""

    def train(self, server: Server, clients: list[Client], t: int, memories: Memories) -> Iterator[Trained]: ...

    def close(self) -> None: ...


def build_executor(federation: Federation, execution: Execution) -> Executor:
    """The executor that ``execution`` asks for."""
    return InProcess(federation, execution)


def train_cohort(
    f: Federation, model: ExitModel, server: Server, t: int, members: list[Client], memories: Memories
) -> Trained:
    """Train ``members`` of round ``t`` as one cohort with the skeleton ``model``: download, local training, upload."""
    slices = {b: f.method.slice_for(b, f.setting) for b in {c.budget for c in members}}
    mine = {c.id: memories[c.id] for c in members if c.id in memories}
    cohort = Cohort(model, f.frozen, f.setting.infos, f.experiment, f.data, server, t, members, slices, mine)
    f.method.client_update(cohort)
    losses = {c.id: float(x) for c, x in zip(cohort.clients, cohort.losses, strict=True)}
    update, new_memories = cohort.update(), cohort.new_memories
    nonfinite = {c: "loss" for c, x in losses.items() if not math.isfinite(x)} | update.nonfinite()
    if nonfinite and f.experiment.nonfinite == "fail":
        client, name = min(nonfinite.items())
        raise FloatingPointError(f"round {t}: client {client}: {name} is not finite (nonfinite = 'fail')")
    if nonfinite and f.experiment.nonfinite == "drop":
        update = update.without(nonfinite)
        new_memories, losses = ({c: x for c, x in d.items() if c not in nonfinite} for d in (new_memories, losses))
    return Trained(f.method.summarise(update, f.setting), new_memories, losses, tuple(nonfinite))


def plan_cohorts(
    clients: list[Client], slices: Mapping[int, Slice], workers: int, size: int | None
) -> list[list[Client]]:
    """Split a round's clients into cohorts of one width each, balanced in depth, at least one a worker."""
    widths: dict[tuple, list[Client]] = {}
    for c in sorted(clients, key=lambda c: (-slices[c.budget].depth, -c.num_examples, c.id)):
        widths.setdefault(slices[c.budget].same_width(), []).append(c)
    out = []
    for group in widths.values():
        share = max(1, round(workers * len(group) / len(clients)))
        parts = max(share, -(-len(group) // size) if size else 1)
        out += [group[i::parts] for i in range(min(parts, len(group)))]  # dealt out, so depths are mixed evenly
    return sorted(out, key=lambda g: -sum(slices[c.budget].depth * c.num_examples for c in g))


@dataclass
class InProcess:
    """Trains cohorts in threads of this process; each thread keeps one model skeleton for the whole run.

    After :meth:`close` (a Ctrl-C, an error in another cohort) a thread stops at its next batch.
    """

    federation: Federation
    execution: Execution
    _local: threading.local = field(default_factory=threading.local)
    _closed: threading.Event = field(default_factory=threading.Event)
    _pool: ThreadPoolExecutor | None = None

    def train(self, server: Server, clients: list[Client], t: int, memories: Memories) -> Iterator[Trained]:
        f, workers = self.federation, self.execution.threads()
        slices = {b: f.method.slice_for(b, f.setting) for b in {c.budget for c in clients}}
        cohorts = plan_cohorts(clients, slices, workers, self.execution.cohort_size)

        def train_one(members: list[Client]) -> Trained:
            return train_cohort(f, self._model(), server, t, members, memories)

        if workers == 1:
            yield from map(train_one, cohorts)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        yield from self._pool.map(train_one, cohorts)

    def _model(self) -> ExitModel:
        if not hasattr(self._local, "model"):
            self._local.model = copy.deepcopy(self.federation.model)
            self._local.model.register_forward_pre_hook(self._stop_if_closed)
        return self._local.model

    def _stop_if_closed(self, *_) -> None:
        if self._closed.is_set():
            raise RuntimeError("the executor was closed while this cohort was training")

    def close(self) -> None:
        self._closed.set()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
