"""The site's page of every method, made without Sphinx: what a page says is in the code, the params and the tables."""

import ast
import dataclasses
import re
import shlex
import shutil
import sys
from pathlib import Path

import pandas as pd
import pytest

from fedlib import recipe
from fedlib.methods import METHODS
from fedlib_lab.cli import overrides_of, parser
from fedlib_lab.report.tables import label_of
from fedlib_lab.runs.params import load_grid, load_spec
from tests.helpers.tracked import OUTPUTS

ROOT = Path(__file__).parents[1]
SILENT = {"fedavg"}  # its file names no deviation


@pytest.fixture(scope="module")
def methods():
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        import methods

        yield methods
    finally:
        sys.path.remove(str(ROOT / "docs"))
        sys.modules.pop("methods", None)


@pytest.fixture(scope="module")
def written(methods, tmp_path_factory):
    """The stored tables beside no runs, and the pages of them by name."""
    outputs, folder = tmp_path_factory.mktemp("outputs"), tmp_path_factory.mktemp("pages")
    for tables in OUTPUTS.glob("*/tables"):
        shutil.copytree(tables, outputs / tables.relative_to(OUTPUTS))
    (folder / "gone.md").write_text("of a method that is no more")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDLIB_OUTPUTS", str(outputs))
        methods.write(folder)
        yield {p.stem: p.read_text("utf-8") for p in folder.iterdir()}


def part(page, title):
    (found,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    return found.strip()


def test_every_method_has_a_page_and_a_row(methods, written):
    assert set(written) == {*methods.built_in(), "table"} and len(methods.built_in()) >= 33
    for name, cls in methods.built_in().items():
        row = next(r for r in written["table"].splitlines() if f"(api/methods/{name}.md)" in r)
        assert row.startswith(f"| [{cls.label}]") and written[name].startswith(f"# {cls.label}\n")
        ((own, every),) = re.findall(r"(\d+) \+ (\d+) \|$", row)
        assert int(own) + int(every) == len(dataclasses.fields(cls))
    assert "| Lee et al., ICML 2024 | one recurrent early exit" in written["table"]


def test_options_hooks_and_deviations_are_those_of_the_class(methods, written):
    for name, cls in methods.built_in().items():
        said = re.findall(r"^\| `(\w+)` \| .+? \| `(.+?)` \|", part(written[name], "Options"), re.M)
        assert dict(said) == {f.name: repr(f.default) for f in dataclasses.fields(cls)}, name
        hooks = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", part(written[name], "Hooks"), re.M)
        own = {h for h, of in hooks if of == cls.__name__}
        known = {h for h, v in vars(methods.Method).items() if callable(v) or isinstance(v, property)}
        assert own == {h for h in vars(cls) if h in known and not h.startswith("_")}, name
        ends = part(written[name], "Deviations")
        assert ends == "Its file names none." if name in SILENT else ends.startswith("Deviations"), name
        assert len(part(written[name], "What clients do, and the server")) > 60, name
        assert "Read next" not in written[name].split("## Its file")[0], name


def test_an_option_says_what_its_annotation_and_comment_say(written):
    """Worked out by hand from ReeFL's file and from Method's."""
    options = part(written["reefl"], "Options")
    assert (
        "| `distill` | str | `'best'` | `best`, `none` | who teaches (L\\_kl, Eq. 5); Table 3: none | `ReeFL` |"
        in options
    )
    assert (
        "| `zeta` | float | `0.2` | above 0 and at most 1 | running estimate of the loss; counts with `distill = 'best'` |"
        in options
    )  # noqa: E501
    assert "| `kd_weight` | float or None | `None` | at least 0 | eta; None: ramped up" in options
    assert "| `weighting` | str | `'examples'` | `examples`, `clients` | of the mean | `Method` |" in options
    assert "| `rates` | list of float | `(1.0,)` | above 0 and at most 1 |" in part(written["fedproto"], "Options")


def test_its_file_is_shown_from_below_the_docstring(written):
    for name in set(written) - {"table"}:
        ((file, first),) = re.findall(r"literalinclude\} /(\S+)\n.*\n:lines: (\d+)-", written[name])
        code = "\n".join((ROOT / file).read_text().splitlines()[int(first) - 1 :])
        assert METHODS[name].__name__ in {n.name for n in ast.parse(code).body if isinstance(n, ast.ClassDef)}, name
        assert ast.get_docstring(ast.parse(code)) is None and '"""' not in code.split("\n\n")[0]


def test_commands_and_snippets_name_the_method(methods, written):
    for name in methods.built_in():
        commands, snippet = re.findall(r"```(?:sh|python)\n(.*?)```", part(written[name], "Run it"), re.S)
        for line in commands.splitlines():
            given = parser().parse_args(shlex.split(line, comments=True)[1:])
            paper, _, table = given.table.partition("/")
            assert load_spec(paper, table)["variants"], line
            if line.startswith("fedlib run"):
                cells = load_grid(paper, table, given.profile, overrides_of(given.overrides))
                assert {c.method for c in cells} == {name}, line
                assert (given.profile == "smoke") <= (len(cells) <= 2), line  # of one seed
            else:
                assert given.row in load_spec(paper, table)["variants"], line
        imports, _, asked, answer = snippet.strip().split("\n")
        compile(snippet, name, "exec")
        space = {"recipe": recipe}
        exec(asked, space)
        assert space["e"].method == name and imports == "from fedlib import recipe, run", name


def test_numbers_are_the_stored_ones(methods, written):
    """Every number of a page stands in the table that it names, and none of ensembles' best runs does."""
    for name in methods.built_in():
        text = part(written[name], "Numbers")
        if "No stored run" in text:
            assert methods.tables(name) and "| --- |" not in text
            continue
        assert "Of the last round at profile `small`" in text and "seeds" in text
        shown = [r.split(" | ") for r in text.split("\n\n")[1].splitlines()[2:]]
        stored = pd.concat([pd.read_csv(OUTPUTS / p / "tables" / f"{t}_small.csv") for p, t in methods.tables(name)
                            if (OUTPUTS / p / "tables" / f"{t}_small.csv").is_file()])  # fmt: skip
        known = {tuple(map(str, row)) for row in stored[["mode", "method", "obtained", "seeds"]].values}
        assert {(r[2], r[3], r[4], r[5]) for r in shown} <= known, name
    reefl = pd.read_csv(OUTPUTS / "reefl/tables/table1_small.csv")
    (said,) = reefl[(reefl.method == "ReeFL") & (reefl.column == "cifar10_alpha1") & (reefl["mode"] == "LoRA")].obtained
    assert f"| CIFAR-10, Dirichlet 1 | LoRA | ReeFL | {said} | 3 | mean over exits |" in written["reefl"]
    standing = pd.read_csv(OUTPUTS / "atlas/tables/map_small_upload_tuned_ranking.csv")
    (row,) = standing[(standing.method == "fedproto") & (standing.task == "cifar10")].to_dict("records")
    both = f"{row['own labels']:g} | {row['sd']:g} | {row['all alike']:g} | {row['majority']:g} | {row['seeds']}"
    assert f"| traffic | CIFAR-10 | FedProto | {both} | {row['rank']} |" in written["fedproto"]


def test_a_row_belongs_to_one_method(methods):
    """Tables say rows by their labels, so no two methods of a table may share one."""
    for name in methods.built_in():
        for paper, table in methods.tables(name):
            rows = [(label_of(r.get("label", v)), r["method"]) for v, r in load_spec(paper, table)["variants"].items()]
            assert len({label for label, _ in rows}) == len(set(rows)), (paper, table)


def test_without_stored_runs_a_page_says_so(methods, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    for name in methods.built_in():
        assert methods.numbers(name) == "No stored run of it at profile `small`."


def test_numbers_of_an_older_rule_say_so(methods, monkeypatch):
    """As if CIFAR-100's runs were of an older rule, and those on CIFAR-10 not (``flags.py``)."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(OUTPUTS))
    monkeypatch.setattr(methods, "older_rules", lambda e, _: ["how crops are counted"] * (e.dataset == "cifar100"))
    monkeypatch.setattr(methods, "tables", lambda name: [("fedepth", "table2")])
    rows = [r for r in methods.numbers("fedepth").splitlines() if "outputs/fedepth" in r]
    for row in rows:
        assert ("made by an older rule" in row) == ("CIFAR-100" in row), row
    assert {"CIFAR-100" in r for r in rows} == {True, False}


def test_a_method_of_no_table_is_run_in_one_of_plain_methods(methods, monkeypatch):
    monkeypatch.setattr(methods, "tables", lambda name: [])
    table, key, row = methods.command("fedproto")
    paper, _, table = table.partition("/")
    assert (key, row) == ("method", "fedproto")
    assert {c.method for c in load_grid(paper, table, "smoke", {key: row})} == {"fedproto"}
