"""What every notebook asks first: were its parameters spelt right? And where goes what it stores?

papermill puts the parameters of its command line into a cell of their own, below the notebook's ``parameters`` cell,
and only warns of a name that the notebook does not know: a run without the asked-for change.
"""

import ast
from collections.abc import Sequence

from ..core.paths import keep_outputs_of
from ..core.validation import check_known

INJECTED = "# Parameters\n"  # how papermill begins its cell


def check_parameters() -> None:
    """``ValueError`` if papermill set a name that the notebook's ``parameters`` cell does not; elsewhere nothing.

    What a trial's ``profile`` (smoke, demo) makes goes to ``outputs/scratch``.
    """
    try:
        from IPython import get_ipython
    except ImportError:  # no notebook
        return
    shell = get_ipython()
    if shell is not None:
        check_sources(shell.user_ns.get("In", ()))
        keep_outputs_of(shell.user_ns.get("profile", ""))


def check_sources(sources: Sequence[str]) -> None:
    """:func:`check_parameters` on the sources of the cells that were executed, in order."""
    for before, source in zip(sources, sources[1:], strict=False):
        if source.startswith(INJECTED):
            check_known(_assigned(source), _assigned(before), "parameters: unknown name {}")


def _assigned(source: str) -> list[str]:
    """The names that the statements of a cell assign, in order."""
    targets = [t for s in ast.parse(source).body if isinstance(s, ast.Assign) for t in s.targets]
    return [t.id for t in targets if isinstance(t, ast.Name)]
