"""A step of local training as one CUDA graph: recorded once, then launched as a whole.

A small net keeps a GPU waiting for its host, as a step is a thousand launches. Steps that are alike (as many examples,
with padding or without) are recorded where a local training has ``LEAST`` of them. A recorded step reads and writes the
same memory each time: ``Batches.place`` says which step it is, what it leaves for the next goes where it was found, and
a member that is done stands still by a rate of zero.

Recorded are no steps that draw what they drop, whose inputs lie in host memory, or that see another part of the net
each, and none that CUDA refuses to record: they run as ever. Without CUDA a step that is recorded runs as it would be.
Read next: ``engine/cohort.py``, whose steps these are.
"""

from collections import Counter
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from fedlib.engine.batches import Batches
from fedlib.engine.forward import Forward
from fedlib.engine.optimisers import LocalOptimiser
from fedlib.layers.dropout import Dropout

from .switch import is_on

LEAST, WARM = 15, 3  # steps that are alike; of these, the first ones, which warm up
Left = Sequence[MutableMapping[str, torch.Tensor]]


def repeat(
    take_step: Callable[[int, Batches], None], batches: Batches, optimiser: LocalOptimiser, forward: Forward, left: Left
) -> bool:
    """Take every step of ``batches``; return False, and take none, where nothing would be recorded.

    ``take_step(step, batches)``. ``left`` are tensors by name that steps replace, first those that run.
    """
    if not is_on("graphs"):
        return False
    host, device = batches.host_weights.clone(), batches.weights.device
    for w, weights in zip(batches.width, host, strict=True):
        weights *= (weights[:, :w] != 0).all()  # where one row is padding each may be, and the device knows which
    kinds = [(w, bool(x[0, 0])) for w, x in zip(batches.width, host, strict=True)]
    often = Counter(kinds)
    drops = any(isinstance(m, (Dropout, nn.Dropout)) and m.p for m in forward.model.modules())
    if drops or batches.rows.device != device or max(often.values()) < LEAST:
        return False
    place = torch.zeros(1, dtype=torch.long, device=device)
    optimiser.read_at(place, batches.active)
    batches = replace(batches, place=place, host_weights=host, active=np.ones_like(batches.active))
    taken, recorded = Counter(), {}
    for step, kind in enumerate(kinds):
        place.fill_(step)
        take = partial(_take_in_place, take_step, step, batches, forward, left)
        if often[kind] >= LEAST and taken[kind] == WARM:
            recorded[kind] = record(take, device)
        taken[kind] += 1
        recorded.get(kind, take)()
    return True


def _take_in_place(
    take_step: Callable[[int, Batches], None], step: int, batches: Batches, forward: Forward, left: Left
) -> None:
    """Take a step; write what it replaces over what was there, which stays in its place."""
    before = [dict(tensors) for tensors in left]
    try:
        take_step(step, batches)
        for tensors, old in zip(left, before, strict=True):
            for name, x in old.items():
                if tensors[name] is not x:
                    x.copy_(tensors[name])
    finally:
        for tensors, old in zip(left, before, strict=True):
            tensors.update(old)
        forward.place_(True, forward.model.context.generators)


def record(take: Callable[[], None], device: torch.device) -> Callable[[], None]:
    """Record what ``take`` does; return what does it again: ``take`` itself without CUDA, or where CUDA refuses."""
    if device.type != "cuda":
        return take
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            take()
    except RuntimeError:
        return take
    return graph.replay
