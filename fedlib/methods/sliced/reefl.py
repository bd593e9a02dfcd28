"""ReeFL (Lee et al., ICML 2024): one recurrent early exit and one classifier shared by all sub-models.

Client (budget r): blocks up to exit r and the whole of Ree; minimise Eq. 5 with the exit of lowest running loss as
teacher of the others (Eq. 6). Server: the mean over the clients that hold a parameter, weighted by examples.
Read next: ``models/ree.py`` for Eqs. 2-4, ``methods/losses.py`` for Eq. 6, ``methods/server.py`` for the mean.

Deviations: the running loss restarts with every local training, from zero, as released; the paper says per client.
Ree's positions are averaged over all clients although shallow ones never move the deep rows, as released. The ramp of
eta is a fraction of the rounds (0.3), so that shorter experiments see it too; 300 of 1000 rounds in the paper.
"""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch

from ...core.annotations import Count, Fraction, NotNegative, Positive, Share, When
from ...models.exits import SharedClassifier
from ...models.ree import Ree
from ..base import Batch, Experiment, Head, Setting, Spec, cross_entropies, kl_to_teacher
from ..losses import ramp_up
from ..server import ServerStep

REE, TAUGHT = When(use_ree=True), When(distill="best")


@dataclass(frozen=True)
class ReeFL(ServerStep):
    """Ree's shape and the paper's ablations are fields."""

    label, color, marker = "ReeFL", "#d55e00", "o"

    distill: Literal["best", "none"] = "best"  # who teaches (L_kl, Eq. 5); Table 3: none
    kd_weight: Annotated[NotNegative | None, TAUGHT] = None  # eta; None: ramped up over the first rounds
    # of the rounds until eta = 1; the paper's 300 of 1000
    ramp_fraction: Annotated[Fraction, TAUGHT, When(kd_weight=None)] = 0.3
    temperature: Annotated[Positive, TAUGHT] = 1.0  # tau, Eq. 6
    zeta: Annotated[Share, TAUGHT] = 0.2  # running estimate of the loss
    modulate: Annotated[bool, REE] = True  # Eq. 4; Table 4: False
    history: Annotated[Literal["modulated", "raw"], REE] = "modulated"  # raw: Eq. 2 as printed
    only_at_exits: Annotated[bool, REE] = False  # Table 5: True
    use_ree: bool = True  # Appendix G: False leaves the shared classifier alone
    ree_width: Annotated[Count, REE] = 16  # bottleneck of Ree's attention
    ree_heads: Annotated[Count, REE] = 8
    ree_mlp_ratio: Annotated[Positive, REE] = 1.35

    @property
    def paced_by(self) -> str:
        return "ramp_fraction" if self.distill != "none" and self.kd_weight is None else ""

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> Head:
        (dim,) = spec.feature(0)
        if not self.use_ree:
            return SharedClassifier(dim, num_classes, exit_units)
        return Ree(
            dim, spec.depth, num_classes, exit_units, self.ree_width, self.ree_heads, self.ree_mlp_ratio,
            self.modulate, self.history, self.only_at_exits,
        )  # fmt: skip

    def check_backbone(self, spec: Spec, e: Experiment) -> None:
        name, why, allowed = e.backbone, "", "a ViT, Vim or BERT"
        if len(spec.feature(0)) != 1:
            why = f", a {type(spec).__name__.removesuffix('Spec')}'s exits read maps"
        elif self.use_ree and not spec.hands_back:
            why = f", and {name!r} has none that could be handed back"
            allowed = f"use_ree = False, or {allowed} of the kit's own"
        elif self.use_ree and spec.averaged:
            why = f", the exits of {name!r} read the mean of all tokens"
            allowed = f"{name.removesuffix('.mean')!r}, or another ViT, Vim or BERT"
        if why:
            raise ValueError(f"reefl: backbone: Ree needs a class token{why}; allowed: {allowed}")

    def check(self, setting: Setting, e: Experiment) -> None:
        if self.ree_width % self.ree_heads:
            raise ValueError(f"reefl: ree_heads = {self.ree_heads} does not divide ree_width = {self.ree_width}")

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return Eq. 5, (M,): sum_e CE_e + eta * L_kl, Eq. 6 with the exit of lowest running loss as teacher."""
        ce = cross_entropies(batch)  # (E, M)
        if self.distill == "none":
            return ce.sum(0)
        eta = ramp_up(batch.t, self.ramp_fraction * batch.rounds) if self.kd_weight is None else self.kd_weight
        return ce.sum(0) + eta * kl_to_teacher(batch, running_best_exit(batch, ce, self.zeta), self.temperature)


def running_best_exit(batch: Batch, ce: torch.Tensor, zeta: float) -> torch.Tensor:
    """Return the teacher (K,): argmin over held exits of the running loss, L <- (1 - zeta) L + zeta CE, from L = 0.

    The current batch counts. The running loss lives in ``scratch``: it restarts with every local training. zeta = 1
    selects by the mini-batch's own loss.
    """
    past = batch.scratch.get("running_loss", torch.zeros_like(ce))
    batch.scratch["running_loss"] = (1 - zeta) * past + zeta * ce.detach()
    return batch.scratch["running_loss"].masked_fill(batch.held == 0, math.inf).argmin(0)
