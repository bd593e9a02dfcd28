"""The pages of results: every stored table beside the paper's, thumbnails of the figures, a verdict on every claim.

``python -m fedlib_lab.report.page`` writes for every paper and extension ``outputs/<paper>/README.md``, read in two
minutes, ``tables.md``, ``claims.md`` and ``claims.csv``, and ``outputs/README.md``, the index. Nothing in them is
written by hand but the sentences of the first page, ``findings_<profile>.md``; tests keep the pages equal to what the
stored runs say, and the numbers and verdicts of those sentences to the tables and claims.
Read next: ``report/claims.py``.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from fedlib.core.paths import outputs_dir, params_dir, root, use_outputs_of
from fedlib.core.storage import read_json
from fedlib.core.tables import read_table

from ..runs.params import Cell, grids
from ..runs.params_files import papers
from ..runs.store import run_path
from .claims import Judged, Stored, judge
from .claims_page import added, claims_boxes, claims_page, comparisons, plot_claim, span
from .clients import VALUES
from .plots import save_figure
from .printed import as_printed
from .style import data_title, spelled
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
        stored.folder.mkdir(parents=True, exist_ok=True)
        verdicts = judge(stored)
        pages = pages_of(stored, verdicts)
        for v in (v for v in verdicts if f"(figures/{claim_figure(stored, v)}.png)" in pages["README.md"]):
            written.append(save_figure(plot_claim(v), f"{paper}/{claim_figure(stored, v)}"))
        for name, text in pages.items():
            if text:
                (stored.folder / name).write_text(text, encoding="utf-8")
                written.append(stored.folder / name)
            else:  # no claim is made, or no comparison is stored any more
                (stored.folder / name).unlink(missing_ok=True)
    path = outputs_dir() / "README.md"
    path.write_text(index_page(outputs_dir()), encoding="utf-8")
    return [*written, path]


def claim_figure(stored: Stored, v: Judged) -> str:
    """Return the name of a claim's figure, which is drawn where the first page shows it."""
    return f"claim_{v.name}_{stored.profile}"


def _read(outputs: Path, paper: str, page: str) -> str:
    path = outputs / paper / page
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def pages_of(stored: Stored, verdicts: Sequence[Judged]) -> dict[str, str]:
    """Return a paper's files by name: the first page, all tables, all claims, and every comparison as CSV."""
    tables, runs = tables_page(stored)
    csv = rows.to_csv(index=False, lineterminator="\n") if len(rows := comparisons(verdicts)) else ""
    front, claims = front_page(stored, verdicts, runs), claims_page(stored, verdicts)
    return {"README.md": front, "tables.md": tables, "claims.md": claims, "claims.csv": csv}


def front_page(stored: Stored, verdicts: Sequence[Judged], runs: Sequence[Cell]) -> str:
    """Return the page that is read in two minutes: ``findings_<profile>.md`` with its braces filled in.

    ``{card}`` is of which runs it is, ``{claims}`` those with a verdict; ``{table1: cifar10_alpha1, lora}`` a table of
    what the words after the colon name: columns, modes, variants.
    """

    def fill(found: re.Match) -> str:
        name, words = found[1], (found[2] or "").split(", ")
        if name == "card":
            return "\n".join(f"- {fact}" for fact in facts(stored, runs))
        if name == "claims":
            return claims_boxes(verdicts)
        _, frame = stored.read(name)
        for key in ("column", "finetune", "variant"):
            frame = frame[frame[key].isin(words)] if frame[key].isin(words).any() else frame
        return table_of(stored, name, frame)

    text = _read(stored.outputs, stored.paper, f"findings_{stored.profile}.md") or TEXTS["front"]
    title = f"# {(name := spelled(stored.paper))[0].upper()}{name[1:]} at profile `{stored.profile}`"
    return "\n\n".join([title, re.sub(r"^\{(\w+)(?:: (.*))?\}$", fill, text.strip(), flags=re.M), TEXTS["more"]]) + "\n"


def tables_page(stored: Stored) -> tuple[str, list[Cell]]:
    """Return the page of every table and figure with stored runs, and these; links are relative to the paper."""
    sections, shown, runs = [], {}, {}
    for table in grid_names(stored.paper):
        cells, frame = stored.read(table)
        done = {c.experiment.hash: c for c, a in zip(cells, frame.accuracy, strict=True) if pd.notna(a)}
        if set(done) - set(shown) or (done and len(done) == len({c.experiment.hash for c in cells})):
            sections.append(section(stored, table, done, shown))  # not if it has only rows shared with a table above
            runs |= done
    title = f"# Tables and figures of {spelled(stored.paper)} at profile `{stored.profile}`"
    return "\n\n".join([title, TEXTS["lead"], *sections, *more_figures(stored, sections)]) + "\n", [*runs.values()]


def grid_names(paper: str) -> list[str]:
    """List the paper's grids: tables by number, then the decomposition, figures, the rest."""
    kind = lambda n: next(i for i, start in enumerate(ORDER) if n.startswith(start))  # noqa: E731
    return sorted(grids(paper), key=lambda n: (kind(n), int(re.sub(r"\D", "", n) or 0), n))


def section(stored: Stored, table: str, done: dict[str, Cell], shown: dict[str, str]) -> str:
    """Return the section of a table or figure: facts, obtained beside reported, thumbnails.

    ``shown`` maps runs to their first section.
    """
    cells, frame = stored.read(table)
    value = stored.spec(table).get("value", "accuracy")
    known = facts(stored, list(done.values()), wanted={c.experiment.hash for c in cells})
    parts = [f"## {title_of(stored.paper, table)}", f"{'; '.join(known)}."]
    if value == "last":
        parts.append("Accuracy of the last exit.")
    if any(c.experiment.evaluate_on == "validation" for c in done.values()):
        parts.append(TEXTS["held out"])
    owner = {shown.get(h) for h in done}
    if value == "accuracy" and len(owner) == 1 and None not in owner:
        parts.append(f"The runs are those of {short_title(stored.paper, owner.pop())}.")
    else:
        parts.append(TEXTS["of clients"] if value in VALUES else "")
        parts.append(table_of(stored, table, frame, search=TEXTS["held out"] in parts))
        csv = f"tables/{table}_{stored.profile}.csv"  # if its notebook stored it
        parts.append(f"[As CSV]({csv})" if (stored.folder / csv).is_file() else "")
    shown.update({h: table for h in done if h not in shown})
    parts.append(thumbnails(sorted((stored.folder / "figures").glob(f"{table}_{stored.profile}*.png"))))
    return "\n\n".join(p for p in parts if p)


def table_of(stored: Stored, table: str, frame: pd.DataFrame, search: bool = False) -> str:
    """Return ``frame``, of the table's runs, as its paper prints it; of a ``search`` the best of a row is bold."""
    spec, beside = stored.spec(table), reported_beside(stored.paper, table)
    rows = obtained(with_further(frame, spec), beside, spec.get("value", "accuracy"), spec.get("thresholds"))
    return markdown_table(as_printed(rows, "method" if search and rows.column.nunique() > 1 else "column"))


def facts(stored: Stored, cells: Sequence[Cell], wanted: set[str] = frozenset()) -> list[str]:
    """Say how many runs there are, of which data, nets, rounds, seeds and hardware, and how long they trained."""
    if not (experiments := {c.experiment.hash: c.experiment for c in cells}):
        return ["0 runs are stored"]
    paths = [run_path(e, stored.outputs / "runs") for e in experiments.values()]
    summaries = [read_json(p / "summary.json") for p in paths]
    records = [read_json(p / "experiment.json") for p in paths]
    origin = [go for r in records for go in (r.get("provenance", {}), *r.get("resumed", []))]
    machines = sorted({f"{p.get('device', 'unknown')}, {p.get('cores', '?')} cores" for p in origin})
    shorter = sorted({e.precision for e in experiments.values()} - {"float32"})
    minutes = sum(s["seconds"] for s in summaries) / 60
    diverged = sum(s["status"] == "diverged" for s in summaries)
    of = f" of {total}" if (total := max(len(experiments), len(wanted))) > len(experiments) else ""
    words = [
        f"{len(experiments):,}{of} run{'s' * (total > 1)}",
        f"data: {', '.join(sorted({data_title(e.dataset) for e in experiments.values()}))}",
        f"backbone: {', '.join(sorted({e.backbone for e in experiments.values()}))}",
        f"rounds: {span({e.rounds for e in experiments.values()})}",
        f"seeds: {', '.join(map(str, sorted({e.seed for e in experiments.values()})))}",
        f"hardware: {' and '.join(machines)}" if machines else "",
        f"products in {' and '.join(shorter)}" if shorter else "",
        f"training: {minutes:,.0f} minutes" if minutes >= 1 else f"training: {60 * minutes:.0f} seconds",
        f"{diverged} diverged" if diverged else "",
    ]
    return [w for w in words if w]


def index_page(outputs: Path) -> str:
    """Return the index: a line per paper with its claims' tally, and the other folders' notebooks as they have run."""
    shown = {p: page for p in papers() if (page := _read(outputs, p, "README.md"))}
    tallies = {p: found[0] for p, page in shown.items() if (found := re.search(r"^Of \d+ claims .*?\.", page, re.M))}
    lines = [f"- [**{p}**]({p}/README.md), [tables]({p}/tables.md). {tallies.get(p, '')}".rstrip() for p in shown]
    for folder in NO_PAPERS:
        if paths := sorted(outputs.glob(f"{folder}/notebooks/*.ipynb")):
            links = ", ".join(f"[{p.stem}]({p.relative_to(outputs).as_posix()})" for p in paths)
            lines.append(f"- **{folder}**: {links}")
    over_all = f"Over all papers: {added(list(tallies.values())).replace('Of', 'of', 1)}" if tallies else ""
    return "\n\n".join(t for t in ("# Results", TEXTS["index"], over_all, "\n".join(lines), TEXTS["words"]) if t) + "\n"


def title_of(paper: str, name: str) -> str:
    """Return the notebook's title, linked to it as it looks when it has run, if it lies there.

    It is found by its name as ``make <paper>/<name>`` does. For a grid without one return the first line of its params
    file.
    """
    folder = root() / "notebooks" / paper
    path = next(iter(sorted([*folder.glob(f"{name}_*.ipynb"), *folder.glob(f"{name}.ipynb")])), None)
    if path is None:
        if not (grid := params_dir() / paper / f"{name}.yaml").is_file():
            return spoken(name)
        return re.split(r"\.(?:\s|$)", grid.read_text(encoding="utf-8").splitlines()[0].removeprefix("#").strip())[0]
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    title = "".join(cells[0]["source"]).splitlines()[0].removeprefix("# ")
    ran = (root() / "outputs" / paper / "notebooks" / path.name).is_file()
    return f"[{title}]({f'notebooks/{path.name}' if ran else f'../../notebooks/{paper}/{path.name}'})"


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
    return "\n".join(f'<img src="figures/{p.stem}.png" width="{THUMBNAIL}" alt="{p.stem}">' for p in paths)


def more_figures(stored: Stored, sections: Sequence[str]) -> list[str]:
    """Return sections of the figures of this profile that no other shows, under their notebooks' titles."""
    shown, groups = "\n".join(sections), {}
    for path in sorted((stored.folder / "figures").glob(f"*_{stored.profile}*.png")):
        if f"figures/{path.name}" not in shown and not path.name.startswith("claim_"):
            groups.setdefault(path.stem.split(f"_{stored.profile}")[0], []).append(path)
    return [f"## {title_of(stored.paper, name)}\n\n{thumbnails(paths)}" for name, paths in groups.items()]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fedlib_lab.report.page", description=write_results.__doc__)
    parser.add_argument("--paper", action="append", choices=papers(), default=[], help="only this; may be repeated")
    parser.add_argument("--profile", default="small")
    given = parser.parse_args(arguments)
    use_outputs_of(given.profile)
    print(*write_results(given.profile, given.paper), sep="\n")


if __name__ == "__main__":
    main()
