"""Notebooks: hygiene, papermill with an override, refusal of typos. (nbval runs them all: see pyproject.toml.)"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
ids = [str(p.relative_to(ROOT / "notebooks")) for p in NOTEBOOKS]


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_committed_clean_and_parameterised(path):
    code = cells(path)
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    assert "parameters" in code[0]["metadata"].get("tags", []) and "smoke" in "".join(code[0]["source"])
    assert sum("parameters" in c["metadata"].get("tags", []) for c in code) == 1
    assert "".join(cells(path, "markdown")[0]["source"]).startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_holds_no_paths_installs_or_long_cells(path):
    for cell in cells(path):
        source = "".join(cell["source"])
        assert len(source.splitlines()) <= 15
        for word in ("sys.path", "!pip", "%pip", "/home", "/work", "/tmp", "import os"):
            assert word not in source


def test_imports_live_in_the_second_cell():
    for path in NOTEBOOKS:
        for i, cell in enumerate(cells(path)):
            lines = "".join(cell["source"]).splitlines()
            assert i == 1 or not any(x.startswith(("import ", "from ")) for x in lines), (path.name, i)


def papermill(notebook, out, *parameters, **kwargs):
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", notebook, out, *parameters]
    env = {**os.environ, "FEDLIB_OUTPUTS": str(Path(out).parent / "outputs")}
    return subprocess.run(command, capture_output=True, text=True, env=env, **kwargs)


def test_papermill_with_an_override_from_any_folder(tmp_path):
    overrides = "{overrides: {num_train: 160, num_test: 50, rounds: 3, method: [reefl], finetune: frozen}}"
    done = papermill(
        ROOT / "notebooks/reefl/table1_four_exits.ipynb", tmp_path / "t.ipynb", "-y", overrides, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    stored = list((tmp_path / "outputs/runs").glob("*/summary.json"))
    assert len(stored) == 1 and json.loads(stored[0].read_text())["t"] == 3
    assert (tmp_path / "outputs/tables/table1_smoke.md").read_text().count("ReeFL") == 1
    assert (tmp_path / "outputs/figures/table1_smoke_exits_cifar100_alpha1.png").stat().st_size > 10_000


def test_a_typo_stops_the_notebook_before_any_compute(tmp_path):
    done = papermill(
        ROOT / "notebooks/reefl/table1_four_exits.ipynb", tmp_path / "t.ipynb", "-y", "{overrides: {roundz: 3}}"
    )
    assert done.returncode != 0 and "did you mean 'rounds'?" in done.stderr
    assert not (tmp_path / "outputs").exists()
