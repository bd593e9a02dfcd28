"""Where something may stand in for a layer's own code, by name. What the door ``doors.LAYERS`` names puts it here.

matmul(x, y, to)   ``linear.matmul``
swap_in(model)     the model that was built, with modules of another class
begin(products)    before a run's first round on a CPU; ``Execution.products``
repeat(...)        the steps of a local training, if it returns True (``Cohort.train``)

``FLOPS`` has what operations of PyTorch's kind count that PyTorch does not know, by operation.
"""

from collections.abc import Callable
from typing import Any

from ..core import doors

OVERRIDES: dict[str, Callable] = {}
FLOPS: dict[Any, Callable] = {}


def override(name: str) -> Callable | None:
    """Return the replacement for ``name`` among all that the door names; None if there is none."""
    for place in doors.LAYERS:
        doors.load(place)
    return OVERRIDES.get(name)
