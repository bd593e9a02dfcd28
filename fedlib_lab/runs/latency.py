"""How long parts of a model take, here and now: what answers, and a step of training, with random weights.

What a machine measures is no part of an experiment. Read next: ``costs.py`` (what is counted).
"""

import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from fedlib.core.experiment import Experiment
from fedlib.core.slices import Slice

from .costs import Shapes, load_shapes
from .prices import num_classes

SECONDS = 0.3  # that a measurement takes


def median_seconds(step: Callable[[], object], device: str = "cpu", seconds: float = SECONDS) -> float:
    """Of ``step``, done over and over for so many ``seconds`` on one thread or GPU; the first does not count.

    On a CPU the thread's own time counts: others may be busy on the same cores. Threads that wait for each other would
    tell less of the machine.
    """
    from torch.utils.benchmark import Timer
    from torch.utils.benchmark.utils.timer import timer  # which waits for the GPU

    clock = time.thread_time if device == "cpu" else timer
    return Timer("step()", timer=clock, globals={"step": step}).blocked_autorange(min_run_time=seconds).median


def seconds_of(shapes: Shapes, part: Slice, examples: int = 1, seconds: float = SECONDS) -> float:
    """Seconds in which ``part`` answers ``examples`` examples, here and now."""
    forward, x = shapes.forward(part), shapes.examples(examples)
    return median_seconds(torch.inference_mode()(lambda: forward(x)), x.device.type, seconds)


def step_seconds(e: Experiment, parts: Sequence[Slice], batch: int = 32) -> np.ndarray:
    """Seconds of one training step (forward and backward) of each of ``parts``; weights are random, inputs ones."""
    shapes = load_shapes(e.replace(pretrained=False), num_classes(e), device="cpu")
    return np.array([_step_seconds(shapes, part, batch) for part in parts])


def _step_seconds(shapes: Shapes, part: Slice, batch: int, seconds: float = SECONDS) -> float:
    forward, x = shapes.forward(part), shapes.examples(batch)
    trained = [p for p in forward.tensors[0].values() if p.requires_grad]
    step = lambda: torch.autograd.grad(forward(x).sum(), trained, allow_unused=True)  # noqa: E731
    return median_seconds(step, x.device.type, seconds)


def level_seconds(e: Experiment, batch: int = 32) -> np.ndarray:
    """Seconds of one training step of what a client of each budget of ``e`` holds, smallest budget first."""
    return step_seconds(e, load_shapes(e, num_classes(e)).slices, batch)


def product_macs_per_second(device: str = "cpu", seconds: float = SECONDS) -> float:
    """MACs in plain matrix products, on one thread or GPU: what training gets within 40 % (DeiT-S, ViT-B, measured)."""
    n = 1024 if device == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    return n**3 / median_seconds(lambda: a @ a, device, seconds)


def timed_macs_per_second(e: Experiment, classes: int, device: str = "cpu", seconds: float = SECONDS) -> float:
    """MACs in training (a step is counted as three forward passes) of ``e``'s middle exit, on one thread or GPU."""
    shapes = load_shapes(e.replace(pretrained=False), classes, device=device)
    part = shapes.slice_for(shapes.budgets // 2)
    macs = 3 * shapes.setting.measure.macs(part) * e.batch_size
    return macs / _step_seconds(shapes, part, e.batch_size, seconds)
