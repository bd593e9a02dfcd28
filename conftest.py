"""Test-wide settings: nothing a test stores lands in the project's outputs, nothing untracked there is read."""

import ast
import atexit
import functools
import json
import os
import shutil
import sys
import tempfile
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


# What tests only a part that changes seldom runs where git says that the part was touched, and in make test-all
RARE = {
    "kernels": "fedlib_lab/kernels",
    "zoo/test_foreign.py": "fedlib_lab/zoo",
    "zoo/test_vim.py": "fedlib_lab/zoo",
    "executors/test_flower.py": "fedlib_lab/executors",
    "system/test_cluster.py": "fedlib_lab/executors",
    "system/test_flower.py": "fedlib_lab/executors",
    "system/test_site.py": "docs",
    "system/test_benchmarks.py": "benchmarks",
    "system/test_away.py": "benchmarks",
    "system/test_jupyterlab.py": "fedlib_lab/report",
    "pretraining": "pretraining",
}


@functools.cache
def touched():
    """Files that differ from the last commit of ``main``."""
    from tests.helpers.touched import changed

    return changed()


def touches(folder):
    return any(name.startswith(f"{folder}/") for name in touched())


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
    """A few of ``notebooks`` in which each name occurs that occurs in any: a greedy cover."""
    names = {path: names_in(path) for path in sorted(notebooks)}
    left, kept = set().union(*names.values()), set()
    while left:
        best = max(names, key=lambda path: len(names[path] & left))
        kept.add(best)
        left -= names[best]
    return kept or set(notebooks)


def pytest_collection_modifyitems(items):
    notebooks = {item.path for item in items if item.path.suffix == ".ipynb"}
    kept = telling(notebooks)
    waiting = {test for test, of in RARE.items() if len({item.path for item in items}) > 5 and not touches(of)}
    for item in items:
        if item.path in notebooks - kept or any(item.path.is_relative_to(ROOT / "tests" / test) for test in waiting):
            item.add_marker("slow")
        if item.path.suffix == ".ipynb" or item.path.is_relative_to(ROOT / "tests/system"):
            item.add_marker("system")
    order = {f"test_{name}": i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.stem, len(SLOW)))
