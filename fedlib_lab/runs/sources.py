"""What a function's code says, so that two Pythons, two machines and two layouts of one text agree.

It is the syntax tree of its source, without comments, layout and docstrings, where the file still holds the code that
runs. Where it does not (the file was edited after its import) it is what was read when it did; where that never was
(a bare ``exec``, a rewritten tree), the compiled code, which differs between versions of Python.
"""

import __future__

import ast
import dis
import functools
import linecache
import os
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path

KIT = tuple(os.path.realpath(Path(__file__).parents[2] / package) for package in ("fedlib", "fedlib_lab"))
LIBRARIES = tuple(os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib"))
INSTALLED = {"site-packages", "dist-packages"}
WITHOUT_MEANING = ("kind", "ctx", "type_comment")  # fields of syntax trees
TORCHS = ("aten", "prim", "prims")  # in ``torch.ops``, PyTorch's own
Import = tuple[str, int, tuple[str, ...]]  # module, dots before it, what of it
_read: dict[types.CodeType, str] = {}  # of code that runs: its file may be edited later


@functools.lru_cache(maxsize=4096)
def owner(file: str | None) -> str:
    """Say whose code lies in ``file``: "kit", "library" (Python's own, or an installed package's), or "own"."""
    if file is None or file.startswith("<"):
        return "library" if file and file.startswith("<frozen") else "own"
    path = os.path.realpath(file)
    if any(Path(path).is_relative_to(package) for package in KIT):
        return "kit"
    installed = INSTALLED & {*Path(file).parts, *Path(path).parts}
    return "library" if installed or any(Path(path).is_relative_to(x) for x in LIBRARIES) else "own"


def text_of(code: types.CodeType) -> tuple[str, bool]:
    """Return what ``code`` says, and whether its file says it no longer."""
    linecache.checkcache(code.co_filename)
    source, own = "".join(linecache.getlines(code.co_filename)), _essence(code)
    of_name = _parsed(source, code.co_flags & __future__.annotations.compiler_flag).get(code.co_qualname, ())
    if (found := next((tree for essence, tree in of_name if essence == own), None)) is not None:
        _read[code] = found
        return found, False
    return _read.get(code) or repr(own), bool(source)


@functools.lru_cache(maxsize=64)
def _parsed(source: str, flags: int) -> dict[str, list[tuple[tuple, str]]]:
    """Return, by qualified name of each function in ``source``, what its code does, and its syntax trees."""
    try:
        tree = ast.parse(source)
        module = compile(source, "<source>", "exec", flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    except (SyntaxError, ValueError):
        return {}
    trees: dict[tuple[int, str], str] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            line = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            key = line, getattr(node, "name", "<lambda>")  # several lambdas on a line count as one
            trees[key] = trees.get(key, "") + _dump(node)
    out: dict[str, list[tuple[tuple, str]]] = {}
    for code in _inside(module):
        if (key := (code.co_firstlineno, code.co_name)) in trees:
            out.setdefault(code.co_qualname, []).append((_essence(code), trees[key]))
    return out


def _dump(node: object) -> str:
    """Write a syntax tree as text that is the same in every version of Python: what is empty is left out."""
    if isinstance(node, list):
        return f"[{', '.join(map(_dump, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = {k: v for k, v in ast.iter_fields(node) if k not in WITHOUT_MEANING and v not in (None, [])}
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and ast.get_docstring(node) is not None:
        fields["body"] = node.body[1:] or [ast.Pass()]
    return f"{type(node).__name__}({', '.join(f'{k}={_dump(v)}' for k, v in fields.items())})"


@functools.lru_cache(maxsize=4096)
def _essence(code: types.CodeType) -> tuple:
    """Return all of ``code`` that decides what it does: no lines, no file."""
    order = lambda c: sorted(map(repr, c)) if isinstance(c, frozenset) else c  # noqa: E731
    constants = tuple(_essence(c) if isinstance(c, types.CodeType) else repr(order(c)) for c in code.co_consts)
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    return code.co_code, constants, names, counts, code.co_exceptiontable


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inside(constant)


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[set[str], set[str], list[Import], set[str]]:
    """List globals that ``code`` and functions inside it read, all names they use, what they import, and operators.

    The last are names of whose ``ops`` or ``library`` they take something: where that is torch's, another's operators.
    """
    read, used, imports, operators = set(), set(), [], set()
    for part in _inside(code):
        used |= set(part.co_names)
        done = [i for i in dis.get_instructions(part) if i.opname != "EXTENDED_ARG"]
        read |= {i.argval for i in done if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")}
        for level, names, here in zip(done, done[1:], done[2:], strict=False):
            if here.opname == "IMPORT_NAME":
                imports.append((here.argval, level.argval, tuple(names.argval or ())))
            if names.argval in ("ops", "library") and here.argval not in TORCHS:
                operators.add(level.argval)
    return read, used, sorted(imports), operators
