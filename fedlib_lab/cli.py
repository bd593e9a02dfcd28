"""The command line, ``fedlib run reefl/table1`` (or ``python -m fedlib_lab``): what notebooks call, by a shell.

What a command does is the library's; here stand its arguments and what it prints.
"""

import argparse
import io
import os
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return the exit status: 0 if all went well, 1 if a run failed, 2 if something is refused."""
    for stream in (sys.stdout, sys.stderr):  # a terminal of ASCII shows what it can of "±"
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    given = parser().parse_args(arguments)
    try:
        return given.command(given)
    except BrokenPipeError:  # ``| head`` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, ImportError, OSError) as error:
        print(f"fedlib: {error}", file=sys.stderr)
        return 2


def parser() -> argparse.ArgumentParser:
    """Make the parser of all commands and their arguments; ``command`` of what it parses runs it."""
    top = argparse.ArgumentParser("fedlib", description="Federated learning on clients of unequal strength.")
    add = top.add_subparsers(title="commands", required=True).add_parser

    p = _command(add, "run", _run, "run what a table lacks, and show it")
    p.add_argument("table", metavar="PAPER/TABLE")
    _add_choices(p)
    _add_machine(p)

    p = _command(add, "sweep", _sweep, "try values for rows of a table on validation examples, as many for each")
    p.add_argument("table", metavar="PAPER/TABLE")
    p.add_argument(
        "--over", nargs="+", action="extend", required=True, metavar="KEY=VALUES",
        help="a list, or a range, by magnitude after log: 'lr=[0.01, 0.1]' options.zeta=0.1..0.9 lr=log:0.01..1",
    )  # fmt: skip
    p.add_argument("--sampler", default="grid", help="grid (default), all combinations, or Optuna's random, tpe")
    p.add_argument("--trials", type=int, default=0, help="of random and tpe: how many a row")
    _add_choices(p)
    _add_machine(p)

    p = _command(add, "explain", _explain, "say of one row of a table which layer set which value, or what it takes")
    p.add_argument("table", metavar="PAPER/TABLE")
    p.add_argument("row", nargs="?", help="a method, or a variant, of the table")
    p.add_argument("--cost", action="store_true", help="what every row takes: runs, GPU hours, memory, disk, downloads")
    _add_choices(p)

    p = _command(add, "runs", _runs, "list the stored runs")
    p.add_argument("words", nargs="*", metavar="WORD", help="only those whose names have every WORD")

    p = _command(add, "show", _show, "show a stored run: what was asked, what came out, what trained it")
    p.add_argument("name", metavar="RUN", help="its name, or a part of it that no other has")

    p = _command(add, "fill", _fill, "run what the tables lack, until a deadline")
    p.description = (
        "Run what the tables of params/ lack, most telling first. Stop it at any time, or kill it: runs go on from "
        "their checkpoints the next time. Several of these commands share the work."
    )
    p.add_argument("tables", nargs="*", metavar="PAPER[/TABLE]", help="which tables (default: all)")
    p.add_argument("--columns", nargs="+", default=[], metavar="COLUMN", help="which of their columns (default: all)")
    p.add_argument("--minutes", type=float, help="stop after so long (default: when nothing is missing)")
    _add_profile(p)
    p.add_argument("--workers", type=int, help="cores to use, one a run (default: all)")
    p.add_argument("--dry-run", action="store_true", help="say what is missing and what it takes; run nothing")
    return top


def _command(add, name: str, command, text: str) -> argparse.ArgumentParser:
    p = add(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    p.set_defaults(command=command)
    return p


def _add_profile(p: argparse.ArgumentParser) -> None:
    p.add_argument("--profile", default="small", help="how big: smoke, demo, small (default) or paper")


def _add_choices(p: argparse.ArgumentParser) -> None:
    _add_profile(p)
    p.add_argument(
        "--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE", dest="overrides",
        help="as a notebook's overrides, in YAML: rounds=20 options.zeta=0.5 'seeds=[1, 2]'",
    )  # fmt: skip


def _add_machine(p: argparse.ArgumentParser) -> None:
    p.add_argument("--workers", type=int, help="cohorts trained side by side (default: one a core)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda (all GPUs) or cuda:<number>")


def overrides_of(texts: Sequence[str]) -> dict[str, object]:
    """Parse ``["rounds=20", "options.zeta=0.5"]`` as ``load_grid``'s overrides.

    ``ValueError`` names a text without ``=``.
    """
    from .runs.params_files import merge, parse_yaml

    layers = []
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals):
            raise ValueError(f"--set {text}: expected KEY=VALUE, e.g. rounds=20")
        key, _, inner = name.partition(".")
        layers.append({key: {inner: parse_yaml(value, text)} if inner else parse_yaml(value, text)})
    return merge(*layers)


def _run(given: argparse.Namespace) -> int:
    from fedlib.core.paths import use_outputs_of
    from fedlib.engine.executors import Execution

    from .report.table import Table

    use_outputs_of(given.profile)
    paper, _, name = given.table.partition("/")
    table = Table(paper, name, given.profile, overrides_of(given.overrides))
    table.run(Execution(given.device, given.workers))
    print(table.obtained().to_string(index=False))
    return 0


def _sweep(given: argparse.Namespace) -> int:
    from fedlib.core.paths import use_outputs_of
    from fedlib.engine.executors import Execution

    from .report.frames import trials_frame
    from .report.tables import load_cells
    from .runs.sweep import best, sweep

    use_outputs_of(given.profile)
    paper, _, name = given.table.partition("/")
    rows: dict = {}  # of modes, columns and seeds the first
    for cell in load_cells(paper, name, given.profile, overrides_of(given.overrides)):
        rows.setdefault(cell.variant, cell.experiment)
    how = {"execution": Execution(given.device, given.workers)}
    trials = sweep(rows, over_of(given.over), given.sampler, given.trials, **how)
    print(trials_frame(trials).to_string(index=False))
    for row, trial in best(trials).items():
        print(f"best of {row}: --set {' '.join(f'{k}={v}' for k, v in trial.choice.items())}")
    return 0


def over_of(texts: Sequence[str]) -> dict[str, object]:
    """Parse ``["lr=[0.01, 0.1]", "options.zeta=0.1..0.9"]`` as ``sweep`` takes it; ``ValueError`` names the text."""
    from .runs.params_files import parse_yaml

    found = {}
    for text in texts:
        key, _, values = text.partition("=")
        low, dots, high = values.removeprefix("log:").partition("..")
        found[key] = _range(text, low, high) if dots else parse_yaml(values, text)
    return found


def _range(text: str, *ends: str) -> object:
    from .runs.sweep import optuna_for

    of, log = optuna_for(f"--over {text}: a range").distributions, "=log:" in text
    try:
        kind, number = (of.IntDistribution, int) if all(map(str.isdigit, ends)) else (of.FloatDistribution, float)
        return kind(*map(number, ends), log=log)
    except ValueError as error:
        raise ValueError(f"--over {text}: expected a range of numbers, e.g. lr=log:0.01..1 ({error})") from error


def _explain(given: argparse.Namespace) -> int:
    from .runs.params import load_grid, load_spec, recipe_cell

    choices = overrides_of(given.overrides)
    paper, _, table = given.table.partition("/")
    if given.row is not None:
        spec = load_spec(paper, table)
        plain = "method" in spec["axes"] or given.row not in spec["variants"]
        choices |= {"method" if plain else "variant": given.row}
    if given.cost:
        from .runs import costs, store

        print(costs.describe_costs(load_grid(paper, table, given.profile, choices), store.shown_run))
        return 0
    for key, layers in recipe_cell(given.table, given.profile, choices).explained().items():
        (*before, (layer, value)) = layers.items()
        over = f" (over {', '.join(f'{v!r}: {name}' for name, v in reversed(before))})" if before else ""
        print(f"{key} = {value!r}: {layer}{over}")
    print("What is not named here has Experiment's default.")
    return 0


def _runs(given: argparse.Namespace) -> int:
    import pandas as pd

    from .report.frames import runs_frame

    frame = pd.concat([runs_frame(folder, given.words) for folder in _run_folders()])
    shown = frame.reindex(columns=["run", "day", "status", "t", "accuracy", "seconds"])
    print(shown.to_string(index=False) if len(shown) else "no stored run" + " has such a name" * bool(given.words))
    return 0


def _run_folders() -> list[Path]:
    """List the folders in which ``fedlib run`` stores, that of trials last."""
    from fedlib.core.paths import outputs_dir

    return [outputs_dir() / "runs", outputs_dir() / "scratch" / "runs"]


def _show(given: argparse.Namespace) -> int:
    import yaml

    from .runs.record import without_bulk
    from .runs.store import stored_runs

    found = [r for folder in _run_folders() for r in stored_runs(folder, [given.name])]
    found = [r for r in found if r.path.name == given.name] or found
    if len(found) != 1:
        names = ", ".join(r.path.name for r in found[:5])
        raise ValueError(f"{given.name}: {f'{len(found)} runs have it: {names}' if found else 'no stored run has it'}")
    parts: Mapping = {"run": str(found[0].path), "experiment": found[0].experiment.identity()}
    parts |= {"summary": without_bulk(found[0].summary), **found[0].record}
    print(yaml.safe_dump(parts, sort_keys=False, default_flow_style=None, width=120), end="")
    return 0


def _fill(given: argparse.Namespace) -> int:
    from fedlib.core.paths import use_outputs_of
    from fedlib.engine.executors import Execution

    from .runs.fill import core_hours, fill, named, queue

    if given.minutes is not None and not given.minutes > 0:
        raise ValueError(f"--minutes {given.minutes:g}: expected a number above 0")
    began = time.monotonic()
    Execution(workers=given.workers)  # refuses what are too few or too many
    use_outputs_of(given.profile)
    missing = queue(named(given.tables), given.profile, columns=given.columns)
    for sentence in missing.skipped:
        print(f"skipped: {sentence}")
    print(f"{len(missing.jobs)} runs are missing, about {core_hours(missing.jobs)}", flush=True)
    if given.dry_run:
        for job in missing.jobs:
            print(f"  {job} ({core_hours([job])})")
        return 0
    minutes = given.minutes and given.minutes - (time.monotonic() - began) / 60  # looking took some
    filled = fill(missing.jobs, minutes, given.workers, stop=_on_signals(), tell=lambda text: print(text, flush=True))
    for sentence, count in Counter(sentence for _, sentence in filled.failed).items():
        jobs = [str(job) for job, s in filled.failed if s == sentence]
        print(f"failed ({count}): {jobs[0]}{' and others' * (count > 1)}: {sentence}")
    print(f"{len(filled.done)} runs done; left: {len(filled.left)} runs, about {core_hours(filled.left)}")
    return 1 if filled.failed else 0


def _on_signals() -> threading.Event:
    """Return an event that is set by Ctrl-C, and by the end of a Slurm slot."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
