"""The round loop: sample, train, aggregate, evaluate. Who trains is an executor's matter (``engine/executors.py``)."""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace

import torch

from ..core.experiment import Experiment
from ..core.profiling import phase
from ..layers.matmul import choose_products
from ..methods import Server
from ..methods.server import all_finite, merge_sums
from .evaluation import evaluate
from .executors import Execution, Executor, InProcess, Memories, Trained
from .federation import Federation
from .privacy import privatise


@dataclass(frozen=True)
class Round:
    """One finished round: the new server, what changed in client memories, and what was measured."""

    t: int
    server: Server
    memories: Memories  # of the clients whose memory changed
    losses: dict[int, float]  # mean training loss per sampled client whose update counts
    metrics: Mapping[str, object] | None  # see evaluation.evaluate; None when not due
    seconds: float
    diverged: bool = False  # did a client's loss or update, or the server's state, become infinite or NaN?
    dropped: tuple[int, ...] = ()  # clients whose update was left out for that reason


def is_due(e: Experiment, t: int) -> bool:
    """Is round ``t`` evaluated?"""
    return t == e.rounds or (e.evaluate_every > 0 and t % e.evaluate_every == 0)


def build_executor(federation: Federation, execution: Execution) -> Executor:
    """The executor that ``execution`` asks for; ``Unforkable`` if that is ``processes`` and they cannot be had."""
    if execution.device == "cpu":
        choose_products()  # before any worker is forked
    if execution.executor == "ray":
        from .cluster import RayExecutor

        return RayExecutor(federation, execution)
    if execution.executor == "processes" or (execution.executor == "auto" and execution.side_by_side() > 1):
        from .processes import ForkedProcesses, Unforkable

        try:
            return ForkedProcesses(federation, execution)
        except Unforkable:
            if execution.executor == "processes":
                raise
    return InProcess(federation, execution)


def run_rounds(
    federation: Federation,
    execution: Execution = Execution(),
    server: Server | None = None,
    memories: MutableMapping[int, dict[str, torch.Tensor]] | None = None,
) -> Iterator[Round]:
    """Run the rounds after ``server.t``, yielding each as it ends. ``memories`` is updated in place."""
    e, method, setting = federation.experiment, federation.method, federation.setting
    server = server if server is not None else federation.server
    memories = memories if memories is not None else {}
    executor = build_executor(federation, execution)
    try:
        for t in range(server.t + 1, e.rounds + 1):
            began = time.perf_counter()
            sampled = federation.sample_clients(t)
            changed: dict[int, dict[str, torch.Tensor]] = {}
            losses: dict[int, float] = {}
            nonfinite: list[int] = []

            def record(trained: Trained, changed=changed, losses=losses, nonfinite=nonfinite):
                changed.update(trained.memories)
                losses.update(trained.losses)
                nonfinite.extend(trained.nonfinite)
                return trained.sums

            sums = merge_sums(map(record, executor.train(server, sampled, t, memories)))
            with phase("aggregation"):
                sums = privatise(federation, server, sums, t)
                # without sums every client was dropped: nothing arrived
                server = method.aggregate(server, sums, t, setting) if sums else replace(server, t=t)
            memories.update(changed)
            with phase("evaluation"):
                metrics = evaluate(federation, server) if is_due(e, t) else None
            dropped = tuple(sorted(nonfinite)) if e.nonfinite == "drop" else ()
            # numbers that arrived finite can still overflow in a server's optimiser
            diverged = len(nonfinite) > len(dropped) or not all_finite(server.params.values())
            yield Round(t, server, changed, losses, metrics, time.perf_counter() - began, diverged, dropped)
    finally:
        executor.close()
