"""Where a run is stored: its folder by the name of its experiment, however its options are spelt; forgetting it."""

import contextlib
import errno
import os
import shutil
import time
from functools import lru_cache
from pathlib import Path

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.core.storage import read_json
from fedlib.core.validation import shown
from fedlib.engine.checks import equivalent_experiments, without_defaults
from fedlib.methods import METHODS

FILES = (".lock", "experiment.json", "metrics.jsonl", "summary.json", "checkpoint.safetensors", "previous.safetensors")
LONGEST = Path("x" * 200, "clients", "x" * 50)  # of a run's files
Folder = str | os.PathLike | None


def run_path(e: Experiment, folder: Folder = None) -> Path:
    """Return where ``e`` is stored: in ``folder``, by default ``outputs/runs``."""
    return place(e, folder)[1]


def as_stored(e: Experiment, folder: Folder = None) -> Experiment:
    """Return ``e`` as named in ``folder``: neither options that say what is done anyway nor 1.0 for 1 rename it."""
    return place(e, folder)[0]


def place(e: Experiment, folder: Folder) -> tuple[Experiment, Path]:
    """Return ``e`` as it is spelt in ``folder``, and its own folder there, which may still have to be made.

    A run that was stored while ``evaluate_every`` was a part of its name is found whatever ``e`` says of that.
    """
    if not isinstance(e, Experiment):
        raise ValueError(f"{shown(e)} is not an Experiment, e.g. Experiment(rounds=20)")
    folder = folder_of(folder)
    if (path := folder / e.slug).exists():  # mostly
        return e, path
    changed = folder.stat().st_mtime_ns if folder.is_dir() else 0
    fresh = time.time_ns() - changed < 1e9  # a second change might not be told from the first by its time
    names = (_names.__wrapped__ if fresh else _names)(folder, changed) if changed else []
    there = [name for name in names if name[:-9] == e.title]
    spelt, plain = _spellings(e, repr(e), METHODS.get(e.method))
    for x in spelt if there else ():  # a title says nothing of options
        for name in (x.slug, x.former_slug):
            if (folder / name).exists():
                return x, folder / name
    for path in (folder / name for name in there):
        if (file := path / "experiment.json").is_file():
            x = _formerly(file, file.stat().st_mtime_ns)
            if x is not None and x in spelt:
                return x, path
    return plain, folder / plain.slug


@lru_cache(maxsize=4096)
def _spellings(e: Experiment, exactly: str, method: type | None) -> tuple[list[Experiment], Experiment]:
    """Return all spellings of ``e``, which ``exactly`` tells from equal ones (1 from 1.0), and that of a new run."""
    return [*equivalent_experiments(e)], without_defaults(e).replace(evaluate_every=e.looks_every)


@lru_cache(maxsize=8)
def _names(folder: Path, changed: int) -> list[str]:
    return sorted(os.listdir(folder))


@lru_cache(maxsize=4096)
def _formerly(file: Path, changed: int) -> Experiment | None:
    """Return what is stored beside ``file`` if its name says how often it was looked at; None if not, or if damaged."""
    try:
        x = Experiment.from_dict(read_json(file)["experiment"])
    except (KeyError, ValueError):
        return None
    return x if x.former_slug == file.parent.name else None


def forget(e: Experiment, folder: Folder = None) -> bool:
    """Delete the stored run of ``e``, finished or not; return whether there was one.

    Files in its folder that no run writes stay. ``RuntimeError`` if a process is running it.
    """
    from filelock import FileLock, Timeout

    path = run_path(e, folder)
    if not path.exists():
        return False
    check_files(path)
    check_place(path)
    try:
        with FileLock(path / ".lock", timeout=0):
            for name in reversed(FILES):  # killed at any moment, it is a whole run or none
                (path / name).unlink(missing_ok=True)
            for own in (path / "clients", path / "mirrors"):
                shutil.rmtree(own, ignore_errors=True)
            for part in path.glob(".*.part"):
                part.unlink(missing_ok=True)
    except Timeout as error:
        raise RuntimeError(f"another process is running {path.name}: end that one first") from error
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()
    return True


def folder_of(folder: Folder) -> Path:
    """Return ``folder`` as a path (None: ``outputs/runs``).

    ``ValueError`` if it is none, or too long for a run's files.
    """
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder)):
        raise ValueError(f"folder = {shown(folder)}: expected the path of a folder, e.g. 'outputs/runs'")
    path = outputs_dir() / "runs" if folder is None else Path(folder)
    try:
        os.stat(path / LONGEST)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ValueError(f"folder = {shown(str(path))}: longer than this file system's names may be") from error
    return path


def check_place(path: Path) -> None:
    """Raise, before any compute, if ``path`` could not be written, or leads elsewhere."""
    for own in (path, path / "clients", path / "mirrors"):
        if own.is_symlink():
            raise ValueError(f"{own} is a symbolic link; put what it points to in its place")
    nearest = next(p for p in (path, *path.parents) if p.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise PermissionError(
            f"{nearest} cannot be written, so no run can be stored in it; set FEDLIB_OUTPUTS to a folder that can"
        )


def check_files(path: Path) -> None:
    """Raise ``ValueError`` if something else lies where the run in ``path`` has a file."""
    for file in (path / name for name in FILES):
        if file.exists() and not file.is_file():
            raise ValueError(f"{file} is a folder or a device where a run has a file; move it away")
