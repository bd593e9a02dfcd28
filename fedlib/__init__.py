"""fedlib: federated learning with early-exit networks on heterogeneous clients.

An :class:`Experiment` is a value; :func:`run` turns it into a stored result. ``notebooks/walkthrough`` shows the rest.
"""

from contextlib import suppress
from typing import TYPE_CHECKING

from .core.experiment import Experiment
from .core.threads import wait_passively

if TYPE_CHECKING:  # what ``__getattr__`` finds
    from fedlib_lab.formats.readers import register_data
    from fedlib_lab.report.frames import runs_frame
    from fedlib_lab.runs.export import save_model
    from fedlib_lab.runs.extend import extend
    from fedlib_lab.runs.params import recipe
    from fedlib_lab.runs.run_paths import forget
    from fedlib_lab.runs.store import run, run_all
    from fedlib_lab.runs.sweep import sweep
    from fedlib_lab.runs.verify import verify
    from fedlib_lab.zoo.families import defaults_of, wrap

    from .engine.executors import Execution
    from .engine.federation import build_federation
    from .engine.rounds import run_rounds

wait_passively()
with suppress(ModuleNotFoundError):  # the core alone
    import fedlib_lab  # noqa: F401  which fills the doors of ``core/doors.py``: the one place that names it

__all__ = ["Experiment", "Execution", "build_federation", "defaults_of", "extend", "forget", "register_data", "recipe",
           "run", "run_all", "run_rounds", "runs_frame", "save_model", "sweep", "verify", "wrap"]  # fmt: skip

_LAZY = {
    "Execution": "fedlib.engine.executors", "run_rounds": "fedlib.engine.rounds",
    "build_federation": "fedlib.engine.federation", "extend": "fedlib_lab.runs.extend",
    "save_model": "fedlib_lab.runs.export", "forget": "fedlib_lab.runs.run_paths", "recipe": "fedlib_lab.runs.params",
    "run": "fedlib_lab.runs.store", "run_all": "fedlib_lab.runs.store", "sweep": "fedlib_lab.runs.sweep",
    "wrap": "fedlib_lab.zoo.families", "register_data": "fedlib_lab.formats.readers",
    "defaults_of": "fedlib_lab.zoo.families", "runs_frame": "fedlib_lab.report.frames",
    "verify": "fedlib_lab.runs.verify",
}  # fmt: skip


def __getattr__(name: str):
    """Import the engine only when it is used: ``import fedlib`` stays fast."""
    if name == "__version__":  # of the git tag that was installed
        from importlib.metadata import distributions

        return next((d.version for d in distributions(name="fedlib-kit")), "not installed")
    if name not in _LAZY:
        raise AttributeError(f"module 'fedlib' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if "fedlib_lab" not in _LAZY[name]:
            raise
        text = f"fedlib.{name} is of the lab, and {error.name} is not installed: pip install 'fedlib-kit[lab]'"
        raise ImportError(text) from error


def __dir__() -> list[str]:
    """What there is, imported or not: completion and ``help(fedlib)`` show it."""
    return sorted({*globals(), *_LAZY})
