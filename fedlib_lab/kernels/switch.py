"""Which kernels are on: ``$FEDLIB_KERNELS``."""

import os
from functools import cache

from fedlib.core.validation import check_known

VARIABLE = "FEDLIB_KERNELS"
NAMES, ASKED = ("products", "vit_block"), ("graphs", "compiled")  # on by default, and where the variable names them


def is_on(name: str) -> bool:
    """Return whether the kernel ``name`` is on; ``ValueError`` if the variable names an unknown one."""
    return name in _named(os.environ.get(VARIABLE, ",".join(NAMES)))


@cache
def _named(value: str) -> frozenset[str]:
    names = [] if value.strip() in ("", "0") else [word.strip() for word in value.split(",")]
    check_known(names, NAMES + ASKED, f"{VARIABLE} = {value!r}: no kernel is called {{}}")
    return frozenset(names)
