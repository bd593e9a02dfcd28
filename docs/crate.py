"""A table's stored runs as an RO-Crate 1.1: files with a description that machines read (``ro-crate-metadata.json``).

``python docs/crate.py reefl/table1 small FOLDER``. In the folder lie the three text files of each run, the table as CSV
and as LaTeX, and the description: a run is a ``CreateAction`` of the software at its commit, with what was asked as its
object and what came out as its result; the paper is cited. Nothing is trained, and nothing else is written.
"""

import argparse
import json
import mimetypes
import sys
from pathlib import Path
from typing import Any

import yaml

from fedlib.core.paths import root
from fedlib_lab.report.page import title_of
from fedlib_lab.report.style import NAMES, spelled
from fedlib_lab.report.table import Table
from fedlib_lab.runs.packed import KEPT
from fedlib_lab.runs.record import Run

PROFILE, METADATA = "https://w3id.org/ro/crate/1.1", "ro-crate-metadata.json"
Entity = dict[str, Any]


def export_crate(table: Table, folder: Path | str) -> Path:
    """Write the stored runs of ``table`` to ``folder``, which must be new or empty, and return its description.

    ``ValueError`` where something lies there, or no run is stored.
    """
    path, runs = Path(folder), {r.path.name: r for r in table.frame.found if isinstance(r, Run)}
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"export_crate: {path} is a file or holds something; allowed: a new or empty folder")
    if not runs:
        raise ValueError(f"export_crate: no run of {table.paper}/{table.name} is stored at profile {table.profile!r}")
    path.mkdir(parents=True, exist_ok=True)
    obtained, files = table.obtained(), {}
    files["table.csv"] = _write(path / "table.csv", obtained.to_csv(index=False).encode(), "The table, as numbers")
    files["table.tex"] = _write(path / "table.tex", table.printed().to_latex().encode(), "The table, as LaTeX")
    actions, software = [], {}
    for name, run in sorted(runs.items()):
        there = {}
        for file in KEPT:
            at = f"runs/{name}/{file}"
            files[at] = there[file] = _write(path / at, (run.path / file).read_bytes(), f"{file} of {name}", at)
        program = _software(run)
        software[program["@id"]] = program
        asked, *came_out = (_refer(there[file]) for file in KEPT)
        began = run.record.get("provenance", {}).get("began")
        actions.append({
            "@id": f"#{name}", "@type": "CreateAction", "name": f"Training of {name}", "instrument": _refer(program),
            "object": [asked], "result": came_out, "endTime": run.day, **({"startTime": began} if began else {}),
            "actionStatus": "http://schema.org/CompletedActionStatus",
        })  # fmt: skip
    cite = yaml.safe_load((root() / "CITATION.cff").read_text(encoding="utf-8"))
    licence = {"@id": f"https://spdx.org/licenses/{cite['license']}", "@type": "CreativeWork", "name": cite["license"]}
    makers = [{"@id": f"#{i}", "@type": "Organization", "name": a["name"]} for i, a in enumerate(cite["authors"])]
    papers = [{"@id": url, "@type": "ScholarlyArticle", "name": spelled(table.paper), "url": url}
              for url in [NAMES["papers"].get(table.paper)] if url]  # fmt: skip
    dataset = {
        "@id": "./", "@type": "Dataset", "name": title_of(table.paper, table.name).split("](")[0].lstrip("["),
        "description": f"{len(runs)} runs of {table.paper}/{table.name} at profile {table.profile}, with the table.",
        "datePublished": max(r.day for r in runs.values()), "license": _refer(licence),
        "author": [*map(_refer, makers)], "citation": [*map(_refer, papers)],
        "hasPart": [*map(_refer, files.values())], "mentions": [*map(_refer, actions)],
    }  # fmt: skip
    about = {"@id": METADATA, "@type": "CreativeWork", "conformsTo": {"@id": PROFILE}, "about": {"@id": "./"}}
    graph = [about, dataset, licence, *makers, *papers, *software.values(), *files.values(), *actions]
    text = json.dumps({"@context": f"{PROFILE}/context", "@graph": graph}, indent=1, ensure_ascii=False)
    (path / METADATA).write_text(text + "\n", encoding="utf-8")
    return path / METADATA


def _refer(entity: Entity) -> Entity:
    return {"@id": entity["@id"]}


def _write(path: Path, data: bytes, name: str, at: str = "") -> Entity:
    """Write a file and return what describes it; ``at``: where it lies in the crate, if not at its top."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    kind = {".jsonl": "application/jsonl", ".tex": "application/x-tex"}.get(path.suffix)
    kind = kind or mimetypes.guess_type(path.name)[0]
    return {
        "@id": at or path.name,
        "@type": "File",
        "name": name,
        "contentSize": str(len(data)),
        "encodingFormat": kind,
    }


def _software(run: Run) -> Entity:
    """Return the kit as it was when ``run`` was trained: its version, and its commit where the run says one."""
    said = run.record.get("provenance", {})
    version = said.get("commit") or said.get("fedlib", "unknown")
    versions = {"softwareVersion": version, "version": said.get("fedlib", "unknown")}
    needs = f"Python {said.get('python')}, torch {said.get('torch')}"
    name = {"@id": f"#fedlib-{version}-torch-{said.get('torch')}", "@type": "SoftwareApplication", "name": "fedlib"}
    return name | versions | {"softwareRequirements": needs}


def main(arguments: list[str] | None = None) -> int:
    """Export by a shell; what is refused is one sentence."""
    parser = argparse.ArgumentParser(prog="python docs/crate.py", description=__doc__.partition("\n")[0])
    parser.add_argument("table", metavar="PAPER/TABLE")
    parser.add_argument("profile", metavar="PROFILE")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    given = parser.parse_args(arguments)
    paper, _, name = given.table.partition("/")
    try:
        print(export_crate(Table(paper, name, given.profile), given.folder))
    except (ValueError, OSError) as error:
        print(f"crate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
