"""Test-wide settings: nothing a test stores lands in the project's outputs, nothing untracked there is read."""

import ast
import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent
os.environ["FEDLIB_ROOT"] = str(ROOT)
# Kernels start in a notebook's folder: they import this tree, with ``benchmarks`` and ``pretraining`` beside it.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
if "PYTEST_XDIST_WORKER" not in os.environ:  # the workers of one test run share its store, as two processes may
    folder = tempfile.mkdtemp(prefix="fedlib-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ["FEDLIB_OUTPUTS"] = os.path.join(folder, "outputs")
    from tests.helpers.tracked import lay_out

    lay_out(ROOT, Path(folder, "tracked"))
    if sys.platform == "linux":
        from tests.helpers.warm_kernels import install

        install(folder)
os.environ["FEDLIB_PROFILE"] = "smoke"  # of notebooks that are not told another
os.environ.setdefault("TQDM_DISABLE", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Files that take longest, most of it waiting for processes: two workers that begin with them end together.
SLOW = "benchmarks cluster packaging jupyterlab kills fill processes notebooks readme site".split()


# What tests a part that changes seldom, and takes long: run where git says that the part was touched, and in make
# test-all. A file, a test of one, or a notebook, and the folders or files of the part
RARE = {
    "tests/kernels": "fedlib_lab/kernels",
    "tests/zoo/test_foreign.py": "fedlib_lab/zoo",
    "tests/zoo/test_vim.py": "fedlib_lab/zoo",
    "tests/zoo/test_timm_nets.py": "fedlib_lab/zoo",
    "tests/atlas": "fedlib_lab/atlas fedlib_lab/executors/meter.py fedlib_lab/runs/costs.py fedlib/models/measure.py",
    "tests/system/test_cluster.py": "fedlib_lab/executors",
    "tests/system/test_virtual_accelerator.py": "fedlib",
    "tests/system/test_precision.py": "fedlib",
    "tests/system/test_combinations.py": "fedlib",
    "tests/system/test_site.py": "docs",
    "tests/system/test_benchmarks.py": "benchmarks",
    "tests/system/test_away.py": "benchmarks",
    "tests/system/test_jupyterlab.py": "fedlib_lab/report",
    "tests/system/test_rehearsal.py": "params",
    "tests/system/test_kills.py": "fedlib_lab/runs",
    "tests/runs/test_fill.py": "fedlib_lab/runs",
    "tests/runs/test_export.py": "fedlib_lab/runs",
    "tests/report/test_verdicts.py::test_where_nothing_differs": "fedlib_lab/report",
    "tests/report/test_horizon.py": "fedlib_lab/report",
    "tests/papers/test_scalefl.py::test_no_grids_exits": "params/scalefl",
    "tests/papers/test_scalefl.py::test_stand_ins_levels": "params/scalefl",
    "tests/papers/fedepth": "fedlib_lab/papers/fedepth",
    "tests/pretraining": "pretraining",
    "notebooks/benchmarks": "benchmarks",
    "notebooks/cluster": "fedlib_lab/executors",
    "notebooks/atlas": "fedlib_lab/atlas",
}
# Of a test of every method these, one of each kind, and those that were touched; the others in make test-all
SAMPLE = {"reefl", "scalefl", "fedepth", "raffm", "cafedistill", "splitmix", "fedrod", "hetlora", "darkdistill"}
MANY = 12  # methods, from which on a test is one of every method
# Tests that take long wait too, unless what they test was touched (tests/helpers/long.py)
LONG = set((ROOT / "tests/long.txt").read_text("utf-8").split("\n"))
RESTS_ON = {"papers": ("outputs", "params"), "report": ("outputs", "params"), "system": ("fedlib", "fedlib_lab")}


@functools.cache
def touched():
    """Files that differ from the last commit of ``main``."""
    from tests.helpers.touched import changed

    return changed()


def touches(part):
    return any(f"{name}/".startswith(f"{part}/") for name in touched())


def is_long(item):
    """Does it take long, and was nothing touched of what it tests?"""
    file, area = item.path.relative_to(ROOT).as_posix(), item.path.parent.relative_to(ROOT / "tests").parts[:1]
    parts = [file, *(f"{package}/{part}" for package in ("fedlib", "fedlib_lab") for part in area)]
    parts += [part for name in area for part in RESTS_ON.get(name, ())] if area else ["fedlib", "fedlib_lab"]
    return bool(LONG & {item.nodeid, item.nodeid.partition("[")[0]}) and not any(map(touches, parts))


def method_of(item):
    """The method that a test is about, if it is about one by name."""
    from fedlib.methods import METHODS

    given = item.callspec.params if hasattr(item, "callspec") else {}
    return next((value for value in given.values() if isinstance(value, str) and value in METHODS), None)


def pytest_configure(config):
    if hasattr(config.option, "nbval_lax"):  # a machine that is lent for minutes may lack nbval
        config.option.nbval_lax, config.option.nbval_cell_timeout = True, 600


def names_in(notebook):
    """The names of the kit that a notebook imports, and the attributes that it reads."""
    out = set()
    for cell in json.loads(notebook.read_text("utf-8"))["cells"]:
        tree = ast.parse("".join(cell["source"])) if cell["cell_type"] == "code" else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                out |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                out.add(node.attr)
    return out


def telling(notebooks):
    """Of each folder of ``notebooks`` the one that uses most names of the kit, and those that were touched."""
    folders = {path.parent for path in notebooks}
    most = {max((p for p in sorted(notebooks) if p.parent == f), key=lambda p: len(names_in(p))) for f in folders}
    return most | {p for p in notebooks if touches(p.relative_to(ROOT).as_posix())}


def pytest_collection_modifyitems(items):
    whole = len({item.path for item in items}) > 5
    waiting = [test for test, part in RARE.items() if whole and not any(map(touches, part.split()))]
    waits = lambda name: any(name.startswith(test) for test in waiting)  # noqa: E731
    notebooks = {item.path for item in items if item.path.suffix == ".ipynb"}
    kept = telling({path for path in notebooks if not waits(path.relative_to(ROOT).as_posix())})
    methods = {item: method_of(item) for item in items}
    number = Counter(item.nodeid.partition("[")[0] for item, method in methods.items() if method)
    fresh = {Path(name).stem for name in touched()}
    for item, method in methods.items():
        many = method and len(items) > 500 and number[item.nodeid.partition("[")[0]] >= MANY
        long = whole and item.path not in notebooks and is_long(item)
        if item.path in notebooks - kept or waits(item.nodeid) or long or (many and method not in SAMPLE | fresh):
            item.add_marker("slow")
        if item.path.suffix == ".ipynb" or item.path.is_relative_to(ROOT / "tests/system"):
            item.add_marker("system")
    order = {f"test_{name}": i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.stem, len(SLOW)))
