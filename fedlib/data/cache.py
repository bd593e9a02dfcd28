"""Decoded data sets and drawn partitions, kept once per machine in ``$FEDLIB_CACHE`` (default ~/.cache/fedlib).

What decodes and divides them is only loaded where something is missing: that saves start-up and memory.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from ..core.storage import DamagedFile, digest_tensors, read_tensors, stored_digest, write_tensors

Decoded = tuple[dict[str, torch.Tensor], list[str]]  # tensors by name, class names


def cache_dir() -> Path:
    """Folder of what is kept; ``FEDLIB_CACHE`` overrides the default."""
    return Path(os.environ.get("FEDLIB_CACHE", Path.home() / ".cache" / "fedlib"))


def cache_file(key: dict) -> Path:
    """The file of what ``key`` describes completely."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    return cache_dir() / f"{digest}.safetensors"


def cached(key: dict, read: Callable[[], Decoded]) -> Decoded:
    """Return ``read()``'s (tensors, class names), from the cache if the same key was read before.

    What cannot be kept (a read-only or full disk) is read again the next time, with a warning.
    """
    file = cache_file(key)
    if file.exists():
        try:
            tensors, metadata = read_tensors(file)
            return tensors, metadata["classes"]
        except DamagedFile as error:
            warnings.warn(f"{file} is damaged ({error.reason}): decoding the data again", stacklevel=2)
    tensors, classes = read()
    try:
        write_tensors(file, tensors, {"classes": classes})
    except OSError as error:
        warnings.warn(f"{file} could not be kept ({error.strerror}): set FEDLIB_CACHE", stacklevel=2)
    return tensors, classes


def known_digest(key: dict) -> str | None:
    """The digest of what ``key`` describes, from the header of its file: nothing is decoded. None if it is not kept."""
    return stored_digest(cache_file(key))


def digest_of(key: dict, tensors: dict[str, torch.Tensor], classes: list[str]) -> str:
    """The digest of what ``key`` describes: as kept, or computed where it could not be."""
    return known_digest(key) or digest_tensors(tensors, {"classes": json.dumps(classes)})
