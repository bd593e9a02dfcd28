"""The MACs of a model's units, each counted alone: what sums are compared with."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedlib.models.measure import Measure


def unit_macs(measure: Measure) -> tuple[int, ...]:
    """Of one example in the stem, then in each unit; exits are not counted."""
    out, z, backbone = [], torch.empty(1, 1, *measure.spec.input_shape, device="meta"), measure.model.backbone
    with torch.no_grad():
        for unit in range(-1, measure.spec.depth):
            with FlopCounterMode(display=False) as counter:
                z = backbone.stem(z) if unit < 0 else backbone.advance(z, unit, 1)[1]
            out.append(counter.get_total_flops() // 2)
    return tuple(out)
