"""Values as bytes that anybody may have sent: tensors as safetensors, the rest as JSON, nothing unpickled."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

SEQUENCES = {"tuple": tuple, "list": list, "frozenset": frozenset}


def serialise(value: object, kinds: Sequence[type] = ()) -> bytes:
    """Serialise numbers, text, tensors (once each), sequences, mappings and dataclasses of ``kinds``.

    ``TypeError`` for anything else.
    """
    from safetensors.torch import save

    tensors: dict[str, torch.Tensor] = {}
    places: dict[int, str] = {}

    def plain(x: Any) -> object:
        if isinstance(x, torch.Tensor):
            if id(x) not in places:
                places[id(x)] = str(len(places))
                tensors[places[id(x)]] = x.detach().to("cpu", copy=True).contiguous()
            return {"tensor": places[id(x)]}
        if x is None or isinstance(x, bool | int | float | str):
            return x
        if isinstance(x, np.generic):
            return x.item()
        if isinstance(x, range):
            return {"range": [x.start, x.stop, x.step]}
        if isinstance(x, Mapping):
            return {"dict": [[plain(k), plain(v)] for k, v in x.items()]}
        if type(x).__name__ in SEQUENCES:
            return {type(x).__name__: [plain(y) for y in x]}
        if type(x) in kinds:
            return {type(x).__name__: [plain(getattr(x, f.name)) for f in fields(x)]}
        raise TypeError(f"{type(x).__name__} cannot be sent: {x!r}")

    return save(tensors, {"value": json.dumps(plain(value))})


def deserialise(data: bytes, kinds: Sequence[type] = ()) -> Any:
    """Invert :func:`serialise`; ``ValueError`` for other bytes. What they hold is the caller's to check."""
    from safetensors.torch import load

    named = {k.__name__: k for k in kinds}
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        tensors = load(data)

        def made(x: Any) -> Any:
            if not isinstance(x, dict):
                return x
            ((kind, parts),) = x.items()
            if kind == "tensor":
                return tensors[parts]
            if kind == "range":
                return range(*parts)
            if kind == "dict":
                return {made(k): made(v) for k, v in parts}
            return SEQUENCES[kind](map(made, parts)) if kind in SEQUENCES else named[kind](*map(made, parts))

        return made(json.loads(header["__metadata__"]["value"]))
    except Exception as error:  # of many types: bytes may be anything
        raise ValueError(f"these {len(data)} bytes are no message: {type(error).__name__}: {error}") from error
