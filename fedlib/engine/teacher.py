"""Members that do not train: what they answer, one row for each training member, without gradients.

They answer as a served model would: batch norm by the statistics that the server averages, if it does. A teacher stands
still while its students train. So where an answer depends on its example alone, all of a client's are computed once.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from ..core.clients import Client
from ..layers.context import Padding
from ..methods.values import Member
from ..models.route import PartialForward
from .batches import Batches, in_order, positions_of
from .federation import Federation
from .forward import Forward, by_example
from .stacks import Stack, Tensors


class Teacher:
    """The members of one name that do not train, each beside the training member of its client.

    ``students``: what trains, in whose place they answer and whose inputs they read.
    """

    def __init__(
        self, federation: Federation, students: Forward, clients: Sequence[Client], members: Sequence[Member],
        params: Tensors, memories: Mapping[int, Tensors],
    ):  # fmt: skip
        by_client: Mapping[int, Member] = {m.client.id: m for m in members}
        self.federation, self.students, self.clients = federation, students, clients
        stack = Stack(federation, [by_client[c.id] for c in clients], memories)
        self.forward = Forward(  # in the students' model: the federation's is every thread's
            students.model, stack.slices, stack.frozen({}), stack.tensors(params), data=federation.data
        )
        self._places: tuple[np.ndarray, torch.Tensor] | None = None  # of the batches's examples, (S, M, B)

    def at(self, batches: Batches, step: int, x: torch.Tensor | PartialForward) -> torch.Tensor:
        """Return outputs (E, M, B, *out) on the inputs ``x`` of one step of ``batches``."""
        if not self.by_example:
            return self.answer(x, batches.padding(step))
        if self._places is None or self._places[0] is not batches.examples:
            places = positions_of(self.federation.data, self.clients, batches.examples, True)
            self._places = batches.examples, torch.from_numpy(places).to(self.known.device)
        members = torch.arange(self.known.shape[1], device=self.known.device)[:, None]
        return self.known[:, members, batches.of(step, self._places[1])]

    @cached_property
    def by_example(self) -> bool:
        """Is an answer the same whatever its batch, and whenever the example comes?"""
        e, model = self.federation.experiment, self.forward.model
        policy = e.batch_norm if e.batch_norm == "tracked" else "batch"
        return by_example(model, policy, training=False) and e.augment == "none" and not model.backbone.reads_all

    def answer(self, x: torch.Tensor | PartialForward, weights: Padding = None) -> torch.Tensor:
        """Return outputs (E, M, B, *out) on ``x``."""
        return self.forward.answer(x, weights, kept=("tracked",))

    @cached_property
    def known(self) -> torch.Tensor:
        """Outputs (E, M, examples, C) on every client's own examples in order."""
        batches = in_order(self.federation.data, self.clients, self.federation.experiment.batch_size, True)
        return torch.cat([self.answer(self.students.inputs(rows), weights) for rows, weights in batches], 2)
