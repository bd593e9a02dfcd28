"""All code and values of a user's own that a method reaches are in its digest; of files without meaning nothing is."""

import importlib
import sys
import warnings
from contextlib import contextmanager

import pytest
import torch

from fedlib.methods import METHODS
from fedlib_lab.runs import code_digest as reached
from fedlib_lab.runs.code_digest import UNVERIFIED, code_of, digest_of

METHOD = '''
import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
import helpers
import statistics
from helpers import Colour, Helper, Scheme, averaged, doubled, halved, pull
from package.inner import deep
from torch.nn.functional import relu as act
from fedlib.methods import Method

SCALE = 1.0
TABLE = {"a": pull, "b": [1, 2, {3, 4}]}
NAMES = OrderedDict(x=1)
HELPER = Helper(0.5)
ARRAY = np.arange(4.0)
NET = torch.nn.Sequential(torch.nn.Linear(2, 2))
with torch.no_grad():
    for p in NET.parameters():
        p.fill_(0.25)
half = functools.partial(pull, by=0.5)
unused = 7


def made(factor):
    def inner(x):
        return factor * x
    return inner


closure = made(2)


def scaled(by):
    def layer(f):
        @functools.wraps(f)
        def wrapper(*args):
            return by * f(*args)
        return wrapper
    return layer


def recursive(n):
    return n and other(n - 1)


def other(n):
    return recursive(n)


class Base:
    """What it inherits of its own."""

    rate = 0.1

    def start(self):
        return self.rate


@dataclass(frozen=True)
class Mine(Base, Method):
    """A method of one's own."""

    mu: float = 0.1  # stored as an option
    helper: object = field(default_factory=lambda: Helper(0.25))
    weights: ClassVar[list] = [1, 2, 3]
    shape = (1, 2)
    key = staticmethod(lambda x: x + 1)
    tick = functools.partialmethod(doubled, 3)
    Inner = Scheme

    @scaled(3)
    def local_loss(self, batch):
        """The loss."""
        from lazily import late
        x = SCALE * sum(self.weights)  # a comment
        y = TABLE["a"](x) + helpers.shifted(x) + deep(x) + averaged(x) + late(x)
        z = Colour.RED.value + Scheme().gamma + HELPER.value + ARRAY.sum()
        return act(NET(x)) + half(y) + closure(z) + statistics.mean(x) + halved(x) + recursive(2) + NAMES["x"]

    @torch.no_grad()
    def local_update(self, cohort):
        return self.cached * 1

    @functools.cached_property
    def cached(self):
        return 2

    @property
    def double(self):
        return 2

    @classmethod
    def build(cls):
        return cls.twice(4)

    @staticmethod
    def twice(x, y=2):
        return x * y

    def generate(self, *, gain=1.5):
        return [x + gain for x in range(3)]
'''
HELPERS = """
import enum
import functools
from dataclasses import dataclass, field

OFFSET = 5


class Helper:
    kind = "h"

    def __init__(self, value):
        self.value = value

    def __call__(self, x):
        return x * self.value


@dataclass
class Scheme:
    gamma: float = 0.9
    parts: list = field(default_factory=lambda: [1])


class Colour(enum.Enum):
    RED = 1
    BLUE = 2

    def shade(self):
        return self.value + 1


def pull(x, by=1.0):
    return x * by


def shifted(x):
    return x + OFFSET


def doubled(x, y):
    return x * y


def averaged(x):
    return inner_average(x)


def inner_average(x):
    return x / 2


@functools.lru_cache
def halved(x):
    return x / 2


def never_called(x):
    return x
"""
FILES = {
    "mine.py": METHOD,
    "helpers.py": HELPERS,
    "statistics.py": "def mean(x):\n    return x / 10\n",  # hides the library's
    "lazily.py": "def late(x):\n    return x - 1\n",
    "package/__init__.py": "",
    "package/inner.py": "from . import deeper\n\ndef deep(x):\n    return deeper.go(x)\n",
    "package/deeper.py": "def go(x):\n    return x + 2\n",
}


@contextmanager
def imported(folder, files):
    """The class that ``files`` define, as a fresh process would import it."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    own = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    kept = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield importlib.import_module("mine").Mine
    finally:
        sys.path.remove(str(folder))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(kept)


def read(folder, files):
    with imported(folder, files) as cls:
        return code_of(cls)


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    return read(tmp_path_factory.mktemp("before"), FILES)


EDITS = [
    ("a function", "mine.py", "return x * y\n\n    def generate", "return x + y\n\n    def generate"),
    ("a helper in another module", "helpers.py", "return x * by", "return x * by * 2"),
    ("what that one calls", "helpers.py", "return x / 2\n\n\n@functools", "return x / 3\n\n\n@functools"),
    ("a global of another module", "helpers.py", "OFFSET = 5", "OFFSET = 6"),
    ("a function of a module of its module", "package/deeper.py", "x + 2", "x + 3"),
    ("a function of a package", "package/inner.py", "return deeper", "return 2 * deeper"),
    ("what is imported when it runs", "lazily.py", "x - 1", "x - 2"),
    ("a module named as the library's", "statistics.py", "x / 10", "x / 11"),
    ("a default argument", "mine.py", "x, y=2", "x, y=3"),
    ("a keyword's default", "mine.py", "gain=1.5", "gain=2.5"),
    ("a default of another module", "helpers.py", "by=1.0", "by=2.0"),
    ("a closure", "mine.py", "made(2)", "made(3)"),
    ("a closure's function", "mine.py", "factor * x", "factor - x"),
    ("a partial's argument", "mine.py", "by=0.5", "by=0.75"),
    ("a partial's function", "mine.py", "partial(pull, by", "partial(lambda x, by: x, by"),
    ("a partial method", "mine.py", "doubled, 3", "doubled, 4"),
    ("a function in a dict", "mine.py", '"a": pull', '"a": doubled'),
    ("a global container", "mine.py", "[1, 2, {3, 4}]", "[1, 3, {3, 4}]"),
    ("a set inside it", "mine.py", "{3, 4}", "{3, 5}"),
    ("a global number", "mine.py", "SCALE = 1.0", "SCALE = 1.5"),
    ("an ordered dict", "mine.py", "OrderedDict(x=1)", "OrderedDict(x=2)"),
    ("an array", "mine.py", "arange(4.0)", "arange(4.0) + 1"),
    ("an array's type", "mine.py", "arange(4.0)", "arange(4)"),
    ("a list of the class", "mine.py", "= [1, 2, 3]", "= [1, 2, 4]"),
    ("a tuple of the class", "mine.py", "shape = (1, 2)", "shape = (2, 2)"),
    ("a list appended to later", "mine.py", "unused = 7", "unused = 7\nTABLE['b'].append(9)"),
    ("a helper instance", "mine.py", "Helper(0.5)", "Helper(0.75)"),
    ("a helper's class", "helpers.py", "x * self.value", "x + self.value"),
    ("a helper's class attribute", "helpers.py", 'kind = "h"', 'kind = "g"'),
    ("a helper of a field", "mine.py", "Helper(0.25)", "Helper(0.35)"),
    ("a dataclass's default", "helpers.py", "gamma: float = 0.9", "gamma: float = 0.8"),
    ("a dataclass's factory", "helpers.py", "lambda: [1]", "lambda: [2]"),
    ("a value of an Enum", "helpers.py", "RED = 1", "RED = 3"),
    ("a method of an Enum", "helpers.py", "self.value + 1", "self.value + 2"),
    ("a decorator's argument", "mine.py", "@scaled(3)", "@scaled(4)"),
    ("a decorator's layer", "mine.py", "by * f(*args)", "by + f(*args)"),
    ("no decorator", "mine.py", "    @scaled(3)\n", ""),
    ("under a decorator", "mine.py", "x = SCALE * sum", "x = SCALE + sum"),
    ("under a library's decorator", "mine.py", "self.cached * 1", "self.cached * 2"),
    ("under a cache", "helpers.py", "def halved(x):\n    return x / 2", "def halved(x):\n    return x / 4"),
    ("a cached property", "mine.py", "def cached(self):\n        return 2", "def cached(self):\n        return 3"),
    ("a property", "mine.py", "def double(self):\n        return 2", "def double(self):\n        return 3"),
    ("a class method", "mine.py", "cls.twice(4)", "cls.twice(5)"),
    ("a static lambda", "mine.py", "lambda x: x + 1", "lambda x: x + 2"),
    ("a module's weights", "mine.py", "fill_(0.25)", "fill_(0.5)"),
    ("a module's shape", "mine.py", "torch.nn.Linear(2, 2)", "torch.nn.Linear(2, 2, bias=False)"),
    ("a module's layers", "mine.py", "Linear(2, 2))", "Linear(2, 2), torch.nn.ReLU())"),
    ("an inherited attribute", "mine.py", "rate = 0.1", "rate = 0.2"),
    ("an inherited method", "mine.py", "return self.rate", "return 2 * self.rate"),
    ("a library's function by another name", "mine.py", "import relu as act", "import gelu as act"),
    ("of two that call each other", "mine.py", "return recursive(n)", "return recursive(n - 1)"),
    ("a comprehension", "mine.py", "x + gain for", "x - gain for"),
    ("a base", "mine.py", "class Mine(Base, Method)", "class Mine(Method, Base)"),
]  # fmt: skip


@pytest.mark.parametrize("what, file, old, new", EDITS, ids=[e[0] for e in EDITS])
def test_an_edit_is_noticed(what, file, old, new, tmp_path, before):
    assert FILES[file].count(old) == 1
    after = read(tmp_path, FILES | {file: FILES[file].replace(old, new)})
    assert after != before and not any(str(v).startswith(UNVERIFIED) for v in after.values())


def with_package(folder, version, text="def helped(x):\n    return x\n"):
    """FILES whose method calls an installed package's function; ``version`` None: it says none."""
    site = folder / "site-packages"
    site.mkdir(parents=True)
    (site / "aided.py").write_text(text)
    if version is not None:
        info = site / "Aided_Kit-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: Aided-Kit\nVersion: {version}\n")
        (info / "top_level.txt").write_text("aided\n")
    return site


@pytest.mark.parametrize(
    "how", ["import aided", "from aided import helped", "from aided import Aid", "import aided.inner"]
)
def test_the_version_of_an_installed_package_counts(how, tmp_path, before, monkeypatch):
    """Whether a module, a function, a class or what is imported when it runs; not of what the kit itself needs."""
    call = {"from aided import helped": "helped(1)", "from aided import Aid": "Aid()"}.get(how, "aided.helped(1)")
    old = "        x = SCALE * sum"
    inside = how.endswith("inner")
    text = METHOD.replace(old, f"        {how if inside else 'pass'}\n        {call}\n{old}")
    files = FILES | {"mine.py": text if inside else text.replace("SCALE = 1.0", f"{how}\nSCALE = 1.0", 1)}
    found = []
    for version in ("1.0", "1.0", "2.0", None):
        folder = tmp_path / str(len(found))
        site = with_package(folder, version, "class Aid:\n    pass\n\n\ndef helped(x):\n    return x\n")
        monkeypatch.syspath_prepend(site)
        reached._packages.cache_clear()
        found.append(read(folder / "own", files)["Mine"])
        sys.modules.pop("aided", None)
        monkeypatch.undo()
    first, again, other, unknown = found
    assert first == again and first.endswith(", Aided-Kit==1.0") and other == first.replace("==1.0", "==2.0")
    assert unknown.startswith(UNVERIFIED) and "of aided, which is installed and says no version" in unknown
    assert "==" not in before["Mine"]  # torch and numpy are reached too


UNFOLLOWED = [
    ("a computed import", "importlib.import_module(name)"),
    ("a computed import by another name", "loaded(name)"),
    ("a computed import by a built-in function", "__import__(name)"),
    ("a file that is run", "runpy.run_path(name)"),
    ("a global by its name", "globals()[name]"),
    ("a text that is run", "eval(name)"),
    ("an operator", "torch.ops.mine.op(1)"),
    ("an operator of a module by another name", "pytorch.ops.mine.op(1)"),
    ("operators in a variable", "[o for o in [torch.ops]]"),
    ("an operator that is registered", "torch.library.custom_op('mine::op')"),
    ("operators by another name", "ops.mine.op(1)"),
]  # fmt: skip
LOADS = "import importlib, runpy\nimport torch as pytorch\nfrom importlib import import_module as loaded\nfrom torch import ops\n"


@pytest.mark.parametrize("what, call", UNFOLLOWED, ids=[u[0] for u in UNFOLLOWED])
def test_what_cannot_be_followed_is_unverified(what, call, tmp_path):
    text = METHOD.replace("    x = SCALE * sum", f"    name = 'a'\n        {call}\n        x = SCALE * sum")
    code = read(tmp_path, FILES | {"mine.py": text.replace("\nSCALE = 1.0", f"\n{LOADS}SCALE = 1.0", 1)})["Mine"]
    assert code.startswith(f"{UNVERIFIED}: ") and "local_loss in Mine is " in code


def test_pytorchs_own_operators_are_verified(tmp_path, before):
    text = METHOD.replace("x = SCALE * sum", "self.ops.mine(torch.ops.aten.relu(SCALE))\n        x = SCALE * sum")
    code = read(tmp_path, FILES | {"mine.py": text})["Mine"]
    assert len(code) == 16 and code != before["Mine"]
    assert (
        digest_of(torch.ops.aten.relu.default)
        == digest_of(torch.ops.aten.relu.default)
        != digest_of(torch.ops.aten.relu)
    )
    torch.library.define("fedlib_test::op", "(Tensor x) -> Tensor")
    for value in (torch.ops.fedlib_test, torch.ops.fedlib_test.op, torch.ops.fedlib_test.op.default):
        assert digest_of(value).startswith(UNVERIFIED)


NO_EDITS = [
    ("nothing", "mine.py", "unused", "unused"),
    ("a comment", "mine.py", "  # a comment", ""),
    ("lines above", "mine.py", "import functools\n", "# what follows\n\n\nimport functools\n"),
    ("layout", "mine.py", "x = SCALE * sum(self.weights)", "x = (\n            SCALE * sum(\n                self.weights))"),
    ("quotes", "mine.py", 'TABLE["a"](x)', "TABLE['a'](x)"),
    ("a docstring", "mine.py", '"""The loss."""', '"""What is minimised."""'),
    ("no docstring", "mine.py", '        """The loss."""\n', ""),
    ("a class's docstring", "mine.py", '"""A method of one\'s own."""', '"""Ours."""'),
    ("a global that nothing reads", "mine.py", "unused = 7", "unused = 8"),
    ("a function that nothing calls", "helpers.py", "never_called(x):\n    return x", "never_called(x):\n    return 2"),
    ("an option, which a run stores", "mine.py", "mu: float = 0.1", "mu: float = 0.2"),
    ("the order of definitions", "helpers.py", "OFFSET = 5\n", "EXTRA = 1\nOFFSET = 5\n"),
]  # fmt: skip


@pytest.mark.parametrize("what, file, old, new", NO_EDITS, ids=[e[0] for e in NO_EDITS])
def test_what_means_nothing_is_not_noticed(what, file, old, new, tmp_path, before):
    assert old in FILES[file]
    with warnings.catch_warnings(action="error"):
        assert read(tmp_path, FILES | {file: FILES[file].replace(old, new)}) == before


def test_a_value_that_cannot_be_read_is_said_and_equals_nothing(tmp_path):
    text = METHOD.replace("SCALE = 1.0", "SCALE = threading.Lock()")
    code = read(tmp_path, FILES | {"mine.py": text})["Mine"]
    assert code == f"{UNVERIFIED}: SCALE in f in local_loss in Mine is a _thread.lock, which has no value to compare"


def test_a_module_edited_after_its_import_counts_as_what_runs(tmp_path, before):
    """Read before the edit it keeps its digest; where nobody had read it, its digest is neither the old nor the new."""
    with imported(tmp_path, FILES) as cls:
        assert code_of(cls) == before
        (tmp_path / "helpers.py").write_text(HELPERS.replace("return x * by", "return 9 * x * by"))
        with pytest.warns(UserWarning, match="helpers.py is not what runs: it was edited after its import"):
            assert code_of(cls) == before
        (tmp_path / "helpers.py").write_text(HELPERS.replace("def pull", "# more\ndef pull"))
        with warnings.catch_warnings(action="error"):
            assert code_of(cls) == before  # moved, not edited


def test_a_module_edited_before_anybody_read_it_is_neither_the_old_nor_the_new(tmp_path):
    (tmp_path / "fresh.py").write_text("def f(x):\n    return x + 1234\n")
    sys.path.insert(0, str(tmp_path))
    f = importlib.import_module("fresh").f
    sys.path.remove(str(tmp_path))
    (tmp_path / "fresh.py").write_text("def f(x):\n    return x + 5678\n")
    with pytest.warns(UserWarning, match="fresh.py is not what runs"):
        runs = digest_of(f)
    sys.modules.pop("fresh")
    space = {"__name__": "fresh"}
    exec(compile("def f(x):\n    return x + 5678\n", str(tmp_path / "fresh.py"), "exec"), space)
    (tmp_path / "old.py").write_text("def f(x):\n    return x + 1234\n")
    exec(compile("def f(x):\n    return x + 1234\n", str(tmp_path / "old.py"), "exec"), old := {"__name__": "fresh"})
    assert len({runs, digest_of(space["f"]), digest_of(old["f"])}) == 3


def test_the_kits_own_methods_are_their_versions():
    for method in METHODS.values():
        assert all(isinstance(v, int) for v in code_of(method).values())


def test_a_digest_is_the_same_in_another_process(tmp_path, before):
    """Whatever strings hash to there."""
    import subprocess

    read(tmp_path, FILES)
    text = "import mine; from fedlib_lab.runs.code_digest import code_of; print(code_of(mine.Mine)['Mine'])"
    out = subprocess.run([sys.executable, "-c", text], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == before["Mine"]
