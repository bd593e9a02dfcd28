"""Values that travel between a method and the engine: what a round is, what a client trains, what comes back."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NoReturn, Protocol

import numpy as np
import torch

from ..core.annotations import Natural
from ..core.clients import Client
from ..core.memories import Overlay
from ..core.rng import numpy_generator
from ..core.slices import Axis, ParamInfo, Slice
from ..core.validation import check_type, convert
from ..models.backbone import Spec
from ..models.measure import Measure
from .sums import MaskedMean

Tensors = Mapping[str, torch.Tensor]
Where = Callable[[ParamInfo], bool]


def unknown(*_: object) -> NoReturn:
    """Raise ``ValueError``: this setting was built without data, or this batch without such members. A placeholder."""
    raise ValueError("it is not known here: this setting has no data, or this batch no such members")


class Lab(Protocol):
    """What the server may do itself; two of it need the public examples of an experiment (``public_fraction``)."""

    def answers(self, part: Slice, model: Tensors) -> torch.Tensor:
        """Return outputs (N, C) of ``model``'s last exit, the tensors of ``part`` by local names, on all N examples."""
        ...

    def run_state(self, part: Slice, model: Tensors, state: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Run ``state``, what a stem gives, through ``part``: outputs (exits, N, C), and what each exit reads, (N, d).

        In training, and differentiable.
        """
        ...

    def distil(
        self, params: Tensors, part: Slice, target: torch.Tensor, passes: int, lr: float, patience: int,
        rng: np.random.Generator,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Return the server's tensors of ``part`` of ``params`` after it learned ``target`` (N, C) probabilities."""
        ...


@dataclass(frozen=True)
class Setting:
    """What stays the same in every round and a method may know."""

    spec: Spec
    exit_units: tuple[int, ...]
    infos: Mapping[str, ParamInfo]
    num_clients: int
    rounds: int
    axes: Mapping[str, Axis] = field(default_factory=dict)
    seed: int = 1
    label_counts: Callable[[int], np.ndarray] = unknown  # a client's training examples by label, (classes,)
    batch_size: int = 32  # examples of a local step
    # What parts of the model cost: budgets are solved with it. None before there are shapes, in a check of names alone
    measure: Measure = None  # pyright: ignore[reportAssignmentType]
    frozen: Tensors = field(default_factory=dict)  # the tensors that nobody trains
    # What runs models at the server. None in a setting of shapes alone, and where clients train
    lab: Lab = None  # pyright: ignore[reportAssignmentType]
    budgets: tuple[int, ...] = ()  # those of clients that may be sampled; of names or shapes alone not known
    solved: dict = field(default_factory=dict, compare=False, repr=False)  # what methods work out of it, once: salience

    @property
    def num_exits(self) -> int:
        return len(self.exit_units)

    def at_hand(self, budget: int) -> int:
        """Return the largest budget up to ``budget`` that clients have, or their smallest; itself if none is known."""
        return max((b for b in self.budgets if b <= budget), default=min(self.budgets, default=budget))

    def full(self) -> Slice:
        """Return the whole model."""
        return Slice.prefix(self.exit_units[-1] + 1, range(self.num_exits))

    def cut(self, keep: Callable[[int], int], scale: float = 1.0, start: int | None = None) -> Slice:
        """Cut every axis that may be cut to a rate, by ``leading``, or from ``start`` on by ``rolling``."""
        cut = [axis for axis in self.axes.values() if axis.permutable]
        index = {x.name: x.leading(keep) if start is None else x.rolling(start, keep) for x in cut}
        return replace(self.full(), index=index, scale=scale)


@dataclass(frozen=True)
class Server:
    """The server's state after round ``t``: a value. ``params`` are the trained tensors, ``memory`` the rest.

    ``mirrors`` are tensors that the server keeps for each client; they live on disk (``core/memories.py``).
    """

    t: int
    params: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]
    mirrors: Mapping[int, Tensors] = field(default_factory=dict)

    @property
    def changed(self) -> dict[str, torch.Tensor]:
        """The tensors that nobody trains and the server has changed since (FLoRA): ``frozen/<name>`` of its memory."""
        return {n.removeprefix("frozen/"): x for n, x in self.memory.items() if n.startswith("frozen/")}

    def with_mirrors(self, changes: Mapping[int, Tensors]) -> "Server":
        """Return this server with the mirrors of some clients replaced."""
        return replace(self, mirrors=Overlay(self.mirrors, changes))


@dataclass(frozen=True)
class Round:
    """Round ``t`` as a method's hooks see it; a finished one is ``rounds.Finished``."""

    t: int
    clients: tuple[Client, ...]  # those sampled
    setting: Setting
    notes: Tensors = field(default_factory=dict)  # of ``Method.prepare``

    @property
    def rounds(self) -> int:
        return self.setting.rounds

    def generator(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Return a generator, a function of (seed, purpose, t, client)."""
        return numpy_generator(self.setting.seed, purpose, self.t, client)


@dataclass(frozen=True)
class Member:
    """One model of one client in one round: what it gets, what of it stays, what it sends. A value, made on the driver.

    ``payload["start"]`` replaces what it would have been served; other payloads are read by their key in the cohort.
    """

    client: Client
    part: Slice
    name: str = "model"  # a client's second model has another name
    upload: Slice | None = None  # None: ``part`` without what is personal; ``NOTHING``: the model never leaves
    keeps: Literal["personal", "all"] = "personal"  # all: the whole model lives at the client
    payload: Mapping[str, Tensors] = field(default_factory=dict)
    trains: bool = True  # False: a teacher, run without gradients
    fresh: bool = False  # what its client has kept nothing of starts as initially, not as served

    def __post_init__(self):
        check_type(self.part, Slice, "a member's part, of slice_for(),")


@dataclass(frozen=True)
class Stage:
    """One optimiser run of local training; the defaults are the whole of it.

    What a stage does not train gets no gradient, no decay, no momentum.
    """

    trains: Where | None = None  # None: all that is trainable
    epochs: int | None = None  # None: the experiment's
    units: range | None = None  # FeDepth: earlier units run without gradients, later ones not at all
    exit: int | None = None  # the only one that answers, for the last of ``units`` through ``Backbone.bridge``
    without: Collection[int] = ()  # units that are left out: the next one reads what came before them
    cached: bool = False  # what comes before ``units`` is computed once (``engine/stages.py``)
    lr: float | None = None

    def __post_init__(self):
        convert(self.epochs, Natural | None, "Stage: epochs")
        for key, kind in (("trains", Callable), ("units", range), ("without", Collection)):
            if (given := getattr(self, key)) is not None:
                check_type(given, kind, f"Stage: {key}")
        if self.units is None and (self.exit is not None or self.without or self.cached):
            raise ValueError("Stage: exit, without and cached have no effect without units")
        if self.lr is not None and not (torch.as_tensor(self.lr) >= 0).all():
            raise ValueError(f"Stage: lr = {self.lr}; allowed: a rate from 0, or None")


@dataclass(frozen=True)
class Serving:
    """How a client answers: outputs of ``members`` averaged, perhaps after a throw-away stage."""

    members: tuple[Member, ...]
    tune: Stage | None = None  # FedBABU

    def __post_init__(self):
        if not check_type(self.members, Collection, "serve(): members"):
            raise ValueError("serve(): members = (): nothing would answer; allowed: a model or more")
        for member in self.members:
            check_type(member, Member, "serve(): one of its members")


@dataclass
class Arrived:
    """What a round brought back."""

    mean: MaskedMean  # of the uploads, entry by entry
    extras: Mapping[int, Tensors] = field(default_factory=dict)  # small tensors sent beside a model, by client
    models: Mapping[int, Tensors] = field(default_factory=dict)  # by client; only if ``Method.needs_models``
