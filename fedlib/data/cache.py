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

ANY_SIZE = {"size": "any"}  # says that data were read that depend on the network's input
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


def cached_for(size: int | None, key: dict, read: Callable[[int | None], tuple[Decoded, bool]]) -> Decoded:
    """As :func:`cached`, of data that may depend on the network's input ``size``: ``read(size)`` also says if they do.

    What does not depend on it is kept once, for all networks.
    """
    fitted = key | {"size": size}
    for k in (key, fitted):
        if cache_file(k).exists():
            return cached(k, lambda: read(size)[0])
    decoded, depends = read(size)
    if depends:
        cached(key | ANY_SIZE, lambda: ({"none": torch.zeros(0)}, []))
    return cached(fitted if depends else key, lambda: decoded)


def was_read(key: dict) -> bool:
    """Has :func:`cached_for` read these data before, for whatever size?"""
    return cache_file(key).exists() or cache_file(key | ANY_SIZE).exists()


def known_digest(key: dict, size: int | None = None) -> str | None:
    """The digest of what ``key`` describes, from the header of its file: nothing is decoded. None if it is not kept."""
    return stored_digest(cache_file(key)) or stored_digest(cache_file(key | {"size": size}))


def digest_of(key: dict, size: int | None, decoded: Decoded) -> str:
    """The digest of what ``key`` describes: as kept, or computed where it could not be."""
    tensors, classes = decoded
    return known_digest(key, size) or digest_tensors(tensors, {"classes": json.dumps(classes)})
