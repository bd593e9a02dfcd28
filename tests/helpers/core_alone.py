"""The core without the lab: ``python -m pytest -p tests.helpers.core_alone tests/core`` hides all that the lab brings.

``fedlib_lab`` and the packages of the extra ``lab`` cannot be imported, and a test that asks for one of them, or is told
to install the extra, is skipped. Whatever else fails, fails. ``make core`` runs it where these packages are not there.
"""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

EXTRA = "fedlib-kit[lab]"
IMPORTED = {"ipywidgets": "ipywidgets", "pillow": "PIL"}  # a package by another name
PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def of_the_lab() -> set[str]:
    """Names of modules at the top that only the lab needs."""
    names = {x.split(">")[0].split("<")[0].strip() for x in PROJECT["optional-dependencies"]["lab"]}
    return {IMPORTED.get(n, n.replace("-", "_")) for n in names} | {"fedlib_lab"}


HIDDEN = {n for n in of_the_lab() if n == "fedlib_lab" or importlib.util.find_spec(n) is None}


class Hide:
    """Python's import system finds nothing of the lab."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def lacks(error: BaseException | None) -> bool:
    """Does ``error``, or what it came from, say that something of the lab is not there?"""
    while error is not None:
        name = getattr(error, "name", None) if isinstance(error, ImportError) else None
        if EXTRA in str(error) or (name or "").partition(".")[0] in HIDDEN:
            return True
        error = error.__cause__ or error.__context__
    return False


class OfTheCore(pytest.Module):
    """A file of tests; where it imports something of the lab it is skipped as a whole."""

    def _getobj(self):
        try:
            return super()._getobj()
        except self.CollectError as error:
            if lacks(error):
                pytest.skip("is of the lab", allow_module_level=True)
            raise


def pytest_pycollect_makemodule(module_path, parent):
    return OfTheCore.from_parent(parent, path=module_path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except Exception as error:
        if lacks(error):
            pytest.skip("is of the lab")
        raise


pytest_runtest_setup = pytest_runtest_call  # a fixture may ask for it too
sys.meta_path.insert(0, Hide)
