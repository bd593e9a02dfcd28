"""Which kernels are on: ``$FEDLIB_KERNELS``."""

import os
from functools import cache

import torch

from fedlib.core.validation import check_known

VARIABLE = "FEDLIB_KERNELS"
COMPILES = torch.__version__ >= (2, 15)  # 2.11 compiles blocks to other gradients; what lies between was not tried
NAMES, ASKED = ("products", "vit_block"), ("graphs", *["compiled"] * COMPILES)  # on by default, and on request


def is_on(name: str) -> bool:
    """Return whether the kernel ``name`` is on; ``ValueError`` if the variable names an unknown one."""
    return name in _named(os.environ.get(VARIABLE, ",".join(NAMES)))


@cache
def _named(value: str) -> frozenset[str]:
    names = [] if value.strip() in ("", "0") else [word.strip() for word in value.split(",")]
    check_known(names, NAMES + ASKED, f"{VARIABLE} = {value!r}: PyTorch {torch.__version__} has no kernel {{}}")
    return frozenset(names)
