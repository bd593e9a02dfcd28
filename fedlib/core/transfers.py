"""Tensors from a device to the host, which waits there until all that is queued is done: once for many of them."""

from collections.abc import Sequence
from itertools import accumulate

import torch


def home(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` on the CPU, by one transfer whatever their number, shapes and types; there already: as they are."""
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    sent = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors]).cpu()
    ends = list(accumulate(t.nbytes for t in tensors))
    parts = [sent[end - t.nbytes : end] for t, end in zip(tensors, ends, strict=True)]
    return [part.clone().view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]  # aligned
