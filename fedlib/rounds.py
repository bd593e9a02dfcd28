"""The round loop: sample, train, aggregate, evaluate. Who trains is an executor's matter (``executors.py``)."""

import time
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

import numpy as np
import torch

from .aggregation import merge_sums
from .evaluation import evaluate
from .executors import Execution, Executor, InProcess, Memories, Trained
from .federation import Federation
from .methods import Server


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


def build_executor(federation: Federation, execution: Execution) -> Executor:
    """The executor that ``execution`` asks for."""
    if execution.executor == "ray":
        from .cluster import RayExecutor

        return RayExecutor(federation, execution)
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

            def record(trained: Trained, changed=changed, losses=losses):
                changed.update(trained.memories)
                losses.update(trained.losses)
                return trained.sums

            sums = merge_sums(map(record, executor.train(server, sampled, t, memories)))
            server = method.aggregate(server, sums, t, setting)
            memories.update(changed)
            due = t == e.rounds or (e.evaluate_every and t % e.evaluate_every == 0)
            metrics = evaluate(federation, server) if due else None
            yield Round(t, server, changed, losses, metrics, time.perf_counter() - began)
    finally:
        executor.close()
