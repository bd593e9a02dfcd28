"""The round loop: sample, train, aggregate, evaluate. Who trains is an executor's matter (``engine/executors.py``)."""

import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..core import doors
from ..core.experiment import Experiment
from ..core.memories import Overlay
from ..core.profiling import phase
from ..core.rng import no_global_draws
from ..core.threads import keep_freed_memory
from ..core.validation import check_type
from ..layers.overrides import override
from ..methods import Arrived, Round, Server
from ..methods.sums import MaskedMean, all_finite
from .arithmetic import arithmetic, check_precision
from .evaluation import evaluate
from .executors import Execution, Executor, InProcess, Memories, Trained, Unforkable, plan_round
from .federation import Federation
from .privacy import privatise
from .serving import evaluate_clients


@dataclass(frozen=True)
class Finished:
    """One finished round: the new server, what changed in client memories and mirrors, and what was measured."""

    t: int
    server: Server
    memories: Memories  # of the clients whose memory changed
    losses: dict[int, float]  # mean training loss per sampled client whose update counts
    metrics: Mapping[str, Any] | None  # see evaluation.evaluate; None when not due
    seconds: float
    diverged: bool = False  # is a client's loss or update, the server's state, or a last answer infinite or NaN?
    dropped: tuple[int, ...] = ()  # clients whose update was left out for that reason
    mirrors: Memories = field(default_factory=dict)  # of the clients whose mirror changed


def is_due(e: Experiment, t: int) -> bool:
    """Return whether round ``t`` is evaluated."""
    return t == e.rounds or (e.looks_every > 0 and t % e.looks_every == 0)


def build_executor(federation: Federation, execution: Execution) -> Executor:
    """Build the executor that ``execution`` asks for.

    ``Unforkable`` if that is ``processes`` and they cannot be had.
    """
    check_precision(federation.experiment, execution.device)
    if execution.device == "cpu":  # before any worker is forked; and the driver evaluates
        keep_freed_memory()
        if (begin := override("begin")) is not None:
            begin(execution.products)
    several = execution.executor == "auto" and execution.side_by_side() > 1
    name = "processes" if several and "processes" in doors.EXECUTORS else execution.executor
    if name in doors.EXECUTORS:
        try:
            return doors.load(doors.EXECUTORS[name])(federation, execution)
        except Unforkable:
            if execution.executor != "auto":
                raise
    return InProcess(federation, execution)


def run_rounds(
    federation: Federation, execution: Execution = Execution(), server: Server | None = None,
    memories: MutableMapping[int, dict[str, torch.Tensor]] | None = None,
    mirrors: MutableMapping[int, dict[str, torch.Tensor]] | None = None,
) -> Iterator[Finished]:  # fmt: skip
    """Run the rounds after ``server.t``, yielding each as it ends; ``memories`` and ``mirrors`` change in place."""
    e, method, setting = federation.experiment, federation.method, federation.setting
    server, memories = server or federation.server, memories if memories is not None else {}
    mirrors = mirrors if mirrors is not None else {c: dict(x) for c, x in server.mirrors.items()}
    executor = build_executor(federation, execution)
    try:
        for t in range(server.t + 1, e.rounds + 1):
            began, before = time.perf_counter(), server.params
            server = replace(server, mirrors=mirrors)
            with arithmetic("float32", federation.device), no_global_draws(e.method):
                r = Round(t, tuple(federation.sample_clients(t)), setting)
                r = replace(r, notes=check_type(method.prepare(server, r), Mapping, f"{e.method}: prepare()"))
                cohorts = plan_round(federation, server, r, executor.workers, executor.cohort_size)
            back = merge_returned(t, len(cohorts), executor.train(server, cohorts, r, memories))
            with phase("aggregation"), arithmetic("float32", federation.device), no_global_draws(e.method):
                dropped = tuple(sorted(back.nonfinite)) if e.nonfinite == "drop" else ()
                mean = privatise(federation, server, back.mean, t)
                if method.noise_multiplier or not {c.id for c in r.clients} <= set(dropped):  # something arrived
                    server = method.aggregate(server, Arrived(mean, back.extras, back.models), r)
                    check_type(server, Server, f"{e.method}: aggregate()")
            server = replace(server, t=t)
            was, now = ({n: (tuple(p.shape), p.dtype) for n, p in x.items()} for x in (before, server.params))
            if other := next((n for n in was if was[n] != now.get(n)), None):  # it may add some (InclusiveFL)
                raise ValueError(f"{e.method}: aggregate() gave {other} {now.get(other)}; allowed: {was[other]}")
            memories.update(back.memories)
            changed = server.mirrors.changes if isinstance(server.mirrors, Overlay) else {}
            mirrors.update(changed)
            if t == 1 and not (dropped or back.memories or back.extras or changed):
                # waits for the device, in the first round alone, and mostly for one tensor
                kept = all(torch.equal(p, server.params[n]) for n, p in before.items())
                if kept and not any(x.any() for x in server.memory.values()):
                    warnings.warn(f"{e.method}: round 1 changed no tensor and no client's memory", stacklevel=2)
            with phase("evaluation"):
                metrics = measure(federation, server, memories) if is_due(e, t) else None
            # numbers that arrived finite can still overflow in a server's optimiser
            overflowed = server.params is not before and not all_finite(server.params.values())
            diverged = overflowed or len(back.nonfinite) > len(dropped)
            if t == e.rounds and metrics is not None:  # before that, how often one looks must end no run
                diverged = diverged or "nonfinite" in {**metrics, **metrics.get("personal", {})}
            seconds = time.perf_counter() - began
            yield Finished(t, server, back.memories, back.losses, metrics, seconds, diverged, dropped, changed)
    finally:
        executor.close()


def measure(f: Federation, server: Server, memories: Memories) -> Mapping[str, Any]:
    """Measure a round on the central test set and, where clients have their own test sets, on these."""
    whole, central = evaluate(f, server), f.experiment.test_split == "central"
    return whole if central else {**whole, "personal": evaluate_clients(f, server, memories)}


def merge_returned(t: int, planned: int, trained: Iterable[Trained]) -> Trained:
    """Merge what the ``planned`` cohorts of round ``t`` bring back as it arrives; one cohort's is held at a time.

    Raises ``RuntimeError`` if more or fewer come back.
    """
    total, came = Trained(MaskedMean({}), {}, {}), 0
    for one in trained:
        came += 1
        total.mean.merge(one.mean)
        for kind in ("memories", "losses", "extras", "models"):
            getattr(total, kind).update(getattr(one, kind))
        total = replace(total, nonfinite=total.nonfinite + one.nonfinite)
    if came != planned:
        raise RuntimeError(f"round {t}: {planned} cohorts were planned and {came} came back")
    return total
