"""Decoded data sets and drawn partitions, kept once per machine in ``$FEDLIB_CACHE`` (default ~/.cache/fedlib).

What decodes and divides them is only loaded where something is missing: that saves start-up and memory.
"""

import contextlib
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..core import storage
from ..core.paths import named_folder
from ..core.storage import DamagedFile

ANY_SIZE = {"size": "any"}  # says that data were read that depend on the network's input
Decoded = tuple[dict[str, torch.Tensor], list[str]]  # tensors by name, class names
Read = Callable[[int | None], tuple[Decoded, bool]]  # of a network's input size; also says if it matters
READER = 3  # raised where a reader makes something else of the same files: keys, which name runs, stay as they are
SETTLED = 2.0  # seconds after which a file that is written again has another time
_digests: dict[str, str] = {}  # of files' bytes, by what the system says of the files
FORMAT = 3  # of the decoded arrays


def cache_dir() -> Path:
    """Return the cache folder; ``FEDLIB_CACHE`` overrides the default."""
    return named_folder("FEDLIB_CACHE") or Path.home() / ".cache" / "fedlib"


def cache_file(key: dict) -> Path:
    """Return the file of the data that ``key`` describes completely, as this version of the readers decodes them."""
    return cache_dir() / f"{source_digest(key)}.{READER}.safetensors"


def cached(key: dict, read: Callable[[], Decoded]) -> Decoded:
    """Return ``read()``'s (tensors, class names), from the cache if the same key was read before.

    What cannot be kept (a read-only or full disk) is read again the next time, with a warning.
    """
    if (file := cache_file(key)).exists():
        try:
            tensors, metadata = storage.read_tensors(file)
            return tensors, metadata["classes"]
        except DamagedFile as error:
            warnings.warn(f"{file} is damaged ({error.reason}): decoding the data again", stacklevel=2)
    tensors, classes = read()
    try:
        storage.write_tensors(file, tensors, {"classes": classes})
    except OSError as error:
        warnings.warn(f"{file} could not be kept ({error.strerror}): set FEDLIB_CACHE", stacklevel=2)
    return tensors, classes


def cached_for(size: int | None, key: dict, read: Read) -> Decoded:
    """Return data that may depend on the network's input ``size``, cached; ``read(size)`` also says if they do.

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


def is_cached(key: dict) -> bool:
    """Return whether :func:`cached_for` has read these data before, for whatever size."""
    return cache_file(key).exists() or cache_file(key | ANY_SIZE).exists()


def known_digest(key: dict, size: int | None = None) -> str | None:
    """Return the digest of what ``key`` describes from its file's header, without decoding; None if it is not kept.

    Without a ``size`` only of what does not depend on one.
    """
    fitted = None if size is None else storage.stored_digest(cache_file(key | {"size": size}))
    return storage.stored_digest(cache_file(key)) or fitted


def published_digest(key: dict, size: int | None = None) -> str | None:
    """Return :func:`known_digest` of the sets that published runs were trained on, from ``known_digests.json``."""
    known = json.loads(Path(__file__).with_name("known_digests.json").read_text())
    return known.get(source_digest(key)) or known.get(source_digest(key | {"size": size}))


def source_digest(key: dict) -> str:
    """Return sixteen hex digits for what ``key`` describes."""
    return hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]


def digest_of(key: dict, size: int | None, decoded: Decoded) -> str:
    """Return the digest of what ``key`` describes: as kept, or computed where it could not be."""
    tensors, classes = decoded
    return known_digest(key, size) or storage.digest_tensors(tensors, {"classes": json.dumps(classes)})


def files_digest(files: Sequence[Path], root: Path) -> str:
    """Return the digest of the files' bytes and their names within ``root``.

    It is kept under their paths, sizes, times and inodes: bytes are read again when one of these is another, also where
    a copy was given the old size and time (no program sets a file's time of change).
    """
    status = [p.stat() for p in files]
    stamp = [(str(p), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino) for p, s in zip(files, status, strict=True)]
    if (key := source_digest({"files": stamp})) in _digests:
        return _digests[key]
    if (file := cache_dir() / f"{key}.json").exists():
        with contextlib.suppress(DamagedFile):
            return _digests.setdefault(key, storage.read_json(file)["files"])
    digest = hashlib.sha256()
    for p in files:
        with open(p, "rb") as f:
            digest.update(json.dumps([p.relative_to(root).as_posix(), p.stat().st_size]).encode())
            digest.update(hashlib.file_digest(f, "sha256").digest())
    found = digest.hexdigest()[:16]
    if time.time() - max((s.st_ctime for s in status), default=0) > SETTLED:
        _digests[key] = found
        with contextlib.suppress(OSError):  # a full or read-only disk: read again the next time
            storage.write_json(file, {"files": found})
    return found
