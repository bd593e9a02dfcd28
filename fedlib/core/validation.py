"""Values from YAML, notebooks and callers: converted to a dataclass's types, or refused in one sentence."""

import dataclasses
import difflib
import math
import reprlib
import sys
import types
import typing
from collections.abc import Iterable, Mapping

Scalar = bool | int | float | str | None | tuple


class _Short(reprlib.Repr):
    """``repr`` for messages: a value of any size or depth takes a line or two."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 12, 12, 12
        self.maxstring, self.maxother, self.maxlong = 120, 120, 60

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


shown = _Short().repr


def did_you_mean(value: object, allowed: Iterable[str]) -> str:
    """The tail of an error message: the nearest allowed name, then all of them."""
    allowed = sorted(map(str, allowed))
    near = difflib.get_close_matches(value if isinstance(value, str) else shown(value), allowed, 1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" allowed: {', '.join(allowed)}"


def check_fields(cls: type, values: Mapping[str, object], where: str) -> dict[str, object]:
    """Return ``values`` converted to the types of dataclass ``cls``'s fields.

    Raises ``ValueError`` naming ``where``, the key, the bad value and what is allowed.
    """
    hints, names = typing.get_type_hints(cls), {f.name for f in dataclasses.fields(cls)}
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} = {shown(values)}: expected a mapping of names to values")
    out = {}
    for key, value in values.items():
        if key not in names:
            raise ValueError(f"{where}: unknown key {shown(key)}{did_you_mean(key, names)}")
        out[key] = _convert(value, hints[key], f"{where}: {key}")
    return out


def _convert(value: object, hint: object, where: str) -> object:
    """Accept exactly the YAML spellings of ``hint``: an int for a float, a list for a tuple, nothing looser."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        options = [a for a in args if a is not type(None)]
        for option in options:
            try:
                return _convert(value, option, where)
            except ValueError:
                if option is options[-1]:
                    raise
    if origin is typing.Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ValueError(f"{where} = {shown(value)} is not possible{did_you_mean(value, args)}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(_convert(v, args[0], where) for v in value)
        raise ValueError(f"{where} = {shown(value)}: expected a list")
    if origin in (Mapping, dict) or hint in (Mapping, dict):
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            return {k: _scalar(v, f"{where}.{k[:40]}") for k, v in sorted(value.items())}
        raise ValueError(f"{where} = {shown(value)}: expected a mapping of names to values")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # neither NaN, nor infinite, nor an integer that no float can hold
            return float(value)
        raise ValueError(f"{where} = {shown(value)}: expected a finite number")
    if isinstance(hint, type) and type(value) is hint:
        return _scalar(value, where)
    raise ValueError(
        f"{where} = {shown(value)}: expected {getattr(hint, '__name__', hint)}, got {type(value).__name__}"
    )


def _scalar(value: object, where: str, depth: int = 3) -> Scalar:
    """A value as JSON can hold it: bool, number, string, None, or a list of such (a tuple here)."""
    if isinstance(value, (list, tuple)) and depth:
        return tuple(_scalar(v, where, depth - 1) for v in value)
    if type(value) is int and abs(value) >= 2**63 or type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} = {shown(value)}: expected a finite number of at most 64 bits")
    if type(value) is str and len(value) > 1000:
        raise ValueError(f"{where} = {shown(value)}: {len(value)} characters are too many")
    if not (value is None or type(value) in (bool, int, float, str)):
        raise ValueError(f"{where} = {shown(value)}: expected a number, a string, true, false, null or a list of such")
    return value
