"""The three commands and their arguments; only the one that is asked for is imported."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    top = argparse.ArgumentParser("python -m benchmarks.away", description="Bounded runs on a lent, offline machine.")
    add = top.add_subparsers(dest="command", required=True).add_parser

    p = add("pack", help="put what an offline machine lacks, and a plan, into an ignored folder")
    p.add_argument("--data", type=_listed, metavar="NAME,NAME", help="data sets (default: those of the plan's runs)")
    p.add_argument("--limit-mib", type=float, default=64, help="of the tree without outputs/ and the folder together")
    p.add_argument("--to", type=Path, default=Path(".away"), help="the folder, which is made anew (default .away)")
    p.add_argument("--profile", default="paper", help="of the plan's runs: paper (default), or smoke for a rehearsal")
    p.add_argument(
        "--cells", nargs="+", metavar="PAPER/TABLE KEY=VALUE",
        help="runs of another table, as fedlib run --set takes them (default: CAFEDistill's Table 1 on CIFAR-10)",
    )  # fmt: skip
    p.add_argument("--plan", type=Path, metavar="FILE", help="runs of a plan.json instead, in its order")
    p.add_argument("--beside", default="small", metavar="PROFILE", help="of runs on spare CPU cores; '' for none")
    p.add_argument("--go-on", type=Path, metavar="FILE", help="a checkpoint.tar of an earlier turn: its runs go first")

    p = add("run", help="measure, then train the plan's runs, until the time is up")
    p.add_argument("--device", default="cuda")
    p.add_argument("--seconds", type=float, default=560, help="after which the command has ended, whatever happens")
    p.add_argument("--out", type=Path, required=True, help="the folder for what comes back: at most 8 files of 16 MiB")
    p.add_argument("--plan", type=Path, default=Path(".away/plan.json"), metavar="FILE", help="of the packed folder")
    p.add_argument("--together", type=int, default=1, metavar="N", help="so many runs at once on the device")
    p.add_argument("--skip", nargs="+", default=[], choices=["tests", "speed", "goals"], help="in a later turn")

    p = add("home", help="take finished runs of a runs.tar into the store")
    p.add_argument("files", nargs="+", type=Path, metavar="FILE")
    p.add_argument("--folder", type=Path, help="default: outputs/runs")
    return top


def _listed(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status: 0 if all went well, 1 if something failed, 2 if something is refused."""
    given = vars(parser().parse_args(arguments))
    command = given.pop("command")
    try:
        return getattr(import_module(f"{__package__}.{command}"), command)(**given)
    except (ValueError, OSError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
