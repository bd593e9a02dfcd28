"""Pack finished runs, ``make pack``: a file for each method and data set, the same bytes for the same runs.

``python docs/packs.py`` packs the finished runs of ``outputs/runs`` (or ``$FEDLIB_OUTPUTS/runs``); with ``--remove``,
as ``make pack`` says, it then deletes what is packed of their folders. A run that was made anew since it was packed
takes the place of the older one. Read next: ``fedlib_lab/runs/packed.py``, which reads packs.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from fedlib.core.storage import DamagedFile, write_lines
from fedlib_lab.runs.packed import FORGOTTEN, KEPT, SUFFIX, VERSION, Packed, pack_of, runs_in, texts
from fedlib_lab.runs.run_paths import Folder, folder_of
from fedlib_lab.runs.store import stored_runs


def pack(
    folder: Folder = None, words: Iterable[str] = (), remove: bool = False, into: Path | None = None
) -> tuple[list[str], list[str]]:
    """Pack the finished runs in ``folder`` whose names have every one of ``words``.

    Return the names of those that lay there as folders, and of these the ones that were packed with other bytes before.
    The packs lie beside the runs, or in the folder ``into``. All are read again before anything else is done.
    ``remove`` then deletes what is packed, byte for byte, of every folder, and a folder in which nothing is left;
    weights stay, and are found, and so does a folder whose run is being run.
    """
    from filelock import FileLock

    folder = folder_of(folder)
    if into is not None and remove:
        raise ValueError("packs in another folder are not read with this one: nothing is removed for them")
    target, words = into or folder, list(words)
    target.mkdir(parents=True, exist_ok=True)
    with FileLock(target / "packs.lock"):
        own = [r.path for r in stored_runs(folder, words) if not isinstance(r.path, Packed)]
        mine: dict[Path, dict[str, dict[str, str]]] = defaultdict(dict)
        for path in own:
            if (files := read(path)).keys() == set(KEPT):  # else it is being made anew
                mine[Path(pack_of(target / path.name))][path.name] = files
        anew: list[str] = []
        for file, runs in mine.items():
            there = runs_in(str(file))
            anew += [n for n in runs if n in there and there[n] != runs[n]]
            write(file, there | runs)
        for path in sorted({file.parent for name in KEPT for file in folder.glob(f"*/{name}")} if remove else ()):
            if all(word in path.name for word in words):
                drop(path)
    return sorted(n for runs in mine.values() for n in runs), sorted(anew)


def read(path: Path) -> dict[str, str]:
    """Return the texts of those of a run's files that lie in the folder ``path``, by name."""
    return {name: (path / name).read_bytes().decode() for name in KEPT if (path / name).is_file()}


def write(file: Path, runs: dict[str, dict[str, str]]) -> None:
    """Make ``file`` the pack of ``runs``, atomically, unless it is. ``DamagedFile`` if it then reads otherwise."""
    if runs_in(str(file)) != runs:
        write_lines(file, [{"pack": VERSION, "run": name, **runs[name]} for name in sorted(runs)])
    if runs_in(str(file)) != runs:
        raise DamagedFile(file, "it does not read as it was written")


def drop(path: Path) -> None:
    """Delete of the run in ``path`` what is packed beside it; nothing if any byte is not, or if it is being run.

    Killed at any moment, the run is the folder's or the packed one; the next time ends it.
    """
    from filelock import FileLock, Timeout

    try:
        with FileLock(path / ".lock", timeout=0):  # nobody writes from here on
            own, packed = read(path), texts(path)
            begun = KEPT[0] in own and own.keys() != packed.keys()  # unfinished: its own, whatever is packed
            hidden = KEPT[0] not in own and (path / FORGOTTEN).exists()
            if begun or hidden or not own.items() <= packed.items():
                return
            for name in (FORGOTTEN, *KEPT, ".lock"):  # without the first two the folder hides nothing
                (path / name).unlink(missing_ok=True)
    except Timeout:
        return
    if not any(path.iterdir()):
        path.rmdir()


def unpack(folder: Folder, into: Path, words: Iterable[str] = ()) -> list[str]:
    """Write the packed runs in ``folder`` whose names have every one of ``words`` as folders of ``into``; their names.

    Byte for byte; ``FileExistsError`` where a folder of that name is.
    """
    found, words = {}, list(words)
    for file in folder_of(folder).glob(f"*{SUFFIX}"):
        found |= {n: files for n, files in runs_in(str(file)).items() if all(word in n for word in words)}
    for name, files in sorted(found.items()):
        (into / name).mkdir(parents=True)
        for kept, text in files.items():
            (into / name / kept).write_bytes(text.encode())
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    """Pack, or unpack, by a shell; what is refused is one sentence."""
    p = argparse.ArgumentParser("python docs/packs.py", description="Pack finished runs.")
    p.add_argument("words", nargs="*", metavar="WORD", help="only those whose names have every WORD")
    p.add_argument("--folder", type=Path, help="of the runs; default: outputs/runs, or $FEDLIB_OUTPUTS/runs")
    p.add_argument("--into", type=Path, help="another folder for the packs")
    p.add_argument("--remove", action="store_true", help="delete the runs' folders once the packs are read again")
    p.add_argument("--unpack", type=Path, metavar="FOLDER", help="instead: write packed runs as folders of FOLDER")
    given = p.parse_args(arguments)
    try:
        if given.unpack is not None:
            print(f"{len(unpack(given.folder, given.unpack, given.words))} runs are unpacked in {given.unpack}")
            return 0
        names, anew = pack(given.folder, given.words, given.remove, given.into)
    except (ValueError, OSError) as error:
        print(f"pack: {error}", file=sys.stderr)
        return 1
    print(f"{len(names)} runs are packed; {len(anew)} of them take the place of an older one{':' * bool(anew)}", *anew)
    return 0


if __name__ == "__main__":
    sys.exit(main())
