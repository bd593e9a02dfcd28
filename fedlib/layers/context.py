"""What the layers of one skeleton must know of the batch that runs, beyond their input.

``share`` gives all layers of a model one :class:`Context`; a deep copy of the model shares a copy of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from ..core.slices import index_of

Policy = Literal["batch", "tracked", "static", "local"]
Padding = torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None  # ``Context.weights``, or with ``device_weights``


@dataclass
class Context:
    """Set before a batch, read by ``BatchNorm2d`` and ``Scaler``."""

    policy: Policy = "batch"  # of batch norm, see ``norms.BatchNorm2d``
    training: bool = True
    weights: torch.Tensor | None = None  # (K, B) or of more clients, in host memory; 0: padding. None: all are examples
    device_weights: torch.Tensor | None = None  # the same on the device, where it is there already
    scale: float | torch.Tensor = 1.0  # ``Slice.scale``: one, or (K,)
    scaled: tuple[str, ...] = ("conv",)  # the places of scalers that are on
    whole_heads: bool = False  # narrower attention has fewer heads of full width, not all heads, narrower
    generators: Sequence[torch.Generator] | None = None  # of each client, for what it drops; None: nothing is dropped
    members: range | None = None  # whose rows follow one another, (K*B, ...), in layers that know of one model
    gathered: dict[nn.Module, Any] | None = None  # while ``norms.recomputed_statistics`` runs: what each norm saw
    _real: tuple[Any, torch.Tensor | None] = field(default=(None, None), repr=False)

    def real(self, device: torch.device) -> torch.Tensor | None:
        """Return (K, B), 1.0 on examples and 0.0 on padding; None if nothing is padding. Computed once a batch."""
        if self.weights is None:
            return None
        if self._real[0] is not self.weights:
            real = self.weights != 0
            there = real if self.device_weights is None else self.device_weights != 0
            self._real = (self.weights, None if bool(real.all()) else there.to(device, self.weights.dtype))
        return self._real[1]

    def pad(self, weights: "Padding") -> None:
        """Tell layers which rows of the batch that comes are padding."""
        self.weights, self.device_weights = weights if isinstance(weights, tuple) else (weights, None)

    @property
    def tracks(self) -> bool:
        """Does a batch move batch norm's running statistics?"""
        return self.policy in ("tracked", "local") and self.training and self.gathered is None

    @contextmanager
    def overridden(self, **fields: Any) -> Iterator["Context"]:
        """Set ``fields`` inside the block, and restore them after it."""
        before = {name: getattr(self, name) for name in fields}
        vars(self).update(fields)
        try:
            yield self
        finally:
            vars(self).update(before)

    def only(self, rows: slice | tuple[int, ...]) -> AbstractContextManager[Any]:
        """Show layers the members ``rows`` of the cohort alone inside the block."""
        if isinstance(rows, slice) and not rows.start:
            return nullcontext()
        given = {n: x for n in ("weights", "device_weights", "generators") if (x := getattr(self, n)) is not None}
        if isinstance(self.scale, torch.Tensor):
            given["scale"] = self.scale
        if isinstance(rows, slice):
            return self.overridden(_real=(None, None), **{n: x[rows] for n, x in given.items()})
        at = {n: [x[i] for i in rows] if n == "generators" else x[index_of(rows, x.device)] for n, x in given.items()}
        return self.overridden(_real=(None, None), **at)

    def alone(self, real: torch.Tensor | None) -> AbstractContextManager["Context"]:
        """Show layers one member's batch, whose examples are ``real`` (B,), inside the block; gather for it alone."""
        own = None if real is None else real.unsqueeze(0)
        return self.overridden(weights=own, _real=(own, own), gathered=None if self.gathered is None else {})


def share(model: nn.Module, policy: Policy = "batch") -> Context:
    """Give all layers of ``model`` that have a context one and the same, and return it."""
    context = Context(policy)
    for layer in model.modules():
        if isinstance(getattr(layer, "context", None), Context):
            layer.context = context
    return context


def evaluation_mode(context: Context, kept: Sequence[Policy] = ("tracked", "local")) -> AbstractContextManager[Context]:
    """Evaluate inside the block: batch norm uses its statistics if the policy is among ``kept``, else the batch's.

    Elsewhere it takes those of the batch, as ``static`` ones are not there before evaluation.
    """
    return context.overridden(policy=context.policy if context.policy in kept else "batch", training=False)


def frozen_statistics(context: Context) -> AbstractContextManager[Context]:
    """Keep batch norm's running statistics fixed inside the block: for a second pass over a training batch."""
    return context.overridden(policy="batch")


class Scaler(nn.Module):
    """Outputs of a layer divided by ``Context.scale``, the width ratio of a cut net (HeteroFL, Eq. 7; ScaleFL).

    It stands at one or several of the places ``conv`` (after a 3x3 convolution, a transformer's products and its
    embedding: ScaleFL), ``shortcut`` (of a residual block: with ``conv``, SplitMix) and ``norm`` (before a norm, and at
    all places of a transformer: HeteroFL), and is on if one is in ``Context.scaled``.
    """

    def __init__(self, *places: str):
        super().__init__()
        self.places, self.context = places, Context()

    @property
    def is_off(self) -> bool:
        """Does nothing pass here but what came?"""
        scale = self.context.scale
        return (not isinstance(scale, torch.Tensor) and scale == 1) or not set(self.places) & set(self.context.scaled)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_off:
            return x
        scale = self.context.scale
        return x / (scale[: len(x)].view(-1, *(1,) * (x.dim() - 1)) if isinstance(scale, torch.Tensor) else scale)
