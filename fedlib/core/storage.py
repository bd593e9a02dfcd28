"""Files that survive a kill at any moment and are never silently wrong.

Written to a temporary file, synced, then ``os.replace``d. Every JSON object, every line of metrics and every tensor
file carries a digest of its content (16 hex digits of a SHA-256), checked at each reading. Nothing is ever unpickled.
"""

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

MAX_OBJECT, MAX_LINES = 2**20, 2**26  # bytes of a JSON object and of a metrics file: more is not ours
LOADED = 2**25  # bytes of a tensor file that is read at once, not mapped


class DamagedFile(ValueError):
    """A stored file that is cut short, altered, missing or not what its name says."""

    def __init__(self, path: Path, reason: object):
        otherwise = "restore it from a copy, or delete the run's folder to run it again"
        super().__init__(f"{path} is damaged ({reason}); {otherwise}")
        self.path, self.reason = path, reason


def replace_file(path: Path, data: bytes, previous: Path | None = None) -> None:
    """Put ``data`` in place of ``path`` atomically; what was there becomes ``previous``, if given.

    ``OSError`` (disk full, read-only, over quota) names the file; then what was stored before is as it was.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        if previous is not None and path.exists():
            os.replace(path, previous)
        os.replace(part, path)
    except OSError as error:
        text = f"{error.strerror}: could not be written; what was stored before is untouched, run again to go on"
        raise OSError(error.errno, text, str(path)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Write ``value`` with its digest as indented JSON, atomically."""
    replace_file(path, (json.dumps(_seal(value), indent=1, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> dict:
    """Read what :func:`write_json` wrote; ``DamagedFile`` if the content is not what was written."""
    return _unseal(path, _read_text(path, MAX_OBJECT))


def write_lines(path: Path, records: Sequence[Mapping[str, object]]) -> None:
    """Write one JSON object a line, each with its digest, atomically."""
    replace_file(path, "".join(json.dumps(_seal(r)) + "\n" for r in records).encode())


def read_lines(path: Path) -> list[dict]:
    """Read what :func:`write_lines` wrote. Whether all lines are there is for the caller to know."""
    return [_unseal(path, line) for line in _read_text(path, MAX_LINES).splitlines()]


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object], previous: Path | None = None
) -> None:
    """Write tensors, JSON metadata and the digest of both as safetensors, atomically (see :func:`replace_file`)."""
    from safetensors.torch import save

    flat = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    text = {k: json.dumps(v) for k, v in metadata.items()}
    replace_file(path, save(flat, text | {"digest": digest_tensors(flat, text)}), previous)


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Read what :func:`write_tensors` wrote; ``DamagedFile`` if the content is not what was written."""
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load

    _size(path)
    try:
        with safe_open(path, "pt") as f:
            text = dict(f.metadata() or {})
            # safetensors' get_tensor leaks 64 bytes a tensor, and rounds read clients' files over and over; large files
            # are read once, and a copy of their bytes would count
            small = path.stat().st_size <= LOADED
            tensors = load(path.read_bytes()) if small else {k: f.get_tensor(k) for k in f.keys()}
        if text.pop("digest", None) != digest_tensors(tensors, text):
            raise DamagedFile(path, "its content does not match its digest")
        return {k: v.to(device) for k, v in tensors.items()}, {k: json.loads(v) for k, v in text.items()}
    except (SafetensorError, json.JSONDecodeError, RecursionError) as error:
        raise DamagedFile(path, error) from error


def stored_digest(path: Path) -> str | None:
    """Return the digest in the header of a tensor file, the only part read; None if it is missing or damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as f:
            return (f.metadata() or {}).get("digest")
    except (OSError, SafetensorError):
        return None


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _seal(value: Mapping[str, object]) -> dict[str, object]:
    """Return ``value`` as JSON gives it back, with the digest of its canonical text."""
    plain = json.loads(json.dumps(value))
    return plain | {"digest": _digest(json.dumps(plain, sort_keys=True).encode())}


def _unseal(path: Path, text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DamagedFile(path, error) from error
    digest = value.pop("digest", None) if isinstance(value, dict) else None
    if digest is None or digest != _digest(json.dumps(value, sort_keys=True).encode()):
        raise DamagedFile(path, "its content does not match its digest")
    return value


def digest_tensors(tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]) -> str:
    """Return the digest of names, types, shapes, bytes and metadata, whatever their order."""
    names = sorted(tensors)
    shapes = [(n, str(tensors[n].dtype), list(tensors[n].shape)) for n in names]
    digest = hashlib.sha256(json.dumps([shapes, sorted(text.items())]).encode())
    for n in names:
        digest.update(tensors[n].reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


def _size(path: Path) -> int:
    """Return the bytes of a regular file; ``DamagedFile``, before it is opened, for a device, a pipe or nothing."""
    try:
        status = path.stat()
    except FileNotFoundError as error:
        raise DamagedFile(path, "it is missing") from error
    if not stat.S_ISREG(status.st_mode):
        raise DamagedFile(path, "it is not a regular file")
    return status.st_size


def _read_text(path: Path, limit: int) -> str:
    if (size := _size(path)) > limit:
        raise DamagedFile(path, f"its {size} bytes exceed the {limit} that such a file can have")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DamagedFile(path, error) from error
