"""Where a kernel may stand in for a layer's own code: ``kernels`` puts its functions here, by name.

attend(heads, q, k, v, mask, scale)   ``attention.attend``, or None: not on these inputs
matmul(x, y, to)                      ``linear.matmul``
"""

from collections.abc import Callable

OVERRIDES: dict[str, Callable] = {}
