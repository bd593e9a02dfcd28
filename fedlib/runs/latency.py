"""Levels by measured latency: solved once on the machine that shall answer, and written into the experiment.

What a machine measures is no part of an experiment, so ``Levels.cost`` counts only; this gives ``widths`` and
``depths`` for its options. Read next: ``methods/scaling.py``, ``methods/scaling.py``.
"""

import statistics
import time
from collections.abc import Callable
from functools import cache, partial

import torch

from ..core.experiment import Experiment
from ..core.slices import Slice
from ..engine.forward import Forward
from ..methods.scaling import priced, solve_levels
from .costs import Shapes, load_shapes


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


def levels_by_latency(
    e: Experiment, classes: int, seconds: Callable[[Shapes, Slice], float] = seconds_of
) -> dict[str, tuple[float, ...]]:
    """``widths`` and ``depths`` of ``e``'s levels, each with its share (``ratios``) of the whole model's latency.

    ``ValueError`` as :func:`solve_levels`, with the nearest split where none fits.
    """
    e = e.replace(pretrained=False)
    shapes = load_shapes(e, classes)
    method, depth = shapes.method, shapes.setting.spec.depth
    units = method.places(depth)
    shapes = load_shapes(e, classes, units, device="cpu")
    price = cache(partial(seconds, shapes))
    cost, full = priced(price, shapes.setting)
    ratios = method.ratios_of(e.num_exits)
    levels = solve_levels(cost, ratios, [u + 1 for u in units], full, method.grid, method.eps)
    return {"widths": tuple(x.width for x in levels), "depths": tuple(round(x.depth / depth, 4) for x in levels)}
