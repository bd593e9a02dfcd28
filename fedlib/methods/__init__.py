"""Methods by name. Adding one: write its file, add one line here."""

from collections.abc import Mapping

from ..core.validation import Scalar, check_fields, did_you_mean
from .base import Method
from .jobs import Arrived, Member, Round, Server, Serving, Setting, Stage
from .personal.cafedistill import CAFEDistill
from .personal.ditto import Ditto
from .personal.fedamp import FedAMP
from .personal.fedbabu import FedBABU
from .personal.fedpac import FedPAC
from .personal.fedper import FedPer
from .personal.fedproto import FedProto
from .personal.fedprox import FedProx
from .personal.fedrep import FedRep
from .personal.fedrod import FedRoD
from .personal.local import Local
from .personal.pfedgraph import PFedGraph
from .server import ServerStep
from .sliced.decoupled import Decoupled
from .sliced.depthfl import DepthFL
from .sliced.exclusivefl import ExclusiveFL
from .sliced.fedavg import FedAvg
from .sliced.fedavg_level1 import FedAvgLevel1
from .sliced.feddf import FedDF
from .sliced.fedepth import FeDepth
from .sliced.fedrolex import FedRolex
from .sliced.fiarse import FIARSE
from .sliced.fjord import FjORD
from .sliced.flexlora import FlexLoRA
from .sliced.flora import FLoRA
from .sliced.heterofl import HeteroFL
from .sliced.hetlora import HetLoRA
from .sliced.inclusivefl import InclusiveFL
from .sliced.raffm import RaFFM
from .sliced.reefl import ReeFL
from .sliced.scalefl import ScaleFL
from .sliced.scalefl_vit import ScaleFLViT
from .sliced.splitmix import SplitMix

METHODS: dict[str, type[Method]] = {
    # what a client cannot hold
    "fedavg": FedAvg,
    "fedavg_level1": FedAvgLevel1,
    "exclusivefl": ExclusiveFL,
    "inclusivefl": InclusiveFL,
    "decoupled": Decoupled,
    "heterofl": HeteroFL,
    "fedrolex": FedRolex,
    "fjord": FjORD,
    "fiarse": FIARSE,
    "scalefl": ScaleFL,
    "scalefl_vit": ScaleFLViT,
    "feddf": FedDF,
    "depthfl": DepthFL,
    "reefl": ReeFL,
    "fedepth": FeDepth,
    "splitmix": SplitMix,
    "raffm": RaFFM,
    "hetlora": HetLoRA,
    "flexlora": FlexLoRA,
    "flora": FLoRA,
    # what a client does not share
    "local": Local,
    "fedprox": FedProx,
    "fedper": FedPer,
    "fedrep": FedRep,
    "fedbabu": FedBABU,
    "fedamp": FedAMP,
    "pfedgraph": PFedGraph,
    "fedrod": FedRoD,
    "ditto": Ditto,
    "fedpac": FedPAC,
    "fedproto": FedProto,
    "cafedistill": CAFEDistill,
}

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
        raise ValueError(f"experiment: method = {name!r} is unknown{now}")
    return METHODS[name](**check_fields(METHODS[name], present_options(name, options), f"options of {name}"))


def present_options(name: str, options: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """``options`` of method ``name`` by the names that they have now: stored runs say older ones."""
    now = {old: new for new, old in OLD_OPTIONS.items() if old not in METHODS[name].__dataclass_fields__}
    return {now.get(k, k): v for k, v in options.items()}


def register(name: str):
    """Class decorator for a method that lives outside this package (a notebook, a script).

    The same class may be defined again, as when a cell is; ``ValueError`` if the name is another method's.
    """

    def add(cls: type[Method]) -> type[Method]:
        known = METHODS.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"a method named {name!r} exists already; choose another name")
        METHODS[name] = cls
        return cls

    return add
