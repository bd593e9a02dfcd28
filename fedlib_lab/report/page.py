"""The pages of results: every stored table beside the paper's, thumbnails of the figures, a verdict on every claim.

``python -m fedlib_lab.report.page`` writes ``outputs/<paper>/README.md`` and ``claims.md`` for every paper and
extension, and ``outputs/README.md``, the index. Nothing in them is written by hand but the first paragraph of a paper,
its ``findings_<profile>.md``; tests keep them equal to what the stored runs say, and its numbers to those of the page.
Read next: ``report/claims.py``.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd

from fedlib.core.paths import outputs_dir, params_dir, root, use_outputs_of
from fedlib.core.storage import read_json
from fedlib.core.tables import read_table

from ..runs.params import Cell, grids
from ..runs.params_files import papers
from ..runs.store import run_path
from .claims import Judged, Stored, judge
from .claims_page import added, claims_page, claims_section, plot_tallies
from .clients import VALUES
from .plots import save_figure
from .printed import as_printed
from .style import data_title, spelled
from .style import title_of as column_title
from .tables import markdown_table, obtained, reported_beside, with_further

THUMBNAIL = 420  # pixels
ORDER = ("table", "decomposition", "figure", "")  # then by number, then by name
TEXTS = read_table(Path(__file__).with_suffix(".yaml"))
NO_PAPERS = ("benchmarks", "cluster", "pretraining", "walkthrough")  # outputs beside the papers', in the index


def write_results(profile: str = "small", only: Sequence[str] = ()) -> list[Path]:
    """Write the pages of every paper with params (or ``only`` these) and the index, and return their paths."""
    written = []
    for paper in only or papers():
        stored = Stored(paper, profile)
        verdicts = judge(stored)
        pages = {"README.md": results_page(stored, verdicts), "claims.md": claims_page(stored, verdicts)}
        stored.folder.mkdir(parents=True, exist_ok=True)
        for name, text in pages.items():
            if text:
                (stored.folder / name).write_text(text, encoding="utf-8")
                written.append(stored.folder / name)
            else:  # no comparison is stored any more
                (stored.folder / name).unlink(missing_ok=True)
    path = outputs_dir() / "README.md"
    path.write_text(index_page(outputs_dir()), encoding="utf-8")
    if tallies := tallies_of(outputs_dir()):
        axes = plot_tallies(tallies, f"profile {profile}: small runs, mostly of three seeds")
        written.append(save_figure(axes, f"claims_{profile}"))
    return [*written, path]


def tallies_of(outputs: Path) -> dict[str, str]:
    """Return, for every paper whose page has one, its sentence on how many claims hold."""
    found = {p: re.search(r"^Of \d+ claims .*?\.", _stored_part(outputs, p), re.M) for p in papers()}
    return {paper: tally[0] for paper, tally in found.items() if tally}


def _stored_part(outputs: Path, paper: str) -> str:
    page = outputs / paper / "README.md"
    return page.read_text(encoding="utf-8").split("\n## Not run")[0] if page.is_file() else ""


def results_page(stored: Stored, verdicts: Sequence[Judged]) -> str:
    """Return a paper's page as Markdown; links and figures are relative to ``outputs/<paper>``."""
    sections, absent, shown, runs = [], [], {}, {}
    for table in grid_names(stored.paper):
        cells, frame = stored.read(table)
        done = {c.experiment.hash: c for c, a in zip(cells, frame.accuracy, strict=True) if pd.notna(a)}
        if not set(done) - set(shown) and len(done) < len({c.experiment.hash for c in cells}):
            absent.append(table)  # nothing, or only rows shared with a table above
            continue
        sections.append(section(stored, table, done, shown))
        runs |= done
    by_hand = stored.folder / f"findings_{stored.profile}.md"
    text = [
        f"# Results of {spelled(stored.paper)} at profile `{stored.profile}`",
        by_hand.read_text(encoding="utf-8").strip() if by_hand.is_file() else "",  # what the runs say, in plain words
        TEXTS["lead"],
        facts(stored, list(runs.values())),
        claims_section(verdicts) if verdicts else "",
        *sections,
        more_figures(stored, sections),
        f"## Not run at this profile\n\n{', '.join(title_of(stored.paper, t) for t in absent)}." if absent else "",
    ]
    return "\n\n".join(t for t in text if t) + "\n"


def grid_names(paper: str) -> list[str]:
    """List the paper's grids: tables by number, then the decomposition, figures, the rest."""
    number = lambda n: int(re.sub(r"\D", "", n) or 0)  # noqa: E731
    kind = lambda n: next(i for i, start in enumerate(ORDER) if n.startswith(start))  # noqa: E731
    return sorted(grids(paper), key=lambda n: (kind(n), number(n), n))


def section(stored: Stored, table: str, done: dict[str, Cell], shown: dict[str, str]) -> str:
    """Return the section of a table or figure: facts, obtained beside reported, thumbnails.

    ``shown`` maps runs to their first section.
    """
    cells, frame = stored.read(table)
    value = stored.spec(table).get("value", "accuracy")
    title = f"## {title_of(stored.paper, table)}"
    parts = [title, facts(stored, list(done.values()), wanted={c.experiment.hash for c in cells}), missing(cells, done)]
    if value == "last":
        parts.append("Accuracy of the last exit.")
    if any(c.experiment.evaluate_on == "validation" for c in done.values()):
        parts.append(TEXTS["held out"])
    owner = {shown.get(h) for h in done}
    if value == "accuracy" and len(owner) == 1 and None not in owner:
        parts.append(f"The runs are those of {short_title(stored.paper, owner.pop())}.")
    else:
        thresholds = stored.spec(table).get("thresholds")
        parts.append(TEXTS["of clients"] if value in VALUES else "")
        more = with_further(frame, stored.spec(table))
        rows = obtained(more, reported_beside(stored.paper, table), value, thresholds)
        search = TEXTS["held out"] in parts and rows.column.nunique() > 1
        parts.append(markdown_table(as_printed(rows, "method" if search else "column")))
        csv = f"tables/{table}_{stored.profile}.csv"  # if its notebook stored it
        parts.append(f"[As CSV]({csv})" if (stored.folder / csv).is_file() else "")
    shown.update({h: table for h in done if h not in shown})
    parts.append(thumbnails(sorted((stored.folder / "figures").glob(f"{table}_{stored.profile}*.png"))))
    return "\n\n".join(p for p in parts if p)


def facts(stored: Stored, cells: Sequence[Cell], wanted: set[str] = frozenset()) -> str:
    """Say in one line how many runs there are, of which data, seeds and hardware, and how long they trained."""
    experiments = {c.experiment.hash: c.experiment for c in cells}
    if not experiments:
        return "0 runs are stored."
    paths = [run_path(e, stored.outputs / "runs") for e in experiments.values()]
    summaries = [read_json(p / "summary.json") for p in paths]
    records = [read_json(p / "experiment.json") for p in paths]
    origin = [go for r in records for go in (r.get("provenance", {}), *r.get("resumed", []))]
    machines = sorted({f"{p.get('device', 'unknown')}, {p.get('cores', '?')} cores" for p in origin})
    shorter = sorted({e.precision for e in experiments.values()} - {"float32"})
    minutes = sum(s["seconds"] for s in summaries) / 60
    diverged = sum(s["status"] == "diverged" for s in summaries)
    total = max(len(experiments), len(wanted))
    of = f" of {total}" if total > len(experiments) else ""
    words = [
        f"{len(experiments)}{of} run{'s' * (total > 1)}",
        f"data: {', '.join(sorted({data_title(e.dataset) for e in experiments.values()}))}",
        f"backbone: {', '.join(sorted({e.backbone for e in experiments.values()}))}",
        f"seeds: {', '.join(map(str, sorted({e.seed for e in experiments.values()})))}",
        f"hardware: {' and '.join(machines)}" if machines else "",
        f"products in {' and '.join(shorter)}" if shorter else "",
        f"training: {minutes:,.0f} minutes" if minutes >= 1 else f"training: {60 * minutes:.0f} seconds",
        f"{diverged} diverged" if diverged else "",
    ]
    return f"{'; '.join(w for w in words if w)}."


def missing(cells: Sequence[Cell], done: Mapping[str, Cell]) -> str:
    """Say what of a grid that was begun is not run yet: whole data columns, and of the others seeds and methods."""
    begun = {c.column for c in cells if c.experiment.hash in done}
    whole, seeds = dict.fromkeys(c.column for c in cells if c.column not in begun), {}
    for c in cells:
        if c.column in begun and c.experiment.hash not in done:
            seeds.setdefault((c.column, c.label), set()).add(c.seed)
    by_seeds: dict[tuple, list[str]] = {}
    for (column, label), lacking in seeds.items():
        by_seeds.setdefault((column, tuple(sorted(lacking))), []).append(f"*{spelled(label)}*")
    parts = [
        f"{column_title(column)}, seed{'s' * (len(lacking) > 1)} {', '.join(map(str, lacking))} of {', '.join(labels)}"
        for (column, lacking), labels in by_seeds.items()
    ]
    parts += [f"all of {', '.join(f'*{column_title(c)}*' for c in whole)}"] if whole else []
    return f"Not run yet: {'; '.join(parts)}." if parts else ""


def index_page(outputs: Path) -> str:
    """Return the index: a line per paper with its claims' tally, and what benchmarks and other notebooks stored."""
    lines, tallies = [], tallies_of(outputs)
    for paper in papers():
        if stored := _stored_part(outputs, paper):
            shown = [t for t in grid_names(paper) if f"## {title_of(paper, t)}\n" in stored]
            titles = "; ".join(short_title(paper, t) for t in shown)
            said = f"{titles or 'no run yet'}. {tallies.get(paper, '')}".strip()
            lines.append(f"- [**{paper}**]({paper}/README.md): {said}")
    for folder in NO_PAPERS:
        paths = sorted([*outputs.glob(f"{folder}/tables/*.csv"), *outputs.glob(f"{folder}/figures/*.png")])
        if paths:
            links = ", ".join(f"[{p.stem}]({p.relative_to(outputs).as_posix()})" for p in paths)
            lines.append(f"- **{folder}**: {links}")
    over_all = f"Over all papers: {added(list(tallies.values())).replace('Of', 'of', 1)}" if tallies else ""
    return "\n\n".join(t for t in ("# Results", TEXTS["index"], over_all, "\n".join(lines)) if t) + "\n"


def notebook_of(paper: str, name: str) -> Path | None:
    """Find the notebook of a paper's table or figure by its name, as ``make <paper>/<name>`` does."""
    folder = root() / "notebooks" / paper
    found = sorted([*folder.glob(f"{name}_*.ipynb"), *folder.glob(f"{name}.ipynb")])
    return found[0] if found else None


def title_of(paper: str, name: str) -> str:
    """Return the notebook's title, linked; for a grid without such a notebook, the first line of its params file."""
    if (path := notebook_of(paper, name)) is None:
        grid = params_dir() / paper / f"{name}.yaml"
        if not grid.is_file():
            return spoken(name)
        first = grid.read_text(encoding="utf-8").splitlines()[0]
        return re.split(r"\.(?:\s|$)", first.removeprefix("#").strip())[0]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
    return f"[{title}](../../{path.relative_to(root()).as_posix()})"


def short_title(paper: str, name: str) -> str:
    """Return ``Table 3`` for ``table3``; else the title up to what it is about: ``BERT, local`` for ``bert_local``."""
    if re.fullmatch(r"(table|figure)\d+\w?", name):
        return spoken(name)
    return re.split(r": | on ", re.sub(r"^\[(.*)\]\(.*\)$", r"\1", title_of(paper, name)))[0]


def spoken(name: str) -> str:
    """Return ``Table 3`` for ``table3``, ``Figure 1b`` for ``figure1b``."""
    return re.sub(r"(\d+\w?)$", r" \1", name).capitalize()


def thumbnails(paths: Sequence[Path]) -> str:
    """Return images at a width that a page has room for; what shows them leads to their files."""
    one = '<img src="figures/{0}.png" width="{1}" alt="{0}">'
    return "\n".join(one.format(p.stem, THUMBNAIL) for p in paths)


def more_figures(stored: Stored, sections: Sequence[str]) -> str:
    """Return the figures of this profile that no section shows, under their notebooks' titles."""
    shown, groups = "\n".join(sections), {}
    for path in sorted((stored.folder / "figures").glob(f"*_{stored.profile}*.png")):
        if f"figures/{path.name}" not in shown:
            groups.setdefault(path.stem.split(f"_{stored.profile}")[0], []).append(path)
    return "\n\n".join(f"## {title_of(stored.paper, name)}\n\n{thumbnails(paths)}" for name, paths in groups.items())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fedlib_lab.report.page", description=write_results.__doc__)
    parser.add_argument("--paper", action="append", choices=papers(), default=[], help="only this; may be repeated")
    parser.add_argument("--profile", default="small")
    given = parser.parse_args(arguments)
    use_outputs_of(given.profile)
    print(*write_results(given.profile, given.paper), sep="\n")


if __name__ == "__main__":
    main()
