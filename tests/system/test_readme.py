"""The promises of README and of the pages it leads to: code runs, links lead somewhere, what is named exists."""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from fedlib.core.paths import use_outputs_of
from fedlib_lab.cli import WORDS, main, overrides_of, parser
from fedlib_lab.report.tables import load_reported
from fedlib_lab.runs.fill import named
from fedlib_lab.runs.params import load_grid

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
CORE = ROOT / "fedlib/README.md"
FOLDERS = ("benchmarks", "docs", "fedlib", "fedlib_lab", "notebooks", "outputs", "params", "tests")
GUIDE = sorted((ROOT / "docs/guide").glob("*.md"))
READMES = (p for folder in FOLDERS for p in (ROOT / folder).rglob("README.md") if "runs" not in p.parts)
PAGES = [README, *sorted(READMES), *GUIDE]
pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
FENCE = re.compile(r"(<!-- not run: [^\n]+ -->\n)?^```(\w*)\n(.*?)^```$", re.S | re.M)


def prose(page):
    """The page without its code blocks."""
    return FENCE.sub("", page.read_text())


def code(page, language):
    """The blocks of ``language``, and whether they are marked as not run."""
    return [(text, bool(mark)) for mark, kind, text in FENCE.findall(page.read_text()) if kind == language]


def test_the_first_page_is_short():
    assert len(README.read_bytes()) < 8_000


def test_the_core_is_one_page_that_links_every_file_that_it_names():
    text = CORE.read_text()
    assert len(text.encode()) <= 6_144 and len(text.splitlines()) <= 80
    named = set(re.findall(r"`(\w+/\w+\.py)`", prose(CORE)))
    assert len(named) > 25 and named == set(re.findall(r"\]\((\w+/\w+\.py)\)", prose(CORE)))


def test_the_example_of_the_core_runs_without_the_lab(tmp_path):
    (text,) = [text for text, mark in code(CORE, "python") if not mark]
    hidden = "import importlib.abc, sys\nclass Hide(importlib.abc.MetaPathFinder):\n"
    hidden += "    def find_spec(self, name, path=None, target=None):\n"
    hidden += "        if name == 'fedlib_lab': raise ModuleNotFoundError(name, name=name)\n"
    hidden += "sys.meta_path.insert(0, Hide())\nimport pathlib\npathlib.Path.is_dir = lambda path: path.exists() and path.name != 'fedlib_lab'\n"
    text = text.replace("rounds=20", "rounds=1, num_train=100, num_test=20")
    done = subprocess.run([sys.executable, "-c", hidden + text], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("1 ["), done.stderr[-3000:]


def test_all_examples_run_as_printed(tmp_path):
    """One after the other in one process, each with names of its own; a round stands for twenty."""
    blocks = [(f"{p.relative_to(ROOT)}, block {i}", text) for p in PAGES for i, (text, mark) in enumerate(code(p, "python")) if not mark]  # fmt: skip
    assert len(blocks) >= 9 and all(
        re.search('rounds=20|"demo"', text) and len(text.splitlines()) < 30 for _, text in blocks
    )
    fewer = {"rounds=20": "rounds=1, num_train=100, num_test=20", '"demo"': '"smoke"'}
    blocks = [(name, re.sub("|".join(fewer), lambda found: fewer[found[0]], text)) for name, text in blocks]
    script = (
        f"for name, text in {blocks!r}:\n    exec(compile(text, name, 'exec'), {{'__name__': name}})\nprint('all ran')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("all ran\n"), done.stderr[-3000:]
    assert "'status': 'finished'" in done.stdout


@pages
def test_examples_that_are_not_run_are_python_at_least(page):
    for text, _ in code(page, "python"):
        compile(text, str(page), "exec")


@pages
def test_every_link_leads_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", prose(page))
    for link in filter(None, (a or b for a, b in links)):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.relative_to(ROOT)}: {link}"
        if anchor and target.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            assert anchor in {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}, link


def test_pages_lead_to_one_another():
    """From the first page every other is at most two links away."""
    seen = {README}
    for _ in range(2):
        for page in list(seen):
            links = re.findall(r"\]\(([^)#\s]+\.md)\)", prose(page))
            seen |= {(page.parent / link).resolve() for link in links if "://" not in link}
    assert set(PAGES) <= seen


@functools.cache
def make_knows(target):
    """Is there a rule, whatever its prerequisites?"""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(["make", "-n", target], cwd=ROOT, env=env, capture_output=True, text=True)
    return done.returncode == 0 and f"no target '{target}'" not in done.stdout


@pages
def test_every_make_target_exists(page):
    spans = re.findall(r"`([^`\n]+)`", prose(page)) + [text for text, _ in code(page, "sh")]
    targets = {t for span in spans for t in re.findall(r"\bmake ([a-z][\w/]*)(?![\w/<])", span)}
    assert all(map(make_knows, targets)), [t for t in targets if not make_knows(t)]
    assert targets or page != README


def test_a_target_that_does_not_exist_is_noticed():
    assert make_knows("demo") and not make_knows("demos")


def commands(page, program):
    """What a page tells to type to ``program``, in a line of its prose or of a block."""
    spans = re.findall(r"`([^`\n]+)`", prose(page)) + [
        line for text, _ in code(page, "sh") for line in text.splitlines()
    ]
    return [shlex.split(span, comments=True)[1:] for span in spans if span.startswith(f"{program} ")]


@pages
def test_every_command_of_fedlib_is_understood_and_its_tables_and_overrides_are_there(page):
    for words in commands(page, "fedlib"):
        given = parser().parse_args(words)
        if "overrides" in given:
            row = {"method": given.row} if getattr(given, "row", None) else {}
            assert load_grid(*given.table.split("/"), given.profile, overrides_of(given.overrides) | row)
        assert "tables" not in given or named(given.tables)
    if page == README:
        assert {words[0] for words in commands(page, "fedlib")} == WORDS["commands"].keys()


FEWER = ["--profile", "smoke", "--workers", "1", "--set", "rounds=1", "columns=cifar100_alpha1", "finetune=frozen"]
SHORTER = {  # what is added to a command, by its program, in place of what it says of the same
    "run": [*FEWER, "method=reefl"], "sweep": FEWER,
    "fill": ["reefl/table1", "--profile", "smoke", "--workers", "1", "--minutes", "0.02"],
}  # fmt: skip


def test_every_command_of_fedlib_on_the_first_page_runs(tmp_path, monkeypatch, capsys):
    """As printed, at profile smoke: on a CPU where it says cuda, on the run that it stored where it says RUN."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    for words in sorted(commands(README, "fedlib"), key=lambda words: words[0] != "run"):
        stored = [p.name for p in (tmp_path / "runs").glob("*")]
        words = [{"cuda": "cpu", "RUN": stored[0] if stored else ""}.get(w, w) for w in words]
        more = SHORTER.get(words[0], [])
        given = {w.partition("=")[0] for w in more if "=" in w}
        words = [w for w in words if w.partition("=")[0] not in given]
        words = words[:-1] if words[-1] == "--set" else words
        assert main([*words, *more]) == 0, (words, capsys.readouterr().err)
        out = capsys.readouterr().out
        if words[0] == "sweep":
            assert "best of reefl: --set lr=0." in out
    assert len(list((tmp_path / "runs").iterdir())) > 5  # of run, sweep and fill
    use_outputs_of("small")


def test_every_command_of_papermill_on_the_first_page_runs(tmp_path):
    for notebook, _, *options in commands(README, "papermill"):
        words = [
            sys.executable,
            "-m",
            "papermill",
            notebook,
            tmp_path / "out.ipynb",
            *options,
            "-p",
            "profile",
            "smoke",
        ]
        done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]


@pages
def test_every_command_of_papermill_names_parameters_of_its_notebook_and_overrides_of_its_grid(page):
    for notebook, _, *options in commands(page, "papermill"):
        source = next("".join(c["source"]) for c in json.loads((ROOT / notebook).read_text())["cells"] if "parameters" in c["metadata"].get("tags", ()))  # fmt: skip
        known = set(re.findall(r"^(\w+) = ", source, re.M))
        given = {
            name: value for flag, name, value in zip(options, options[1:], options[2:], strict=False) if flag == "-p"
        }
        given |= yaml.safe_load(options[options.index("-y") + 1]) if "-y" in options else {}
        assert given and given.keys() <= known, (notebook, given.keys() - known)
        if "overrides" in given:
            paper, table = notebook.split("/")[1], Path(notebook).stem.split("_")[0]
            assert load_grid(paper, table, given.get("profile", "small"), given["overrides"])
    assert page != README or commands(page, "papermill")


def test_every_file_that_a_command_of_another_program_names_is_there():
    for words in commands(README, "conda"):
        assert (ROOT / words[words.index("-f") + 1]).is_file()


@pages
def test_every_notebook_that_a_command_names_exists(page):
    for name in re.findall(r"(?<!/)\bnotebooks/[\w/]+\.ipynb", page.read_text()):
        assert (ROOT / name).exists() or (page.parent / name).exists(), name  # a link is of the page's own folder


@pages
def test_every_test_that_a_page_names_exists(page):
    files = {p.relative_to(ROOT / "tests").as_posix(): p.read_text() for p in (ROOT / "tests").rglob("test_*.py")}
    defined = set(re.findall(r"^def (test_\w+)", "\n".join(files.values()), re.M))
    for name in re.findall(r"`((?:\w+/)*test_\w+(?:\.py)?)`", page.read_text()):
        assert name in (files if name.endswith(".py") else defined), name


def test_every_fault_has_a_test():
    rows = re.search(r"^\| fault \|.*?\n\n", (ROOT / "tests/README.md").read_text() + "\n\n", re.M | re.S)[0]
    rows = [row.strip("|").split("|") for row in rows.strip().splitlines()[2:]]
    assert len(rows) >= 23 and all("`test_" in row[2] for row in rows)


def test_the_results_shown_are_those_stored():
    """README's count of claims, its differences and the verdicts on main claims are what the stored runs say."""
    said = README.read_text().replace("\n", " ")
    claims = re.search(r"of \d+ claims .*?\.", (ROOT / "outputs/README.md").read_text())[0]
    assert claims in said
    differences = {}
    for name in ("horizon", "table1"):
        rows = pd.read_csv(ROOT / f"outputs/reefl/tables/{name}_small.csv")
        for data in ("cifar100", "cifar10"):
            own = rows[(rows["mode"] == "Frozen") & (rows.column == f"{data}_alpha1")].set_index("method").obtained
            own = own.str.split(" ").str[0].astype(float)
            differences[name, data] = own.ReeFL - own.DepthFL
            assert name == "table1" or own.idxmax() == "ReeFL"
    printed = load_reported("reefl", "table1").query("finetune == 'frozen' and column == 'cifar100_alpha1'")
    paper = printed.set_index("method")["mean"]
    assert f"ReeFL is {paper.reefl - paper.depthfl:.0f} points above DepthFL on CIFAR-100" in said
    answers = pd.read_csv(ROOT / "outputs/reefl/tables/why_small_answers.csv").query("factor == 'rounds'")
    ahead = answers.set_index(["data", "level"]).ahead
    verdicts = [ahead[data, rounds] for data in ("CIFAR-100", "CIFAR-10") for rounds in ("1000", "100")]
    assert verdicts == ["undecided", "contradicted", "holds", "undecided"]  # of three seeds
    rows = pd.read_csv(ROOT / "outputs/reefl/claims.csv").query("claim == 'reefl_leads_over_1000_rounds'")
    assert len(rows) == 8 and set(rows.verdict) == {"holds"} and {*rows.seeds} == {3, 4}
    assert "that it leads every rival there holds, of three and four seeds" in said
    long, short, tens, ten = (differences[n, d] for d in ("cifar100", "cifar10") for n in ("horizon", "table1"))
    assert f"it is {long:.1f} above after as many rounds and {-short:.1f} below after 100" in said
    assert f"on CIFAR-10 {tens:.1f} above and {-ten:.1f} below (undecided)" in said
    statuses = re.findall(r"^\| \[\w+\]\(https.*?\), .*? \| (.*?) \|", README.read_text(), re.M)
    assert len(statuses) == 5 and all(len(s.split()) <= 6 for s in statuses)
    claims = "reefl_leads_four_exits scalefl_leads_text fedepth_leads_fair cafedistill_leads on_par_glue".split()
    for paper, name, status in zip("reefl scalefl fedepth cafedistill raffm".split(), claims, statuses, strict=True):
        claim = (ROOT / "outputs" / paper / "claims.md").read_text().split(f"\n## {name}\n")[1]
        assert status.split(": ")[1] == re.search(r"\): \*\*(.*?)\*\*", claim)[1], paper


def test_the_first_sentence_counts_the_methods():
    from fedlib.methods import METHODS

    count = sum(m.__module__.startswith(("fedlib.", "fedlib_lab.")) for m in METHODS.values())
    assert f"{count} methods" in README.read_text()
