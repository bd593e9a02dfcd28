"""Test-wide settings: nothing a test stores lands in the project's outputs, nothing untracked there is read."""

import atexit
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


def pytest_configure(config):
    if hasattr(config.option, "nbval_lax"):  # a machine that is lent for minutes may lack nbval
        config.option.nbval_lax, config.option.nbval_cell_timeout = True, 600


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.suffix == ".ipynb" or item.path.is_relative_to(ROOT / "tests/system"):
            item.add_marker("system")
    order = {f"test_{name}": i for i, name in enumerate(SLOW)}
    items.sort(key=lambda item: order.get(item.path.stem, len(SLOW)))
