"""Values from YAML, notebooks and callers: converted to a dataclass's types, or refused in one sentence.

A field's annotation says all that it may be: its type, the options of a ``Literal``, its limits and when it counts.
``beta: Annotated[float, Ge(0), Lt(1), When(aggregation="fedadam")] = 0.9``; the limits are annotated_types' own.
"""

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le, Lt

from .annotations import Scalar, When

LIMITS = {
    Gt: ("above", operator.gt),
    Ge: ("at least", operator.ge),
    Lt: ("below", operator.lt),
    Le: ("at most", operator.le),
}


class _Short(reprlib.Repr):
    """``repr`` for messages: a value of any size or depth takes a line or two."""

    def __init__(self):
        super().__init__()
        self.maxlevel, self.maxlist, self.maxtuple, self.maxdict = 3, 12, 12, 12
        self.maxstring, self.maxother, self.maxlong = 120, 120, 60

    def repr_int(self, x: int, level: int) -> str:
        return super().repr_int(x, level) if x.bit_length() < 1000 else f"an integer of {x.bit_length()} bits"


shown = _Short().repr


class Fixed(dict):
    """A mapping that does not change: what a frozen dataclass holds."""

    def _refuse(*_: object, **__: object) -> Any:
        raise TypeError("an experiment is a value and does not change; make another: e.replace(options={...})")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self):
        return Fixed, (dict(self),)


def did_you_mean(value: object, allowed: Iterable[object]) -> str:
    """Return the end of an error message: the nearest allowed name, then all of them."""
    allowed = sorted(map(str, allowed))
    near = difflib.get_close_matches(value if isinstance(value, str) else shown(value), allowed, 1)
    return (f"; did you mean {near[0]!r}?" if near else ";") + f" allowed: {', '.join(allowed)}"


def check_all(*checks: Callable[[], object]) -> None:
    """Run every check; raise one ``ValueError`` with all sentences that they raise, each on a line of its own."""
    said = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            said.append(str(error))
    if said:
        raise ValueError("\n".join(said))


def check_known(names: Iterable[object], allowed: Collection[object], says: str) -> None:
    """Raise ``ValueError`` for the first of ``names`` that is not ``allowed``: ``says``, with it in place of {}."""
    for name in names:
        if name not in allowed:
            raise ValueError(says.replace("{}", shown(name)) + did_you_mean(name, allowed))


def check_type(value: Any, kind: Any, where: str) -> Any:
    """Return ``value``, called ``where``; ``ValueError`` if it is not of type ``kind``."""
    if not isinstance(value, kind):
        raise ValueError(f"{where} = {shown(value)}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def check_fields(cls: type, values: Mapping[str, object], where: str) -> dict[str, Any]:
    """Return ``values`` converted to the types of dataclass ``cls``'s fields and checked against their limits.

    Raises ``ValueError`` naming ``where``, the key, the bad value and what is allowed.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{where} = {shown(values)}: expected a mapping of names to values")
    check_names(cls, values, where)
    plain = (str, int, float, bool, type(None))  # of which grids have thousands alike
    return {k: (_once if type(v) in plain else _once.__wrapped__)(cls, k, v, where) for k, v in values.items()}


@functools.lru_cache(maxsize=16384, typed=True)  # 1 is not 1.0
def _once(cls: type, key: str, value: object, where: str) -> Any:
    return convert(value, field_hints(cls)[key], f"{where}: {key}")


def check_names(cls: type, names: Iterable[object], where: str) -> None:
    """Raise ``ValueError`` for the first of ``names`` that is no field of dataclass ``cls``, with the nearest one."""
    check_known(names, {f.name for f in dataclasses.fields(cls)}, f"{where}: unknown key {{}}")


def check_instance(instance: Any, where: str) -> None:
    """Convert and check every field of a frozen dataclass in place: what its ``__post_init__`` calls."""
    values = {f.name: getattr(instance, f.name) for f in dataclasses.fields(instance)}
    for key, value in check_fields(type(instance), values, where).items():
        object.__setattr__(instance, key, value)


def check_conditions(instance: Any, where: str) -> None:
    """Raise ``ValueError`` for fields that differ from their default and do nothing (:class:`When`), a line each."""
    said = []
    for f in dataclasses.fields(instance):
        given = getattr(instance, f.name)
        if given != f.default and (missing := unmet_condition(instance, f.name)):
            switch, allowed = missing
            why = f"has no effect with {switch} = {shown(getattr(instance, switch))}"
            needs = f"it needs {switch} = {' or '.join(map(shown, allowed))}"
            said.append(f"{where}: {f.name} = {shown(given)} {why}; {needs}")
    if said:
        raise ValueError("\n".join(said))


def unmet_condition(instance: Any, name: str) -> tuple[str, tuple] | None:
    """Return the first field that makes field ``name`` do nothing (:class:`When`), and its needed values; else None."""
    for condition in typing.get_args(field_hints(type(instance))[name])[1:]:
        for switch, allowed in condition.switches.items() if isinstance(condition, When) else ():
            if getattr(instance, switch) not in allowed:
                return switch, allowed
    return None


class NamedFields:
    """A dataclass that refuses an unknown keyword by name, as :func:`check_fields` does."""

    def __new__(cls, *_: Any, **named: Any):
        check_names(cls, named, cls.__name__.lower())
        return super().__new__(cls)


@functools.cache
def field_hints(cls: type) -> dict[str, Any]:
    """Return the annotations of dataclass ``cls``'s fields; a field that is only re-typed keeps its base's limits.

    ``temperature: float = 3.0`` in a subclass changes the default and keeps the limits; ``distill: str = "last"`` keeps
    the options. A ``Literal`` or limits of the subclass's own replace the base's.
    """
    hints: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        own = typing.get_type_hints(base, include_extras=True)
        for name in inspect.get_annotations(base):
            known = hints.get(name)
            anew = known is None or own[name] != _plain(own[name]) or own[name] != _plain(known)
            hints[name] = own[name] if anew else _without_conditions(known)
    return hints


def _plain(hint: Any) -> Any:
    """Return ``hint`` without limits and options: the type alone."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        return _plain(args[0])
    if origin is typing.Literal:
        return type(args[0])
    if origin in (typing.Union, types.UnionType):
        return functools.reduce(lambda a, b: a | b, map(_plain, args))
    return tuple[tuple(map(_plain, args))] if origin is tuple else hint


def _without_conditions(hint: Any) -> Any:
    """Return ``hint`` without :class:`When`: a field that is declared anew may serve something else."""
    if typing.get_origin(hint) is not Annotated:
        return hint
    bare, *extras = typing.get_args(hint)
    return functools.reduce(lambda of, x: Annotated[of, x], (x for x in extras if not isinstance(x, When)), bare)


def convert(value: object, hint: Any, where: str) -> Any:
    """Convert ``value``, called ``where``, to the type of ``hint`` within its limits.

    ``ValueError`` if it does not fit.

    Accept the spellings of ``hint`` in YAML and numpy: an int for a float, a list or array for a tuple, no more.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        out = convert(value, args[0], where)
        told = [(*LIMITS[k], getattr(m, k.__name__.lower())) for m in args[1:] if (k := type(m)) in LIMITS]  # Gt(gt=0)
        if out is not None and not all(allows(out, limit) for _, allows, limit in told):
            allowed = " and ".join(f"{words} {limit:g}" for words, _, limit in told)
            raise ValueError(f"{where} = {shown(out)} must be {allowed}")
        return out
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        kinds = [a for a in args if a is not type(None)]  # a misspelt word is told which words there are
        *others, last = sorted(kinds, key=lambda a: isinstance(value, str) and typing.get_origin(a) is typing.Literal)
        for option in others:
            with suppress(ValueError):
                return convert(value, option, where)
        return convert(value, last, where)
    value = _as_python(value)
    if origin is typing.Literal:
        if isinstance(value, str) and value in args:
            return value
        raise ValueError(f"{where} = {shown(value)} is not possible{did_you_mean(value, args)}")
    if origin is tuple:
        if isinstance(value, (list, tuple)):
            return tuple(convert(v, args[0], where) for v in value)
        raise ValueError(f"{where} = {shown(value)}: expected a list")
    if origin in (Mapping, dict) or hint in (Mapping, dict):
        if type(value) is Fixed:  # as this returned it
            return value
        if isinstance(value, Mapping) and all(isinstance(k, str) for k in value):
            return Fixed({k: _scalar(v, f"{where}.{k[:40]}") for k, v in sorted(value.items())})
        raise ValueError(f"{where} = {shown(value)}: expected a mapping of names to values")
    if hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # neither NaN, nor infinite, nor an integer that no float can hold
            return float(value)
        raise ValueError(f"{where} = {shown(value)}: expected a finite number")
    if isinstance(hint, type) and type(value) is hint:
        return _scalar(value, where)
    expected = getattr(hint, "__name__", hint)
    raise ValueError(f"{where} = {shown(value)}: expected {expected}, got {type(value).__name__}")


def _as_python(value: Any) -> Any:
    """Convert a numpy scalar or array to Python numbers and lists, a path to a string; return anything else as it is.

    A relative path of one part gets its ``./``: a plain word would name something else.
    """
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, os.PathLike) and isinstance(text := os.fspath(value), str):
        return text if os.sep in text else os.path.join(os.curdir, text)
    return value


def _scalar(value: Any, where: str, depth: int = 3) -> Scalar:
    """Convert to what JSON can hold: bool, number, string, None, or a list of such (a tuple here)."""
    value = _as_python(value)
    if depth and isinstance(value, (list, tuple)):
        return tuple(_scalar(v, where, depth - 1) for v in value)
    if type(value) is int and abs(value) >= 2**63 or type(value) is float and not math.isfinite(value):
        raise ValueError(f"{where} = {shown(value)}: expected a finite number of at most 64 bits")
    if type(value) is str and len(value) > 1000:
        raise ValueError(f"{where} = {shown(value)}: {len(value)} characters are too many")
    if not (value is None or type(value) in (bool, int, float, str)):
        raise ValueError(f"{where} = {shown(value)}: expected a number, a string, true, false, null or a list of such")
    return value
