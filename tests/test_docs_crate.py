"""A table's runs as an RO-Crate: every file is there and described, every reference leads somewhere, nothing is overwritten."""

import importlib.util
import json

import pandas as pd
import pytest

import fedlib
from fedlib.core.paths import root
from fedlib_lab.report.table import Table
from fedlib_lab.runs.packed import KEPT

spec = importlib.util.spec_from_file_location("crate_of_runs", root() / "docs/crate.py")
crate = importlib.util.module_from_spec(spec)
spec.loader.exec_module(crate)


@pytest.fixture(scope="module")
def table():
    some = {"finetune": "frozen", "columns": "cifar10_alpha1", "method": ["reefl", "depthfl"]}
    return Table("reefl", "table1", "small", some, root() / "outputs/runs")


@pytest.fixture(scope="module")
def folder(table, tmp_path_factory):
    path = tmp_path_factory.mktemp("crate") / "crate"
    assert crate.export_crate(table, path) == path / "ro-crate-metadata.json"
    return path


def references(value):
    """Every ``{"@id": ...}`` that stands for another entity."""
    if isinstance(value, list):
        return [x for v in value for x in references(v)]
    if not isinstance(value, dict):
        return []
    return [value["@id"]] if value.keys() == {"@id"} else [x for v in value.values() for x in references(v)]


def test_every_file_is_there_and_every_reference_resolves(folder):
    content = json.loads((folder / "ro-crate-metadata.json").read_text(encoding="utf-8"))
    assert content["@context"] == "https://w3id.org/ro/crate/1.1/context"
    graph = {x["@id"]: x for x in content["@graph"]}
    assert len(graph) == len(content["@graph"]) and graph["ro-crate-metadata.json"]["about"] == {"@id": "./"}
    on_disk = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()} - {"ro-crate-metadata.json"}
    described = {name for name, x in graph.items() if x["@type"] == "File"}
    assert described == on_disk == {x["@id"] for x in graph["./"]["hasPart"]}
    assert all(int(graph[n]["contentSize"]) == (folder / n).stat().st_size for n in described)
    known = {*graph, "https://w3id.org/ro/crate/1.1"}
    assert not [x for x in references(content["@graph"]) if x not in known]


def test_a_run_is_an_action_of_the_software_on_what_was_asked(folder, table):
    graph = json.loads((folder / "ro-crate-metadata.json").read_text(encoding="utf-8"))["@graph"]
    graph = {x["@id"]: x for x in graph}
    actions = [x for x in graph.values() if x["@type"] == "CreateAction"]
    assert len(actions) == len(set(table.frame.run)) == len(graph["./"]["mentions"]) == 6
    for run in table.frame.found:
        action = graph[f"#{run.path.name}"]
        assert [x["@id"].split("/")[-1] for x in action["object"] + action["result"]] == list(KEPT)
        assert action["endTime"] == run.day and graph[action["instrument"]["@id"]]["name"] == "fedlib"
        summary = json.loads((folder / f"runs/{run.path.name}/summary.json").read_text())
        assert summary["accuracy"] == run.accuracy
    assert graph["./"]["license"] == {"@id": "https://spdx.org/licenses/Apache-2.0"}
    assert graph["./"]["citation"] == [{"@id": "https://arxiv.org/abs/2405.14791"}]
    assert graph["./"]["datePublished"] == max(r.day for r in table.frame.found)


def test_the_table_lies_beside_as_csv_and_latex(folder, table):
    pd.testing.assert_frame_equal(pd.read_csv(folder / "table.csv"), table.obtained(), check_dtype=False)
    assert r"\toprule" in (folder / "table.tex").read_text(encoding="utf-8")


def test_nothing_is_overwritten_and_without_runs_nothing_is_written(folder, table, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="holds something"):
        crate.export_crate(table, folder)
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "none"))
    none = Table("reefl", "table1", "smoke")
    with pytest.raises(ValueError, match="no run of reefl/table1 is stored"):
        crate.export_crate(none, tmp_path / "new")
    assert not (tmp_path / "new").exists() and fedlib.runs_frame().empty


@pytest.mark.parametrize(
    "table, at, words",
    [("reefl/table99", "new", "table = 'table99' is unknown"), ("reefl", "new", "table = '' is unknown"),
     ("reefl/table1", "file", "is a file or holds something")],
)  # fmt: skip
def test_a_shell_is_told_in_one_sentence_what_is_refused(table, at, words, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert crate.main([table, "small", str(tmp_path / at)]) == 1
    told = capsys.readouterr()
    assert words in told.err and told.err.count("\n") == 1 and not told.out and not (tmp_path / "new").exists()
