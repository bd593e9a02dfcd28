"""What every notebook asks first: were its parameters spelt right, and who asks? And where goes what it stores?

A notebook that is opened and run shows what is stored at profile ``small``. ``$FEDLIB_PROFILE`` names another for all
that papermill does not tell one; who asks for a trial (smoke, demo) gets it trained, as it takes seconds or minutes.

papermill puts the parameters of its command line into a cell of their own, below the notebook's ``parameters`` cell. It
only warns of a name that the notebook does not know: a run without the asked-for change. Of YAML's words for a bool its
``-p`` knows ``True`` and ``False`` alone: ``false`` would be a string, which counts as true.
"""

import ast
import os
from collections.abc import Sequence

from fedlib.core.paths import TRIALS, use_outputs_of
from fedlib.core.validation import check_known, shown

INJECTED = "# Parameters\n"  # how papermill begins its cell
SHARED = {"profile": str, "overrides": dict, "run_missing": bool, "device": str}  # what notebooks' parameters share


def check_parameters() -> None:
    """Raise ``ValueError`` for a papermill parameter that the ``parameters`` cell does not name, or of another type.

    Those that all notebooks share are looked at in JupyterLab, too; outside a notebook nothing is. A word for a bool
    and a number in quotes become what they say. What a trial's ``profile`` makes goes to ``outputs/scratch``.
    """
    try:
        from IPython import get_ipython
    except ImportError:  # no notebook
        return
    if (shell := get_ipython()) is not None:
        names = shell.user_ns
        given = check_sources(names.get("In", ()))
        names |= given | {n: typed(n, names[n], kind) for n, kind in SHARED.items() if n in names}
        asked = names["profile"] if "profile" in given else os.environ.get("FEDLIB_PROFILE")
        if asked:
            names["profile"] = asked
        if asked in TRIALS and "run_missing" not in given:
            names["run_missing"] = True
        use_outputs_of(names.get("profile", ""))


def check_sources(sources: Sequence[str]) -> dict[str, object]:
    """Check the sources of executed cells (:func:`check_parameters`); return what papermill set, in its own type."""
    given = {}
    for before, source in zip(sources, sources[1:], strict=False):
        if source.startswith(INJECTED):
            given, known = _assigned(source), _assigned(before)
            check_known(given, known, "parameters: unknown name {}")
            given = {n: typed(n, x, type(known[n])) for n, x in given.items()}
    return given


def typed(name: str, value: object, kind: type) -> object:
    """Return ``value`` as a ``kind``, or unchanged where that is the type of None.

    Raise a ``ValueError`` that names the parameter and what it may be.
    """
    from pydantic import TypeAdapter, ValidationError

    if kind is type(None):
        return value
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        allowed = {bool: "True, False", dict: "names and values (papermill -y)"}
        allowed[str] = f"a string (papermill -r {name} ...)"
        raise ValueError(f"parameters: {name} = {shown(value)}; allowed: {allowed.get(kind, kind.__name__)}") from error


def _assigned(source: str) -> dict[str, object]:
    """Return the names that the statements of a cell assign, and what: a value, or code that is none."""
    found = {}
    for s in ast.parse(source).body:
        for name in (t.id for t in (s.targets if isinstance(s, ast.Assign) else ()) if isinstance(t, ast.Name)):
            try:
                found[name] = ast.literal_eval(s.value)
            except ValueError:
                found[name] = ast.unparse(s.value)
    return found
