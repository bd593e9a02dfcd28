"""Notebooks: hygiene, papermill with an override, refusal of typos. (nbval runs them all: see pyproject.toml.)"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedlib import Experiment
from fedlib.core import paths
from fedlib.core.paths import outputs_dir
from fedlib_lab.report.notebook import check_parameters, check_sources
from fedlib_lab.report.tables import run_cells
from fedlib_lab.runs.store import run_path
from tests.helpers.tracked import lay_out

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").rglob("*.ipynb"))
ids = [str(p.relative_to(ROOT / "notebooks")) for p in NOTEBOOKS]

TRAINS = dict.fromkeys(  # what they look at is not stored: weights, or runs at all
    ("cafedistill/students_and_teachers", "fedepth/figure5_similarity", "raffm/figure4_clients", "cluster/ray",
     "raffm/figure5_prioritisation", "reefl/adaptive_inference", "reefl/figure1_attention_maps",
     "reefl/figure7_teacher", "reefl/speech_and_writers", "scalefl/adaptive_inference", "pretraining/deit_micro"), "smoke",
) | dict.fromkeys(("walkthrough/00_start_here", "walkthrough/02_one_round_by_hand", "walkthrough/03_write_a_method",
                   "walkthrough/05_bring_your_own"), "demo")  # fmt: skip


def cells(path, kind="code"):
    return [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == kind]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_committed_clean_and_parameterised(path):
    code = cells(path)
    assert all(not c["outputs"] and c["execution_count"] is None for c in code)
    source = "".join(code[0]["source"])
    assert "parameters" in code[0]["metadata"].get("tags", []) and re.search(r"# .*smoke", source)
    default = re.search('^profile = "(.+)"', source)[1]
    assert default == TRAINS.get(path.relative_to(ROOT / "notebooks").with_suffix("").as_posix(), "small")
    assert default != "small" or "run_missing = True" not in source  # a reader who runs all waits for no training
    assert sum("parameters" in c["metadata"].get("tags", []) for c in code) == 1
    assert "".join(cells(path, "markdown")[0]["source"]).startswith("# ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_holds_no_paths_installs_or_long_cells(path):
    for cell in cells(path):
        source = "".join(cell["source"])
        assert len(source.splitlines()) <= (30 if "@register(" in source else 15)  # a method is a short file, so a cell
        for word in ("sys.path", "!pip", "%pip", "/home", "/work", "/tmp", "import os"):
            assert word not in source


def test_imports_live_in_the_second_cell():
    for path in NOTEBOOKS:
        for i, cell in enumerate(cells(path)):
            lines = "".join(cell["source"]).splitlines()
            assert i == 1 or not any(x.startswith(("import ", "from ")) for x in lines), (path.name, i)


def papermill(notebook, out, *parameters, **kwargs):
    """Run it with ``out``'s folder for a project: what is not told otherwise lands in its ``outputs``."""
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", notebook, out, *parameters]
    project = Path(out).parent
    for name in ("params", "notebooks"):
        (project / name).symlink_to(ROOT / name)
    env = {k: v for k, v in os.environ.items() if k != "FEDLIB_OUTPUTS"} | {"FEDLIB_ROOT": str(project)}
    return subprocess.run(command, capture_output=True, text=True, env=env, **kwargs)


def test_papermill_with_an_override_from_any_folder(tmp_path):
    """And a trial stores all that it makes where git does not look."""
    overrides = "{overrides: {num_train: 160, num_test: 50, rounds: 3, variant: [reefl], finetune: frozen}}"
    notebook = ROOT / "notebooks/reefl/table4_modulation.ipynb"
    done = papermill(notebook, tmp_path / "t.ipynb", "-y", overrides, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [p.name for p in (tmp_path / "outputs").iterdir()] == ["scratch"]
    stored = list((tmp_path / "outputs/scratch/runs").glob("*/summary.json"))
    assert len(stored) == 1 and json.loads(stored[0].read_text())["t"] == 3
    assert (tmp_path / "outputs/scratch/reefl/tables/table4_smoke.csv").read_text().count("ReeFL") == 1
    assert (tmp_path / "outputs/scratch/reefl/figures/table4_smoke_exits.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-y", "{overrides: {roundz: 3}}"], "unknown key 'roundz'; did you mean 'rounds'?"),
        (["-p", "profil", "small"], "parameters: unknown name 'profil'; did you mean 'profile'?"),
        (["-p", "run_missing", "never"], "parameters: run_missing = 'never'; allowed: True, False"),
    ],
)
def test_a_typo_stops_the_notebook_before_any_compute(tmp_path, arguments, message):
    done = papermill(ROOT / "notebooks/reefl/table1_four_exits.ipynb", tmp_path / "t.ipynb", *arguments)
    assert done.returncode != 0 and message in done.stderr
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_every_notebook_asks_for_its_parameters_before_it_does_anything(path):
    """Between the parameters cell, below which papermill puts its own, and the call stand imports only."""
    parameters, second = ("".join(c["source"]) for c in cells(path)[:2])
    names = [t.id for s in ast.parse(parameters).body for t in s.targets]
    assert len(names) == len(ast.parse(parameters).body) >= 4  # plain assignments
    statements = ast.parse(second).body
    first = next(i for i, s in enumerate(statements) if not isinstance(s, ast.Import | ast.ImportFrom))
    assert ast.unparse(statements[first]) == "check_parameters()"


@pytest.mark.parametrize(
    "injected, refused",
    [
        ("profile = 'small'\noverrides = {'rounds': 3}", None),
        (
            "overridez = {'rounds': 3}",
            "unknown name 'overridez'; did you mean 'overrides'? allowed: overrides, profile",
        ),
        ("profile = 'small'\nx = 1", "unknown name 'x'; allowed: overrides, profile"),
    ],
)
def test_names_that_papermill_sets_are_those_of_the_parameters_cell(injected, refused):
    # IPython's list of executed cells begins with an empty one
    executed = ["", "profile = 'smoke'  # smoke | small\noverrides = {}", f"# Parameters\n{injected}\n", "import x"]
    assert check_sources(executed[:2]) == {}  # nothing injected: JupyterLab, nbval
    if refused is None:
        assert check_sources(executed) == {"profile": "small", "overrides": {"rounds": 3}}
    else:
        with pytest.raises(ValueError, match="parameters") as error:
            check_sources(executed)
        assert refused in str(error.value)


OTHER = {str: 3, bool: "flase", int: "many", float: "many", dict: "{lr: 0.1}"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=ids)
def test_every_parameter_of_every_notebook_is_of_the_type_of_its_default(path):
    """What papermill's -p makes of a word for a bool and -r of a number is meant so; anything else stops."""
    cell = "".join(cells(path)[0]["source"])
    defaults = {s.targets[0].id: ast.literal_eval(s.value) for s in ast.parse(cell).body}

    def given(name, value):
        return check_sources(["", cell, f"# Parameters\n{name} = {value!r}\n", "import x"])[name]

    for name, value in defaults.items():
        assert given(name, value) == value and type(given(name, value)) is type(value)
        if type(value) is bool:
            assert [given(name, word) for word in ("false", "no", "False", "off", 0)] == [False] * 5
            assert [given(name, word) for word in ("true", "Yes", "True", "on", 1)] == [True] * 5
        if type(value) is int:
            assert given(name, "7") == 7
        if value is not None:
            for wrong in (OTHER[type(value)], None, 1.5 if type(value) is not float else [1.5], []):
                with pytest.raises(ValueError, match=f"^parameters: {name} = .*; allowed: "):
                    given(name, wrong)


def test_a_word_for_a_bool_in_the_parameters_cell_itself_trains_nothing(monkeypatch):
    monkeypatch.delenv("FEDLIB_PROFILE", raising=False)
    monkeypatch.setattr(paths, "_trial", False)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(user_ns=names))
    names = {"profile": "small", "run_missing": "false"}
    check_parameters()
    assert names["run_missing"] is False
    for wrong in ({"run_missing": "never"}, {"overrides": "{lr: 0.1}"}, {"device": 0}):
        names = {"profile": "small"} | wrong
        with pytest.raises(ValueError, match=f"parameters: {next(iter(wrong))} = .*; allowed: "):
            check_parameters()
    with pytest.raises(ValueError, match="run_missing = 'false': expected bool"):
        run_cells([], run_missing="false")


def test_trials_are_stored_where_git_does_not_look(tmp_path, monkeypatch):
    """Smoke and demo; what is worth keeping is not. A folder that was asked for is taken by all."""
    for name in ("FEDLIB_OUTPUTS", "FEDLIB_PROFILE"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    monkeypatch.setattr(paths, "_trial", False)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(user_ns=names))
    for profile, folder in {"small": "outputs", "demo": "outputs/scratch", "smoke": "outputs/scratch"}.items():
        names = {"profile": profile}
        check_parameters()
        assert outputs_dir() == tmp_path / folder and run_path(Experiment()).parent == tmp_path / folder / "runs"
    for name in (
        "runs/a/summary.json",
        "reefl/tables/table1_smoke.csv",
        "walkthrough/figures/start_here_demo_exits.png",
    ):
        ignored = subprocess.run(["git", "check-ignore", "-q", f"outputs/scratch/{name}"], cwd=ROOT).returncode
        assert ignored == 0 or not (ROOT / ".git").exists(), name
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path / "mine"))
    assert outputs_dir() == tmp_path / "mine"


def test_a_notebook_shows_what_is_stored_unless_somebody_asks_for_more(monkeypatch):
    """JupyterLab: the cell's profile, nothing trained. Tests: $FEDLIB_PROFILE. papermill: what its command says."""
    monkeypatch.setattr(paths, "_trial", False)
    monkeypatch.setattr("IPython.get_ipython", lambda: SimpleNamespace(user_ns=names))
    cell = 'profile = "small"\nrun_missing = False'
    for asked, injected, profile, trains in ((None, None, "small", False), ("smoke", None, "smoke", True),
                                             ("smoke", "small", "small", False), (None, "demo", "demo", True)):  # fmt: skip
        monkeypatch.delenv("FEDLIB_PROFILE", raising=False)
        if asked:
            monkeypatch.setenv("FEDLIB_PROFILE", asked)
        given = ["", cell, *([f'# Parameters\nprofile = "{injected}"\n'] if injected else []), "check_parameters()"]
        names = {"profile": injected or "small", "run_missing": False, "In": given}
        check_parameters()
        assert (names["profile"], names["run_missing"]) == (profile, trains)


def test_tests_read_only_what_git_tracks(tmp_path, monkeypatch):
    project = tmp_path / "project"
    for name in ("outputs/a/README.md", "outputs/walkthrough/figures/x.png", "notebooks/n.ipynb"):
        (project / name).parent.mkdir(parents=True)
        (project / name).write_text(name)
    git = ["git", "-C", str(project), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "outputs/a"], check=True)
    monkeypatch.setenv("FEDLIB_TESTS_TRACKED", "")  # put back at the end
    lay_out(project, tmp_path / "tracked")
    assert [p.name for p in (tmp_path / "tracked/outputs").iterdir()] == ["a"]
    assert (tmp_path / "tracked/outputs/a/README.md").read_text() == "outputs/a/README.md"
    assert (tmp_path / "tracked/outputs/a/../../notebooks/n.ipynb").exists()


def test_outside_a_notebook_there_is_nothing_to_check():
    check_parameters()


def test_the_map_names_every_notebook_and_its_commands_exist():
    text = (ROOT / "notebooks/README.md").read_text()
    names = {n.removesuffix(".ipynb") for n in ids}
    assert set(re.findall(r"`((?:%s)/\w+)`" % "|".join({n.split("/")[0] for n in names}), text)) == names  # noqa: UP031
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M)) | {n.split("_")[0] for n in names}
    assert set(re.findall(r"make (\w+(?:/\w+)?)", text)) <= targets


def test_a_first_word_is_enough_to_name_a_notebook():
    short = [i.removesuffix(".ipynb").split("_")[0] for i in ids]
    assert len(set(short)) == len(short)


def make(*arguments):
    # -o: neither look at nor build the environment; a make that runs the tests would have this one name its folders
    command = ["make", "-n", "-o", "setup", *arguments]
    alone = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=alone)


def test_make_runs_the_notebook_of_one_paper():
    done = make("reefl/table1", "PROFILE=smoke")
    assert done.returncode == 0
    assert "notebooks/reefl/table1_four_exits.ipynb outputs/executed/reefl-table1-smoke.ipynb -p profile smoke -p run_missing True" in done.stdout  # fmt: skip
    assert "-p device" not in done.stdout
    assert (
        make("reefl/table1", "PROFILE=paper", "DEVICE=cuda")
        .stdout.rstrip()
        .endswith("-p run_missing True -p device cuda")
    )
    whole = make("reefl/table10_aggregation_distillation_twelve_exits")
    assert "notebooks/reefl/table10_aggregation_distillation_twelve_exits.ipynb" in whole.stdout
    old = subprocess.run(["make", "table1"], cwd=ROOT, capture_output=True, text=True)
    assert old.returncode == 2 and "no target 'table1'; did you mean: make" in old.stderr
    assert all(f"{paper}/table1" in old.stderr for paper in ("cafedistill", "fedepth", "reefl"))
