"""The page of results: every stored table beside the paper's, thumbnails of the figures, a verdict on every claim.

``python -m fedlib.report.page`` writes ``outputs/README.md``; nothing in it is written by hand, and a test keeps it
equal to what the stored runs say. Read next: ``report/claims.py``, ``report/site.py``.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ..core.paths import params_dir, root
from ..core.storage import read_json
from ..runs.params import Cell, load_yaml
from ..runs.store import run_path
from .claims import COLUMNS, Judged, Stored, judge
from .tables import beside_reported, best_runs, load_reported, markdown_table

THUMBNAIL = 420  # pixels
ORDER = ("table", "decomposition", "figure", "")  # then by number, then by name


def write_results(paper: str = "reefl", profile: str = "small") -> Path:
    """Write ``outputs/README.md`` from what is stored, and return its path."""
    stored = Stored(paper, profile)
    path = stored.outputs / "README.md"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(results_page(stored), encoding="utf-8")
    return path


def results_page(stored: Stored) -> str:
    """The whole page as Markdown; links and figures are relative to the outputs folder."""
    sections, absent, shown, runs = [], [], {}, {}
    for table in grid_names(stored.paper):
        cells, frame = stored.read(table)
        done = {c.experiment.hash: c for c, a in zip(cells, frame.accuracy, strict=True) if pd.notna(a)}
        if not set(done) - set(shown) and len(done) < len({c.experiment.hash for c in cells}):
            absent.append(table)  # nothing, or only rows shared with a table above
            continue
        sections.append(section(stored, table, done, shown))
        runs |= done
    verdicts = judge(stored)
    text = [
        f"# Results of `{stored.paper}` at profile `{stored.profile}`",
        "Written by `make results` from the stored runs in [`runs`](runs); do not edit. Obtained: mean ± SD over seeds "
        "of the last round's accuracy in percent, mean over exits. Reported: the paper's backbone and data, so compare "
        "orderings, not values.",
        facts(stored, list(runs.values())),
        "## What the paper says, and whether it holds here",
        claims_section(verdicts),
        *sections,
        more_figures(stored, sections),
        f"## Not run at this profile\n\n{', '.join(map(title_of, absent))}." if absent else "",
    ]
    return "\n\n".join(t for t in text if t) + "\n"


def grid_names(paper: str) -> list[str]:
    """The params files that describe a grid: tables by number, then the decomposition, figures, the rest."""
    names = [p.stem for p in (params_dir() / paper).glob("*.yaml") if {"axes", "extends"} & set(load_yaml(p))]
    number = lambda n: int(re.sub(r"\D", "", n) or 0)  # noqa: E731
    kind = lambda n: next(i for i, start in enumerate(ORDER) if n.startswith(start))  # noqa: E731
    return sorted(names, key=lambda n: (kind(n), number(n), n))


def section(stored: Stored, table: str, done: dict[str, Cell], shown: dict[str, str]) -> str:
    """One table or figure: facts, obtained beside reported, thumbnails. ``shown`` maps runs to their first section."""
    cells, frame = stored.read(table)
    value = stored.spec(table).get("value", "accuracy")
    parts = [f"## {title_of(table)}", facts(stored, list(done.values()), wanted={c.experiment.hash for c in cells})]
    owner = {shown.get(h) for h in done}
    if value == "accuracy" and len(owner) == 1 and None not in owner:
        parts.append(f"The runs are those of {short_title(owner.pop())}.")
    else:
        parts.append(markdown_table(obtained(stored.paper, table, frame, value)))
    shown.update({h: table for h in done if h not in shown})
    parts.append(thumbnails(figures_of(stored, table)))
    return "\n\n".join(p for p in parts if p)


def obtained(paper: str, table: str, frame: pd.DataFrame, value: str) -> pd.DataFrame:
    """``tables.beside_reported``; for ensembles the best run's, as printed, and the mean over seeds."""
    try:
        reported = load_reported(paper, table)
    except FileNotFoundError:  # not the paper's own
        reported = pd.DataFrame(columns=["finetune", "column", "variant", "mean", "sd"], dtype=object)
    if value == "accuracy":
        out = beside_reported(frame, reported)
    else:
        out = beside_reported(best_runs(frame), reported, value).rename(columns={"obtained": f"best run's {value}"})
        out["mean over seeds"] = beside_reported(frame, reported, value).obtained
        out["mean exit"] = beside_reported(frame, reported).obtained
        out["seeds"] = beside_reported(frame, reported, value).seeds
    return out.drop(columns="reported") if (out.reported == "–").all() else out


def facts(stored: Stored, cells: Sequence[Cell], wanted: set[str] = frozenset()) -> str:
    """One line: how many runs, of which data, seeds, hardware, and how long they trained."""
    experiments = {c.experiment.hash: c.experiment for c in cells}
    paths = [run_path(e, stored.outputs / "runs") for e in experiments.values()]
    summaries = [read_json(p / "summary.json") for p in paths]
    origin = [read_json(p / "experiment.json").get("provenance", {}) for p in paths]
    machines = sorted({f"{p.get('device', 'unknown')}, {p.get('cores', '?')} cores" for p in origin})
    minutes = sum(s["seconds"] for s in summaries) / 60
    diverged = sum(s["status"] == "diverged" for s in summaries)
    words = [
        f"{len(experiments)}{f' of {len(wanted)}' if len(wanted) > len(experiments) else ''} runs",
        f"data: {', '.join(sorted({e.dataset for e in experiments.values()}))}",
        f"backbone: {', '.join(sorted({e.backbone for e in experiments.values()}))}",
        f"seeds: {', '.join(map(str, sorted({e.seed for e in experiments.values()})))}",
        f"hardware: {' and '.join(machines)}" if machines else "",
        f"training: {minutes:,.0f} minutes" if minutes >= 1 else f"training: {60 * minutes:.0f} seconds",
        f"{diverged} diverged" if diverged else "",
    ]
    return f"{'; '.join(w for w in words if w)}."


def claims_section(verdicts: Sequence[Judged]) -> str:
    """The claims as one table, and every comparison behind them, folded."""
    counts = pd.Series([v.verdict for v in verdicts]).value_counts()
    summary = ", ".join(f"{counts.get(v, 0)} {word}" for v, word in (
        ("holds", "hold"), ("does not hold", "do not hold"), ("undecided", "are undecided"),
        ("not testable", "are not testable here")))  # fmt: skip
    rule = (
        "A comparison is a difference paired by seed; it holds if its 95 % bootstrap interval over seeds excludes zero "
        "on the claimed side (with three seeds: if all agree), and is contradicted on the other side. A claim about "
        '"most" or "often" needs more than half of its comparisons, any other all of them. `in print`: how many of the '
        "paper's own comparisons of printed means agree."
    )
    table = pd.DataFrame(
        [{"claim": v.says, "where": v.where, "verdict": f"**{v.verdict}**", "here": v.numbers, "in print": v.printed}
         for v in verdicts]
    )  # fmt: skip
    folded = [folded_comparisons(v) for v in verdicts if (v.comparisons.seeds > 0).any()]
    return "\n\n".join([f"Of {len(verdicts)} claims {summary}.", rule, markdown_table(table), *folded])


def folded_comparisons(v: Judged) -> str:
    """The comparisons of a claim that have runs, with their intervals in points, behind a fold."""
    rows = v.comparisons[v.comparisons.seeds > 0][COLUMNS].copy()
    interval = [f"{a:+.2f} to {b:+.2f}" if pd.notna(a) else "–" for a, b in zip(rows.low, rows.high, strict=True)]
    rows["mean"] = [f"{m:+.2f}" for m in rows["mean"]]
    rows.insert(5, "95 % interval", interval)
    rows = markdown_table(rows.drop(columns=["low", "high"]))
    return f"<details><summary>{v.says} <b>{v.verdict}</b></summary>\n\n{rows}\n\n</details>"


def notebook_of(name: str) -> Path | None:
    """The notebook of a table or figure, found by its name as ``make`` does."""
    found = sorted([*root().glob(f"notebooks/*/{name}_*.ipynb"), *root().glob(f"notebooks/*/{name}.ipynb")])
    return found[0] if found else None


def title_of(name: str) -> str:
    """The notebook's title, linked; of a grid without a notebook of that name, the first line of its params file."""
    if (path := notebook_of(name)) is None:
        lines = [p.read_text(encoding="utf-8").splitlines()[0] for p in params_dir().glob(f"*/{name}.yaml")]
        return lines[0].removeprefix("#").strip().split(".")[0] if lines else name
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
    return f"[{title}](../{path.relative_to(root()).as_posix()})"


def short_title(name: str) -> str:
    """``Table 3`` of ``table3``."""
    return re.sub(r"(\d+)$", r" \1", name).capitalize()


def figures_of(stored: Stored, name: str) -> list[Path]:
    """The stored figures of a table at this profile."""
    return sorted((stored.outputs / "figures").glob(f"{name}_{stored.profile}*.png"))


def thumbnails(paths: Sequence[Path]) -> str:
    """Images that link to their files."""
    one = '<a href="figures/{0}.png"><img src="figures/{0}.png" width="{1}" alt="{0}"></a>'
    return "\n".join(one.format(p.stem, THUMBNAIL) for p in paths)


def more_figures(stored: Stored, sections: Sequence[str]) -> str:
    """Figures of this profile that no section shows, under their notebooks' titles."""
    shown, groups = "\n".join(sections), {}
    for path in sorted((stored.outputs / "figures").glob(f"*_{stored.profile}*.png")):
        if f"figures/{path.name}" not in shown:
            groups.setdefault(path.stem.split(f"_{stored.profile}")[0], []).append(path)
    return "\n\n".join(f"## {title_of(name)}\n\n{thumbnails(paths)}" for name, paths in groups.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fedlib.report.page", description=write_results.__doc__)
    parser.add_argument("--paper", default="reefl")
    parser.add_argument("--profile", default="small")
    given = parser.parse_args(arguments)
    print(write_results(given.paper, given.profile))


if __name__ == "__main__":
    main()
