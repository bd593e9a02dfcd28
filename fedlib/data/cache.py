"""Decoded data sets, kept once per machine in ``$FEDLIB_CACHE`` (default ~/.cache/fedlib)."""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from ..storage import DamagedFile, read_tensors, write_tensors

Decoded = tuple[dict[str, torch.Tensor], list[str]]  # tensors by field of ImageData, class names


def cache_dir() -> Path:
    """Folder for decoded data sets; ``FEDLIB_CACHE`` overrides the default."""
    return Path(os.environ.get("FEDLIB_CACHE", Path.home() / ".cache" / "fedlib"))


def cache_file(key: dict) -> Path:
    """The file of the set that ``key`` describes completely."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{digest}.safetensors"


def cached(key: dict, read: Callable[[], Decoded]) -> Decoded:
    """Return ``read()``'s (tensors, class names), from the cache if the same key was decoded before."""
    file = cache_file(key)
    if file.exists():
        try:
            tensors, metadata = read_tensors(file)
            return tensors, metadata["classes"]
        except DamagedFile as error:
            warnings.warn(f"{file} is damaged ({error.reason}): decoding the data again", stacklevel=2)
    tensors, classes = read()
    write_tensors(file, tensors, {"classes": classes})
    return tensors, classes
