"""Executed notebooks in git are of the notebooks and of the stored runs that stand beside them."""

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


def test_every_notebook_that_trains_nothing_stands_there_executed():
    wanted = {notebooks.executed(s, OUTPUTS) for s in SOURCES}
    assert wanted == set(OUTPUTS.glob("*/notebooks/*.ipynb")) and len(wanted) > 45
    assert sum(p.stat().st_size for p in wanted) < 12e6


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_it_is_of_the_stored_runs(source):
    """By the digest of the notebook and of the runs that it asks for; nothing is run."""
    text = notebooks.executed(source, OUTPUTS).read_text(encoding="utf-8")
    notebook = json.loads(text)
    assert notebook["metadata"][notebooks.DIGEST] == notebooks.digest(source, OUTPUTS), "stale: run `make notebooks`"
    code = [c for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c["source"] for c in code] == [c["source"] for c in notebooks.cells(source) if c["cell_type"] == "code"]
    outputs = [o for c in code for o in c["outputs"]]
    assert outputs and not any(o["output_type"] == "error" for o in outputs)
    said = json.dumps([{k: v for k, v in o.get("data", {}).items() if k != "image/png"} | {"text": o.get("text")} for o in outputs])  # fmt: skip
    assert not re.search(r"/(work|tmp|home|root|usr)/|\d+it/s|Traceback", said)
    assert not any(c["metadata"].keys() - {"tags"} for c in notebook["cells"])


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_cell_that_draws_shows_its_picture(source):
    """Executed under a backend that shows nothing, a figure would be saved and not be seen."""
    for cell in json.loads(notebooks.executed(source, OUTPUTS).read_text(encoding="utf-8"))["cells"]:
        said = "".join(cell["source"])
        draws = re.search(r"^(?!def |from |import |\s).*\b(plot_\w+|save_figure)\(", said, re.M)
        if cell["cell_type"] == "code" and draws:
            assert any("image/png" in o.get("data", {}) for o in cell["outputs"]), said


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
        "[d](https://a.b) [e](../../../notebooks/reefl/figure7_teacher.ipynb)"
    )
