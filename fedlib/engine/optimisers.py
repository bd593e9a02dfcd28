"""Optimisers of local training: SGD, Adam and AdamW on leaves that are stacked over the members of a cohort.

Leaf i is (len(rows[i]), *shape): its rows are the members ``rows[i]``, in increasing order. One step, in this order:
gradients are clipped element by element, then by each member's norm; weight decay; moments; the rate. Members without
a batch stand still, their moments and step counts too; a leaf without a gradient gets no decay and no momentum. An
optimiser is made for one run of local training: its state starts at zero.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from ..core.experiment import Experiment

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam and AdamW (Kingma and Ba 2015)
Members = Sequence[int]  # of a leaf: which of the cohort's members its rows are
Rate = float | np.ndarray  # one for all, or (M,)


class LocalOptimiser:
    """What all optimisers share: clipping, who moves, and by how much."""

    def __init__(
        self, leaves: Sequence[torch.Tensor], rows: Sequence[Members], weight_decay: float = 0.0,
        clip_value: float | None = None, clip_norm: float | None = None,
    ):  # fmt: skip
        self.leaves, self.weight_decay = list(leaves), weight_decay
        self.rows = [_at(r) for r in rows]
        self.clip_value, self.clip_norm = clip_value, clip_norm
        self.members = 1 + max(max(r) for r in rows)  # those that hold any of the leaves
        self.moments: list[list[torch.Tensor]] = []  # each like ``leaves``

    def _moment(self) -> list[torch.Tensor]:
        self.moments.append([torch.zeros_like(p) for p in self.leaves])
        return self.moments[-1]

    @torch.no_grad()
    def step_(self, grads: Sequence[torch.Tensor | None], rate: Rate, active: np.ndarray) -> None:
        """One step of the ``active`` members (M,), in place.

        ``grads`` are like the leaves, or None where the loss does not reach one; they may be clipped in place.
        ``rate`` is one number or each member's own (M,).
        """
        active, rate = active[: self.members], rate[: self.members] if isinstance(rate, np.ndarray) else rate
        reached = [i for i, g in enumerate(grads) if g is not None]
        if not reached:
            return
        grads, rows = [grads[i] for i in reached], [self.rows[i] for i in reached]
        if self.clip_value is not None:
            torch._foreach_clamp_min_(grads, -self.clip_value)
            torch._foreach_clamp_max_(grads, self.clip_value)
        if self.clip_norm is not None:
            grads = clip_norms(grads, rows, self.members, self.clip_norm)
        state = [[x[i] for i in reached] for x in (self.leaves, *self.moments)]
        with _standing_still(state, rows, active):
            self._update_(*state, grads=grads, reached=reached, rate=rate, active=active)

    def _update_(self, leaves, *moments, grads, reached, rate, active) -> None:
        raise NotImplementedError

    def _rows(self, values: np.ndarray, reached: Sequence[int]) -> list[torch.Tensor]:
        """Each reached leaf's numbers (rows, 1, ...) of those of the members, (M,) or (leaves, M)."""
        p = self.leaves[0]
        table = torch.as_tensor(values, dtype=p.dtype, device=p.device).expand(len(self.leaves), -1)
        return [_column(table[i, self.rows[i]], self.leaves[i]) for i in reached]


class SGD(LocalOptimiser):
    """v <- momentum v + g + decay p; p <- p - rate v."""

    def __init__(self, leaves, rows, momentum: float = 0.0, **options):
        super().__init__(leaves, rows, **options)
        self.momentum = momentum
        if momentum:
            self._moment()

    def _update_(self, leaves, velocity=None, *, grads, reached, rate, active):
        if self.weight_decay:
            grads = torch._foreach_add(grads, leaves, alpha=self.weight_decay)
        if velocity is not None:
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        if isinstance(rate, np.ndarray):
            torch._foreach_addcmul_(leaves, grads, self._rows(-rate, reached))
        else:
            torch._foreach_add_(leaves, grads, alpha=-rate)


class Adam(LocalOptimiser):
    """m, v: decayed means of g and g^2; p <- p - rate m' / (sqrt(v') + eps), both without the bias of their start."""

    decoupled = False  # weight decay: a part of the gradient

    def __init__(self, leaves, rows, **options):
        super().__init__(leaves, rows, **options)
        self._moment(), self._moment()
        self.steps = np.zeros((len(self.leaves), self.members))  # of each leaf's members

    def _update_(self, leaves, mean, square, *, grads, reached, rate, active):
        if self.weight_decay and self.decoupled:
            kept = 1 - np.broadcast_to(rate, active.shape) * self.weight_decay
            torch._foreach_mul_(leaves, self._rows(kept, reached))
        elif self.weight_decay:
            grads = torch._foreach_add(grads, leaves, alpha=self.weight_decay)
        torch._foreach_lerp_(mean, grads, 1 - BETAS[0])
        torch._foreach_mul_(square, BETAS[1])
        torch._foreach_addcmul_(square, grads, grads, 1 - BETAS[1])
        self.steps[reached] += active
        steps = np.maximum(self.steps, 1)  # of members that have not begun: not used
        bias, root = 1 - BETAS[0] ** steps, np.sqrt(1 - BETAS[1] ** steps)
        below = torch._foreach_sqrt(square)
        torch._foreach_add_(below, self._rows(EPS * root, reached))
        torch._foreach_div_(below, self._rows(-rate * root / bias, reached))
        torch._foreach_addcdiv_(leaves, mean, below)


class AdamW(Adam):
    """Adam whose weight decay is a step of its own: p <- (1 - rate decay) p (Loshchilov and Hutter 2019)."""

    decoupled = True


OPTIMISERS = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def build_optimiser(e: Experiment, leaves: Sequence[torch.Tensor], rows: Sequence[Members]) -> LocalOptimiser:
    """The experiment's optimiser, fresh, of ``leaves`` whose rows are the members ``rows``."""
    options = {"momentum": e.momentum} if e.optimiser == "sgd" else {}
    kind = OPTIMISERS[e.optimiser]
    return kind(leaves, rows, weight_decay=e.weight_decay, clip_value=e.clip_value, clip_norm=e.clip_norm, **options)


def check_optimiser(e: Experiment) -> None:
    """Raise ``ValueError`` where an option has no effect or makes no sense."""
    if e.optimiser != "sgd" and e.momentum:
        raise ValueError(
            f"experiment: momentum = {e.momentum} is of optimiser = 'sgd'; {e.optimiser!r} has moments of its own; "
            "allowed: 0"
        )
    if e.clip_norm is not None and e.clip_norm <= 0:
        raise ValueError(f"experiment: clip_norm = {e.clip_norm} must be positive, or null for none")


def clip_norms(
    grads: Sequence[torch.Tensor], rows: Sequence[slice | list[int]], members: int, limit: float
) -> list[torch.Tensor]:
    """Gradients whose norm over all of a member's leaves is at most ``limit``: longer ones are scaled down to it."""
    squares = grads[0].new_zeros(members)
    for g, at in zip(grads, rows, strict=True):
        squares[at] += torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1).square()
    scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    # Not in place: in a batch of one, gradients share memory (prefix, positions).
    return list(torch._foreach_mul(grads, [_column(scale[at], g) for g, at in zip(grads, rows, strict=True)]))


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(rows,) as (rows, 1, ...), to multiply ``like`` with."""
    return values.view(-1, *(1,) * (like.dim() - 1))


@contextmanager
def _standing_still(
    state: Sequence[Sequence[torch.Tensor]], rows: Sequence[slice | list[int]], active: np.ndarray
) -> Iterator:
    """Put the rows of inactive members back as they were, whatever happens to them inside."""
    kept = []
    if not active.all():
        device = state[0][0].device
        idle = [torch.as_tensor(np.flatnonzero(~active[at]), device=device) for at in rows]
        moving = ((t, at) for tensors in state for t, at in zip(tensors, idle, strict=True) if len(at))
        kept = [(t, at, t.index_select(0, at)) for t, at in moving]
    yield
    for t, at, before in kept:
        t.index_copy_(0, at, before)


def _at(members: Members) -> slice | list[int]:
    """``members`` as an index, a slice where they follow one another."""
    whole = members[-1] - members[0] + 1 == len(members)
    return slice(members[0], members[-1] + 1) if whole else list(members)
