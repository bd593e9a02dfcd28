"""Optimisers of local training: SGD, Adam and AdamW on leaves that are stacked over the members of a cohort.

Leaf i is (len(rows[i]), *shape): ``rows[i]`` are the members that hold it, increasing. One step, in this order:
gradients are clipped element by element, then by each member's norm; weight decay; moments; the rate. Members without
a batch stand still, their moments and step counts too; a leaf without a gradient gets no decay and no momentum. An
optimiser is made for one run of local training: its state starts at zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ..core.experiment import Experiment

BETAS, EPS = (0.9, 0.999), 1e-8  # of Adam and AdamW (Kingma and Ba 2015)
Rows = Sequence[int]
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
Rate = float | np.ndarray | torch.Tensor  # one for all, or each member's own (M,)


class LocalOptimiser:
    """What all optimisers share: clipping, who moves, and by how much."""

    def __init__(
        self, leaves: Sequence[torch.Tensor], rows: Sequence[Rows], moments: int = 0, weight_decay: float = 0.0,
        clip_value: float | None = None, clip_norm: float | None = None,
    ):  # fmt: skip
        self.leaves, self.rows, self.weight_decay = list(leaves), [tuple(r) for r in rows], weight_decay
        self.clip_value, self.clip_norm = clip_value, clip_norm
        self.moments = [[torch.zeros_like(p) for p in leaves] for _ in range(moments)]
        at = {r: torch.tensor(r, device=p.device) for r, p in dict(zip(self.rows, leaves, strict=True)).items()}
        self._at = [at[r] for r in self.rows]
        self._idle: dict[bytes, dict[tuple[int, ...], torch.Tensor]] = {}  # of those who do not move: places in rows
        self.place: torch.Tensor | None = None  # the step's, see :meth:`read_at`

    def read_at(self, place: torch.Tensor, active: np.ndarray) -> None:
        """Read by a step's ``place`` (1,), on the device, who of ``active`` (S, M) moves: nobody does who has stopped.

        From here on the rate of the others is zero; all leaves are reached in every step.
        """
        self.place, self._moves = place, torch.from_numpy(active.astype(np.float64)).to(place.device)

    @torch.no_grad()
    def step_(self, grads: Sequence[torch.Tensor | None], rate: Rate, active: np.ndarray) -> None:
        """Take one step of the ``active`` members (M,), in place.

        ``grads`` are like the leaves, or None where the loss does not reach one; they may be clipped in place.
        ``rate`` is one number or each member's own (M,).
        """
        if not (reached := [i for i, g in enumerate(grads) if g is not None]):
            return
        held = [g for g in grads if g is not None]
        if self.clip_value is not None:
            torch._foreach_clamp_min_(held, -self.clip_value)
            torch._foreach_clamp_max_(held, self.clip_value)
        if self.clip_norm is not None:
            held = clip_norms(held, [self._at[i] for i in reached], len(active), self.clip_norm)
        rate = rate if self.place is None else rate * self._moves.index_select(0, self.place)[0]
        rate = float(rate) if np.ndim(rate) == 0 else torch.as_tensor(rate, dtype=torch.float64, device=held[0].device)
        state = [[tensors[i] for i in reached] for tensors in (self.leaves, *self.moments)]
        with _rows_unchanged(state, [self.rows[i] for i in reached], self._still(active)):
            self._update_(*state, grads=held, reached=reached, rate=rate, active=active)

    def _update_(
        self, leaves: Tensors, *moments: Tensors, grads: Tensors, reached: Sequence[int], rate: Rate, active: np.ndarray
    ) -> None:
        raise NotImplementedError

    def _still(self, active: np.ndarray) -> dict[tuple[int, ...], torch.Tensor]:
        """Return by ``rows`` which rows of a leaf do not move in this step; {} if all members are ``active``."""
        if active.all():
            return {}
        if (key := active.tobytes()) not in self._idle:
            found = {r: np.flatnonzero(~active[list(r)]) for r in set(self.rows)}
            device = self.leaves[0].device
            self._idle[key] = {r: torch.as_tensor(at, device=device) for r, at in found.items() if len(at)}
        return self._idle[key]

    def _factors(self, values: float | np.ndarray | torch.Tensor, reached: Sequence[int]) -> float | list[torch.Tensor]:
        """Return one number for all, or each reached leaf's (rows, 1, ...) of values (M,) or (leaves, M)."""
        if isinstance(values, float):
            return values
        p = self.leaves[0]
        table = torch.as_tensor(values).to(p.device, p.dtype).expand(len(self.leaves), -1)
        rows = [table[i] if len(self.rows[i]) == table.shape[1] else table[i, self._at[i]] for i in reached]
        return [_column(x, self.leaves[i]) for x, i in zip(rows, reached, strict=True)]


class SGD(LocalOptimiser):
    """v <- momentum v + g + decay p; p <- p - rate v."""

    def __init__(self, leaves: Tensors, rows: Sequence[Rows], momentum: float = 0.0, **options: Any):
        super().__init__(leaves, rows, int(momentum > 0), **options)
        self.momentum = momentum

    def _update_(
        self, leaves: Tensors, velocity: Tensors | None = None, *, grads: Tensors, reached: Sequence[int], rate: Rate,
        active: np.ndarray,
    ) -> None:  # fmt: skip
        if self.weight_decay:
            grads = torch._foreach_add(grads, leaves, alpha=self.weight_decay)
        if velocity is not None:
            torch._foreach_mul_(velocity, self.momentum)
            torch._foreach_add_(velocity, grads)
            grads = velocity
        own = self._factors(-rate, reached)
        if isinstance(own, list):
            torch._foreach_addcmul_(leaves, grads, own)
        else:
            torch._foreach_add_(leaves, grads, alpha=own)


class Adam(LocalOptimiser):
    """m, v: decayed means of g and g^2; p <- p - rate m' / (sqrt(v') + eps), both without the bias of their start."""

    decoupled = False  # weight decay: a part of the gradient

    def __init__(self, leaves: Tensors, rows: Sequence[Rows], **options: Any):
        super().__init__(leaves, rows, 2, **options)
        self.steps = np.zeros((1, 1), np.int64)  # (leaves, M) from the first step on

    def read_at(self, place: torch.Tensor, active: np.ndarray) -> None:
        super().read_at(place, active)
        steps = torch.from_numpy(np.maximum(active.cumsum(0), 1.0)).to(place.device)
        self._biases = torch.stack([1 - BETAS[0] ** steps, (1 - BETAS[1] ** steps).sqrt()], 1)  # (S, 2, M)

    def _update_(
        self, leaves: Tensors, mean: Tensors, square: Tensors, *, grads: Tensors, reached: Sequence[int], rate: Rate,
        active: np.ndarray,
    ) -> None:  # fmt: skip
        if self.weight_decay and self.decoupled:
            torch._foreach_mul_(leaves, self._factors(1 - rate * self.weight_decay, reached))
        elif self.weight_decay:
            grads = torch._foreach_add(grads, leaves, alpha=self.weight_decay)
        torch._foreach_lerp_(mean, grads, 1 - BETAS[0])
        torch._foreach_mul_(square, BETAS[1])
        torch._foreach_addcmul_(square, grads, grads, 1 - BETAS[1])
        bias, root = self._bias(reached, active)
        if isinstance(rate, torch.Tensor) and isinstance(bias, np.ndarray):
            bias, root = (torch.as_tensor(x, device=rate.device) for x in (bias, root))
        below = torch._foreach_sqrt(square)
        torch._foreach_add_(below, self._factors(EPS * root, reached))
        torch._foreach_div_(below, self._factors(-rate * root / bias, reached))
        torch._foreach_addcdiv_(leaves, mean, below)

    def _bias(self, reached: Sequence[int], active: np.ndarray) -> Sequence[Any]:
        """Count a step; return the bias of the mean and the root of the square's: numbers, or (leaves, M) or (M,)."""
        if self.place is not None:
            return self._biases.index_select(0, self.place)[0].unbind()
        self.steps = self.steps + np.isin(np.arange(len(self.leaves)), reached)[:, None] * active
        made = self.steps[reached][:, active]  # those that stand still are put back, whatever they get
        alike = made.size > 0 and bool((made == made.flat[0]).all())
        steps = made.flat[:1] if alike else np.maximum(self.steps, 1)
        found = 1 - BETAS[0] ** steps, np.sqrt(1 - BETAS[1] ** steps)
        return [float(x[0]) for x in found] if alike else found


class AdamW(Adam):
    """Adam whose weight decay is a step of its own: p <- (1 - rate decay) p (Loshchilov and Hutter 2019)."""

    decoupled = True


OPTIMISERS = {"sgd": SGD, "adam": Adam, "adamw": AdamW}


def build_optimiser(
    e: Experiment, leaves: Tensors, rows: Sequence[Rows], active: np.ndarray | None = None
) -> LocalOptimiser:
    """Build the experiment's optimiser, fresh, of ``leaves`` that the members ``rows`` hold.

    Where all steps' ``active`` members (S, M) are known ahead, no step copies anything from the host.
    """
    options = {"weight_decay": e.weight_decay, "clip_value": e.clip_value, "clip_norm": e.clip_norm}
    options |= {"momentum": e.momentum} if e.optimiser == "sgd" else {}
    made = OPTIMISERS[e.optimiser](leaves, rows, **options)
    for moving in np.unique(active, axis=0) if active is not None else ():
        made._still(moving)
    return made


def clip_norms(grads: Tensors, at: Sequence[torch.Tensor], members: int, limit: float) -> list[torch.Tensor]:
    """Scale gradients down so that the norm over all of a member's leaves is at most ``limit``.

    ``at`` (rows,) are the members of each gradient's rows.
    """
    norms = [torch.linalg.vector_norm(g.reshape(len(g), -1), dim=1) for g in grads]
    if grads[0].device.type != "cpu" and all(len(rows) == members for rows in at):  # few, large kernels
        squares = torch.stack(norms).square().sum(0)
    else:
        squares = grads[0].new_zeros(members)
        for norm, rows in zip(norms, at, strict=True):
            squares.index_add_(0, rows, norm.square())
    scale = (limit / (squares.sqrt() + 1e-6)).clamp(max=1.0)
    # Not in place: in a batch of one, gradients share memory.
    own = [scale if len(rows) == members else scale[rows] for rows in at]
    return list(torch._foreach_mul(grads, [_column(x, g) for g, x in zip(grads, own, strict=True)]))


def _column(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Reshape (rows,) to (rows, 1, ...), to multiply ``like`` with."""
    return values.view(-1, *(1,) * (like.dim() - 1))


@contextmanager
def _rows_unchanged(
    state: Sequence[Tensors], rows: Sequence[tuple[int, ...]], idle: Mapping[tuple[int, ...], torch.Tensor]
) -> Iterator[None]:
    """Put ``idle`` rows back as they were after the block, whatever happens to them inside."""
    moving = ((t, idle[r]) for tensors in state for t, r in zip(tensors, rows, strict=True) if r in idle)
    kept = [(t, at, t.index_select(0, at)) for t, at in moving]
    yield
    for t, at, before in kept:
        t.index_copy_(0, at, before)
