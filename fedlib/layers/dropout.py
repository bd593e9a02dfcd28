"""Dropout in a cohort: every client draws from its own generator, for its own examples alone, so that who trains
beside it changes nothing."""

import torch
from torch import nn

from ..core.devices import to_device
from .context import Context


class Dropout(nn.Module):
    """Zero with probability ``p`` while clients train, else 1 / (1 - p) as much: entries of (K, B, ...), or with
    ``whole`` all of an example at once (stochastic depth, or drop-connect). Padding is let through.

    Where layers know of one model alone, x is (B, ...) of one member or of all, one below another
    (``Context.members``). Outside of local training, and without ``Context.generators``, nothing is dropped.
    """

    def __init__(self, p: float, whole: bool = False):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout: p = {p} must be in [0, 1)")
        self.p, self.whole, self.context = p, whole, Context()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context, members = self.context, self.context.members
        if not self.p or not context.training or context.generators is None:
            return x
        if members is None:
            return self._dropped(x, range(len(x)))
        return self._dropped(x.unflatten(0, (len(members), -1)), members).flatten(0, 1)

    def _dropped(self, x: torch.Tensor, members: range) -> torch.Tensor:
        """Drop entries of x (K, B, ...), whose K clients are ``members`` of the cohort."""
        shape = (1,) * (x.dim() - 2) if self.whole else x.shape[2:]
        factor = torch.ones(*x.shape[:2], *shape)
        for k, member in enumerate(members):
            n = self._examples(member, x.shape[1])
            drawn = torch.rand(n, *shape, generator=self.context.generators[member])
            factor[k, :n] = (drawn >= self.p) / (1 - self.p)
        return x * to_device(factor, x.device).to(x.dtype)

    def _examples(self, member: int, rows: int) -> int:
        """Count the rows of a member that are examples: these come first."""
        weights = self.context.weights
        return rows if weights is None else int((weights[member] != 0).sum())


class TokenDropout(Dropout):
    """:class:`Dropout` of (K, B, T, d), or of attention (K, B, heads, T, T), whose T may be a batch's longest row.

    An entry is dropped by where it stands and one number that its client drew, so that neither longer rows beside it
    nor the device change what is dropped.
    """

    def _dropped(self, x: torch.Tensor, members: range) -> torch.Tensor:
        drawn = [
            int(torch.randint(2**31, (), generator=self.context.generators[m])) if self._examples(m, x.shape[1]) else 0
            for m in members
        ]
        at = to_device(torch.tensor(drawn, dtype=torch.int32), x.device).view(-1, *(1,) * (x.dim() - 1))
        for dim in range(1, x.dim()):
            places = torch.arange(x.shape[dim], dtype=torch.int32, device=x.device)
            at = hash_bits_(at + places.view(-1, *(1,) * (x.dim() - 1 - dim)))
        return x.masked_fill((at >> 8 & 0xFFFFFF) < int(self.p * 2**24), 0.0) / (1 - self.p)


def hash_bits_(x: torch.Tensor) -> torch.Tensor:
    """Make every bit of int32 ``x`` depend on all others, in place (C. Wellons' lowbias32)."""
    x ^= x >> 16 & 0xFFFF
    x *= 0x7FEB352D
    x ^= x >> 15 & 0x1FFFF
    x *= 0x846CA68B - 2**32
    x ^= x >> 16 & 0xFFFF
    return x
