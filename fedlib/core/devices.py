"""Devices: what is free on one, and tensors between it and the host.

The host waits for what comes home until all that is queued is done.
"""

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import psutil
import torch

CGROUP = Path("/sys/fs/cgroup")


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return ``x`` on ``device``: a GPU copies it from pinned memory, in order with queued work, and the host goes on.

    PyTorch gives nobody else the pinned memory before it is read.
    """
    if x.device.type == "cpu" and device.type == "cuda":
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


def to_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy ``tensors`` to the CPU in one transfer, whatever their number, shapes and types.

    Return as they are if there.
    """
    if all(t.device.type == "cpu" for t in tensors):
        return list(tensors)
    sent = torch.cat([t.contiguous().flatten().view(torch.uint8) for t in tensors]).cpu()
    ends = list(accumulate(t.nbytes for t in tensors))
    parts = [sent[end - t.nbytes : end] for t, end in zip(tensors, ends, strict=True)]
    return [part.clone().view(t.dtype).view(t.shape) for part, t in zip(parts, tensors, strict=True)]  # aligned


def free_memory(device: torch.device) -> float:
    """Return the bytes that may still be claimed on ``device``.

    On a CPU what the system or the container's limit leaves.
    """
    if device.type == "cuda":  # what PyTorch keeps of what was freed is free
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + kept
    return min(psutil.virtual_memory().available, _container_memory())


def _container_memory() -> int | float:
    """Return the bytes that a control group's limit (version 2) leaves, without its file cache.

    Infinite without a limit.
    """
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        used = int((CGROUP / "memory.current").read_text())
        files = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()).get("inactive_file", 0)
    except (OSError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used + int(files)


def memory_to_plan_with(device: torch.device) -> float:
    """Return the bytes to plan with: all of a GPU while half are free, so that no plan depends on earlier runs.

    Where others have more than half of it, twice what they leave; on a CPU what is free.
    """
    if device.type != "cuda":
        return free_memory(device)
    return min(torch.cuda.get_device_properties(device).total_memory, 2 * free_memory(device))
