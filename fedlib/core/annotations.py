"""What the annotations of a dataclass say of its fields, for ``validation.py`` to hold values to."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

Scalar = bool | int | float | str | None | tuple
Count = Annotated[int, Ge(1)]
Rounds = Annotated[int, Ge(1), Le(10**6)]  # a stored run that says more keeps no look-up busy
Natural = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Gt(0), Le(1)]
Fraction = Annotated[float, Ge(0), Le(1)]
Part = Annotated[float, Ge(0), Lt(1)]


class When:
    """A field counts only if its dataclass's other fields are as given (one value, or a tuple of allowed ones).

    ``When(distill=("best", "mutual"))``: elsewhere a value other than the default is refused, as it would do nothing.
    """

    def __init__(self, **switches: object):
        self.switches = {k: v if isinstance(v, tuple) else (v,) for k, v in switches.items()}
