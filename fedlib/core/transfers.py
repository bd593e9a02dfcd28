"""Tensors between a device and the host, which waits for what comes home until all that is queued is done."""

from collections.abc import Sequence
from itertools import accumulate

import torch


def sent(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``x`` on ``device``: a GPU copies it from pinned memory, before all that is queued later, and the host goes on.

    PyTorch gives nobody else the pinned memory before it is read.
    """
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def home(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """``tensors`` on the CPU, by one transfer whatever their number, shapes and types; there already: as they are."""
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    sent = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors]).cpu()
    ends = list(accumulate(t.nbytes for t in tensors))
    parts = [sent[end - t.nbytes : end] for t, end in zip(tensors, ends, strict=True)]
    return [part.clone().view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]  # aligned
