"""Exits as ScaleFL has them: poolers on sentences, three convolutions on maps, classifiers on a ViT's class token."""

from collections.abc import Sequence

import torch
from torch import nn

from ..layers.linear import Linear
from .backbone import Spec
from .exits import Classifiers
from .map_exits import PooledClassifiers


class Pooler(nn.Module):
    """tanh of a square linear layer on the class token (BERT's pooler), then linear d -> classes."""

    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.pool = Linear(dim, dim, axes=("/pooled", "residual"))
        self.linear = Linear(dim, num_classes, axes=("classes", "/pooled"))

    def forward(self, token: torch.Tensor) -> torch.Tensor:  # (K, B, d) -> (K, B, classes)
        return self.linear(torch.tanh(self.pool(token)))


class Poolers(Classifiers):
    """One pooler and classifier per exit."""

    def __init__(self, dim: int, num_classes: int, exit_units: Sequence[int]):
        super().__init__(dim, num_classes, tuple(exit_units))
        self.exits = nn.ModuleList(Pooler(dim, num_classes) for _ in exit_units)


def scaling_exits(spec: Spec, num_classes: int, exit_units: Sequence[int]) -> nn.Module:
    """The exits that ScaleFL adds to a backbone of shape ``spec``, and its own last one."""
    if len(spec.feature(0)) == 3:
        return PooledClassifiers(spec, num_classes, exit_units, spec.exit_head or spec.early_exit, spec.final_exit)
    kind = Poolers if spec.reads == "tokens" else Classifiers
    return kind(spec.feature(0)[0], num_classes, tuple(exit_units))
