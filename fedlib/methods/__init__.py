"""Methods by name. Adding one: write its file, add one line here."""

from collections.abc import Mapping

from ..core.validation import Scalar, check_fields, did_you_mean
from .base import Method
from .jobs import Arrived, Member, Round, Server, Serving, Setting, Stage
from .options import Distillation, ServerStep
from .sliced.decoupled import Decoupled
from .sliced.depthfl import DepthFL
from .sliced.exclusivefl import ExclusiveFL
from .sliced.fedavg import FedAvg
from .sliced.fedavg_level1 import FedAvgLevel1
from .sliced.feddf import FedDF
from .sliced.heterofl import HeteroFL
from .sliced.inclusivefl import InclusiveFL
from .sliced.reefl import ReeFL
from .sliced.scalefl import ScaleFL
from .sliced.scalefl_original import ScaleFLOriginal

METHODS: dict[str, type[Method]] = {
    "exclusivefl": ExclusiveFL,
    "inclusivefl": InclusiveFL,
    "scalefl": ScaleFL,
    "depthfl": DepthFL,
    "reefl": ReeFL,
    "fedavg": FedAvg,
    "heterofl": HeteroFL,
    "scalefl_original": ScaleFLOriginal,
    "decoupled": Decoupled,
    "feddf": FedDF,
    "fedavg_level1": FedAvgLevel1,
}

__all__ = [
    "METHODS", "Arrived", "Distillation", "Member", "Method", "Round", "Server", "ServerStep", "Serving", "Setting",
    "Stage", "build_method", "register",
]  # fmt: skip


def build_method(name: str, options: Mapping[str, Scalar]) -> Method:
    """Return method ``name`` with its options; ``ValueError`` names what is unknown or of a wrong type."""
    if name not in METHODS:
        raise ValueError(f"experiment: method = {name!r} is unknown{did_you_mean(name, METHODS)}")
    return METHODS[name](**check_fields(METHODS[name], options, f"options of {name}"))


def register(name: str):
    """Class decorator for a method that lives outside this package (a notebook, a script)."""

    def add(cls: type[Method]) -> type[Method]:
        if name in METHODS and METHODS[name].__qualname__ != cls.__qualname__:
            raise ValueError(f"a method named {name!r} exists already; choose another name")
        METHODS[name] = cls
        return cls

    return add
