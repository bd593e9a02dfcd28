"""Runs that differ in seed, rate or split alone train together: their clients are members of the same cohorts.

Small nets leave a GPU idle: fifty members take the launches of ten. Each run goes on in a thread of its own, with its
own server, checkpoint and lock, through the same round loop as ever; only where a round's clients train do the runs
meet. One thread works at any time, and the last to come trains for all. There client i of run k is client k N + i, and
a server's tensor ``name`` of that run is ``k/name``, so that everything behind is ordinary training of one cohort.
Read next: ``runs/side_by_side.py`` (which runs), ``engine/executors.py``.
"""

import copy
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.rng import numpy_generator, torch_generator
from fedlib.core.slices import NOTHING, Slice
from fedlib.data.federated import FederatedData
from fedlib.data.partition import Divided, Drawn
from fedlib.engine.executors import Cohorts, Execution, Memories, Trained, automatic_cohort_size, plan_cohorts
from fedlib.engine.federation import Federation, label_counts
from fedlib.engine.rounds import build_executor, merge_returned
from fedlib.engine.schedules import round_rate
from fedlib.methods import Member, Round, Server
from fedlib.methods.mixtures import under
from fedlib.methods.sums import MaskedMean

_here = threading.local()  # .meeting: that of this thread's run


class Meeting:
    """Where runs meet once a round. A run that has left is waited for no more."""

    def __init__(self, runs: int):
        self.turn, self.present, self.stopped = threading.Condition(), runs, False
        self.asking: list[Asked] = []
        self.joints: dict[Stacked, Joint] = {}

    def attend(self, work: Callable[[], Any]) -> Any:
        """Do the ``work`` of one run in this thread, while no other one works."""
        with self.turn:
            _here.meeting = self
            try:
                return work()
            finally:
                self.present -= 1
                self.turn.notify_all()

    def train(self, asked: "Asked") -> Trained:
        """Return what the clients ``asked`` for bring back, once all runs that are present have asked."""
        with self.turn:
            self.asking.append(asked)
            while asked.back is None:
                if self.stopped:
                    raise KeyboardInterrupt
                if len(self.asking) < self.present:
                    self.turn.wait()
                else:
                    self._train_waiting()
        if isinstance(asked.back, Exception):
            raise asked.back
        return asked.back

    def _train_waiting(self) -> None:
        """Train for those who are furthest behind; what cannot train together trains one after another."""
        for new in (a.by for a in self.asking):
            if new not in self.joints:
                others = (b.by for b in self.asking if b.by not in self.joints)
                alike = [by for by in others if are_alike(new.federation, by.federation)]
                self.joints |= dict.fromkeys(alike, Joint([by.federation for by in alike], new.execution))
        t = min(a.r.t for a in self.asking)
        now, self.asking = [a for a in self.asking if a.r.t == t], [a for a in self.asking if a.r.t > t]
        for joint in dict.fromkeys(self.joints[a.by] for a in now):
            some = [a for a in now if self.joints[a.by] is joint]
            try:
                joint.train(some)
            except Exception as error:
                if self.stopped:
                    raise KeyboardInterrupt from error
                if len(joint.runs) == 1:
                    some[0].back = error
                else:  # they ask again, and what goes wrong then is each run's own
                    warnings.warn(f"runs that cannot train together train one after another: {error}", stacklevel=2)
                    joint.executor.close()
                    self.joints |= {a.by: Joint([a.by.federation], a.by.execution) for a in some}
                    self.asking += some
        self.turn.notify_all()

    def close(self) -> None:
        """Close what trains; a run that still goes on ends as if interrupted, amid its training."""
        self.stopped = True
        for joint in set(self.joints.values()):
            with suppress(Exception):
                joint.executor.close()


class Stacked:
    """The executor of one run, whose clients train with those of the runs that its thread meets."""

    workers, cohort_size = 1, 0  # planned again, with those of the others

    def __init__(self, federation: Federation, execution: Execution):
        self.federation, self.execution = federation, replace(execution, executor="auto")
        self.meeting: Meeting = getattr(_here, "meeting", None) or Meeting(1)

    def train(self, server: Server, cohorts: Cohorts, r: Round, memories: Memories) -> Iterator[Trained]:
        yield self.meeting.train(Asked(self, server, cohorts, r, memories))
        yield from (Trained(MaskedMean({}), {}, {}) for _ in cohorts[1:])  # the first holds all

    def close(self) -> None:
        """Do nothing: others go on."""


@dataclass(eq=False)
class Asked:
    """What one run asks for in a round, and gets back."""

    by: Stacked
    server: Server
    cohorts: Cohorts
    r: Round
    memories: Memories
    back: Trained | Exception | None = None


def are_alike(a: Federation, b: Federation) -> bool:
    """Return whether two runs share all that members have once: method, examples, their scale, frozen tensors."""
    x, y = a.data, b.data
    pairs = [(x.labels, y.labels), (x.mean, y.mean), (x.std, y.std)]
    pairs += [(p, b.frozen.get(n)) for n, p in a.frozen.items()]
    same = a.method == b.method and x.inputs is y.inputs
    return same and all(p is q or (q is not None and torch.equal(p, q)) for p, q in pairs)


@dataclass(frozen=True)
class Examples(FederatedData):
    """The data of several runs, whose clients stand one after another."""

    runs: tuple[tuple[Divided | Drawn, int], ...] = ()  # who holds what, and the seed

    def client(self, i: int) -> np.ndarray:
        run, own = divmod(i, len(self.holdings.num_examples))
        return self.runs[run][0].client(own)

    def in_order(self, i: int) -> np.ndarray:
        run, own = divmod(i, len(self.holdings.num_examples))
        return numpy_generator(self.runs[run][1], "in order", client=own).permutation(self.client(i))


@dataclass(frozen=True)
class Together(Federation):
    """Several runs as one federation, for those who train."""

    runs: tuple[Experiment, ...] = ()

    def generator(self, purpose: str, t: int, client: int) -> torch.Generator:
        run, own = divmod(client, self.experiment.num_clients)
        return torch_generator(self.runs[run].seed, purpose, t, own)

    def rate(self, t: int, clients: Sequence[Client]) -> float | torch.Tensor:
        own = [round_rate(self.runs[c.id // self.experiment.num_clients], t) for c in clients]
        return own[0] if len(set(own)) == 1 else torch.tensor(own, dtype=torch.float64, device=self.device)


@dataclass(frozen=True)
class Unlike:
    """Stands where a client's training would read a field in which the runs differ. Whoever uses it is told.

    ``Cohort.generator`` and ``Cohort.rate`` know each client's own.
    """

    field: str

    def refuse(self, *_: object) -> NoReturn:
        raise RuntimeError(f"the training of clients reads {self.field}, in which they differ")

    __index__ = __iter__ = __len__ = __add__ = __radd__ = __mul__ = __rmul__ = __hash__ = __str__ = refuse  # type: ignore[assignment]


class Names(dict):
    """``Slice.aliases`` of one run's member, and ``""`` its run: where its tensors lie in the server of all."""

    def get(self, name: str, default: Any = None) -> str:
        return f"{self['']}/{super().get(name, default)}"


class Joint:
    """Runs that train together on an executor of their own."""

    def __init__(self, runs: Sequence[Federation], execution: Execution):
        first = runs[0]
        self.runs, self.clients = list(runs), first.experiment.num_clients
        held = tuple((f.data.holdings, f.data.seed) for f in runs)
        data = Examples(**vars_of(first.data) | {"runs": held, "public": np.empty(0, np.int64)})
        e, each = copy.copy(first.experiment), [vars(f.experiment) for f in runs]
        setting = replace(first.setting, label_counts=partial(label_counts, data), solved={})
        for name in (n for n, x in each[0].items() if any(own[n] != x for own in each)):
            object.__setattr__(e, name, Unlike(name))
        setting = replace(setting, seed=e.seed)
        self.server = self.merged({k: f.server for k, f in enumerate(runs)})
        own = {"experiment": e, "setting": setting, "data": data, "server": self.server}
        self.federation = Together(**vars_of(first) | own, runs=tuple(f.experiment for f in runs))
        size = execution.cohort_size or automatic_cohort_size(first)
        self.executor = build_executor(self.federation, replace(execution, cohort_size=size))

    def merged(self, servers: Mapping[int, Server]) -> Server:
        """Put the servers of some runs in one."""
        some = next(iter(servers.values()))
        params = {f"{k}/{n}": p for k, server in servers.items() for n, p in server.params.items()}
        return Server(some.t, params, under("frozen", some.changed))

    def train(self, asked: Sequence[Asked]) -> None:
        """Train what is ``asked`` for, and give each what its clients bring back."""
        if len(self.runs) > 1 and any(a.server.changed for a in asked):
            raise RuntimeError("the server changes what clients do not train")
        by_run = {k: a for a in asked for k, f in enumerate(self.runs) if f is a.by.federation}
        jobs: dict[tuple[int, int, int], list[Member]] = {}  # by run, cohort and client
        memories = {}
        for run, a in by_run.items():
            for k, m in ((k, m) for k, cohort in enumerate(a.cohorts) for m in cohort):
                own = self.member(run, m)
                jobs.setdefault((run, k, m.client.id), []).append(own)
                if m.client.id in a.memories:
                    memories[own.client.id] = a.memories[m.client.id]
        cohorts = plan_cohorts(list(jobs.values()), self.executor.workers, self.executor.cohort_size, self.program)
        server = self.merged({run: a.server for run, a in by_run.items()})
        server = replace(server, params={**self.server.params, **server.params})
        r = replace(asked[0].r, clients=(), setting=self.federation.setting, notes={})
        total = merge_returned(r.t, len(cohorts), self.executor.train(server, cohorts, r, memories))
        for run, a in by_run.items():
            a.back = self.part(run, total)

    def member(self, run: int, m: Member) -> Member:
        """Return a run's member as one of all."""

        def own(part: Slice) -> Slice:
            return replace(part, aliases=Names({**part.aliases, "": run}))

        sent = m.upload if m.upload is None or m.upload is NOTHING else own(m.upload)
        client = replace(m.client, id=run * self.clients + m.client.id)
        return replace(m, client=client, part=own(m.part), upload=sent)

    def program(self, client: Client) -> object:
        run, own = divmod(client.id, self.clients)
        return self.runs[run].method.program(replace(client, id=own), self.runs[run].setting)

    def part(self, run: int, total: Trained) -> Trained:
        """Return what the clients of one run brought back."""
        start, its = f"{run}/", range(run * self.clients, (run + 1) * self.clients)
        mean = total.mean.named({n: n.removeprefix(start) for n in total.mean.total if n.startswith(start)})
        kinds = ("memories", "losses", "extras", "models")
        own = {k: {c - its.start: x for c, x in getattr(total, k).items() if c in its} for k in kinds}
        return Trained(mean, nonfinite=tuple(c - its.start for c in total.nonfinite if c in its), **own)


def vars_of(whole: Any) -> dict[str, Any]:
    """Return the fields of a dataclass by name."""
    return {f.name: getattr(whole, f.name) for f in fields(whole)}
