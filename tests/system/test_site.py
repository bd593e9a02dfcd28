"""The static report: pages of executed notebooks and results, complete, offline, and looked at by a real browser."""

import base64
import re
import shutil
from html.parser import HTMLParser

import nbformat
import pandas as pd
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from fedlib.core.storage import read_json, write_json
from fedlib.report.safety import POLICY, cleaned
from fedlib.report.site import STATE, WIDGET, build_report, linked, made_from, main, state_of
from fedlib.runs.params_files import papers
from tests.helpers.browser import check_pages, chromium, open_page, unavailable
from tests.helpers.tracked import OUTPUTS

PIXEL = base64.b64encode(base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)).decode()  # fmt: skip
in_browser = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def picture():
    return new_output("display_data", {"image/png": PIXEL, "text/plain": "<Figure>"})


def executed(folder):
    """Two executed notebooks: a figure, a table and a widget that shows a figure beside a progress bar; and an error."""
    folder.mkdir(parents=True)
    models = {
        "box": {"model_name": "VBoxModel", "state": {"children": ["IPY_MODEL_out"]}},
        "out": {"model_name": "OutputModel", "state": {"outputs": [dict(picture())]}},
        "bar": {"model_name": "HBoxModel", "state": {"children": ["IPY_MODEL_progress"]}},
        "progress": {"model_name": "FloatProgressModel", "state": {"value": 3}},
    }
    view = lambda i: new_output("display_data", {WIDGET: {"model_id": i}, "text/plain": f"widget {i}"})  # noqa: E731
    html = "<table class='dataframe'><tr><td>42.5</td></tr></table>"
    table = new_output("execute_result", {"text/html": html, "text/plain": "42.5"}, execution_count=2)
    cells = [
        new_markdown_cell("# Table 1: four exits\n\nSee [below](#Figure).\n\n## Figure"),
        new_code_cell("plot()", outputs=[view("bar"), picture()], execution_count=1),
        new_code_cell("table", outputs=[table], execution_count=2),
        new_code_cell("browse()", outputs=[view("box")], execution_count=3),
    ]
    notebook = new_notebook(cells=cells, metadata={"widgets": {STATE: {"state": models}}})
    nbformat.write(notebook, folder / "reefl-table1-small.ipynb")
    error = new_output("error", ename="ValueError", evalue="no", traceback=["ValueError: no"])
    broken = new_notebook(cells=[new_markdown_cell("# Start here"), new_code_cell("x", outputs=[error], execution_count=1), new_code_cell("y")])  # fmt: skip
    nbformat.write(broken, folder / "walkthrough-00-demo.ipynb")
    return folder


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder of outputs with its report, made once."""
    outputs = tmp_path_factory.mktemp("built") / "outputs"
    for paper in ("reefl", "extensions"):
        shutil.copytree(OUTPUTS / paper, outputs / paper)
    some = [p for p in (OUTPUTS / "runs").iterdir() if re.match(r"(reefl|depthfl)-cifar10-lora", p.name)]
    for path in some:
        shutil.copytree(path, outputs / "runs" / path.name)
    executed(outputs / "executed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLIB_OUTPUTS", str(outputs))
        build_report()
    return outputs


@pytest.fixture
def report(built, tmp_path, monkeypatch):
    """The first page of a copy that a test may spoil."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    return shutil.copytree(built, tmp_path / "outputs") / "report" / "index.html"


def test_pages_hold_what_the_notebooks_show_and_fetch_nothing(report):
    page = (report.parent / "reefl-table1-small.html").read_text()
    assert page.count(f"data:image/png;base64,{PIXEL}") == 2 and "42.5</td>" in page  # the widget's picture, too
    assert "widget bar" not in page and "widget box" not in page
    for path in report.parent.glob("*.html"):
        assert not re.search(r"""<(script|link|img)[^>]*(src|href)=["']?https?:""", path.read_text()), path.name
        assert "cdnjs" not in path.read_text() and "unpkg" not in path.read_text()


def test_the_index_leads_to_every_page_and_says_what_stopped(report):
    index = report.read_text()
    for name in ("results", "reefl-table1-small", "walkthrough-00-demo"):
        assert f'href="{name}.html"' in index and (report.parent / f"{name}.html").exists()
    assert "stopped by ValueError" in index and "complete" in index
    assert re.search(r'<a href="walkthrough-00-demo.html"><code>walkthrough/00_start_here</code>', index)  # the map
    assert 'href="results-reefl.html"' in (report.parent / "results.html").read_text()
    results = (report.parent / "results-reefl.html").read_text()
    assert 'href="reefl-table1-small.html"' in results and "ipynb" not in results
    figure = base64.b64encode((OUTPUTS / "reefl/figures/table4_small_exits.png").read_bytes()).decode()
    assert (
        f'src="data:image/png;base64,{figure}"' in results and 'href="reefl/figures/table4_small_exits.png"' in results
    )
    assert 'src="reefl/figures' not in results
    assert 'href="results-reefl-claims.html#modulation_helps"' in results
    assert (report.parent / "results-reefl-claims.html").exists()


SCRIPTS = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))",
           "<a href='data:text/html,<script>alert(1)</script>'>x</a>", "<iframe src=//evil.example></iframe>",
           "<svg onload=alert(1)>", "<b onmouseover=alert(1)>x</b>", "<img src='http://evil.example/x.png'>",
           "<style>body {background: url(http://evil.example)}</style>", "| a | `b` $c$ _d_ <script>")  # fmt: skip


class Dangerous(HTMLParser):
    """What of a page can run or fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "iframe", "object", "embed", "svg", "form", "base", "link"):
            self.found.append(tag)
        for name, value in attrs:
            address = re.match(r"\s*(javascript|vbscript|data:(?!image/))", value or "", re.I)
            fetches = name == "src" and re.match(r"(https?:)?//", value or "")
            self.found += [(tag, name, value)] if name.startswith("on") or address or fetches else []


def dangers(page):
    parser = Dangerous()
    parser.feed(page)
    return parser.found


def test_the_parser_knows_danger():
    assert all(dangers(s) for s in SCRIPTS if s.startswith("<") and not s.startswith("<style"))
    assert not dangers("<p>&lt;script&gt; <img src='figures/x.png'> <a href='https://example.org'>x</a></p>")


def hostile(folder):
    """A notebook whose every part is a script: titles, names, text, outputs in all forms, errors, metadata."""
    folder.mkdir(parents=True, exist_ok=True)
    all_of_them = "\n\n".join(SCRIPTS)
    forms = ("text/html", "text/markdown", "text/latex", "text/plain", "application/javascript", "text/vnd.mermaid",
             "image/svg+xml", "application/json", "text/x-unknown")  # fmt: skip
    outputs = [
        new_output("display_data", {form: all_of_them}, metadata={form: {"width": "1 onload=x"}}) for form in forms
    ]
    outputs += [new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"width": "1 onerror=alert(1)"}}),
                new_output("display_data", {"image/png": "'\"><script>alert(1)</script>"}),
                new_output("stream", text=all_of_them), new_output("error", ename=SCRIPTS[0], evalue=SCRIPTS[1],
                                                                   traceback=[all_of_them])]  # fmt: skip
    classes = pd.DataFrame({"class": SCRIPTS}).to_html()
    outputs.append(new_output("display_data", {"text/html": classes}))
    code = new_code_cell(
        SCRIPTS[0], outputs=outputs, execution_count=1, metadata={"tags": ['"><script>alert(1)</script>']}
    )
    cells = [new_markdown_cell(f"# {SCRIPTS[0]} {SCRIPTS[2]} | {SCRIPTS[-1]}\n\n{all_of_them}"), code]
    notebook = new_notebook(cells=cells, metadata={"title": SCRIPTS[0], "widgets": {STATE: {"state": {}}}})
    nbformat.write(notebook, folder / "<img src=x onerror=alert(1)>.ipynb")


def test_what_runs_and_notebooks_say_is_text(report):
    outputs = report.parent.parent
    hostile(outputs / "executed")
    for run in (outputs / "runs").iterdir():
        stored = read_json(run / "experiment.json")
        stored["provenance"] = stored.get("provenance", {}) | {"device": SCRIPTS[0], "cores": SCRIPTS[1]}
        write_json(run / "experiment.json", stored)
    (outputs / "reefl" / "figures" / "table1_small_<script>alert(1)<\u2215script>.png").write_bytes(
        base64.b64decode(PIXEL)
    )
    build_report()
    pages = {p.name: p.read_text() for p in report.parent.glob("*.html")}
    assert len(pages) == 6 + len(papers()) and {n: d for n, p in pages.items() if (d := dangers(p))} == {}
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in pages["results-reefl.html"]  # said, not run
    page = pages["<img src=x onerror=alert(1)>.html"]
    assert page.count("&lt;script&gt;alert(1)") > 5 and PIXEL in page and not re.search("<style[^<]*evil", page)
    assert "default-src 'none'" in page
    row = next(line for line in pages["index.html"].splitlines() if "onerror" in line and "<td>" in line)
    assert "%3Cimg" in row and "<img" not in row


def test_tables_and_folds_survive_cleaning():
    page = '<h2 id="a">A</h2><table class="x"><tbody><tr><td>1</td></tr></tbody></table><details><summary>s <b>t</b></summary></details>'
    assert cleaned(page) == page and cleaned("<style scoped>\ntd {}</style><p>x</p>") == "<p>x</p>"
    for address in (r"\\evil\x.png", "\\/evil/x.png", "/\\evil/x.png", "//evil/x.png", " //evil/x", "/etc/x.png",
                    "file:///etc/x.png", "figures\\..\\x.png", "http://evil/x.png"):  # fmt: skip
        for quote in ("'", '"', ""):
            assert "evil" not in cleaned(f"<img src={quote}{address}{quote}>") and "x.png" not in cleaned(
                f"<img src={quote}{address}{quote}>"
            )
    assert "file:" not in POLICY
    picture = '<a href="figures/a.png"><img src="figures/a.png" width="420" alt="a"></a>'
    assert cleaned(picture) == picture


@in_browser
def test_no_column_of_a_table_is_cut_off(report):
    with chromium() as driver:
        for width in (1400, 700):
            driver.set_window_size(width, 1200)
            open_page(driver, report)
            cut = driver.execute_script("""return [...document.querySelectorAll('td, th')].filter(
                c => c.getBoundingClientRect().right > document.documentElement.clientWidth
                  || c.scrollWidth > c.clientWidth + 1).map(c => c.textContent)""")
            assert cut == [], (width, cut)


@in_browser
def test_a_browser_finds_the_report_whole_and_every_fault(report):
    with chromium() as driver:
        counts, broken = check_pages(driver, report.parent)
        assert (
            broken == [] and counts["pages"] == 5 + len(papers()) and counts["images"] >= 3 and counts["links"] >= 10
        ), counts

        faults = """<img src="figures/none.png"><a href="none.html">a</a><a href="index.html#none">b</a>
            <a href="../outside.html">c</a><script src="http://127.0.0.1:9/x.js"></script>"""
        (report.parent.parent / "outside.html").write_text("here, but not in the report")
        (report.parent / "faulty.html").write_text(f"<html><body>{faults}</body></html>")
        _, broken = check_pages(driver, report.parent)
    found = "\n".join(broken)
    assert len(broken) == 5 and all(b.startswith("faulty.html: ") for b in broken), found
    for word in ("figures/none.png does not load", "none.html, which is not", "index.html#none, which has no such place",
                 "outside.html, which is not in the report", "asks for http://127.0.0.1:9/x.js"):  # fmt: skip
        assert word in found


def test_without_executed_notebooks(tmp_path, monkeypatch, capsys):
    import fedlib.report.site as site

    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    with pytest.raises(FileNotFoundError, match="no executed notebook in"):
        build_report()
    assert not (tmp_path / "outputs/report").exists()
    monkeypatch.setattr(site, "execute_all", lambda folder: [executed(folder).name])
    shutil.copytree(OUTPUTS / "reefl/tables", tmp_path / "outputs/reefl/tables")
    main(["--executed", str(tmp_path / "executed"), "--folder", str(tmp_path / "report")])
    said = capsys.readouterr().out
    assert "executing all at profile smoke" in said and "did not run to their end" in said
    assert (tmp_path / "report/index.html").exists()


def test_execution_leaves_results_alone_and_names_what_failed(tmp_path, monkeypatch):
    """Two notebooks of a made-up project: outputs go to a scratch folder; the failed one keeps its page."""
    import fedlib.report.site as site

    for folder, name, source in (
        ("a", "good", "import os, pathlib\npathlib.Path(os.environ['FEDLIB_OUTPUTS'], 'x').write_text(profile)"),
        ("a", "bad", "raise ValueError(profile)"), ("pretraining", "long", "1"),
    ):  # fmt: skip
        (tmp_path / "notebooks" / folder).mkdir(parents=True, exist_ok=True)
        cells = [new_code_cell('profile = "x"', metadata={"tags": ["parameters"]}), new_code_cell(source)]
        spec = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
        nbformat.write(new_notebook(cells=cells, metadata=spec), tmp_path / "notebooks" / folder / f"{name}.ipynb")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "outputs"))
    assert site.execute_all(tmp_path / "executed") == ["a/bad"]
    made = {p.stem: nbformat.read(p, 4) for p in (tmp_path / "executed").iterdir()}
    assert sorted(made) == ["a-bad-smoke", "a-good-smoke"] and not (tmp_path / "outputs").exists()
    assert state_of(made["a-good-smoke"]) == "complete" and "ValueError" in state_of(made["a-bad-smoke"])


def test_names():
    assert made_from("reefl-table1-small", "reefl/table1_four_exits")
    assert made_from("walkthrough-00-demo", "walkthrough/00_start_here")
    assert not made_from("reefl-table1-small", "reefl/table10_x") and not made_from("reefl-table1-small", "scalefl/table1_x")  # fmt: skip
    made = {"reefl-table1-small": None}
    text = "[Table 1](../../notebooks/reefl/table1_four_exits.ipynb) [`runs`](../runs) [web](https://example.org) [a](claims.md#b)"  # fmt: skip
    assert linked(text, "reefl", made) == "[Table 1](reefl-table1-small.html) `runs` [web](https://example.org) [a](results-reefl-claims.html#b)"  # fmt: skip
    assert linked("[reefl](reefl/README.md) [x](../notebooks/a/b.ipynb)", "", made) == "[reefl](results-reefl.html) x"
    assert linked('<img src="figures/a.png">', "reefl", made) == '<img src="reefl/figures/a.png">'
    cells = [new_code_cell("x", execution_count=1), new_code_cell("y"), new_code_cell("")]
    assert state_of(new_notebook(cells=cells)) == "**1 of 2 cells executed**"
