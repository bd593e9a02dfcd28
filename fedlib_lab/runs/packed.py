"""Packed runs: finished runs of one method on one data set in one file, read as if their folders lay beside it.

``outputs/runs/<method>-<data>.runs.jsonl`` has a line for each run: the version ``pack``, the name ``run``, and the
text of each of the run's files by the file's name, sealed as a line of metrics is (``core/storage.py``). A folder of
that name hides the packed run if a run was begun or forgotten in it; weights and clients' files are the folder's.
Nothing here writes: ``make pack`` does (``docs/packs.py``).
"""

import io
import os
import warnings
from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedlib.core.storage import DamagedFile, read_lines
from fedlib.core.validation import shown

KEPT = ("experiment.json", "metrics.jsonl", "summary.json")  # of a finished run
VERSION, SUFFIX, FORGOTTEN = 1, ".runs.jsonl", ".forgotten"  # the last in a folder: hides the packed run of its name


class Packed(type(Path())):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
    """The folder of a packed run, or a file in it: the pack's, or else what lies there. No pack is written to."""

    def _text(self) -> str | None:
        return texts(os.path.dirname(self)).get(self.name)

    def exists(self, **how: Any) -> bool:
        return self.is_file() or super().exists(**how) or bool(texts(self))

    def is_file(self, **how: Any) -> bool:
        return self._text() is not None or super().is_file(**how)

    def open(self, mode: str = "r", *how: Any, **named: Any) -> Any:
        """Open the packed text, or a file in the folder."""
        if mode not in ("r", "rt", "rb") or (text := self._text()) is None:
            return super().open(mode, *how, **named)
        return io.BytesIO(text.encode()) if mode == "rb" else io.StringIO(text)

    def stat(self, **how: Any) -> os.stat_result:
        """Say of a packed file that it is a regular one, and its size; a pack keeps no times."""
        if (text := self._text()) is None:
            return super().stat(**how)
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, len(text.encode()), 0, 0, 0), {"st_mtime_ns": 0})


def pack_of(path: str | Path) -> str:
    """Return the pack in which the run in the folder ``path`` is, or would be."""
    return os.path.join(os.path.dirname(path), "-".join(os.path.basename(path).split("-", 2)[:2]) + SUFFIX)


def texts(path: str | Path) -> dict[str, str]:
    """Return the packed files of the run in the folder ``path``, hidden or not, by name; none if it is not packed."""
    return runs_in(pack_of(path)).get(os.path.basename(path), {})


def seen(path: Path) -> Path | None:
    """Return the folder ``path`` of a run as it is to be read: one's own, else a packed one, else None."""
    if (own := os.path.exists(path)) and any((path / name).exists() for name in (KEPT[0], FORGOTTEN)):
        return path
    return Packed(path) if texts(path) else path if own else None


def listed(folder: Path, pattern: str, file: str) -> Iterator[Path]:
    """Yield by name the runs in ``folder`` that have ``file`` and match ``pattern``; warn of what cannot be read."""
    names = own = {p.parent.name for p in folder.glob(f"{pattern}/{file}")}
    for pack in folder.glob(os.path.basename(pack_of(folder / pattern))):
        try:
            names = names.union(n for n in runs_in(str(pack)) if fnmatchcase(n, pattern))
        except ValueError as error:
            warnings.warn(f"the runs in {pack.name} are left out: {error}", stacklevel=3)
    found = (seen(folder / name) for name in sorted(names))
    yield from (path for path in found if isinstance(path, Packed) or path is not None and path.name in own)


def runs_in(pack: str) -> dict[str, dict[str, str]]:
    """Return by run the texts, by file name, of what the file ``pack`` holds; none if there is no such file.

    ``DamagedFile`` if a line is not as it was written, or a run is there twice or is another pack's; ``ValueError`` for
    another version.
    """
    try:
        of = os.stat(pack)
    except (FileNotFoundError, NotADirectoryError):
        return {}
    return _runs_in(pack, of.st_mtime_ns, of.st_ino, of.st_size)


@lru_cache(maxsize=512)
def _runs_in(pack: str, *changed: int) -> dict[str, dict[str, str]]:
    lines = read_lines(Path(pack))
    if other := {line.get("pack") for line in lines} - {VERSION}:
        raise ValueError(f"{pack} is a pack of version {other.pop()!r}, and this kit reads {VERSION}: update the kit")
    found = {line["run"]: {name: line[name] for name in KEPT} for line in lines}
    if len(found) < len(lines):
        raise DamagedFile(Path(pack), "a run is there twice")
    if other := [name for name in found if pack_of(os.path.join(os.path.dirname(pack), name)) != pack]:
        raise DamagedFile(Path(pack), f"{shown(other[0])} is no run of this file")  # no name leads out of the folder
    return found
