"""Tars of runs: plain files by run, nothing else; a run's files carry digests of their own."""

import contextlib
import io
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path

NAME = re.compile(r"\w[\w.+=,-]*(/\w[\w.+=,-]*){1,2}")


def write_tar(file: Path, members: Iterable[tuple[str, bytes]]) -> None:
    """Write ``members`` beside ``file``, then take its place."""
    part = file.with_name(f".{file.name}.part")
    with tarfile.open(part, "w") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    os.replace(part, file)


def unpacked(file: Path) -> dict[str, bytes]:
    """The members of a tar by name; ``ValueError`` if it is damaged, or if one is no file or leads outside."""
    found: dict[str, bytes] = {}
    try:
        if file.read_bytes()[-1024:] != bytes(1024):
            raise tarfile.ReadError("its end is missing")
        with tarfile.open(file, "r:") as tar:
            for info in tar:
                if not info.isreg() or not NAME.fullmatch(info.name) or info.name in found:
                    kind = "is no plain file" if not info.isreg() else "stands where no run has a file"
                    raise ValueError(f"{file} is refused: {info.name!r} {kind}")
                tarfile.data_filter(info, str(file.parent))
                content = tar.extractfile(info)
                found[info.name] = b"" if content is None else content.read()
                if len(found[info.name]) != info.size:
                    raise tarfile.ReadError(f"{info.name} is cut short")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    if not found:
        raise ValueError(f"{file} holds no run")
    return found


def lay_out(members: Mapping[str, bytes], folder: Path) -> None:
    """Write ``members`` into ``folder``."""
    for name, content in members.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def of_folder(folder: Path, names: Iterable[str]) -> list[tuple[str, bytes]]:
    """``names`` within a run's ``folder`` as members; those that are not there (any more) are left out."""
    found = []
    for name in names:
        with contextlib.suppress(OSError):
            found.append((f"{folder.name}/{name}", (folder / name).read_bytes()))
    return found
