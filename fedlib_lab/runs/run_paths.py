"""Where a run is stored: its folder by the name of its experiment, however its options are spelt; forgetting it."""

import contextlib
import errno
import glob
import os
import shutil
from functools import lru_cache
from pathlib import Path

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.core.storage import read_json
from fedlib.core.validation import shown
from fedlib.engine.checks import equivalent_experiments, without_defaults

from .packed import FORGOTTEN, KEPT, listed, seen, texts

FILES = (".lock", *KEPT, "checkpoint.safetensors", "previous.safetensors", "best.safetensors")
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
    folder, spelt = folder_of(folder), []
    for x in equivalent_experiments(e):  # mostly the first is there
        spelt.append(x)
        for name in (x.slug, x.former_slug) if x.evaluate_every else (x.slug,):  # else they are one
            if (path := seen(folder / name)) is not None:
                return x, path
    for path in listed(folder, f"{glob.escape(e.title)}-????????", "experiment.json"):
        if (x := _formerly(file := path / "experiment.json", file.stat().st_mtime_ns)) is not None and x in spelt:
            return x, path
    plain = without_defaults(e).replace(evaluate_every=e.looks_every)
    return plain, folder / plain.slug


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

    Files in its folder that no run writes stay. A packed run stays in its pack, where its folder hides it from now on.
    ``RuntimeError`` if a process is running it.
    """
    from filelock import FileLock, Timeout

    below = texts(path := Path(run_path(e, folder)))
    if not (path.exists() or below) or (path / FORGOTTEN).exists() and len(os.listdir(path)) == 1:
        return False
    check_files(path)
    check_place(path)
    path.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(path / ".lock", timeout=0):
            if below:
                (path / FORGOTTEN).touch()
            files = [path / name for name in reversed(FILES)]  # killed at any moment, it is a whole run or none
            for own in (*files, *path.glob(".*.part")):
                own.unlink(missing_ok=True)
            for own in (path / "clients", path / "mirrors"):
                shutil.rmtree(own, ignore_errors=True)
    except Timeout as error:
        raise RuntimeError(f"another process is running {path.name}: end that one first") from error
    with contextlib.suppress(OSError):  # not empty
        path.rmdir()
    return True


def folder_of(folder: Folder) -> Path:
    """Return ``folder`` as a path (None: ``outputs/runs``).

    ``ValueError`` if it is none, or too long for a run's files.
    """
    if folder is not None and (not isinstance(folder, (str, os.PathLike)) or "\0" in (str(folder) or "\0")):
        raise ValueError(f"folder = {shown(folder)}: expected the path of a folder, e.g. 'outputs/runs'")
    path = outputs_dir() / "runs" if folder is None else Path(folder).expanduser()
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
        why = f"{nearest} cannot be written, so no run can be stored in it"
        raise PermissionError(f"{why}; set FEDLIB_OUTPUTS to a folder that can")


def check_files(path: Path) -> None:
    """Raise ``ValueError`` if something else lies where the run in ``path`` has a file."""
    for file in (path / name for name in FILES):
        if not file.is_file() and file.exists():
            raise ValueError(f"{file} is a folder or a device where a run has a file; move it away")
