"""Executed notebooks in git are of the notebooks and of the stored runs that stand beside them."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from fedlib.core.storage import read_json, write_json
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.store import run_path
from tests.helpers.stored import laid_out
from tests.helpers.tracked import OUTPUTS

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("executed_notebooks", ROOT / "docs/notebooks.py")
notebooks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(notebooks)
SOURCES = notebooks.sources()
PICTURES = {"image/png", "image/jpeg"}


def test_every_notebook_stands_there_executed():
    assert set(SOURCES) == set((ROOT / "notebooks").rglob("*.ipynb")) and len(SOURCES) > 60
    wanted = {notebooks.executed(s, OUTPUTS) for s in SOURCES}
    assert wanted == set(OUTPUTS.glob("*/notebooks/*.ipynb"))
    sizes = {f"{p.parts[-3]}/{p.stem}": p.stat().st_size for p in wanted}
    assert sum(sizes.values()) < 6e6 and {name for name, size in sizes.items() if size > 400_000} <= {"atlas/map"}


def test_a_notebook_that_trains_is_executed_with_outputs_of_its_own(tmp_path, monkeypatch):
    """A trial leaves nothing behind; one that is shown at another profile says so below its parameters."""
    source = tmp_path / "folder/one.ipynb"
    source.parent.mkdir()
    code = ['profile = "smoke"  # smoke | small', "import os\n\nprofile, os.environ.get('FEDLIB_OUTPUTS', 'none')"]
    new = notebooks.nbformat.v4
    cells = [new.new_code_cell(code[0], metadata={"tags": ["parameters"]}), new.new_code_cell(code[1])]
    book = new.new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    notebooks.nbformat.write(book, source)
    monkeypatch.setenv("FEDLIB_OUTPUTS", "the repository's")
    notebooks.execute(source, tmp_path / "trial.ipynb")
    monkeypatch.setitem(notebooks.SHOWN_WITH, "folder/one", {"profile": "small"})
    notebooks.execute(source, tmp_path / "small.ipynb")
    trial, small = (json.loads((tmp_path / f"{n}.ipynb").read_text())["cells"] for n in ("trial", "small"))
    assert ["".join(c["source"]) for c in small] == [code[0], '# Parameters\nprofile = "small"', code[1]]
    assert len(trial) == 2
    profile, folder = ast.literal_eval("".join(trial[1]["outputs"][0]["data"]["text/plain"]))
    assert profile == "smoke" and folder != "the repository's" and not Path(folder).exists()
    assert "".join(small[2]["outputs"][0]["data"]["text/plain"]) == "('small', \"the repository's\")"


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_it_is_of_the_stored_runs(source):
    """By the digest of the notebook and of the runs that it asks for; nothing is run."""
    text = notebooks.executed(source, OUTPUTS).read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert notebook["metadata"][notebooks.DIGEST] == notebooks.digest(source, OUTPUTS), "stale: run `make notebooks`"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    wanted = ["".join(c["source"]) for c in notebooks.cells(source) if c["cell_type"] == "code"]
    assert ["".join(c["source"]) for c in code] == [wanted[0], *filter(None, [notebooks.told(source)]), *wanted[1:]]
    outputs = [o for c in code for o in c["outputs"]]
    assert outputs and not any(o["output_type"] == "error" for o in outputs)
    said = json.dumps([{k: v for k, v in o.get("data", {}).items() if k not in PICTURES} | {"text": o.get("text")} for o in outputs])  # fmt: skip
    assert not re.search(r"/(work|tmp|home|root|usr)/|\d+it/s|Traceback", said)
    assert not any(c["metadata"].keys() - {"tags"} for c in notebook["cells"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_cell_that_draws_shows_its_picture(source):
    """Executed under a backend that shows nothing, a figure would be saved and not be seen."""
    for cell in json.loads(notebooks.executed(source, OUTPUTS).read_text(encoding="utf-8"))["cells"]:
        said = "".join(cell["source"])
        draws = re.search(r"^(?!def |from |import |\s).*\b(plot_\w+|save_figure)\(", said, re.M)
        if cell["cell_type"] == "code" and draws:
            told = "".join("".join(o.get("text", "")) for o in cell["outputs"])
            nothing = re.search(r"^(no (longer )?run is stored( yet)?|values of \w+ that are stored: .*)$", told, re.M)
            assert any(PICTURES & o.get("data", {}).keys() for o in cell["outputs"]) or nothing, said


def test_a_trials_digest_is_of_its_source_alone(tmp_path):
    (tmp_path / "reefl").mkdir()
    source = tmp_path / "reefl/one.ipynb"

    def said(*lines):
        source.write_text(json.dumps({"cells": [{"source": [line]} for line in lines]}))
        return notebooks.digest(source, tmp_path), notebooks.digest(source, OUTPUTS)

    first, same = said('profile = "smoke"', 'Table("reefl", "table4", profile)')
    assert first == same and len({first, *said('profile = "demo"', 'Table("reefl", "table4", profile)')}) == 2
    none, stored = said('profile = "small"', 'Table("reefl", "table4", profile)')
    assert none != stored


def test_a_digest_tells_another_run_and_another_source(tmp_path):
    (tmp_path / "reefl").mkdir()
    source = tmp_path / "reefl/one.ipynb"
    write = lambda *lines: source.write_text(json.dumps({"cells": [{"source": list(lines)}]}))  # noqa: E731
    write('table = Table("reefl", "table4", profile)')
    first = notebooks.digest(source, tmp_path)
    stored = run_path(load_grid("reefl", "table4", "small")[0].experiment, OUTPUTS / "runs")
    path = laid_out(stored, tmp_path / "runs")

    def looked_at_anew():
        notebooks.runs_of_grid.cache_clear()
        notebooks.runs_of.cache_clear()
        return notebooks.digest(source, tmp_path)

    second, record = looked_at_anew(), read_json(path / "experiment.json")
    write_json(path / "experiment.json", record | {"inputs": record["inputs"] | {"kit": {}, "options": {}}})
    third = looked_at_anew()
    write('table = Table("reefl", "table4", profile)  # again')
    assert len({first, second, third, looked_at_anew()}) == 4


def test_links_lead_from_the_new_place():
    source = ROOT / "notebooks/reefl/table1_four_exits.ipynb"
    text = "[a](why.ipynb) [b](../walkthrough/01_exits_and_costs.ipynb) [c](../../README.md#x) [d](https://a.b) [e](figure7_teacher.ipynb)"
    assert notebooks.relinked(text, source) == (
        "[a](why.ipynb) [b](../../walkthrough/notebooks/01_exits_and_costs.ipynb) [c](../../../README.md#x) "
        "[d](https://a.b) [e](figure7_teacher.ipynb)"
    )
