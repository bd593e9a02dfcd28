"""Methods by name: those of the five papers here, others by the door ``doors.METHODS`` or by :func:`register`."""

import difflib
import warnings
from collections.abc import Mapping
from importlib import import_module

from ..core import doors
from ..core.annotations import Scalar
from ..core.validation import check_fields, did_you_mean
from .base import Method
from .server import ServerStep
from .values import Arrived, Member, Round, Server, Serving, Setting, Stage

NAMES = {  # of files, each of which holds the method of its name
    "sliced": (
        "fedavg", "fedavg_level1", "exclusivefl", "inclusivefl", "decoupled", "heterofl", "scalefl", "scalefl_vit",
        "feddf", "depthfl", "reefl", "fedepth", "splitmix", "raffm",
    ),
    "personal": (
        "local", "fedprox", "fedper", "fedrep", "fedbabu", "fedamp", "pfedgraph", "fedrod", "ditto", "fedpac",
        "cafedistill",
    ),
}  # fmt: skip


def _method_in(module: str) -> type[Method]:
    """Return the one class in ``module`` that has a label."""
    return next(c for c in vars(import_module(module)).values() if isinstance(c, type) and "label" in vars(c))


METHODS = {name: _method_in(f"{__name__}.{folder}.{name}") for folder, names in NAMES.items() for name in names}
METHODS |= {name: _method_in(module) for name, module in doors.METHODS.items()}
RENAMED = {"scalefl_original": "scalefl"}
OLD_OPTIONS = {"update_norm": "clip_norm"}  # what stored runs call them

__all__ = [
    "METHODS", "Arrived", "Member", "Method", "Round", "Server", "ServerStep", "Serving", "Setting",
    "Stage", "build_method", "register",
]  # fmt: skip


def build_method(name: str, options: Mapping[str, Scalar]) -> Method:
    """Return method ``name`` with its options; ``ValueError`` names what is unknown or of a wrong type."""
    if name not in METHODS:
        now = f"; it is now called {RENAMED[name]!r}" if name in RENAMED else did_you_mean(name, METHODS)
        raise ValueError(f"experiment: method = {name!r} is unknown{now}{doors.install_hint()}")
    return METHODS[name](**check_fields(METHODS[name], present_options(name, options), f"options of {name}"))


def present_options(name: str, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Rename ``options`` of method ``name`` as they are called now: stored runs have older names."""
    now = {old: new for new, old in OLD_OPTIONS.items() if old not in METHODS[name].__dataclass_fields__}
    return {now.get(k, k): v for k, v in options.items()}


GONE = {  # hooks of earlier versions, and what does their work
    "weights_of": "summarise weighs: update.weights(self.weighting)",
    **dict.fromkeys(("effort", "training_mib"), "what training takes is counted as it runs"),
}


def register(name: str):
    """Register a method class that lives outside this package (a notebook, a script); a class decorator.

    The same class may be defined again, as when a cell is; ``ValueError`` if the name is another method's, or if the
    class has a hook that nothing calls any more.
    """

    def add(cls: type[Method]) -> type[Method]:
        if not isinstance(name, str) or not (isinstance(cls, type) and issubclass(cls, Method)):
            raise ValueError(f"register({name!r}) of {cls!r}; allowed: a name, above a class that derives from Method")
        for own in (n for n, x in vars(cls).items() if n[0] != "_" and callable(x) and not hasattr(Method, n)):
            if near := difflib.get_close_matches(own, [n for n in vars(Method) if n[0] != "_"], 1, 0.8):
                warnings.warn(f"method {name!r}: {own}() is no hook; did you mean {near[0]}()?", stacklevel=2)
        if gone := [f"{hook} ({instead})" for hook, instead in GONE.items() if hasattr(cls, hook)]:
            raise ValueError(f"method {name!r} has hooks that nothing calls any more: {', '.join(gone)}")
        known = METHODS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"a method named {name!r} exists already; choose another name")
        METHODS[name] = cls
        return cls

    return add
