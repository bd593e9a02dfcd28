"""What every notebook asks first: were its parameters spelt right, and who asks? And where goes what it stores?

A notebook that is opened and run shows what is stored at profile ``small``. ``$FEDLIB_PROFILE`` names another for all
that papermill does not tell one; who asks for a trial (smoke, demo) gets it trained, as it takes seconds or minutes.

papermill puts the parameters of its command line into a cell of their own, below the notebook's ``parameters`` cell,
and only warns of a name that the notebook does not know: a run without the asked-for change.
"""

import ast
import os
from collections.abc import Sequence

from ..core.paths import TRIALS, keep_outputs_of
from ..core.validation import check_known

INJECTED = "# Parameters\n"  # how papermill begins its cell


def check_parameters() -> None:
    """``ValueError`` if papermill set a name that the notebook's ``parameters`` cell does not; elsewhere nothing.

    What a trial's ``profile`` makes goes to ``outputs/scratch``.
    """
    try:
        from IPython import get_ipython
    except ImportError:  # no notebook
        return
    shell = get_ipython()
    if shell is not None:
        names = shell.user_ns
        given = check_sources(names.get("In", ()))
        asked = names["profile"] if "profile" in given else os.environ.get("FEDLIB_PROFILE")
        if asked:
            names["profile"] = asked
        if asked in TRIALS and "run_missing" not in given:
            names["run_missing"] = True
        keep_outputs_of(names.get("profile", ""))


def check_sources(sources: Sequence[str]) -> list[str]:
    """:func:`check_parameters` on the sources of the cells that were executed; the names that papermill set."""
    given = []
    for before, source in zip(sources, sources[1:], strict=False):
        if source.startswith(INJECTED):
            given = _assigned(source)
            check_known(given, _assigned(before), "parameters: unknown name {}")
    return given


def _assigned(source: str) -> list[str]:
    """The names that the statements of a cell assign, in order."""
    targets = [t for s in ast.parse(source).body if isinstance(s, ast.Assign) for t in s.targets]
    return [t.id for t in targets if isinstance(t, ast.Name)]
