"""A digest of all code and values of a user's own that a method, or a backbone, reaches.

Whatever lies neither in Python's library, nor in an installed package, nor in the kit is followed: functions (their
source, defaults, closures, the globals and modules that they name, what they import), every layer of a decorator,
classes, containers and instances by value, weights by their bytes. Of Python's library, the kit and what the kit needs
the name counts (of the kit without folders, which may change), of other installed packages the version too. What has
no value that could be read (a lock, an open file) or cannot be followed (an import by a computed name, somebody's
operator in ``torch.ops``) leaves the run ``unverified``: it equals no other.
Read next: ``sources.py`` (what a function's code says).
"""

import copyreg
import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.util
import re
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from importlib import metadata
from typing import Any

import numpy as np
import torch

from .sources import TORCHS, Import, names_in, owner, text_of

UNVERIFIED, KIT = "unverified", "fedlib-kit"
CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
CACHED = type(functools.lru_cache(lambda: None))
PARTS = {  # what is made of other code, and where it keeps that
    classmethod: ("__func__",), staticmethod: ("__func__",), property: ("fget", "fset", "fdel"),
    CACHED: ("__wrapped__",), functools.cached_property: ("func",), types.MethodType: ("__func__", "__self__"),
}  # fmt: skip
BUILT_IN = (
    types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.ClassMethodDescriptorType,
    types.MethodWrapperType, types.MemberDescriptorType, types.GetSetDescriptorType,
)  # fmt: skip
COMPUTED = {"import_module", "__import__", "exec_module", "run_path", "run_module"}  # who names these imports anything
WHOLE = {"getattr", "vars", "__dict__", "globals", "eval", "exec"}  # who names these may reach all of a module


def code_of(method: type) -> dict[str, int | str]:
    """Return, for each class that ``method`` is made of, its ``version`` if it is the kit's, else its code's digest.

    And the digests of functions and classes of one's own that were put into one of the kit's, or into its module.
    """
    out: dict[str, int | str] = {}
    for cls in method.__mro__:
        if (whose := _class_owner(cls)) == "own":
            out[cls.__name__] = digest_of(cls, method.__mro__)
        elif whose == "kit":
            out |= {cls.__name__: vars(cls)["version"]} if "version" in vars(cls) else {}
            places = {**vars(sys.modules[cls.__module__]), **vars(cls)}
            out |= {f"{cls.__name__}.{name}": digest_of(x) for name, x in places.items() if _is_own(x)}
    return out


def digest_of(value: object, method: Collection[type] = ()) -> str:
    """Return 16 hex digits for all that ``value`` reaches, with packages and their versions; or ``unverified: why``.

    Plain defaults of fields of ``method``'s classes do not count: a run stores their values. Warns of files that were
    edited after their import: what runs, and counts, is the older code.
    """
    walk = _Walk(method)
    walk.way.append(getattr(value, "__name__", type(value).__name__))
    try:
        digest = hashlib.sha256("\n".join(walk.value(value)).encode(errors="surrogatepass")).hexdigest()[:16]
    except (_Unreadable, RecursionError) as error:
        return f"{UNVERIFIED}: {' in '.join(walk.way[::-1])} is {str(error)[:200]}"
    for file in sorted(walk.edited):
        why = f"{file} is not what runs: it was edited after its import. A run says what runs; to run what is written,"
        warnings.warn(f"{why} restart Python (a notebook's kernel), or reload it", stacklevel=2)
    return ", ".join([digest, *sorted(walk.packages)])


class _Unreadable(Exception):
    """A value that could not be read."""


class _Walk:
    """One walk from a class or a value to all that it reaches."""

    def __init__(self, method: Collection[type], of: "_Walk | None" = None):
        self.method = set(method)
        self.edited, self.packages = (of.edited, of.packages) if of is not None else (set(), set())
        self.seen: dict[object, tuple[int, object]] = {}  # kept alive: an id is not given twice
        self.way: list[str] = []  # names that lead to what is being read

    def named(self, name: str, value: object, used: Collection[str] | None = None) -> Iterator[str]:
        self.way.append(name)
        yield name
        yield from self.module(value, used) if isinstance(value, types.ModuleType) else self.value(value)
        self.way.pop()

    def each(self, values: Mapping[str, object]) -> Iterator[str]:
        for name in sorted(values):
            yield from self.named(name, values[name])

    def met(self, whose: str, name: str | None) -> None:
        """Note the package that a library's module ``name`` is of; a function may bear the name of what it wraps."""
        if whose == "library" and name:
            self.packages |= _packages(name.partition(".")[0])

    def value(self, x: Any) -> Iterator[str]:
        kind = type(x)
        if x is importlib.import_module or x is __import__:
            raise _Unreadable("a function that imports what its argument says")
        if kind in CONSTANTS:
            yield repr(x)
            return
        if kind is not tuple:  # equal tuples may be one object or two
            if id(x) in self.seen:
                yield f"again {self.seen[id(x)][0]}"
                return
            self.seen[id(x)] = len(self.seen), x
        parts = next((names for of, names in PARTS.items() if isinstance(x, of)), None)
        yield kind.__name__
        if isinstance(x, types.ModuleType):
            yield from self.module(x, None)
        elif isinstance(x, type):
            yield from self.class_(x)
        elif isinstance(x, types.FunctionType):
            yield from self.function(x)
        elif isinstance(x, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            yield _checked(str(x))
        elif isinstance(x, BUILT_IN):
            if (module := sys.modules.get(getattr(x, "__module__", None) or "")) is not None:
                self.met(_module_owner(module), module.__name__)
            yield f"{getattr(x, '__module__', None)}.{x.__qualname__}"
            if not isinstance(of := getattr(x, "__self__", None), (types.ModuleType, type(None))):
                yield from self.value(of)
        elif parts is not None:
            for name in parts:
                yield from self.value(getattr(x, name))
        elif isinstance(x, enum.Enum):
            yield from self.named(str(x.name), kind)
        elif kind in (tuple, list):
            for item in x:
                yield from self.value(item)
        elif kind in (set, frozenset):
            yield from sorted("\n".join(_Walk(self.method, self).value(item)) for item in x)
        elif kind in (dict, types.MappingProxyType):
            for key, item in x.items():
                yield from self.value(key)
                yield from self.named(str(key)[:40], item)
        else:
            yield from self.instance(x)

    def module(self, x: types.ModuleType, used: Collection[str] | None) -> Iterator[str]:
        """Yield the name of a library's module; of one's own module what is ``used`` of it (None: all)."""
        name = x.__name__
        yield _checked(name.removeprefix("torch.ops.")) if name.startswith("torch.ops") else _module_name(name)
        if (whose := _module_owner(x)) != "own":
            self.met(whose, name)
            return
        whole = used is None or WHOLE & set(used)
        found = {k for k in vars(x) if not k.startswith("__")} if whole else set(used or ()) & vars(x).keys()
        if (key := (id(x), frozenset(found))) not in self.seen:
            self.seen[key] = len(self.seen), x
            for name in sorted(found):
                yield from self.named(name, vars(x)[name], used)

    def function(self, f: types.FunctionType) -> Iterator[str]:
        code, whose = f.__code__, owner(f.__code__.co_filename)
        if _made(f) or whose != "own":
            self.met(whose, f.__globals__.get("__name__"))
            yield f"{_module_name(f.__module__)}.{f.__qualname__}"
        else:
            text, edited = text_of(code)
            self.edited |= {code.co_filename} if edited else set()
            yield text
            yield from self.value(f.__defaults__)
            yield from self.value(f.__kwdefaults__)
            yield from self.globals(f)
        is_named = whose != "own" and getattr(sys.modules.get(f.__module__), f.__qualname__, 0) is f  # of a library
        if not _made(f) and not is_named:
            for name, cell in zip(code.co_freevars, f.__closure__ or (), strict=True):
                yield from self.named(name, "empty" if cell == types.CellType() else cell.cell_contents)
        yield from self.each(vars(f))

    def globals(self, f: types.FunctionType) -> Iterator[str]:
        read, used, imports, operators = names_in(f.__code__)
        if computed := sorted(COMPUTED & used | {"eval", "exec", "globals"} & read - f.__globals__.keys()):
            raise _Unreadable(f"a function that imports, or reads, what is not written in it, by {computed[0]}")
        if any(name == "torch" or f.__globals__.get(name) is torch for name in operators):
            raise _Unreadable("a function that uses an operator of torch.ops whose code is not known")
        for name in sorted(k for k in read & f.__globals__.keys() if not k.startswith("__")):
            yield from self.named(name, f.__globals__[name], used)
        for wanted in imports:
            if isinstance(module := _imported(wanted, f.__globals__), str):
                self.met("library", module)
            yield from self.named(wanted[0], module, used)

    def class_(self, c: type) -> Iterator[str]:
        whose = _class_owner(c)
        yield f"{_module_name(c.__module__)}.{c.__qualname__}" if whose != "own" else c.__qualname__
        if whose != "own":
            self.met(whose, c.__module__)
            yield from self.value(vars(c).get("version") if whose == "kit" else None)
            return
        for base in (*c.__bases__, type(c)):
            yield from self.value(base)
        # a ClassVar is none
        fields = {k: f for k, f in vars(c).get("__dataclass_fields__", {}).items() if f in dataclasses.fields(c)}
        for name, f in fields.items():
            inherited = any(getattr(b, "__dataclass_fields__", {}).get(name) is f for b in c.__mro__[1:])
            if not inherited and not (c in self.method and _is_plain(f.default)):
                yield from self.named(name, (f.default, f.default_factory))
        members = getattr(c, "__members__", {}) if issubclass(c, enum.Enum) else {}
        yield from self.each({k: m.value for k, m in members.items()})
        for name, x in sorted(vars(c).items()):
            if name not in fields and name not in members and _counts(name, x, c):
                yield from self.named(name, x)

    def instance(self, x: object) -> Iterator[str]:
        """Yield an instance's class and state: weights by their bytes, anything else as it would be copied."""
        yield from self.value(type(x))
        if isinstance(x, torch.nn.Module):
            yield from self.each({k: v for k, v in vars(x).items() if not k.startswith("_") or v})
            return
        try:
            if isinstance(x, torch.Tensor):
                data = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                state = (str(x.dtype), tuple(x.shape), x.requires_grad, hashlib.sha256(data).hexdigest())
            elif isinstance(x, np.ndarray) and not x.dtype.hasobject:
                state = (x.dtype.str, x.shape, hashlib.sha256(np.ascontiguousarray(x)).hexdigest())
            else:
                state = copyreg.dispatch_table.get(type(x), lambda x: x.__reduce_ex__(2))(x)
                state = (*state[:3], *map(list, filter(None, state[3:5]))) if isinstance(state, tuple) else state
        except Exception as error:  # any class's own code
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise _Unreadable(f"a {kind}, which has no value to compare") from error
        yield from self.value(state)


@functools.cache
def _packages(root: str) -> frozenset[str]:
    """Return ``{name==version}`` of the package that module ``root`` is of; empty for Python's and what the kit needs.

    Empty too where the kit itself is not installed, so that nobody knows what it needs.
    """
    same = lambda name: re.sub(r"[-_.]+", "-", name).lower()  # noqa: E731
    needs = {same(re.split(r"[^\w.-]", need)[0]) for d in metadata.distributions(name=KIT) for need in d.requires or ()}
    if not needs or root in sys.stdlib_module_names or same(root) in needs:
        return frozenset()
    owners = set(metadata.packages_distributions().get(root, ()))
    if any(same(name) in needs for name in owners):
        return frozenset()
    found = {f"{name}=={metadata.version(name)}" for name in owners}
    if not found or any(p.endswith("==None") for p in found):
        raise _Unreadable(f"of {root}, which is installed and says no version")
    return frozenset(found)


def _module_name(module: str | None) -> str:
    """Return a module's name; for the kit's only the last part, so that files may move between its folders."""
    parts = str(module).split(".")
    return f"fedlib.{parts[-1]}" if parts[0] in ("fedlib", "fedlib_lab") else ".".join(parts)


def _checked(operator: str) -> str:
    if operator.partition(".")[0] not in TORCHS:
        raise _Unreadable(f"an operator of torch.ops, {operator}, whose code is not known")
    return f"torch.ops.{operator}"


def _imported(wanted: Import, space: Mapping[str, Any]) -> object:
    """Return the module that a function imports when it runs; a library's name if not loaded; None if there is none."""
    name, level, parts = wanted
    try:
        name = importlib.util.resolve_name("." * level + name, space.get("__package__") or "")
        root = name.partition(".")[0]
        spec = None if root in sys.modules else importlib.util.find_spec(root)
        if spec is not None and owner(spec.origin) != "own":
            return name
        module = importlib.import_module(name)
        for part in parts:
            if _module_owner(module) == "own" and hasattr(module, "__path__") and not hasattr(module, part):
                importlib.import_module(f"{name}.{part}")
        return module
    except ImportError:
        return None


def _module_owner(module: types.ModuleType) -> str:
    if module.__name__ in sys.builtin_module_names:
        return "library"
    return owner(getattr(module, "__file__", None) or next(iter(getattr(module, "__path__", ())), None))


def _class_owner(cls: type) -> str:
    module = sys.modules.get(cls.__module__)
    return "own" if module is None else _module_owner(module)


def _made(f: types.FunctionType) -> bool:
    """Return whether ``dataclass`` or ``namedtuple`` wrote ``f``, so that the fields say it all."""
    return f.__code__.co_qualname.startswith("__create_fn__") or str(f.__module__).startswith("namedtuple_")


def _counts(name: str, x: object, c: type) -> bool:
    """Return whether ``x`` is part of what class ``c`` does, and not written by Python."""
    if name == "_abc_impl" or (issubclass(c, enum.Enum) and name.startswith("_") and name.endswith("_")):
        return isinstance(x, types.FunctionType) and owner(x.__code__.co_filename) == "own"
    if not name.startswith("__") or name.startswith("__annotate"):  # Python 3.14's annotations, to be evaluated
        return not name.startswith("__")
    if not isinstance(f := _inner(x), types.FunctionType) or _made(f):
        return False
    return _is_own(f) or (bool(f.__closure__) and name != "__repr__")


def _inner(x: object) -> object:
    """Return the function that a method, a property or a cached function ``x`` is made of; else ``x`` itself."""
    return next(getattr(x, PARTS[of][0]) for of in PARTS if isinstance(x, of)) if isinstance(x, tuple(PARTS)) else x


def _is_own(x: object) -> bool:
    """Return whether ``x`` is a class or a function of one's own."""
    if isinstance(f := _inner(x), types.FunctionType):
        return not _made(f) and owner(f.__code__.co_filename) == "own"
    return isinstance(f, type) and _class_owner(f) == "own"


def _is_plain(value: object) -> bool:
    """Return whether JSON can hold ``value``, so that a run stores it among its options."""
    return all(map(_is_plain, value)) if type(value) is tuple else type(value) in (type(None), bool, int, float, str)
