"""The command line: ``fedlib fill reefl/table1 --minutes 150`` (or ``python -m fedlib``); each command is a function.

What a command does is the library's; here stand its arguments and what it prints.
"""

import argparse
import signal
import threading
from collections import Counter
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 if all went well, 1 if a run failed, 2 if the arguments are wrong."""
    parser = argparse.ArgumentParser("fedlib", description="Federated learning on clients of unequal strength.")
    commands = parser.add_subparsers(title="commands", required=True)
    _add_fill(commands)
    given = parser.parse_args(arguments)
    try:
        return given.command(given)
    except ValueError as error:
        parser.exit(2, f"fedlib: {error}\n")


def _add_fill(commands) -> None:
    p = commands.add_parser(
        "fill",
        help="run what the tables lack, until a deadline",
        description="Run what the tables of params/ lack, most telling first. Stop it at any time, or kill it: runs go "
        "on from their checkpoints the next time. Several of these commands share the work.",
    )
    p.add_argument("grids", nargs="*", metavar="PAPER[/TABLE]", help="which tables (default: all)")
    p.add_argument("--minutes", type=float, help="stop after so long (default: when nothing is missing)")
    p.add_argument("--profile", default="small", help="how big: smoke, demo, small (default) or paper")
    p.add_argument("--workers", type=int, help="cores to use, one a run (default: all)")
    p.add_argument("--dry-run", action="store_true", help="say what is missing and what it takes; run nothing")
    p.set_defaults(command=_fill)


def _fill(given: argparse.Namespace) -> int:
    from .core.paths import keep_outputs_of
    from .runs.fill import core_hours, fill, named, queue

    if given.minutes is not None and not given.minutes > 0:
        raise ValueError(f"--minutes {given.minutes:g}: expected a number above 0")
    if given.workers is not None and given.workers < 1:
        raise ValueError(f"--workers {given.workers}: expected a number of cores, at least 1")
    keep_outputs_of(given.profile)
    missing = queue(named(given.grids), given.profile)
    for sentence in missing.skipped:
        print(f"skipped: {sentence}")
    print(f"{len(missing.jobs)} runs are missing, about {core_hours(missing.jobs)}", flush=True)
    if given.dry_run:
        for job in missing.jobs:
            print(f"  {job} ({core_hours([job])})")
        return 0
    filled = fill(
        missing.jobs, given.minutes, given.workers, stop=_on_signals(), tell=lambda text: print(text, flush=True)
    )
    for sentence, count in Counter(sentence for _, sentence in filled.failed).items():
        jobs = [str(job) for job, s in filled.failed if s == sentence]
        print(f"failed ({count}): {jobs[0]}{' and others' * (count > 1)}: {sentence}")
    print(f"{len(filled.done)} runs done; left: {len(filled.left)} runs, about {core_hours(filled.left)}")
    return 1 if filled.failed else 0


def _on_signals() -> threading.Event:
    """Set by Ctrl-C, and by the end of a Slurm slot."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop
