"""The frozen cache: leading units that nothing trains or feeds back into give the same output all run long.

So it is computed once per example and kept on the training device: of the training set where there is no augmentation,
of the test set always. Of the units inside, only features that the head reads are kept, after its own units or, where
those skip to an exit (FeDepth), after others; with a frozen backbone and no feedback nothing else is.
"""

import math
import mmap
import threading
from collections.abc import Callable, Collection

import numpy as np
import torch

from ..core.devices import free_memory
from ..models.exit_model import ExitModel
from ..models.route import PartialForward

SHARE_OF_FREE_MEMORY = 0.25  # a larger cache is not made


class FrozenCache:
    """Outputs of the first ``units`` units for examples 0..n-1, filled as they are asked for.

    ``render(rows)`` gives inputs (len(rows), *input_shape) on the device. Threads share a cache, and so do forked
    processes.
    """

    def __init__(
        self, model: ExitModel, units: int, n: int, render: Callable[[torch.Tensor], torch.Tensor],
        device: torch.device, skips: Collection[int] = (),
    ):  # fmt: skip
        self.units, self.render, self.device = units, render, device
        self.goes_on = units < model.depth  # does anything run after them?
        state, features, self.read = _shapes(model, units, skips)
        self.z = _empty(n, *(state if self.goes_on else (0, 0)), device=device)  # pages never asked for stay untouched
        self.features = [_empty(n, *shape, device=device) for shape in features]
        self._ready = _empty(n, device="cpu", dtype=torch.uint8).numpy().view(bool)
        self._lock = threading.Lock()

    @staticmethod
    def bytes_needed(model: ExitModel, units: int, n: int, skips: Collection[int] = ()) -> int:
        """Return the memory of a full cache in bytes."""
        state, features, _ = _shapes(model, units, skips)
        return 4 * n * sum(math.prod(shape) for shape in (*([state] if units < model.depth else []), *features))

    @torch.no_grad()
    def fill(self, model: ExitModel, rows: np.ndarray, batch_size: int = 128) -> None:
        """Compute what is missing of ``rows`` with ``model``, whose frozen parameters must be in place."""
        missing = np.unique(rows)
        missing = missing[~self._ready[missing]]
        for a in range(0, len(missing), batch_size):
            part = torch.from_numpy(missing[a : a + batch_size])
            made = model.run_leading(self.render(part)[None], self.units, keep=self.read)
            part = part.to(self.device)
            with self._lock:
                for kept, unit in zip(self.features, self.read, strict=True):
                    kept[part] = made.features[unit][0]
                if self.goes_on:
                    length = made.z.shape[2]  # of sentences, the longest of the batch
                    self.z[part, :length], self.z[part, length:] = made.z[0], 0
        self._ready[missing] = True

    def __call__(self, rows: torch.Tensor) -> PartialForward:
        """Return the units' output for filled ``rows`` (K, B)."""
        features = {unit: kept[rows] for kept, unit in zip(self.features, self.read, strict=True)}
        return PartialForward(self.units, self.z[rows], features)


def _shapes(
    model: ExitModel, units: int, skips: Collection[int]
) -> tuple[tuple[int, ...], list[tuple[int, ...]], tuple[int, ...]]:
    """Return one example's shape of z after ``units``, those of the features that the head reads, and their units."""
    spec, read = model.backbone.spec, tuple(u for u in range(units) if model.head.reads(u) or u in skips)
    return spec.state(units - 1), [spec.feature(u) for u in read], read


def _empty(*shape: int, device: torch.device | str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Allocate memory that is claimed page by page as it is written; on a CPU zero, and shared with later forks."""
    n = math.prod(shape)
    if torch.device(device).type != "cpu" or not n:
        return torch.empty(shape, dtype=dtype, device=device)
    return torch.frombuffer(mmap.mmap(-1, n * dtype.itemsize), dtype=dtype).view(shape)


def build_frozen_cache(
    model: ExitModel, units: int, n: int, render: Callable[[torch.Tensor], torch.Tensor], device: torch.device,
    skips: Collection[int] = (),
) -> FrozenCache | None:  # fmt: skip
    """Build a cache for ``n`` examples; None where no unit is frozen or it would take too much memory."""
    if not units or FrozenCache.bytes_needed(model, units, n, skips) > SHARE_OF_FREE_MEMORY * free_memory(device):
        return None
    return FrozenCache(model, units, n, render, device, skips)
