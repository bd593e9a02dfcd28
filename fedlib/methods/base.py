"""What a method is: a frozen dataclass of hyper-parameters with hooks, so the round loop never asks which method runs.

Every default below is FedAvg with early exits: prefix sub-models, the sum of the exits' cross-entropies, one SGD run,
and the mean over the clients that hold an entry. A method overrides what its paper changes.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import nn

from ..core.clients import Client
from ..core.slices import ParamInfo, Slice
from ..models.exits import Classifiers
from ..models.vit import ViTConfig
from .losses import Batch, cross_entropies, kl_to_teacher, last_exit, mutual_kl, ramp_up, running_best_exit  # fmt: skip
from .server import MaskedMean, Sums, Update, fedadam, feddyn_gradient, feddyn_server
from .uploads import UploadOptions, send


@dataclass(frozen=True)
class Setting:
    """What a method may know about the experiment it runs in."""

    config: ViTConfig
    exit_blocks: tuple[int, ...]
    infos: dict[str, ParamInfo]
    num_clients: int
    rounds: int

    @property
    def num_exits(self) -> int:
        return len(self.exit_blocks)


@dataclass(frozen=True)
class Server:
    """The server's state after round ``t``: a value. ``params`` are the trained tensors, ``memory`` the rest."""

    t: int
    params: dict[str, torch.Tensor]
    memory: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Method(UploadOptions):
    """Early-exit federated learning with every choice at its plainest; see the hooks and :class:`UploadOptions`."""

    # Any class of the kit may have its own. Raise it where a change of the class changes what it computes: runs stored
    # before are then refused, not mixed with new ones. Of a class that is not the kit's, the source is compared.
    version: ClassVar[int] = 1

    distill: Literal["none", "best", "mutual", "last"] = "none"  # who teaches whom (L_kl, Eq. 5)
    kd_weight: float | None = None  # eta; None: ramped up over the first rounds
    ramp_fraction: float = 0.3  # of the rounds until eta = 1; the papers' 300 of 1000
    temperature: float = 1.0  # tau, Eq. 6
    zeta: float = 0.2  # running estimate of the loss; distill = best
    aggregation: Literal["mean", "feddyn", "fedadam"] = "mean"
    weighting: Literal["examples", "clients"] = "examples"  # of the mean
    feddyn_alpha: float = 0.1
    server_lr: float = 1e-3  # FedAdam
    beta1: float = 0.9
    beta2: float = 0.999
    adam_tau: float = 1e-6

    def __post_init__(self):
        self.check_uploads(type(self).__name__.lower(), self.weighting)

    # --- what is built -------------------------------------------------------------------------------------------

    def exit_blocks(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """0-based blocks with an exit: every depth/E-th. ``ValueError`` if E does not divide the depth."""
        if depth % num_exits:
            allowed = [e for e in range(1, depth + 1) if depth % e == 0]
            raise ValueError(f"experiment: num_exits = {num_exits} does not divide {depth} blocks; allowed: {allowed}")
        return tuple(range(depth // num_exits - 1, depth, depth // num_exits))

    def build_head(self, dim: int, depth: int, num_classes: int, exit_blocks: tuple[int, ...]) -> nn.Module:
        """The exits: one classifier each."""
        return Classifiers(dim, num_classes, exit_blocks)

    def check(self, setting: Setting, finetune: str) -> None:
        """Raise ``ValueError`` for what this method cannot do, before any compute."""

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """The state before round 1."""
        return Server(0, params, {})

    # --- who trains what -----------------------------------------------------------------------------------------

    def eligible(self, budgets: np.ndarray, setting: Setting) -> np.ndarray:
        """Ids of the clients that may be sampled, given every client's budget."""
        return np.arange(len(budgets))

    def slice_for(self, budget: int, setting: Setting) -> Slice:
        """What a client of this budget holds: the prefix up to its exit, with all exits on the way."""
        return Slice.prefix(setting.exit_blocks[budget] + 1, range(budget + 1))

    def model_for(self, exit: int, setting: Setting) -> Slice:
        """The sub-model whose exit ``exit`` is evaluated: the global model."""
        return Slice.prefix(setting.exit_blocks[-1] + 1, range(setting.num_exits))

    # --- the client ----------------------------------------------------------------------------------------------

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Eq. 5, (K,): sum_e CE_e + eta * L_kl."""
        ce = cross_entropies(batch)  # (E, K)
        loss = ce.sum(0)
        if self.distill == "none":
            return loss
        eta = ramp_up(batch.t, self.ramp_fraction * batch.rounds) if self.kd_weight is None else self.kd_weight
        if self.distill == "mutual":
            return loss + eta * mutual_kl(batch, self.temperature)
        teacher = running_best_exit(batch, ce, self.zeta) if self.distill == "best" else last_exit(batch)
        return loss + eta * kl_to_teacher(batch, teacher, self.temperature)

    def client_update(self, cohort) -> None:
        """Local training of a cohort: SGD on ``local_loss``, with FedDyn's term where that is the aggregation."""
        if self.aggregation != "feddyn":
            cohort.sgd(self.local_loss)
            return
        alpha, start = self.feddyn_alpha, cohort.start
        g = cohort.recall("feddyn_gradient")  # zeros at a client's first participation
        cohort.sgd(self.local_loss, lambda name, p: feddyn_gradient(p, start[name], g[name], alpha))
        cohort.remember("feddyn_gradient", {n: g[n] - alpha * (p - start[n]) for n, p in cohort.params.items()})

    def upload(self, cohort) -> Update:
        """What a trained cohort sends: as it is, or compressed and clipped as the options say."""
        if self.noise_multiplier and cohort.new_memories and not self.remembers:
            raise ValueError(f"{type(self).__name__}: clients keep memory, so its property remembers must be True")
        return send(self, cohort)

    @property
    def remembers(self) -> bool:
        """Do clients keep memory across rounds? (Sampling then hides less: ``privacy.epsilon``.)"""
        return self.aggregation == "feddyn" or self.error_feedback

    # --- the server ----------------------------------------------------------------------------------------------

    def weights_of(self, update: Update) -> list[float]:
        """Each client's weight in the mean."""
        return [float(c.num_examples if self.weighting == "examples" else 1) for c in update.clients]

    def group_of(self, client: Client) -> int:
        """Clients of one group are averaged together; ``aggregate`` sees a mean per group."""
        return 0

    def summarise(self, update: Update, setting: Setting) -> Sums:
        """A cohort's uploads as weighted sums by group; runs where the cohort was trained, so no model travels."""
        groups = [self.group_of(c) for c in update.clients]
        sums = {group: MaskedMean(setting.infos) for group in groups}
        for group, mean in sums.items():
            weights = self.weights_of(update)
            mean.add(update, [w if g == group else 0.0 for w, g in zip(weights, groups, strict=True)])
        return sums

    def aggregate(self, server: Server, sums: Sums, t: int, setting: Setting) -> Server:
        """The mean over the holders of each entry, as it is or as the input of FedDyn or FedAdam."""
        mean = sums[0]
        new, memory = dict(server.params), dict(server.memory)
        for name, value in mean.result(server.params).items():
            theta, count = server.params[name], mean.count[name]
            if self.aggregation == "feddyn":
                h = memory.get(f"h/{name}", torch.zeros_like(theta))
                share = (count / setting.num_clients).to(theta.dtype)
                new[name], memory[f"h/{name}"] = feddyn_server(theta, value, h, share, self.feddyn_alpha)
            elif self.aggregation == "fedadam":
                new[name], moments = self.adam_step(name, theta, theta - value, memory, count > 0)
                memory |= moments
            else:
                new[name] = value
        return replace(server, t=t, params=new, memory=memory)

    def adam_step(self, key: str, theta: torch.Tensor, delta: torch.Tensor, memory: dict, held: torch.Tensor):
        """One FedAdam step whose moments live under ``m/key`` and ``v/key``; entries not ``held`` stay."""
        m, v = (memory.get(f"{x}/{key}", torch.zeros_like(theta)) for x in "mv")
        stepped = fedadam(theta, delta, m, v, self.server_lr, self.beta1, self.beta2, self.adam_tau)
        theta, m, v = (torch.where(held, new, old) for new, old in zip(stepped, (theta, m, v), strict=True))
        return theta, {f"m/{key}": m, f"v/{key}": v}


def clients_of(budgets: np.ndarray, ids: Iterable[int], num_examples: np.ndarray) -> list[Client]:
    """The sampled clients as values."""
    return [Client(int(i), int(budgets[i]), int(num_examples[i])) for i in ids]
