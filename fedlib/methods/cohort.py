"""What a method sees of the models that it trains: a round's clients that train together, as one batched program.

Tensors are by name and stacked: (rows, ...), a row for each member that holds the parameter, ``rows`` saying which.
A member is a client's model; most methods have one a client. ``engine/cohort.py`` is it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.slices import Slice
from ..models.exit_model import ExitModel
from .losses import Batch
from .sums import Update
from .values import Setting, Stage

Stacked = dict[str, torch.Tensor]
Loss = Callable[[Batch], torch.Tensor]  # (M,), one number for each member
View = Callable[[str, torch.Tensor], torch.Tensor]  # by a tensor's name and its value, stacked or shared by all
Gradient = Callable[[str, torch.Tensor], torch.Tensor]  # by a parameter's name and its value, stacked


class Cohort(Protocol):
    """From download to upload; ``Method.local_update`` trains it, ``Method.upload`` sends it."""

    experiment: Experiment
    setting: Setting
    t: int  # the round
    model: ExitModel  # the skeleton: its head and its context, for losses that run exits themselves
    clients: tuple[Client, ...]  # of each member; peers share one
    rows: Mapping[str, Sequence[int]]
    start: Stacked  # what the members received, or kept
    params: Stacked  # what they train, from ``start`` on
    steps: torch.Tensor  # of the last local training, (M,)
    rate: float | torch.Tensor  # of this round; (M,) where members have their own
    new_memories: dict[int, Stacked]  # what is to stay with each client

    @property
    def received(self) -> Stacked:
        """The server's tensors, whatever members kept."""
        ...

    @property
    def trained(self) -> Stacked:
        """``params`` without batch norm's statistics."""
        ...

    def train(
        self, loss: Loss, stage: Stage = ..., gradient: Gradient | None = None,
        view: Callable[[int], View] | None = None,
    ) -> None:  # fmt: skip
        """Run one optimiser on ``params``, in place; ``gradient`` is added to the loss's.

        ``view(step)`` makes the tensors that run in a step of those that members hold.
        """

    def narrow(self, part: Slice) -> View:
        """Return the view of a ``part`` of what members hold."""
        ...

    def answers(self, exit: int = -1) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (features (M, B, d), labels, weights) at ``exit`` over the clients' own examples, in order."""
        ...

    def generator(self, purpose: str, client: int) -> torch.Generator:
        """Return the generator of a client in this round: a function of (seed, purpose, t, client)."""
        ...

    def label_counts(self) -> torch.Tensor:
        """Count the training examples by label of each member's client, (M, classes)."""
        ...

    def payload(self, key: str) -> Stacked:
        """Return the tensors that members brought under ``key`` (``Member.payload``)."""
        ...

    def rows_named(self, member: str) -> Callable[[str], torch.Tensor]:
        """Mask a gradient: by parameter, 1 on the rows of the members of that name."""
        ...

    def recall(self, key: str) -> Stacked:
        """Return what clients remember under ``key``; zeros where there is nothing."""
        ...

    def remember(self, key: str, tensors: Stacked, rows: Mapping[str, Sequence[int]] | None = None) -> None:
        """Keep ``tensors`` with the clients, across rounds."""

    def send(self, key: str, tensors: Stacked) -> None:
        """Send ``tensors`` beside the model (``Arrived.extras``)."""

    def update(self) -> Update:
        """Return what is sent of ``params``."""
        ...
