"""The frozen prefix: leading blocks that nothing trains or feeds back into give the same output all run long.

So it is computed once per example and kept on the training device: of the training set where there is no augmentation,
of the test set always. Of the blocks inside, only class tokens that the head reads are kept; with a frozen backbone and
no feedback nothing else is.
"""

import math
import mmap
import os
import threading
from collections.abc import Callable

import numpy as np
import torch

from ..models.exit_model import ExitModel, Prefix

SHARE_OF_FREE_MEMORY = 0.25  # a larger cache is not made


class PrefixCache:
    """Outputs of the first ``blocks`` blocks for examples 0..n-1, filled as they are asked for.

    ``render(rows)`` gives images (len(rows), C, H, W) on the device. Threads share a cache, and so do forked processes.
    """

    def __init__(self, model: ExitModel, blocks: int, n: int, render: Callable[[torch.Tensor], torch.Tensor], device):
        config = model.backbone.spec
        self.blocks, self.render, self.device = blocks, render, device
        self.goes_on = blocks < model.exit_units[-1] + 1  # does anything run after the prefix?
        tokens = config.num_patches + config.prefix_tokens if self.goes_on else 0
        self.z = _empty(n, tokens, config.dim, device=device)  # pages of rows never asked for are never touched
        self.read = tuple(b for b in range(blocks) if model.head.reads(b))
        self.class_tokens = _empty(len(self.read), n, config.dim, device=device)
        self._ready = _empty(n, device="cpu", dtype=torch.uint8).numpy().view(bool)
        self._lock = threading.Lock()

    @staticmethod
    def bytes_needed(model: ExitModel, blocks: int, n: int) -> int:
        """Memory of a full cache in bytes."""
        config, goes_on = model.backbone.spec, blocks < model.exit_units[-1] + 1
        tokens = config.num_patches + config.prefix_tokens if goes_on else 0
        return 4 * n * config.dim * (tokens + sum(map(model.head.reads, range(blocks))))

    @torch.no_grad()
    def fill(self, model: ExitModel, rows: np.ndarray, batch_size: int = 128) -> None:
        """Compute what is missing of ``rows`` with ``model``, whose frozen parameters must be in place."""
        missing = np.unique(rows)
        missing = missing[~self._ready[missing]]
        for a in range(0, len(missing), batch_size):
            part = torch.from_numpy(missing[a : a + batch_size]).to(self.device)
            made = model.prefix(self.render(part)[None], self.blocks)
            with self._lock:
                for kept, block in zip(self.class_tokens, self.read, strict=True):
                    kept[part] = made.class_tokens[block][0]
                if self.goes_on:
                    length = made.z.shape[-2]  # of sentences, the longest of the batch
                    self.z[part, :length], self.z[part, length:] = made.z[0], 0
        self._ready[missing] = True

    def __call__(self, rows: torch.Tensor) -> Prefix:
        """The prefix of filled ``rows`` (K, B)."""
        tokens = {block: kept[rows] for kept, block in zip(self.class_tokens, self.read, strict=True)}
        return Prefix(self.blocks, self.z[rows], tokens)


def _empty(*shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Memory that is claimed page by page as it is written; on a CPU zero, and shared with processes forked later."""
    n = math.prod(shape)
    if torch.device(device).type != "cpu" or not n:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, n * dtype.itemsize), dtype=dtype).view(shape)


def free_memory(device: torch.device) -> int:
    """Bytes that are free on ``device``."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def build_prefix_cache(
    model: ExitModel, blocks: int, n: int, render: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> PrefixCache | None:
    """A cache for ``n`` examples, or None where there is no frozen prefix or it would take too much memory."""
    if not blocks or PrefixCache.bytes_needed(model, blocks, n) > SHARE_OF_FREE_MEMORY * free_memory(device):
        return None
    return PrefixCache(model, blocks, n, render, device)
