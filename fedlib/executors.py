"""Executors train a round's clients as cohorts, here or elsewhere. How is not part of an experiment.

``Execution`` says how to run; ``rounds.build_executor`` turns it into an executor with ``train`` and ``close``. Every
executor calls ``train_cohort`` and gives the same numbers up to float rounding. Read next: ``cluster.py``.
"""

import copy
import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Literal, Protocol

import torch

from .aggregation import Client, Sums
from .cohort import Cohort
from .experiment import check_fields
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


@dataclass(frozen=True)
class Execution:
    """How to run, which must not change the numbers beyond float rounding."""

    device: str = "cpu"
    workers: int | None = None  # train cohorts side by side; None: threads, one a core or GPU; ray, all of the cluster
    cohort_size: int | None = None  # clients a cohort; None: as few cohorts as there are workers
    executor: Literal["threads", "ray"] = "threads"  # of this process, or the workers of a Ray cluster
    address: str | None = None  # ray: "auto", "host:port", "ray://host:port"; None: $RAY_ADDRESS, else a local Ray
    patience_seconds: float = 120.0  # ray: how long to go without any worker before giving up

    def __post_init__(self):
        for key, value in check_fields(
            type(self), {f.name: getattr(self, f.name) for f in fields(self)}, "execution"
        ).items():
            object.__setattr__(self, key, value)
        for key in ("workers", "cohort_size", "patience_seconds"):
            if getattr(self, key) is not None and getattr(self, key) <= 0:
                raise ValueError(f"execution: {key} = {getattr(self, key)!r} must be positive")
        if self.executor == "ray" and self.device not in ("cpu", "cuda"):
            raise ValueError(f"execution: device = {self.device!r} with executor = 'ray'; allowed: cpu, cuda")
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"execution: address = {self.address!r} needs executor = 'ray', not {self.executor!r}")
        if self.address is not None and not re.fullmatch(r"auto|local|(ray://)?[^\s:/]+:\d+", self.address):
            raise ValueError(f"execution: address = {self.address!r}; allowed: auto, local, host:port, ray://host:port")

    @property
    def home(self) -> str:
        """The device of this process, which coordinates: a cluster's GPUs may all be elsewhere."""
        alone = self.executor == "threads" or torch.cuda.is_available()
        return self.device if alone else "cpu"

    def threads(self) -> int:
        if self.workers is not None:
            return self.workers
        return torch.get_num_threads() if self.device == "cpu" else 1


class Executor(Protocol):
    """Trains the sampled clients of round ``t``; yields what each cohort brings back, in a fixed order."""

    def train(self, server: Server, clients: list[Client], t: int, memories: Memories) -> Iterator[Trained]: ...

    def close(self) -> None: ...


def train_cohort(
    f: Federation, model: ExitModel, server: Server, t: int, members: list[Client], memories: Memories
) -> Trained:
    """Train ``members`` of round ``t`` as one cohort with the skeleton ``model``: download, local training, upload."""
    slices = {b: f.method.slice_for(b, f.setting) for b in {c.budget for c in members}}
    mine = {c.id: memories[c.id] for c in members if c.id in memories}
    cohort = Cohort(model, f.frozen, f.setting.infos, f.experiment, f.data, server, t, members, slices, mine)
    f.method.client_update(cohort)
    losses = {c.id: float(x) for c, x in zip(cohort.clients, cohort.losses, strict=True)}
    return Trained(f.method.summarise(cohort.update(), f.setting), cohort.new_memories, losses)


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
        return self._local.model

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
