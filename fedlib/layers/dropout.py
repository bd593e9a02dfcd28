"""Dropout in a cohort: every client draws from its own generator, for its own examples alone, so that who trains
beside it changes nothing."""

import torch
from torch import nn

from .context import Context


class Dropout(nn.Module):
    """Zero with probability ``p`` while clients train, else 1 / (1 - p) as much: entries of (K, B, ...), or with
    ``whole`` all of an example at once (stochastic depth, or drop-connect). Padding is let through.

    Outside of local training, and without ``Context.generators``, nothing is dropped.
    """

    def __init__(self, p: float, whole: bool = False):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout: p = {p} must be in [0, 1)")
        self.p, self.whole, self.context = p, whole, Context()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.context
        if not self.p or not context.training or context.generators is None:
            return x
        real = None if context.weights is None else (context.weights != 0).sum(1).tolist()
        shape = (1,) * (x.dim() - 2) if self.whole else x.shape[2:]
        factor = torch.ones(*x.shape[:2], *shape)
        for k, generator in enumerate(context.generators[: len(x)]):
            n = x.shape[1] if real is None else real[k]  # a client's examples come first
            factor[k, :n] = (torch.rand(n, *shape, generator=generator) >= self.p) / (1 - self.p)
        return x * factor.to(x)
