"""Where a project keeps its params and outputs: papermill starts in the caller's folder, nbval in the notebook's."""

import os
from pathlib import Path


def root() -> Path:
    """``$FEDLIB_ROOT``, or the nearest folder upwards that holds ``params/`` and ``notebooks/``, or the current one."""
    if "FEDLIB_ROOT" in os.environ:
        return Path(os.environ["FEDLIB_ROOT"])
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / "params").is_dir() and (p / "notebooks").is_dir()), here)


def outputs_dir() -> Path:
    """Stored runs, tables and figures; ``$FEDLIB_OUTPUTS`` overrides the default ``<root>/outputs``."""
    return Path(os.environ.get("FEDLIB_OUTPUTS", root() / "outputs"))


def params_dir() -> Path:
    """The layered YAML files."""
    return root() / "params"
