"""Executors train a round's clients as cohorts, here or elsewhere. How is not part of an experiment.

``Execution`` says how to run; ``rounds.build_executor`` turns it into an executor with ``train`` and ``close``. Every
executor calls ``train_cohort`` and gives the same numbers up to float rounding. Read next: ``executors/workers.py``.
"""

import math
import re
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Annotated, Protocol

import torch
from annotated_types import Ge, Le

from ..core import doors
from ..core.annotations import Count, Positive
from ..core.clients import Client
from ..core.devices import memory_to_plan_with
from ..core.profiling import phase
from ..core.rng import no_global_draws
from ..core.threads import close, one_thread, warn_if_spinning
from ..core.validation import NamedFields, check_instance, check_known, check_type
from ..methods import Member, Round, Server
from ..methods.sums import MaskedMean, Update
from ..models.exit_model import ExitModel
from .arithmetic import arithmetic
from .checks import check_device
from .cohort import Cohort
from .federation import Federation

Memories = Mapping[int, dict[str, torch.Tensor]]  # client memories by client id
Cohorts = Sequence[Sequence[Member]]


@dataclass(frozen=True)
class Trained:
    """What comes back from a cohort: weighted partial sums (not one model per client), memories, losses."""

    mean: MaskedMean
    memories: dict[int, dict[str, torch.Tensor]]  # of the clients whose memory changed
    losses: dict[int, float]  # mean training loss per client
    nonfinite: tuple[int, ...] = ()  # clients whose loss or update holds a NaN or infinity (Experiment.nonfinite)
    extras: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # sent beside a model, by client
    models: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)  # where the method needs whole models


Side = Annotated[int, Ge(1), Le(1024)]  # how many may train side by side


@dataclass(frozen=True)
class Execution(NamedFields):
    """How to run, which must not change the numbers beyond float rounding.

      device           cpu, cuda (all GPUs of this machine) or cuda:<number> (one)
      workers          train so many cohorts side by side (at most 1024); None: one a core or GPU; with ray, all
                       there are
      cohort_size      most clients of a cohort; None: see ``automatic_cohort_size``
      executor         auto: processes (``processes.py``) on several GPUs, and on a CPU where a fork is safe and there
                       is more than one worker, as they do not wait for each other's interpreter lock; elsewhere
                       threads, on the current GPU. ray: ``cluster.py``
      address          ray: "auto", "host:port", "ray://host:port"; None: $RAY_ADDRESS, else a local Ray
      stack            most runs of a list that train together if they differ in seed, rate or split alone
                       (``stacked.py``); None: on a GPU as many as memory suffices for, on a CPU each by itself
      patience_seconds ray: how long to go without any worker before giving up
      products         who multiplies on a CPU, as provenance names it: of a run that goes on, who did; "": as suits it

    Raises ``ValueError`` for what is impossible, such as a GPU that this machine has not.
    """

    device: str = "cpu"
    workers: Side | None = None
    cohort_size: Count | None = None
    stack: Count | None = None
    executor: str = "auto"
    address: str | None = None
    patience_seconds: Positive = 120.0
    products: str = ""

    def __post_init__(self):
        check_instance(self, "execution")
        check_known([self.executor], ("auto", "threads", *doors.EXECUTORS), "execution: executor = {} is not possible")
        if self.executor in ("ray", "processes") and self.device not in ("cpu", "cuda"):
            how = f"with executor = {self.executor!r}"
            raise ValueError(f"execution: device = {self.device!r} {how}; allowed: cpu, cuda")
        if self.executor != "ray":
            check_device(self.device)
        if self.address is not None and self.executor != "ray":
            raise ValueError(f"execution: address = {self.address!r} needs executor = 'ray', not {self.executor!r}")
        if self.address is not None and not re.fullmatch(r"auto|local|(ray://)?[^\s:/]+:\d+", self.address):
            allowed = "auto, local, host:port, ray://host:port"
            raise ValueError(f"execution: address = {self.address!r}; allowed: {allowed}")

    @property
    def home(self) -> str:
        """The device of this process, which coordinates: a cluster's GPUs may all be elsewhere."""
        return self.device if self.executor != "ray" or torch.cuda.is_available() else "cpu"

    def side_by_side(self) -> int:
        """Return the number of workers of this machine."""
        if self.workers is not None:
            return self.workers
        return torch.get_num_threads() if self.device == "cpu" else len(self.devices())

    def devices(self) -> list[str]:
        """Return the devices that workers of this machine compute on, in turn."""
        if self.device != "cuda" or self.executor not in ("auto", "processes"):
            return [self.device]
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]


class Unforkable(RuntimeError):
    """A fork of this process could not train."""


class Executor(Protocol):
    """Trains cohorts that somebody else planned, for ``workers`` of at most ``cohort_size`` models each.

    Yields what each brings back, in their order.
    """

    workers: int
    cohort_size: int

    def train(self, server: Server, cohorts: Cohorts, r: Round, memories: Memories) -> Iterator[Trained]: ...

    def close(self) -> None: ...


def train_cohort(
    f: Federation, model: ExitModel, server: Server, r: Round, members: Sequence[Member], memories: Memories
) -> Trained:
    """Train ``members`` of round ``r`` as one cohort with the skeleton ``model``: download, local training, upload."""
    mine = {m.client.id: memories[m.client.id] for m in members if m.client.id in memories}
    with arithmetic(f.experiment.precision, f.device):
        with phase("download"):
            cohort = Cohort(f, model, server, r, members, mine)
        with no_global_draws(f.experiment.method):
            f.method.local_update(cohort)
        cohort.keep()
    losses, finite = cohort.losses(plain := cohort.update())
    nonfinite = {c: "loss" for c, x in losses.items() if not math.isfinite(x)} | ({} if finite else plain.nonfinite())
    if nonfinite and f.experiment.nonfinite == "fail":
        client, name = min(nonfinite.items())
        raise FloatingPointError(f"round {r.t}: client {client}: {name} is not finite (nonfinite = 'fail')")
    with phase("aggregation"):
        update = check_type(f.method.upload(cohort), Update, f"{f.experiment.method}: upload()")
        new_memories, extras = cohort.new_memories, cohort.extras
        if nonfinite and f.experiment.nonfinite == "drop":
            update = update.without(nonfinite)
            new_memories, extras = ({c: x for c, x in d.items() if c not in nonfinite} for d in (new_memories, extras))
            losses = {c: x for c, x in losses.items() if c not in nonfinite}
        models = {}
        if f.method.needs_models:
            kinds = {n: p.dtype for n, p in cohort.params.items()}  # what was compressed comes in float64
            models = {c.id: update.model(i, kinds) for i, c in reversed(list(enumerate(update.clients)))}
        sums = check_type(f.method.summarise(update, f.setting), MaskedMean, f"{f.experiment.method}: summarise()")
        return Trained(sums, new_memories, losses, tuple(nonfinite), extras, models)


CACHE_BYTES = {"stacked": 3 * 2**20, "maps": 5 * 2**20, "shared": 16 * 2**20}  # by timing (two cores, AMD EPYC)
SHARE_OF_GPU_MEMORY = 0.4


def automatic_cohort_size(f: Federation) -> int:
    """Return the most clients worth training as one cohort, from shapes alone (so that a run repeats bit for bit).

    CPU: batching pays while the widest activation of a cohort stays in cache. Measured per client on one core, a cohort
    against one client at a time: width 64 fully trained, batch 32 / 8: 1.2 / 2.2 times faster, LoRA 1.5 / 2.7; width
    192 fully trained, batch 32: 0.75-0.99 (weights that differ per client gain nothing once one client fills the
    cache), LoRA 1.17; a convnet of 32 and 64 channels, batch 10: two clients 1.24, four 1.34; ResNet-8, batch 32: two
    0.97. GPU: as many as fit, by the activations that autograd keeps.
    """
    spec, e = f.model.backbone.spec, f.experiment
    widest, kept = spec.numbers(min(e.batch_size, int(f.data.num_examples.max())))
    if f.device.type == "cpu":
        infos = (i for n, i in f.setting.infos.items() if n in f.server.params)
        trains_blocks = any(i.kind == "backbone" and i.unit >= 0 for i in infos)
        per_client, kind = 4 * widest, "stacked" if trains_blocks else "shared"
        if kind == "stacked" and len(spec.feature(0)) == 3 and 4 * per_client <= CACHE_BYTES["maps"]:
            kind = "maps"  # small ones, four and more together
        limit = CACHE_BYTES[kind]
    else:
        state = 4 * 4 * sum(p.numel() for p in f.server.params.values())  # start, parameters, gradients, client memory
        limit, per_client = SHARE_OF_GPU_MEMORY * memory_to_plan_with(f.device), 4 * kept + state
    return max(1, int(limit / per_client))


def plan_round(f: Federation, server: Server, r: Round, workers: int, size: int | None) -> list[list[Member]]:
    """Plan a round's cohorts, once, on the driver, whoever trains them.

    Models of one client stay together where they can stack: those that teach or are taught must meet.
    """
    jobs, hook = list[list[Member]](), f"{f.experiment.method}: members()"
    for client in r.clients:
        given, shapes = f.method.members(client, server, r), dict[Hashable, list[Member]]()
        members = [check_type(m, Member, f"{hook}: one of them") for m in check_type(given, Iterable, hook)]
        for m in (m for m in members if m.trains):
            shapes.setdefault(m.part.shape_key(), []).append(m)
        jobs += [group + [m for m in members if not m.trains] for group in shapes.values()]
    if r.clients and not jobs:
        raise ValueError(f"{hook} gave nothing that trains to any client of round {r.t}")
    program = f"{f.experiment.method}: program()"
    return plan_cohorts(jobs, workers, size, lambda c: check_type(f.method.program(c, f.setting), Hashable, program))


def plan_cohorts(
    jobs: Sequence[Sequence[Member]], workers: int, size: int | None,
    program: Callable[[Client], Hashable] = lambda client: None,
) -> list[list[Member]]:  # fmt: skip
    """Split the clients' ``jobs`` into cohorts of one shape and program, balanced in depth, at least one a worker.

    A round lasts as long as its slowest worker, and a cohort as many steps as its largest client, each of the units
    that its deepest member has. So jobs are sorted by depth and examples, and each group is dealt out like cards: all
    its cohorts get deep and shallow clients, and as many. The plan depends on nothing but the jobs and the number of
    workers asked for, so that a run repeats its sums.
    """

    def depth(job: Sequence[Member]) -> int:
        return max(m.part.depth for m in job)

    alike: dict[Hashable, list[Sequence[Member]]] = {}
    for job in sorted(jobs, key=lambda job: (-depth(job), -job[0].client.num_examples, job[0].client.id)):
        key = job[0].part.shape_key(), tuple((m.name, m.part.shape_key()) for m in job if not m.trains)
        alike.setdefault((key, program(job[0].client)), []).append(job)
    out = []
    for group in alike.values():
        # workers are shared out by the number of clients; a cohort's members stack, so all must be of one group
        share, models = max(1, round(workers * len(group) / len(jobs))), max(len(job) for job in group)
        parts = -(-len(group) * models // (share * size)) * share if size else share  # each worker gets as many
        out += [group[i::parts] for i in range(min(parts, len(group)))]  # dealt out, so depths are mixed evenly
    # the longest first, so that no worker starts it when the others are done
    out.sort(key=lambda cohort: -sum(depth(job) * job[0].client.num_examples for job in cohort))
    return [[m for job in cohort for m in job] for cohort in out]


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

    def __post_init__(self):
        self.workers = self.execution.side_by_side()
        self.cohort_size = self.execution.cohort_size or automatic_cohort_size(self.federation)
        if self.execution.device == "cpu" and self.workers == 1:
            warn_if_spinning(torch.get_num_threads())

    def train(self, server: Server, cohorts: Cohorts, r: Round, memories: Memories) -> Iterator[Trained]:
        def train_one(members: Sequence[Member]) -> Trained:
            return train_cohort(self.federation, self._model(), server, r, members, memories)

        if self.workers == 1:
            one_at_a_time = one_thread(train_one) if len(self.federation.setting.spec.feature(0)) > 1 else train_one
            for members in cohorts:  # not by ``map``, which would take a method's StopIteration for its end
                yield one_at_a_time(members)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,))
        yield from self._pool.map(train_one, cohorts)

    def _model(self) -> ExitModel:
        if not hasattr(self._local, "model"):
            self._local.model = self.federation.model.twin()
            self._local.model.register_forward_pre_hook(self._stop_if_closed)
        return self._local.model

    def _stop_if_closed(self, *_: object) -> None:
        if self._closed.is_set():
            raise RuntimeError("the executor was closed while this cohort was training")

    def close(self) -> None:
        self._closed.set()
        if self._pool is not None:
            close(self._pool)
