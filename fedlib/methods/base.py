"""What a method is: a frozen dataclass of hyper-parameters with hooks, so the round loop never asks which method runs.

Every default below is FedAvg with early exits: prefix sub-models, the sum of the exits' cross-entropies, one local
training, and the mean over the clients that hold an entry. A method overrides what its paper changes; the words that
all methods use (``Client``, ``Slice``, ``Batch``, …) are imported from here.
Read next: ``values.py`` (the values hooks see), ``losses.py``, ``server.py``, ``sliced/reefl.py``.
"""

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, Literal, NoReturn

import numpy as np
import torch

from ..core.annotations import NotNegative, Positive, When
from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.slices import NOTHING, ParamInfo, Slice  # noqa: F401  the words that methods import from here
from ..core.validation import check_conditions, check_instance
from ..models.backbone import Spec
from ..models.exit_model import ExitModel
from ..models.exits import Head
from ..models.map_exits import classifiers
from .cohort import Cohort
from .losses import Batch, cross_entropies, kl_to_teacher, last_exit
from .sums import MaskedMean, Update
from .uploads import UploadOptions, send
from .values import Arrived, Member, Round, Server, Serving, Setting, Tensors

Sizes = tuple[Collection[int], Collection[int]]  # of the tensors that a client receives, and sends
Measured = Callable[[tuple[int, ...]], Setting]  # the setting, of shapes alone, of a model with exits after these units


@dataclass(frozen=True)
class Method(UploadOptions):
    """Early-exit federated learning with every choice at its plainest; see the hooks and :class:`UploadOptions`."""

    # Any class of the kit may have its own ``version``. Raise it where a change of the class changes what it computes:
    # runs stored before are then refused, not mixed with new ones. Of a class that is not the kit's, the source counts.
    version: ClassVar[int] = 1
    label: ClassVar[str]  # how tables and figures spell it; without one, by its name
    color: ClassVar[str]  # and draw it; without them, in a colour and marker that follow from its name
    marker: ClassVar[str]
    needs_models: ClassVar[bool] = False  # does ``aggregate`` ask for whole models?
    last_answers: ClassVar[bool] = False  # do exits before the last only help to train, and are never asked?
    needs_extras: ClassVar[bool] = False  # or for what single clients send beside them?
    sends_model: ClassVar[bool] = True  # does any parameter leave a client?
    one_slice: ClassVar[bool] = True  # does a client send one model, of the same slice in every round?
    needs_classes: ClassVar[str] = ""  # the part that needs class labels, for an error message

    weighting: Literal["examples", "clients"] = "examples"  # of the mean

    def __post_init__(self):
        name = f"options of {type(self).__name__.lower()}"
        check_instance(self, name)
        check_conditions(self, name)
        for f in fields(self):
            if (said := getattr(type(self), f.name, f.default)) is not f.default:
                self.refuse(f"{f.name} = {said!r} does not count; allowed: with a type, below @dataclass(frozen=True)")
        self.check_options()

    def check_options(self) -> None:
        """Raise ``ValueError`` for options that do not go together; each alone is checked by its annotation."""
        if self.noise_multiplier and self.update_norm is None:
            self.refuse(f"noise_multiplier = {self.noise_multiplier} needs an update_norm: noise is scaled to it")
        if self.noise_multiplier and self.weighting != "clients":
            why = "numbers of examples are private"
            self.refuse(f"noise_multiplier needs weighting = 'clients', not {self.weighting!r}: {why}")
        if self.dp_delta is not None and not self.noise_multiplier:
            self.refuse(f"dp_delta = {self.dp_delta} has no effect without a noise_multiplier")
        if self.noise_multiplier and (self.needs_models or self.needs_extras):
            self.refuse(f"noise_multiplier protects sums; {type(self).__name__.lower()} looks at single clients")
        if not self.sends_model and (self.update_norm is not None or self.compress != "none"):
            self.refuse("no model is sent, so update_norm and compress would have no effect")
        self.check_slices("noise_multiplier", self.noise_multiplier)
        self.check_slices("error_feedback", self.error_feedback)

    def check_slices(self, key: str, asked: object) -> None:
        """Raise ``ValueError`` for an option that a client can only follow if it sends one and the same slice."""
        if asked and not self.one_slice:
            need = "needs clients that send one model, of the same slice in every round"
            self.refuse(f"{key} = {getattr(self, key)} {need}; {type(self).__name__.lower()}'s do not")

    def refuse(self, reason: str) -> NoReturn:
        """Raise ``ValueError``: options do not go together for this ``reason``."""
        raise ValueError(f"options of {type(self).__name__.lower()}: {reason}")

    # --- what is built -------------------------------------------------------------------------------------------

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """Return the 0-based units with an exit: every depth/E-th. ``ValueError`` if E does not divide the depth."""
        if depth % num_exits:
            allowed = [e for e in range(1, depth + 1) if depth % e == 0]
            raise ValueError(f"experiment: num_exits = {num_exits} does not divide {depth} blocks; allowed: {allowed}")
        return tuple(range(depth // num_exits - 1, depth, depth // num_exits))

    def place_exits(self, spec: Spec, num_exits: int, measured: Measured) -> tuple[int, ...]:
        """Choose the units with an exit, where the experiment names none; ``measured`` prices exits elsewhere."""
        return self.exit_units(spec.depth, num_exits)

    def client_budgets(self, num_clients: int, num_exits: int) -> np.ndarray | None:
        """Return each client's budget, (clients,); None: as the experiment's ``budgets`` says."""

    def num_budgets(self, num_exits: int) -> int:
        """Count the budgets that clients may have: one per exit."""
        return num_exits

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> Head:
        """Build the exits: one classifier each."""
        return classifiers(spec, num_classes, exit_units)

    def skips(self, setting: Setting) -> Collection[int]:
        """List the units whose features skip to a later exit (FeDepth), which a frozen backbone's cache keeps; none."""
        return ()

    def configure(self, model: ExitModel) -> None:
        """Set what layers must know for the whole run (``model.context``); nothing by default."""

    def check_backbone(self, spec: Spec, e: Experiment) -> None:
        """Raise ``ValueError`` for a backbone that this method cannot run, before its exits are placed."""

    def check(self, setting: Setting, e: Experiment) -> None:
        """Raise ``ValueError`` for an experiment ``e`` that this method cannot run, before any compute."""

    @property
    def paced_by(self) -> str:
        """Name of the option tied to the total number of rounds; "" if none. Such runs cannot be extended.

        A class of one's own says ``paced_by = ""`` itself, whatever its base says; else its runs are not extended.
        """
        return ""

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """Build the state before round 1."""
        return Server(0, params, {})

    # --- who trains what -----------------------------------------------------------------------------------------

    def eligible(self, budgets: np.ndarray, setting: Setting) -> np.ndarray:
        """Return the ids of the clients that may be sampled, given every client's budget."""
        return np.arange(len(budgets))

    def prepare(self, server: Server, r: Round) -> Tensors:
        """Compute the round's ``notes`` once, before anybody is served; none by default."""
        return {}

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Cut a client's part of the model: the prefix up to its budget's exit, with all exits on the way."""
        if client.budget >= r.setting.num_exits:
            given = f"{type(self).__name__.lower()}: {r.setting.num_exits} exits, and clients of budget {client.budget}"
            raise ValueError(f"{given}; allowed: an exit a budget (exit_units()), or a slice_for() that says otherwise")
        return Slice.prefix(r.setting.exit_units[client.budget] + 1, range(client.budget + 1))

    def personal(self, info: ParamInfo) -> bool:
        """Return whether this parameter stays at the client between rounds; none does."""
        return False

    def members(self, client: Client, server: Server, r: Round) -> Sequence[Member]:
        """List the client's models: one, of ``slice_for``."""
        return [Member(client, self.slice_for(client, server, r))]

    def program(self, client: Client, setting: Setting) -> Hashable:
        """Return a key of the client's training; clients of unequal keys train in separate cohorts. All are equal."""

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """Sizes of the tensors that ``client`` receives, and sends: what costs count.

        ``shared``: sizes by name of what of its model is trained and not personal.
        """
        sizes = shared.values() if self.sends_model else ()
        return sizes, sizes

    # --- under a cap (``atlas/fitting.py``) -----------------------------------------------------------------------

    def at_caps(self, caps: Sequence[float], of: str, slack: float) -> dict[str, object] | None:
        """The fields of an experiment whose budgets meet ``caps`` by themselves; None: ``sizes`` are tried."""

    def sizes(self, depth: int) -> Sequence[float]:
        """What a cap chooses from, smallest first: how many of ``depth`` units a client holds. None: nothing."""
        return range(1, depth + 1)

    def of_sizes(self, sizes: Sequence[float]) -> dict[str, object]:
        """The fields of an experiment whose budgets have these ``sizes``, which increase."""
        return {"num_exits": len(sizes), "exit_blocks": tuple(int(n) - 1 for n in sizes)}

    # --- the client ----------------------------------------------------------------------------------------------

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of the exits' cross-entropies, (M,)."""
        return cross_entropies(batch).sum(0)

    def local_update(self, cohort: Cohort) -> None:
        """Train a cohort: one optimiser run on ``local_loss``."""
        cohort.train(self.local_loss)

    def upload(self, cohort: Cohort) -> Update:
        """Send a trained cohort: as it is, or compressed and clipped as the options say."""
        kept = cohort.new_memories if self.noise_multiplier else {}
        if kept and not self.remembers and cohort.experiment.batch_norm != "local":  # ``privacy_spent`` knows of these
            raise ValueError(f"{type(self).__name__}: clients keep memory, so its property remembers must be True")
        return send(self, cohort)

    @property
    def remembers(self) -> bool:
        """Whether clients keep memory across rounds. (Sampling then hides less: ``privacy.epsilon``.)"""
        return self.error_feedback or type(self).personal is not Method.personal

    # --- the server ----------------------------------------------------------------------------------------------

    def summarise(self, update: Update, setting: Setting) -> MaskedMean:
        """Sum a cohort's uploads, weighted; runs where the cohort was trained, so no model travels."""
        mean = MaskedMean(setting.infos)
        mean.add(update, update.weights(self.weighting))
        return mean

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        """Take the mean over the holders of each entry."""
        return replace(server, t=r.t, params={**server.params, **arrived.mean.result(server.params)})

    # --- answers -------------------------------------------------------------------------------------------------

    def model_for(self, exit: int, server: Server, r: Round) -> Slice | tuple[Slice, ...]:
        """Choose the sub-model whose exit ``exit`` is evaluated on the central test set: what the largest budget holds.

        By default the global model, where anybody holds it: what nobody trains answers nothing. Of several sub-models
        the mean of their outputs does.
        """
        if not self.sends_model:  # the initial model, which nobody trains
            return r.setting.full()
        return self.slice_for(Client(-1, r.setting.at_hand(self.num_budgets(r.setting.num_exits) - 1), 0), server, r)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Answer for a client on its own test set with its members that train, as they are."""
        return Serving(tuple(m for m in self.members(client, server, r) if m.trains))


@dataclass(frozen=True)
class JointExits(Method):
    """Every client trains the whole model, whose m exits count equally: a single-exit method's multi-exit form.

    With one exit it is the method as published. ``distill="last"`` is local distillation: the last exit teaches.
    """

    distill: Literal["none", "last"] = "none"
    kd_weight: Annotated[NotNegative, When(distill="last")] = 1.0
    temperature: Annotated[Positive, When(distill="last")] = 1.0

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Return the whole model: budgets are ignored."""
        return r.setting.full()

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return 1/m sum_j [CE_j + eta KL(p_m || p_j)], (M,)."""
        loss = cross_entropies(batch).sum(0)
        if self.distill == "last":
            loss = loss + self.kd_weight * kl_to_teacher(batch, last_exit(batch), self.temperature)
        return loss / batch.held.sum(0)
