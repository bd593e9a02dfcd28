"""The round loop, and the executor that trains a round's clients as cohorts on this machine."""

import copy
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from .aggregation import Client, Update
from .cohort import Cohort
from .evaluation import evaluate
from .federation import Federation
from .methods import Server
from .slices import Slice

Memories = dict[int, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Round:
    """One finished round: the new server, what changed in client memories, and what was measured."""

    t: int
    server: Server
    memories: Memories  # of the clients whose memory changed
    losses: dict[int, float]  # mean training loss per sampled client
    metrics: Mapping[str, object] | None  # see evaluation.evaluate; None when not due
    seconds: float

    @property
    def diverged(self) -> bool:
        """Did a client's loss become infinite or NaN?"""
        return not np.isfinite(list(self.losses.values())).all()


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
    """Trains cohorts in threads of this process; each thread keeps one model skeleton for the whole run."""

    federation: Federation
    execution: Execution
    _local: threading.local = field(default_factory=threading.local)
    _pool: ThreadPoolExecutor | None = None

    def train(self, server: Server, clients: list[Client], t: int, memories: Memories) -> Iterator[Cohort]:
        """Yield each trained cohort, in a fixed order."""
        f = self.federation
        slices = {b: f.method.slice_for(b, f.setting) for b in {c.budget for c in clients}}
        workers = self.execution.threads()
        cohorts = plan_cohorts(clients, slices, workers, self.execution.cohort_size)

        def train_one(members: list[Client]) -> Cohort:
            cohort = Cohort(
                self._model(), f.frozen, f.setting.infos, f.experiment, f.data, server, t, members, slices,
                {c.id: memories[c.id] for c in members if c.id in memories},
            )  # fmt: skip
            f.method.client_update(cohort)
            return cohort

        if workers == 1:
            yield from map(train_one, cohorts)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,))
        yield from self._pool.map(train_one, cohorts)

    def _model(self):
        if not hasattr(self._local, "model"):
            self._local.model = copy.deepcopy(self.federation.model)
        return self._local.model

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)


def run_rounds(
    federation: Federation,
    execution: Execution = Execution(),
    server: Server | None = None,
    memories: Memories | None = None,
) -> Iterator[Round]:
    """Run the rounds after ``server.t``, yielding each as it ends. ``memories`` is updated in place."""
    e, method, setting = federation.experiment, federation.method, federation.setting
    server = server if server is not None else federation.server
    memories = memories if memories is not None else {}
    executor = InProcess(federation, execution)
    try:
        for t in range(server.t + 1, e.rounds + 1):
            began = time.perf_counter()
            sampled = federation.sample_clients(t)
            changed: Memories = {}
            losses: dict[int, float] = {}

            def updates(server=server, t=t, sampled=sampled, changed=changed, losses=losses) -> Iterator[Update]:
                for cohort in executor.train(server, sampled, t, memories):
                    changed.update(cohort.new_memories)
                    losses.update({c.id: float(x) for c, x in zip(cohort.clients, cohort.losses, strict=True)})
                    yield cohort.update()

            server = method.aggregate(server, updates(), t, setting)
            memories.update(changed)
            due = t == e.rounds or (e.evaluate_every and t % e.evaluate_every == 0)
            metrics = evaluate(federation, server) if due else None
            yield Round(t, server, changed, losses, metrics, time.perf_counter() - began)
    finally:
        executor.close()
