"""Pack finished runs, ``make pack``: a file for each method and data set, the same bytes for the same runs.

``python docs/packs.py`` packs the finished runs of ``outputs/runs`` (or ``$FEDLIB_OUTPUTS/runs``); with ``--remove``,
as ``make pack`` says, it then deletes their folders. Read next: ``fedlib_lab/runs/packed.py``, which reads packs.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Collection, Iterable
from pathlib import Path

from fedlib.core.storage import DamagedFile, write_lines
from fedlib_lab.runs.packed import FORGOTTEN, KEPT, VERSION, Packed, pack_of, runs_in
from fedlib_lab.runs.run_paths import Folder, folder_of
from fedlib_lab.runs.store import stored_runs


def pack(
    folder: Folder = None, words: Iterable[str] = (), remove: bool = False, replace: bool = False,
    into: Path | None = None,
) -> list[str]:  # fmt: skip
    """Pack the finished runs in ``folder`` whose names have every one of ``words``; their names.

    The packs lie beside the runs, or in the folder ``into``. All are read again before anything else is done.
    ``remove`` then deletes the three files of each, and a folder in which nothing is left; weights stay, and are found.
    ``ValueError``, and nothing is written, if a run of such a name is packed with other bytes, unless ``replace`` puts
    that of the folder in its place. ``filelock.Timeout`` if a run that is to be removed is being run.
    """
    from filelock import FileLock

    folder = folder_of(folder)
    if into is not None and remove:
        raise ValueError("packs in another folder are not read with this one: nothing is removed for them")
    target = into or folder
    target.mkdir(parents=True, exist_ok=True)
    with FileLock(target / "packs.lock"):
        own = [r.path for r in stored_runs(folder, words) if not isinstance(r.path, Packed)]
        mine: dict[Path, dict[str, dict[str, str]]] = defaultdict(dict)
        for path in own:
            mine[Path(pack_of(target / path.name))][path.name] = {
                name: (path / name).read_bytes().decode() for name in KEPT
            }
        there = {file: runs_in(str(file)) for file in mine}
        other = sorted(n for file, runs in mine.items() for n in runs.keys() & there[file] if runs[n] != there[file][n])
        if other and not replace:
            raise ValueError(f"{', '.join(other)}: packed with other bytes; --replace takes those of the folder")
        for file, runs in mine.items():
            write(file, there[file] | runs)
        for path in own if remove else ():
            drop(path)
    return [path.name for path in own]


def write(file: Path, runs: dict[str, dict[str, str]]) -> None:
    """Make ``file`` the pack of ``runs``, atomically, unless it is. ``DamagedFile`` if it then reads otherwise."""
    if runs_in(str(file)) != runs:
        write_lines(file, [{"pack": VERSION, "run": name, **runs[name]} for name in sorted(runs)])
    if runs_in(str(file)) != runs:
        raise DamagedFile(file, "it does not read as it was written")


def drop(path: Path) -> None:
    """Delete what is packed of the run in ``path``. Killed at any moment, the run is the folder's or the packed one."""
    from filelock import FileLock

    with FileLock(path / ".lock", timeout=0):
        for name in (*KEPT, FORGOTTEN, ".lock"):  # without the first one the folder hides nothing
            (path / name).unlink(missing_ok=True)
    if not any(path.iterdir()):
        path.rmdir()


def unpack(folder: Path, into: Path, names: Collection[str] | None = None) -> list[Path]:
    """Write the packed runs in ``folder`` (those of ``names``) as folders of ``into``, byte for byte; their paths."""
    made = []
    for name, files in sorted((n, f) for file in folder.glob("*.runs.jsonl") for n, f in runs_in(str(file)).items()):
        if names is None or name in names:
            (into / name).mkdir(parents=True)
            for kept, text in files.items():
                (into / name / kept).write_bytes(text.encode())
            made.append(into / name)
    return made


def main(arguments: list[str] | None = None) -> int:
    """Pack by a shell; what is refused is one sentence."""
    p = argparse.ArgumentParser("python docs/packs.py", description="Pack finished runs.")
    p.add_argument("words", nargs="*", metavar="WORD", help="only those whose names have every WORD")
    p.add_argument("--folder", type=Path, help="of the runs; default: outputs/runs, or $FEDLIB_OUTPUTS/runs")
    p.add_argument("--into", type=Path, help="another folder for the packs")
    p.add_argument("--remove", action="store_true", help="delete the runs' folders once the packs are read again")
    p.add_argument("--replace", action="store_true", help="what is packed with other bytes is replaced by the folder's")
    try:
        print(f"{len(pack(**vars(p.parse_args(arguments))))} runs are packed")
    except (ValueError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
