"""How products of float32 numbers are computed: as IEEE 754 says, unless an experiment names something else.

PyTorch's own defaults differ by operation (TF32 in convolutions on a GPU), and a program may have changed them.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from ..core.experiment import Experiment
from ..core.threads import Switches

PRODUCTS = {"cpu": Switches(), "cuda": Switches()}  # one kind of device does not wait for the other
_CUDA = (
    (torch.backends.cudnn, "allow_tf32"),  # the former switches first: beside only the present ones they are errors
    (torch.backends.cuda.matmul, "allow_tf32"),
    (torch.backends.cudnn.conv, "fp32_precision"),  # pyright: ignore[reportAttributeAccessIssue]
    (torch.backends.cudnn.rnn, "fp32_precision"),  # pyright: ignore[reportAttributeAccessIssue]
    (torch.backends.cuda.matmul, "fp32_precision"),
    (torch.backends.cudnn, "deterministic"),
    (torch.backends.cudnn, "benchmark"),
)
_CPU = (torch.backends.mkldnn.matmul, "fp32_precision"), (torch.backends.mkldnn.conv, "fp32_precision")  # pyright: ignore


def arithmetic(precision: str, device: torch.device) -> AbstractContextManager[None]:
    """Compute products of float32 on ``device`` in this ``Experiment.precision`` inside the block.

    ``tf32`` says so itself; under ``bfloat16`` autocast casts, and the rest is IEEE. On a GPU, cuDNN's convolutions
    also repeat their numbers. ``RuntimeError`` if another thread of the process runs with another precision.
    """
    tf32 = precision == "tf32"
    values = {"allow_tf32": tf32, "fp32_precision": "tf32" if tf32 else "ieee", "deterministic": True}
    kind, switches = ("cuda", _CUDA) if device.type == "cuda" else ("cpu", _CPU)
    return PRODUCTS[kind].held([(partial(_ask, *at), partial(_set, *at), values.get(at[1], False)) for at in switches])


def _ask(owner: Any, name: str) -> Any:
    try:
        return getattr(owner, name)
    except RuntimeError:  # a former switch, of which PyTorch cannot tell what the present ones say
        return None


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not None:
        setattr(owner, name, value)


def check_precision(e: Experiment, device: str) -> None:
    """Raise ``ValueError`` if ``device``, or a switch around the run, cannot compute in the experiment's precision."""
    if e.precision == "tf32" and not device.startswith("cuda"):
        raise e.refused("precision", f"is of GPUs, and this one trains on {device}", "float32, bfloat16")
    found = torch.is_grad_enabled(), any(map(torch.is_autocast_enabled, ("cpu", "cuda"))), torch.get_default_dtype()
    if found != (True, False, torch.float32):
        raise ValueError("a run inside no_grad, autocast or another set_default_dtype; allowed: one outside of these")
