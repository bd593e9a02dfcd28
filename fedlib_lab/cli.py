"""The command line, ``fedlib run reefl/table1`` (or ``python -m fedlib_lab``): what notebooks call, by a shell.

What a command does is the library's; here stands what it prints, and in ``cli.yaml`` what arguments it has. With
``--json`` a command prints one document and nothing else; what it has to say meanwhile goes to the standard error.
"""

import argparse
import contextlib
import io
import json
import os
import shlex
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedlib.core.paths import use_outputs_of
from fedlib.core.tables import read_table

if TYPE_CHECKING:
    from .runs.record import Run

WORDS = read_table(Path(__file__).with_suffix(".yaml"))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 if all went well, 1 if a run failed, 2 if something is refused."""
    for stream in (sys.stdout, sys.stderr):  # a terminal of ASCII shows what it can of "±"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = parser().parse_args(arguments)
    given.stdout, as_json = sys.stdout, getattr(given, "json", False)
    use_outputs_of(getattr(given, "profile", ""))
    try:
        with contextlib.redirect_stdout(sys.stderr) if as_json else contextlib.nullcontext():
            return given.command(given)
    except BrokenPipeError:  # ``| head`` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), given.stdout.fileno())
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"fedlib: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their arguments; ``command`` of what it parses runs it."""
    top = argparse.ArgumentParser("fedlib", description=WORDS["description"])
    add = top.add_subparsers(title="commands", required=True).add_parser
    for name, said in WORDS["commands"].items():
        text = said["help"]
        p = add(name, help=text, description=said.get("description", f"{text[0].upper()}{text[1:]}."))
        p.set_defaults(command=globals()[f"_{name}"])
        for argument, own in said["arguments"].items():
            how = WORDS["shared"].get(argument, {}) | (own or {})
            p.add_argument(argument, **how | ({"type": {"int": int}.get(how["type"], float)} if "type" in how else {}))
    return top


def _answer(given: argparse.Namespace, value: object, text: str = "") -> None:
    """Print ``text`` if there is any, with ``--json`` instead ``value`` as a document; NaN and infinity are null."""
    if given.json:
        plain = json.dumps(value, default=lambda x: x.item() if hasattr(x, "item") else str(x))
        print(json.dumps(json.loads(plain, parse_constant=lambda _: None), indent=1), file=given.stdout)
    elif text:
        print(text)


def values_of(texts: Sequence[str] | None, option: str = "--set") -> dict[str, object]:
    """Parse the KEY=VALUE of ``option``, values in YAML; ``ValueError`` names a text without ``=``."""
    from .runs.params_files import parse_yaml

    found = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not (name and equals) or name in found:
            raise ValueError(f"{option} {text}: expected KEY=VALUE, e.g. rounds=20, each key once")
        found[name] = parse_yaml(value, text)
    return found


def overrides_of(texts: Sequence[str] | None) -> dict[str, object]:
    """Parse ``["rounds=20", "options.zeta=0.5"]`` as ``load_grid``'s overrides."""
    from .runs.params_files import nested

    return nested(values_of(texts))


def _run(given: argparse.Namespace) -> int:
    from fedlib.engine.executors import Execution

    from .report.table import Table

    paper, _, name = given.table.partition("/")
    table = Table(paper, name, given.profile, overrides_of(given.overrides))
    table.run(Execution(given.device, given.workers))
    print(table.obtained().to_string(index=False))
    return 0


def _sweep(given: argparse.Namespace) -> int:
    from fedlib.engine.executors import Execution

    from .report.frames import trials_frame
    from .report.tables import load_cells
    from .runs.sweep import best, sweep

    paper, _, name = given.table.partition("/")
    rows: dict = {}  # of modes, columns and seeds the first
    for cell in load_cells(paper, name, given.profile, overrides_of(given.overrides)):
        rows.setdefault(cell.variant, cell.experiment)
    trials = sweep(rows, values_of(given.over, "--over"), Execution(given.device, given.workers))
    print(trials_frame(trials).to_string(index=False))
    for row, trial in best(trials).items():
        said = {k: v if isinstance(v, str) else json.dumps(v) for k, v in trial.choice.items()}  # as YAML reads it
        print(f"best of {row}: --set {shlex.join(f'{k}={v}' for k, v in said.items())}")
    return 0


def _explain(given: argparse.Namespace) -> int:
    from .runs.params import load_grid, load_spec, recipe_cell
    from .runs.run_paths import run_path

    choices = overrides_of(given.overrides)
    paper, _, table = given.table.partition("/")
    if given.row is not None:
        spec = load_spec(paper, table)
        key = "method" if "method" in spec["axes"] or given.row not in spec["variants"] else "variant"
        if choices.setdefault(key, given.row) is not given.row:
            raise ValueError(f"row {given.row!r} beside --set {key}={choices[key]}; allowed: one of them")
    if given.cost:
        from .runs import costs, store

        told = costs.table_costs(load_grid(paper, table, given.profile, choices), store.shown_run)
        _answer(given, told, costs.describe_costs(told))
        return 0
    cell = recipe_cell(given.table, given.profile, choices)
    values, lines = {}, []
    for key, layers in cell.explained().items():
        (*before, (layer, value)) = layers.items()
        over = f" (over {', '.join(f'{v!r}: {name}' for name, v in reversed(before))})" if before else ""
        lines.append(f"{key} = {value!r}: {layer}{over}")
        values[key] = {"value": value, "layer": layer, "over": dict(before)}
    told = {"table": given.table, "profile": given.profile, "run": run_path(cell.experiment).name, "values": values}
    _answer(given, told, "\n".join([*lines, "What is not named here has Experiment's default."]))
    return 0


def _runs(given: argparse.Namespace) -> int:
    import pandas as pd

    from .report.frames import differing, runs_frame, save_frame, where, whole

    names = [word for word in given.words if not set(word) & set("<>=")]
    frame = whole(pd.concat([runs_frame(folder, names) for folder in _run_folders()], ignore_index=True))
    frame = where(frame, [word for word in given.words if word not in names])
    if given.save is not None:
        save_frame(frame, given.save)
    shown = frame.reindex(columns=["run", *differing(frame), "day", "status", "t", "accuracy", "seconds"])
    text = shown.to_string(index=False) if len(shown) else "no stored run" + " is so" * bool(given.words)
    _answer(given, frame.astype(object).where(frame.notna(), None).to_dict("records"), text)
    return 0


def _run_folders() -> list[Path]:
    """List the folders in which ``fedlib run`` stores, that of trials last."""
    from fedlib.core.paths import outputs_dir

    return [outputs_dir() / "runs", outputs_dir() / "scratch" / "runs"]


def _stored(name: str) -> "Run":
    """Find the one stored run whose name has ``name``; ``ValueError`` if there is none, or another."""
    from .runs.store import stored_runs

    found = [r for folder in _run_folders() for r in stored_runs(folder, [name])]
    found = [r for r in found if r.path.name == name] or found
    if len(found) != 1:
        names = ", ".join(r.path.name for r in found[:5])
        raise ValueError(f"{name}: {f'{len(found)} runs have it: {names}' if found else 'no stored run has it'}")
    return found[0]


def _show(given: argparse.Namespace) -> int:
    import yaml

    from .runs.record import without_bulk

    found = _stored(given.name)
    parts = {"run": str(found.path), "experiment": found.experiment.identity()}
    parts |= {"summary": without_bulk(found.summary), **found.record}
    _answer(given, parts, yaml.safe_dump(parts, sort_keys=False, default_flow_style=None, width=120).rstrip("\n"))
    return 0


def _verify(given: argparse.Namespace) -> int:
    from fedlib.engine.executors import Execution

    from .runs.verify import verify

    how = None if given.workers is None else Execution(workers=given.workers)
    found = verify(_stored(given.name), given.rounds, how)
    _answer(given, vars(found), str(found))
    return 0 if found.passed else 1


def _schema(given: argparse.Namespace) -> int:
    from .runs.schema import schemas

    found = schemas(given.what)
    for name, schema in found.items() if given.out else ():
        path = Path(given.out) / f"{name}.schema.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(schema, indent=1) + "\n", encoding="utf-8")
        print(path)
    if not given.out:
        print(json.dumps(found if len(found) > 1 else next(iter(found.values())), indent=1))
    return 0


def _fill(given: argparse.Namespace) -> int:
    began = time.monotonic()

    from fedlib.engine.executors import Execution

    from .runs.fill import core_hours, fill, named, queue

    if given.minutes is not None and not given.minutes > 0:
        raise ValueError(f"--minutes {given.minutes:g}: expected a number above 0")
    Execution(given.device, given.workers)  # refuses what is not there, too few or too many
    # a third of the time is for prices; without an end, all that they take
    missing = queue(named(given.tables), given.profile, None, given.columns or (), began + 20 * (given.minutes or 1e9))
    for sentence in missing.skipped:
        print(f"skipped: {sentence}")
    print(f"{len(missing.jobs)} runs are missing, about {core_hours(missing.jobs)}", flush=True)
    if given.dry_run:
        for job in missing.jobs:
            print(f"  {job} ({core_hours([job])})")
        _answer(given, {"skipped": missing.skipped, "missing": [job.plain() for job in missing.jobs]})
        return 0
    minutes = given.minutes and given.minutes - (time.monotonic() - began) / 60  # looking took some
    filled = fill(missing.jobs, minutes, given.workers, stop=_on_signals(), device=given.device)
    for sentence, count in Counter(sentence for _, sentence in filled.failed).items():
        jobs = [str(job) for job, s in filled.failed if s == sentence]
        print(f"failed ({count}): {jobs[0]}{' and others' * (count > 1)}: {sentence}")
    print(f"{len(filled.done)} runs done; left: {len(filled.left)} runs, about {core_hours(filled.left)}")
    told = {"skipped": missing.skipped, "done": [job.plain() for job in filled.done]}
    told |= {"failed": [job.plain() | {"why": why} for job, why in filled.failed]}
    _answer(given, told | {"left": [job.plain() for job in filled.left]})
    return 1 if filled.failed else 0


def _on_signals() -> threading.Event:
    """Return an event that is set by Ctrl-C, and by the end of a Slurm slot."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
