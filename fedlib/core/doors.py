"""Six doors: what comes in here is known by name and lies elsewhere, and is loaded when it is first asked for.

The lab (``fedlib_lab``) fills these tables before anybody reads them, and so may you. Of a place
``package.module:name`` the name may be left out.
"""

from importlib import import_module
from typing import Any

METHODS: dict[str, str] = {}  # by name, the module whose one class with a label it is (``methods/__init__.py``)
BACKBONES: list[str] = []  # modules with FAMILIES (``models/registry.py``)
TUNERS: list[str] = []  # of the same door: modules with what else trains a backbone (``models/adapters.py``)
READERS: list[str] = []  # modules that find a data set (``data/datasets.py``)
EXECUTORS: dict[str, str] = {}  # by name, what makes one of a federation and an execution (``engine/rounds.py``)
LAYERS: list[str] = []  # modules with what stands in for layers (``layers/overrides.py``)


def install_hint() -> str:
    """Return the end of an error message: what to install where nothing came in by a door, else ""."""
    return "" if METHODS else "; more comes with fedlib-kit[lab]"


def load(place: str) -> Any:
    """Import and return what lies at ``place``; ``ImportError`` as Python says it."""
    module, _, name = place.partition(":")
    found = import_module(module)
    return getattr(found, name) if name else found
