"""Files that survive a kill at any moment: temporary file, fsync, ``os.replace``. Nothing is ever unpickled."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch


def replace_file(path: Path, write) -> None:
    """Call ``write(temporary path)``, then put the result in place of ``path`` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        write(part)
        with open(part, "rb+") as f:
            os.fsync(f.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    """Write ``value`` as indented JSON, atomically."""
    replace_file(path, lambda part: part.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n"))


def read_json(path: Path) -> object:
    """Read JSON; a damaged file raises ``ValueError`` that names it."""
    try:
        return json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to run the experiment again") from error


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, object]) -> None:
    """Write tensors with JSON metadata as safetensors, atomically."""
    from safetensors.torch import save_file

    flat = {k: v.detach().to("cpu", copy=True).contiguous() for k, v in tensors.items()}
    text = {k: json.dumps(v) for k, v in metadata.items()}
    replace_file(path, lambda part: save_file(flat, part, text))


def read_tensors(path: Path, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """Inverse of :func:`write_tensors`; a damaged file raises ``ValueError`` that names it."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt", device=device) as f:
            metadata = {k: json.loads(v) for k, v in (f.metadata() or {}).items()}
            return {k: f.get_tensor(k) for k in f.keys()}, metadata
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} is damaged ({error}); delete it to start again") from error
