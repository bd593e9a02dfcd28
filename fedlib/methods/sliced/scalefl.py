"""ScaleFL (Ilhan, Su and Liu, CVPR 2023) as its paper has it: sub-models cut in width and in depth, on any backbone.

Levels (once): per level the most balanced split (s_w, s_d) that costs its share of the whole model; exits after the
N s_d-th unit. Client (level j): units up to exit j, exits 1..j, the leading s_w of every hidden width; outputs of cut
layers divided by s_w; sum over exits i of i / (j (j+1) / 2) [CE_i + gamma tau^2 KL(exit j || exit i)], the second
term once more than a quarter of the rounds is behind. Server: plain mean over the holders of each entry. Evaluated are
all exits of the whole model, and with ``test_split`` each client's own level on its own test set.
``scalefl_vit`` (``scalefl_vit.py``) is the form of ReeFL's comparison, on a ViT.
Read next: ``scaling.py`` (levels), ``losses.py``, ``decoupled.py``.

Deviations: the loss is the release's, by default with a detached teacher and the KL summed over classes; the release's
``detach=False`` lets the teacher learn from its pupils, its ``kl_mean="all"`` divides by the number of classes too;
``objective="paper"`` is the slides' 1 / (j (j+1)) sum i [gamma KL + (1 - gamma) CE]. Heads and concatenations are cut
segment by segment everywhere (the release: only as far as the first exit). Batch norm's statistics are the
experiment's ``batch_norm``, the release's "batch".
"""

import warnings
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from ...core.annotations import NotNegative, Part, Positive
from ...models.vit import ViTSpec
from ..base import Batch, Experiment, Spec, cross_entropies, last_exit
from ..losses import divergences
from ..scaling import Levels


@dataclass(frozen=True)
class ScaleFL(Levels):
    """Four exits are four levels of 1/8, 1/4, 1/2 and all parameters; ``kd_weight=0`` is without self-distillation."""

    label, color, marker = "ScaleFL", "#37ad70", "^"

    version: ClassVar[int] = 3  # distillation started one round early; width alone was priced without all exits

    kd_weight: NotNegative = 0.05  # gamma
    temperature: Positive = 3.0  # tau
    distill_from: Part = 0.25  # of the rounds, without distillation
    objective: Literal["release", "paper"] = "release"
    detach: bool = True
    kl_mean: Literal["batch", "all"] = "batch"  # all: over the classes too

    @property
    def paced_by(self) -> str:
        return "distill_from" if self.kd_weight and self.distill_from else ""

    def check_backbone(self, spec: Spec, e: Experiment) -> None:
        if isinstance(spec, ViTSpec):
            told = "on a ViT ReeFL compares with 'scalefl_vit', its own form of this method"
            warnings.warn(f"scalefl: {told}", stacklevel=2)

    def local_loss(self, batch: Batch) -> torch.Tensor:
        plain = self.distill_from * batch.rounds  # the release's rounds count from 0, and its inequality is strict
        gamma = self.kd_weight if batch.t - 1 > plain or not plain else 0.0
        ce, kl = cross_entropies(batch), 0.0
        if gamma:
            kl = divergences(batch, last_exit(batch), self.temperature, self.detach) * self.temperature**2
            kl = kl / batch.outputs.shape[-1] if self.kl_mean == "all" else kl
        both = (gamma * kl + (1 - gamma) * ce) / 2 if self.objective == "paper" else ce + gamma * kl
        return (exit_shares(batch.held) * both).sum(0)


def exit_shares(held: torch.Tensor) -> torch.Tensor:
    """Weight the i-th of a member's j exits by i / (j (j+1) / 2), (E, M); they sum to one. Zero if not held."""
    place = held.cumsum(0) * held
    return place / place.sum(0)
