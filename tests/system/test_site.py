"""The site: built of this repository's pages without a warning, offline, harmless, and looked at by a real browser."""

import base64
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from tests.helpers.browser import check_pages, chromium, open_page, unavailable
from tests.helpers.tracked import OUTPUTS

ROOT = Path(__file__).parents[2]
PIXEL = base64.b64encode(base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)).decode()  # fmt: skip
API = "# API\n\n```{eval-rst}\n.. autosummary::\n   :toctree: api\n\n   fedlib.Experiment\n   fedlib.core.slices\n```\n"
in_browser = pytest.mark.skipif(bool(unavailable()), reason=unavailable())


def sphinx(project, *options):
    command = [sys.executable, "-m", "sphinx", "-q", *options, "-c", "docs", "-d", "doctrees", ".", "site"]
    return subprocess.run(command, cwd=project, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The whole site but for most of the API; a warning would have failed."""
    project = tmp_path_factory.mktemp("project")
    for name in ("benchmarks", "docs", "fedlib", "fedlib_lab", "notebooks", "params", "tests", "README.md",
                 "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"):  # fmt: skip
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, project / name)
    shutil.rmtree(project / "docs/api", ignore_errors=True)
    shutil.copytree(OUTPUTS, project / "outputs", ignore=shutil.ignore_patterns("runs"))
    (project / "outputs/runs").mkdir()
    (project / "docs/api.md").write_text(API)
    done = sphinx(project, "-W", "--keep-going")
    assert done.returncode == 0, done.stderr[-4000:]
    return project / "site"


def test_pages_are_whole_and_fetch_nothing(site):
    pages = {p.relative_to(site).as_posix(): p.read_text() for p in site.rglob("*.html")}
    for name, page in pages.items():
        assert not re.search(r"""<(script|link|img|iframe)[^>]*(src|href)=["']?(https?:)?//""", page), name
    results = pages["outputs/reefl/README.html"]
    ((alt, figure),) = re.findall(r"^!\[(.+)\]\((.+)\)$", (OUTPUTS / "reefl/README.md").read_text(), re.M)
    (picture,) = re.findall(rf'<img alt="{alt}" src="../../(_images/[^"]+)"', results)
    assert (site / picture).read_bytes() == (OUTPUTS / "reefl" / figure).read_bytes()
    assert 'href="claims.html#reefl-leads' in results and 'class="verdict verdict-contradicted"' in results
    assert "docs/index.html" in pages["index.html"] and 'href="../outputs/README.html"' in pages["docs/index.html"]
    experiment = pages["docs/api/fedlib.Experiment.html"]
    assert "label_groups        label by what a class name says" in experiment  # columns stay columns


SCRIPTS = ("<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "[x](javascript:alert(1))",
           "<a href='data:text/html,<script>alert(1)</script>'>x</a>", "<iframe src=//evil.example></iframe>",
           "<svg onload=alert(1)><script>alert(1)</script></svg>", "<b onmouseover=alert(1)>x</b>",
           "<img src='http://evil.example/x.png'>", "<style>body {background: url(http://evil.example)}</style>",
           "<b style='background: url(http://evil.example)'>x</b>", "| a | `b` $c$ _d_ <script>")  # fmt: skip


class Dangerous(HTMLParser):
    """What of a page's article and its contents can run or fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        if tag in ("script", "iframe", "object", "embed", "svg", "form", "base", "link", "style"):
            self.found.append(tag)
        for name, value in attrs:
            address = re.match(r"\s*(javascript|vbscript|data:(?!image/(png|jpeg|gif)))", value or "", re.I)
            fetches = name in ("src", "style") and re.search(r"//", value or "")
            self.found += [(tag, name, value)] if name.startswith("on") or address or fetches else []


def dangers(page):
    parser = Dangerous()
    parser.feed(page)
    return parser.found


def test_the_parser_knows_danger():
    assert all(dangers(s) for s in SCRIPTS if s.startswith("<"))
    assert not dangers("<p>&lt;script&gt; <img src='figures/x.png'> <a href='https://example.org'>x</a></p>")


def hostile():
    """A notebook whose every part is a script: titles, text, outputs in all forms, errors, metadata."""
    all_of_them = "\n\n".join(SCRIPTS)
    forms = ("text/html", "text/markdown", "text/latex", "text/plain", "application/javascript", "text/vnd.mermaid",
             "image/svg+xml", "application/json", "text/x-unknown")  # fmt: skip
    outputs = [new_output("display_data", {f: all_of_them}, metadata={f: {"width": "1 onload=x"}}) for f in forms]
    outputs += [new_output("display_data", {"image/png": PIXEL}, metadata={"image/png": {"width": "1 onerror=alert(1)"}}),
                new_output("stream", text=all_of_them),
                new_output("error", ename=SCRIPTS[0], evalue=SCRIPTS[1], traceback=[all_of_them])]  # fmt: skip
    code = new_code_cell(SCRIPTS[0], outputs=outputs, execution_count=1, metadata={"tags": ['"><script>alert(1)</script>']})  # fmt: skip
    title = f"# {SCRIPTS[0]} {SCRIPTS[2]} | {SCRIPTS[-1]}\n\n{all_of_them}"
    return new_notebook(cells=[new_markdown_cell(title), code], metadata={"title": SCRIPTS[0]})


def test_what_runs_and_notebooks_say_is_text(tmp_path):
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("*.md", "api"))
    (tmp_path / "docs/index.md").write_text("# Site\n\n```{toctree}\n:glob:\n\n../outputs/*/README\n../outputs/*/notebooks/*\n```\n")  # fmt: skip
    (tmp_path / "outputs/evil/notebooks").mkdir(parents=True)
    (tmp_path / "outputs/evil/README.md").write_text(f"# Evil {SCRIPTS[0]}\n\n" + "\n\n".join(SCRIPTS))
    nbformat.write(hostile(), tmp_path / "outputs/evil/notebooks/x.ipynb")
    done = sphinx(tmp_path)
    assert done.returncode == 0, done.stderr[-4000:]
    for name in ("README", "notebooks/x"):
        page = (tmp_path / f"site/outputs/evil/{name}.html").read_text()
        article = re.search(r"<article class=\"bd-article\".*</article>", page, re.S)[0]
        contents = re.search(r"<nav[^>]*page-toc.*?</nav>", page, re.S)
        assert dangers(article) == [] and (contents is None or dangers(contents[0]) == []), name
        assert "alert(1)" not in page[: page.index("</head>")].split("<title>")[0]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in article and PIXEL[:20] not in article  # said; pictures are files


@in_browser
@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_a_screen_and_a_phone(site, width):
    """No page scrolls sideways, a table scrolls in its box, and nothing is cut."""
    with chromium() as driver:
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride",
                               {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 700})  # fmt: skip
        for name in (
            "docs/index",
            "docs/play",
            "README",
            "outputs/reefl/README",
            "outputs/reefl/claims",
            "docs/api/fedlib.Experiment",
        ):
            open_page(driver, site / f"{name}.html")
            assert driver.execute_script("return document.documentElement.scrollWidth") <= width, name
            wide = driver.execute_script("""return [...document.querySelectorAll('.bd-article *')].filter(e => {
                const scrolls = e.closest('table, pre, .cell_output, .highlight, .play');
                return !scrolls && e.getBoundingClientRect().right > document.documentElement.clientWidth + 1;
            }).map(e => e.tagName + ' ' + e.textContent.slice(0, 60))""")
            assert wide == [], name


@in_browser
def test_a_browser_finds_the_site_whole_and_every_fault(site, tmp_path):
    some = shutil.copytree(site, tmp_path / "site")
    with chromium() as driver:
        counts, broken = check_pages(driver, some, ["docs/index.html", "README.html", "outputs/README.html", "outputs/reefl/README.html"])  # fmt: skip
        assert broken == [] and counts["pages"] == 4 and counts["images"] >= 3 and counts["links"] >= 10, broken
        faults = """<img src="figures/none.png"><a href="none.html">a</a><a href="README.html#none">b</a>
            <a href="../outside.html">c</a><script src="http://127.0.0.1:9/x.js"></script>"""
        (tmp_path / "outside.html").write_text("here, but not of the site")
        (some / "faulty.html").write_text(f"<html><body>{faults}</body></html>")
        _, broken = check_pages(driver, some, ["faulty.html", "README.html"])
    found = "\n".join(broken)
    assert len(broken) == 5 and all(b.startswith("faulty.html: ") for b in broken), found
    for word in ("figures/none.png does not load", "none.html, which is not", "README.html#none, which has no such place",
                 "outside.html, which is not of the site", "asks for http://127.0.0.1:9/x.js"):  # fmt: skip
        assert word in found
