"""What code a method is: the versions of the kit's own classes, digests of the source of a user's.

A digest covers what a class defines, and the functions, classes and constants of its own module that this code names.
Fields do not count (a run stores their values), nor do layout, comments and docstrings, nor the code of other modules.
"""

import ast
import dis
import functools
import hashlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Mapping
from weakref import WeakKeyDictionary

KIT = "fedlib"
_told: WeakKeyDictionary[type, str] = WeakKeyDictionary()  # digests of classes whose source another process has


def code_of(method: type) -> dict[str, int | str]:
    """For each class that ``method`` is made of: its ``version`` if it is the kit's, else the digest of its source."""
    out: dict[str, int | str] = {}
    for cls in method.__mro__:
        package = cls.__module__.partition(".")[0]
        if package == KIT:
            if "version" in vars(cls):
                out[cls.__name__] = cls.version
        elif package not in sys.stdlib_module_names:
            out[cls.__name__] = _told.get(cls) or _digest("\n".join(_class(cls, set())))
    return out


def tell(method: type, code: Mapping[str, int | str]) -> None:
    """Use ``code`` as :func:`code_of` of ``method``: a class that was sent to this process came without its source."""
    for cls in method.__mro__:
        if isinstance(code.get(cls.__name__), str):
            _told[cls] = code[cls.__name__]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _class(cls: type, seen: set[object]) -> Iterator[str]:
    yield f"class {cls.__name__}({', '.join(b.__name__ for b in cls.__bases__)})"
    fields = getattr(cls, "__dataclass_fields__", {})
    for name, value in sorted(vars(cls).items()):
        if name not in fields and (not name.startswith("__") or _functions(value)):
            yield from _named(name, value, cls.__module__, seen)


def _named(name: str, value: object, module: str, seen: set[object]) -> Iterator[str]:
    """What ``value`` is and, if it is code of ``module``, what that names in turn; nothing of other modules."""
    if _is_constant(value):
        yield f"{name} = {value!r}"
    elif isinstance(value, type):
        if value.__module__ == module and value not in seen:
            seen.add(value)
            yield from _class(value, seen)
    else:
        for function in _functions(value):
            if function.__module__ == module and function not in seen:
                seen.add(function)
                yield f"{name}: {_text(function)}"
                for other in sorted(_globals(function.__code__) & function.__globals__.keys()):
                    yield from _named(other, function.__globals__[other], module, seen)


def _is_constant(value: object) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return value is None or type(value) in (bool, int, float, str)


def _functions(value: object) -> list[types.FunctionType]:
    """The functions behind a function, method or property."""
    if isinstance(value, property):
        parts = [value.fget, value.fset]
    elif isinstance(value, functools.cached_property):
        parts = [value.func]
    else:
        parts = [value.__func__ if isinstance(value, (classmethod, staticmethod)) else value]
    unwrapped = [inspect.unwrap(p) for p in parts if callable(p)]
    return [f for f in unwrapped if isinstance(f, types.FunctionType)]


@functools.lru_cache(maxsize=4096)  # of the function that runs: its file may be edited later
def _text(function: types.FunctionType) -> str:
    """Source without comments, layout and docstrings; where there is none (a bare ``exec``), the compiled code."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError):  # SyntaxError: a lambda inside an expression
        made = function.__name__ in ("__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__")
        return "made by dataclass" if made else _compiled(function.__code__)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def _compiled(code: types.CodeType) -> str:
    constants = [_compiled(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {constants}"


@functools.lru_cache(maxsize=4096)
def _globals(code: types.CodeType) -> set[str]:
    """Names of the globals that ``code`` and the functions inside it read."""
    own = {i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"}
    return own.union(*(_globals(c) for c in code.co_consts if isinstance(c, types.CodeType)))
