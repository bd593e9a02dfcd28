"""The notebooks as they look when they have run: ``make notebooks`` writes ``outputs/<folder>/notebooks/``.

A notebook is executed at its default profile. At ``small`` it looks at stored runs and trains nothing; the few of
``SHOWN_WITH`` are given other parameters, and say so in papermill's cell below their own. A trial
(smoke, demo) trains in a folder of outputs of its own, which is deleted. What is kept are a notebook's outputs, figures
as small as they can be, no paths, and a digest of its source and, but of a trial, of the runs that it asks for: one
that still fits is not executed again. Read next: ``docs/conf.py``, the site that shows them.
"""

import base64
import hashlib
import io
import json
import os
import posixpath
import re
import sys
import tempfile
from functools import cache
from pathlib import Path

import nbformat
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
KEPT = ("image/png", "text/html", "text/markdown", "text/plain")
COLOURS = 256  # of a figure: with fewer the colours of methods run together
LARGE, READ_AT = 80_000, 700  # bytes, pixels
DIGEST = "fedlib_digest"
TRIALS = ("smoke", "demo")  # as in fedlib/core/paths.py
# Parameters that are not a notebook's own: at smoke maps of attention say nothing, so weights are trained anew first,
# in minutes, beside the stored runs; and a local Ray starts on an idle machine alone
SHOWN_WITH = {"reefl/figure1_attention_maps": {"profile": "small"}, "cluster/ray": {"executor": "processes"}}


def sources() -> list[Path]:
    """All notebooks."""
    return sorted((ROOT / "notebooks").glob("*/*.ipynb"))


def default_of(source: Path) -> str:
    """The profile in a notebook's parameters cell; ``small`` if it names none."""
    found = re.search(r'^profile = "(\w+)"', "\n".join("".join(c["source"]) for c in cells(source)), re.M)
    return found[1] if found else "small"


def profile_of(source: Path) -> str:
    """The profile at which a notebook is executed."""
    return shown_with(source).get("profile") or default_of(source)


def shown_with(source: Path) -> dict[str, str]:
    """The parameters that a notebook is given."""
    return SHOWN_WITH.get(f"{source.parent.name}/{source.stem}", {})


def told(source: Path) -> str:
    """Papermill's cell of what a notebook is given; "" for nothing."""
    lines = [f'{name} = "{value}"' for name, value in shown_with(source).items()]
    return "\n".join(["# Parameters", *lines]) if lines else ""


def executed(source: Path, outputs: Path = ROOT / "outputs") -> Path:
    """Where a notebook's executed form lies."""
    return outputs / source.parent.name / "notebooks" / source.name


def cells(source: Path) -> list[dict]:
    """A notebook's cells as they are stored."""
    return json.loads(source.read_text("utf-8"))["cells"]


def digest(source: Path, outputs: Path = ROOT / "outputs") -> str:
    """Of a notebook's source, and of every run that a grid named in it asks for: its name and what it ended with.

    Of a trial, which reads no stored run, of its source and its profile alone.
    """
    from fedlib_lab.runs.params_files import grids, papers

    said = ["".join(cell["source"]) for cell in cells(source)]
    if profile_of(source) in TRIALS:
        own = [said, profile_of(source), *shown_with(source).items()]
        return hashlib.sha256(json.dumps(own).encode()).hexdigest()[:16]
    words = set(re.findall(r'"(\w+)"', "\n".join(said))) | {source.parent.name}
    if any("tasks_of(" in cell for cell in said):  # of atlas.py: all of a folder's grids
        words |= set(grids(source.parent.name))
    asked = sorted({run for paper in papers() if paper in words for run in runs_of(paper, frozenset(words), outputs)})
    return hashlib.sha256(json.dumps([said, asked]).encode()).hexdigest()[:16]


@cache
def runs_of(paper: str, words: frozenset[str], outputs: Path) -> list[tuple[str, str]]:
    """The runs of the paper's grids that ``words`` name, and the bytes of their summaries."""
    from fedlib_lab.runs.params import grids

    return [run for grid in grids(paper) if grid in words for run in runs_of_grid(paper, grid, outputs)]


@cache
def runs_of_grid(paper: str, grid: str, outputs: Path) -> list[tuple[str, str]]:
    from fedlib_lab.runs.identity import older_rules
    from fedlib_lab.runs.params import load_grid
    from fedlib_lab.runs.store import shown_run

    runs = [shown_run(c.experiment, outputs / "runs") for c in load_grid(paper, grid, "small")]
    lacks = f"{paper}/{grid}"  # what a run that is not stored would be called is no matter
    said = [
        r and (r.path / "summary.json").read_text("utf-8") + ", ".join(older_rules(r.experiment, r.record))
        for r in runs
    ]
    return [(r.path.name, s) if r and s else (lacks, str(i)) for i, (r, s) in enumerate(zip(runs, said, strict=True))]


def execute(source: Path, target: Path) -> None:
    """Run the notebook with the outputs of this repository, a trial with its own; keep what is worth keeping."""
    from nbclient import NotebookClient

    notebook, stamp, profile = nbformat.read(source, as_version=4), digest(source), profile_of(source)
    if said := told(source):
        how = {"id": "injected", "metadata": {"tags": ["injected-parameters"]}}
        asked = nbformat.v4.new_code_cell(said, **how)
        at = next(i for i, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", []))
        notebook.cells.insert(at + 1, asked)
    with tempfile.TemporaryDirectory() as own:
        env = os.environ | ({"FEDLIB_OUTPUTS": own} if profile in TRIALS else {})
        where = {"metadata": {"path": str(source.parent)}}
        # nbclient may wait for ever for the end of what a widget draws, which no page shows
        client = NotebookClient(
            notebook, resources=where, timeout_func=lambda cell: 180 if "explore(" in cell.source else None
        )
        client.execute(env=env)
    target.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(kept(notebook, source, stamp), target)


def kept(notebook, source: Path, stamp: str):
    """The notebook without what differs from machine to machine, its links as they lead from its new place."""
    language = {"name": "python", "pygments_lexer": "ipython3"}
    notebook.metadata = {"kernelspec": notebook.metadata.kernelspec, "language_info": language, DIGEST: stamp}
    for cell in notebook.cells:
        cell.metadata = {k: v for k, v in cell.metadata.items() if k == "tags"}
        if cell.cell_type == "markdown":
            cell.source = relinked(cell.source, source)
        else:
            cell.outputs = [o for o in map(shown, cell.outputs) if o is not None]
    return notebook


def shown(output):
    """An output in the one form that a page shows; None: a warning, a widget, a bar of progress."""
    if output.output_type == "stream":
        return output if output.name == "stdout" else None
    if any("widget" in form for form in output.data):  # moves where a kernel lives
        return None
    output.data = {form: said for form, said in output.data.items() if form in KEPT}
    output.metadata = {}
    if picture := output.data.get("image/png"):
        output.data = squeezed(picture)
    elif page := output.data.get("text/html"):
        output.data = {"text/html": re.sub(r"<style\b.*?</style>\s*", "", page, flags=re.S)}
    return output if output.data else None


def squeezed(picture: str) -> dict[str, str]:
    """A picture in base64, by its form: a PNG of few colours; of many photographs a JPEG, as wide as it is read."""
    image, form, file = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB"), "image/png", io.BytesIO()
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    if file.tell() > LARGE:
        image.thumbnail((READ_AT, 4 * READ_AT), Image.Resampling.LANCZOS)
        form, file = "image/jpeg", io.BytesIO()
        image.save(file, "JPEG", quality=75, optimize=True)
    return {form: base64.b64encode(file.getvalue()).decode()}


def relinked(text: str, source: Path) -> str:
    """Markdown whose relative links lead from the executed notebook to where they led, if it can to an executed one."""
    here, there = f"notebooks/{source.parent.name}", f"outputs/{source.parent.name}/notebooks"
    of = {p.relative_to(ROOT).as_posix(): executed(p).relative_to(ROOT).as_posix() for p in sources()}

    def link(m: re.Match) -> str:
        target = posixpath.normpath(posixpath.join(here, m[1]))
        return f"]({posixpath.relpath(of.get(target, target), there)}"

    return re.sub(r"\]\((?!\w+:)([^()#\s]+)", link, text)


def main(words: list[str]) -> None:
    """Execute the notebooks whose names hold one of ``words`` (none: all), if what they rest on is new."""
    os.environ |= {"FEDLIB_ROOT": str(ROOT), "TQDM_DISABLE": "1"}
    os.environ.pop("FEDLIB_PROFILE", None)
    for source in sources():
        name, target = f"{source.parent.name}/{source.stem}", executed(source)
        if words and not any(word in name for word in words):
            continue
        if target.exists() and nbformat.read(target, as_version=4).metadata.get(DIGEST) == digest(source):
            continue
        print(name, flush=True)
        execute(source, target)


if __name__ == "__main__":
    main(sys.argv[1:])
