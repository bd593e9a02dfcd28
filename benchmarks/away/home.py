"""Home: finished runs of a ``runs.tar`` into the store, each checked first; nothing that lies there is touched."""

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.away import KEPT
from benchmarks.away.tars import lay_out, unpacked


def home(files: Sequence[Path], folder: Path | None = None) -> int:
    """Take what is absent from each of ``files``, and say what each run is; 1 if anything was refused."""
    import pandas as pd

    from fedlib_lab.runs.run_paths import folder_of

    folder, rows, refused = folder_of(folder), [], []
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        try:
            members = unpacked(file)
            runs = _by_run(file, members)
        except (ValueError, OSError) as error:
            refused.append(str(error))
            continue
        for name, kept in runs.items():
            try:
                rows.append(_taken(name, kept, folder))
            except ValueError as error:
                refused.append(f"{name} of {file} is refused: {error}")
    if rows:
        print(pd.DataFrame(rows).to_string(index=False))
    for sentence in refused:
        print(f"home: {sentence}", file=sys.stderr)
    return 1 if refused else 0


def _by_run(file: Path, members: dict[str, bytes]) -> dict[str, dict[str, bytes]]:
    """The members by run; ``ValueError`` if one is another kind of file than a run's three, or a run lacks one."""
    runs: dict[str, dict[str, bytes]] = defaultdict(dict)
    for name, content in members.items():
        run, _, kept = name.partition("/")
        if kept not in KEPT:
            raise ValueError(f"{file} is refused: {name!r} is none of {', '.join(KEPT)}")
        runs[run][kept] = content
    for run, kept in runs.items():
        if lacking := [k for k in KEPT if k not in kept]:
            raise ValueError(f"{file} is refused: {run} lacks {', '.join(lacking)}")
    return runs


def _taken(name: str, kept: dict[str, bytes], folder: Path) -> dict:
    """Check a run beside the store, move it there if it is absent; its row. ``ValueError`` says what is wrong."""
    from fedlib.core.experiment import Experiment
    from fedlib.core.storage import read_json
    from fedlib_lab.runs.packed import seen
    from fedlib_lab.runs.store import find_run

    with tempfile.TemporaryDirectory(dir=folder, prefix=".home-") as beside:
        lay_out({f"{name}/{k}": content for k, content in kept.items()}, Path(beside))
        stored = read_json(Path(beside, name, "experiment.json"))
        e = Experiment.from_dict(stored.get("experiment", {}), name)
        found = find_run(e, beside)
        if found is None or found.path.name != name:
            raise ValueError(f"its folder is not named as its experiment is, {e.slug}")
        state = "taken"
        if (there := seen(folder / name)) is not None:
            state = "there already" if (there / "summary.json").is_file() else "an unfinished one lies there"
        else:
            os.rename(found.path, folder / name)
    s = found.summary
    row = {"method": e.method, "data": e.dataset, "seed": e.seed, "accuracy": round(s["accuracy"], 2)}
    row |= {"personal": round(s.get("personal", {}).get("accuracy", float("nan")), 2), "seconds": s["seconds"]}
    return row | {"device": found.record.get("provenance", {}).get("device", "?"), "here": state}
