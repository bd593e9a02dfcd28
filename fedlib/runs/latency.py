"""How long parts of a model take, here and now: what answers, and a step of training, with random weights.

What a machine measures is no part of an experiment. Read next: ``costs.py`` (what is counted).
"""

import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch

from ..core.experiment import Experiment
from ..core.slices import Slice
from ..engine.forward import Forward
from .costs import Shapes, load_shapes
from .prices import num_classes


def seconds_of(shapes: Shapes, part: Slice, examples: int = 1, repeats: int = 5) -> float:
    """Median seconds in which ``part`` answers ``examples`` examples, here and now; the first pass does not count."""
    spec, times = shapes.setting.spec, []
    forward = Forward(shapes.model, [part], shapes.held(part)).place_(training=True)
    x = torch.ones(1, examples, *spec.input_shape)
    with torch.inference_mode():
        for _ in range(repeats + 1):
            began = time.perf_counter()
            forward(x)
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def step_seconds(e: Experiment, parts: Sequence[Slice], batch: int = 32, repeats: int = 2) -> np.ndarray:
    """Seconds of one training step (forward and backward) of each of ``parts``, the best of ``repeats``, one thread.

    Weights are random and inputs ones.
    """
    shapes = load_shapes(e.replace(pretrained=False), num_classes(e), device="cpu")
    x = torch.ones(1, batch, *shapes.setting.spec.input_shape)
    threads, out = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for part in parts:
            held = {n: p.detach().requires_grad_(n in shapes.trainable) for n, p in shapes.held(part).items()}
            trained, taken = [p for p in held.values() if p.requires_grad], []
            forward = Forward(shapes.model, [part], held).place_(training=True)
            for _ in range(repeats + 1):  # the first is slower than those that follow
                began = time.perf_counter()
                torch.autograd.grad(forward(x).sum(), trained, allow_unused=True)
                taken.append(time.perf_counter() - began)
            out.append(min(taken[1:]))
    finally:
        torch.set_num_threads(threads)
    return np.array(out)


def level_seconds(e: Experiment, batch: int = 32) -> np.ndarray:
    """Seconds of one training step of what a client of each budget of ``e`` holds, smallest budget first."""
    shapes = load_shapes(e, num_classes(e))
    return step_seconds(e, [shapes.slice_for(b) for b in range(shapes.budgets)], batch, repeats=8)
