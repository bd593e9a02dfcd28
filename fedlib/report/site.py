"""A browsable report: the executed notebooks and the pages of results as HTML that needs neither server nor network.

``python -m fedlib.report.site`` (``make report``) writes ``outputs/report/``: ``index.html``, ``results.html`` with a
page per paper, and a page per executed notebook. nbconvert's own pages fetch scripts from the web; ours hold none
(``TEMPLATE``), and an interactive output shows the picture that its widget last held. What runs and notebooks say is
text: no script of theirs reaches a page (``report/safety.py``). Read next: ``report/page.py``.
"""

import argparse
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from ..core.paths import outputs_dir, root
from .page import write_results
from .safety import POLICY, cleaned, escaped, harmless

WIDGET = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"
SKIPPED = ("benchmarks", "pretraining")  # notebooks that `make report` does not execute: hours, or other environments
# nbconvert's page without require.js, MathJax, mermaid and the widget manager, which it loads from the web.
TEMPLATE = """{% extends 'lab/index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block jupyter_widgets %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block html_head_css %}POLICY
<style>main {max-width: 1100px; margin: auto; overflow-x: auto} img {max-width: 100%}
.home {margin: 1em 3px; font: 14px sans-serif} a, a code {color: #0b5394}
.jp-RenderedMarkdown table {table-layout: auto; margin-left: 0; max-width: 100%}
.jp-RenderedMarkdown :is(td, th) {overflow-wrap: anywhere; min-width: 4em} .jp-RenderedMarkdown td code {white-space: normal}
.jp-RenderedHTML {overflow-x: auto}</style>{% endblock %}
{% block body_header %}{{ super() }}{% if nb.metadata.home %}<p class="home"><a href="index.html">Report</a></p>{% endif %}{% endblock %}
""".replace("POLICY", POLICY)  # noqa: E501


def build_report(executed: Path | None = None, folder: Path | None = None) -> Path:
    """Write the report of the notebooks in ``executed`` (default ``outputs/executed``), and return its index.

    ``FileNotFoundError`` if there is none. The page of results is written anew; what was in ``folder`` is replaced.
    """
    import nbformat

    executed, folder = executed or outputs_dir() / "executed", folder or outputs_dir() / "report"
    paths = sorted(executed.glob("*.ipynb"))
    if not paths:
        raise FileNotFoundError(f"no executed notebook in {executed}; `make demo` or `make <paper>/<table>` leaves one")
    notebooks = {p.stem: nbformat.read(p, as_version=4) for p in paths}
    results = write_results()
    outputs = results[-1].parent  # the index
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for figures in outputs.glob("*/figures"):
        shutil.copytree(figures, folder / figures.relative_to(outputs))
    for name, notebook in notebooks.items():
        _write(folder / f"{name}.html", _still(notebook), title_of(notebook, name))
    for path in results:
        of = path.parent.relative_to(outputs).as_posix()
        text = linked(embedded(path.read_text(encoding="utf-8"), path.parent), "" if of == "." else of, notebooks)
        name = page_of((Path("outputs") / path.relative_to(outputs)).as_posix(), notebooks)
        _write(folder / name, _page(text), text.splitlines()[0].lstrip("# "))
    _write(folder / "index.html", _page(index(notebooks), home=False), "Report")
    return folder / "index.html"


def index(notebooks: dict) -> str:
    """The first page: results, every executed notebook with its state, and the map of the notebooks with links."""
    rows = [
        f"| [{escaped(title_of(nb, name))}]({quote(name)}.html) | <code>{escaped(name)}</code> | {state_of(nb)} |"
        for name, nb in notebooks.items()
    ]
    text = "# Report\n\n[**Results**: every table beside the paper's, and a verdict on every claim](results.html)\n\n"
    text += "## Executed notebooks\n\n| notebook | file | state |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"
    readme = root() / "notebooks" / "README.md"
    readme = readme.read_text(encoding="utf-8") if readme.exists() else ""
    if found := re.search(r"^## Map\n.*?(?=^## |\Z)", readme, re.M | re.S):
        link = lambda m: next((f"[`{m[1]}`]({n}.html)" for n in notebooks if made_from(n, m[1])), m[0])  # noqa: E731
        text += "\n" + linked(re.sub(r"`(\w+/\w+)`", link, found[0]), "../notebooks", notebooks)
    return text


def linked(text: str, folder: str, notebooks: dict) -> str:
    """A page of ``outputs/<folder>`` with its links turned to the report's pages; those of other files are text."""

    def link(m: re.Match) -> str:
        target, _, place = m[2].partition("#")
        path = posixpath.normpath(posixpath.join("outputs", folder, target))
        page = target if target.endswith(".html") else page_of(path, notebooks)
        return f"[{m[1]}]({page}{'#' if place else ''}{place})" if page else m[1]

    text = re.sub(r"\[([^\]]+)\]\(([^):]+)\)", link, text)
    return re.sub(r'(src|href)="figures/', rf'\1="{folder}/figures/', text)


def embedded(text: str, folder: Path) -> str:
    """A page of ``folder`` that holds its figures: of a file a browser may not show another file."""

    def picture(m: re.Match) -> str:
        file = folder / "figures" / m[1]
        return f'src="data:image/png;base64,{b64encode(file.read_bytes()).decode()}"' if file.is_file() else m[0]

    return re.sub(r'src="figures/([^"/]+\.png)"', picture, text)


def page_of(path: str, notebooks: dict) -> str | None:
    """Where the report holds a file of the project: an executed notebook, a page of results, a figure; else None."""
    if path.endswith(".ipynb"):
        source = path.removeprefix("notebooks/").removesuffix(".ipynb")
        return next((f"{name}.html" for name in notebooks if made_from(name, source)), None)
    if found := re.fullmatch(r"outputs/(?:(\w+)/)?(README|claims)\.md", path):
        return f"results{f'-{found[1]}' if found[1] else ''}{'-claims' if found[2] == 'claims' else ''}.html"
    return path.removeprefix("outputs/") if re.fullmatch(r"outputs/\w+/figures/[^/]+\.png", path) else None


def made_from(executed: str, notebook: str) -> bool:
    """Was the file ``executed`` (``reefl-table1-small``) made from ``reefl/table1_four_exits``?"""
    made, source = re.sub(r"-(smoke|demo|small|paper)$", "", executed), notebook.replace("/", "-", 1)
    return source == made or source.startswith(f"{made}_")


def title_of(notebook, name: str) -> str:
    """The notebook's first heading, or ``name``."""
    first = next((c.source for c in notebook.cells if c.cell_type == "markdown"), "")
    return first.splitlines()[0].lstrip("# ") if first.startswith("#") else name


def state_of(notebook) -> str:
    """``complete``, or how it ended: with an error, or before its end."""
    code = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    errors = [o.ename for c in code for o in c.outputs if o.output_type == "error"]
    if errors:
        return f"**stopped by {escaped(errors[0])}**"
    done = sum(c.execution_count is not None for c in code)
    return "complete" if done == len(code) else f"**{done} of {len(code)} cells executed**"


def _still(notebook):
    """The notebook with every interactive output replaced by what its widget last showed; no progress bars.

    Of all metadata and forms of output only those stay that cannot run.
    """
    import nbformat

    models = notebook.metadata.pop("widgets", {}).get(STATE, {}).get("state", {})

    def family(model_id: str) -> list[dict]:
        model = models.get(model_id, {"model_name": "", "state": {}})
        children = model["state"].get("children", ())
        return [model, *(m for child in children for m in family(child.removeprefix("IPY_MODEL_")))]

    def shown(view: dict, output) -> list:
        found = family(view["model_id"])
        if any(m["model_name"] == "FloatProgressModel" for m in found):
            return []
        return [nbformat.from_dict(o) for m in found for o in m["state"].get("outputs", ())] or [output]

    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            kept = []
            for output in cell.outputs:
                view = output.get("data", {}).pop(WIDGET, None)
                kept += shown(view, output) if view else [output]
            kept = [harmless(nbformat.from_dict(o)) for o in kept]
            cell.outputs = [o for o in kept if o.get("data", True)]
    notebook.metadata = nbformat.from_dict({"home": True})
    return notebook


def _page(markdown: str, home: bool = True):
    from nbformat.v4 import new_markdown_cell, new_notebook

    return new_notebook(cells=[new_markdown_cell(markdown)], metadata={"home": home})


def _write(path: Path, notebook, title: str) -> None:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True, sanitize_html=True)
    exporter.raw_template = TEMPLATE
    exporter.register_filter("clean_html", cleaned)
    notebook.metadata["title"] = title
    path.write_text(exporter.from_notebook_node(notebook)[0], encoding="utf-8")


def execute_all(executed: Path) -> list[str]:
    """Execute every notebook at profile ``smoke`` into ``executed``; the names of those that failed (they keep a page).

    Their runs, tables and figures land in a temporary folder, not among the results.
    """
    executed.mkdir(parents=True, exist_ok=True)
    failed = []
    with tempfile.TemporaryDirectory() as scratch:
        for path in sorted((root() / "notebooks").rglob("*.ipynb")):
            if path.parent.name in SKIPPED or ".ipynb_checkpoints" in path.parts:
                continue
            out = executed / f"{path.parent.name}-{path.stem}-smoke.ipynb"
            print(f"executing {path.relative_to(root())} at smoke", flush=True)
            options = ["--no-progress-bar", "--log-level", "ERROR", "-p", "profile", "smoke"]
            command = [sys.executable, "-m", "papermill", path, out, *options]
            done = subprocess.run(command, env={**os.environ, "FEDLIB_OUTPUTS": scratch})
            failed += [f"{path.parent.name}/{path.stem}"] if done.returncode else []
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fedlib.report.site", description="HTML of executed notebooks and results"
    )
    parser.add_argument("--executed", type=Path, default=outputs_dir() / "executed", help="folder of notebooks")
    parser.add_argument("--folder", type=Path, default=outputs_dir() / "report", help="where the report goes")
    given = parser.parse_args(arguments)
    if not list(given.executed.glob("*.ipynb")):
        print(f"No executed notebook in {given.executed}: executing all at profile smoke (numbers mean nothing).")
        if failed := execute_all(given.executed):
            print(f"These did not run to their end: {', '.join(failed)}")
    print(build_report(given.executed, given.folder))


if __name__ == "__main__":
    main()
