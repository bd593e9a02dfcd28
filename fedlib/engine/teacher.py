"""Members that do not train: what they answer, one row for each training member, without gradients.

They answer as a served model would: batch norm by the statistics that the server averages, if it does. A teacher stands
still while its students train. So where an answer depends on its example alone, all of a client's are computed once.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from ..layers.context import answering
from ..layers.norms import BatchNorm2d
from ..methods.jobs import Member
from ..models.route import Route, rows_of
from .batches import Batches, in_order, places_of
from .stacks import Stack

if TYPE_CHECKING:
    from .cohort import Cohort


class Teacher:
    """The members of one name that do not train, each beside the training member of its client."""

    def __init__(self, cohort: "Cohort", members: Sequence[Member]):
        by_client: Mapping[int, Member] = {m.client.id: m for m in members}
        self.cohort = cohort
        self.stack = Stack(cohort.federation, [by_client[c.id] for c in cohort.clients], cohort.memories)
        self.params = self.stack.tensors(cohort.server.params)
        self._known: torch.Tensor | None = None  # (E, M, examples, C)
        self._places: tuple[Batches, torch.Tensor] | None = None  # of the plan's examples, (S, M, B)

    def at(self, plan: Batches, step: int, x) -> torch.Tensor:
        """Outputs (E, M, B, *out) on the inputs ``x`` of one step of ``plan``."""
        if not self.by_example:
            return self.answer(x)
        if self._known is None:
            self._known = self._every_example()
        if self._places is None or self._places[0] is not plan:
            places = places_of(self.cohort.data, self.cohort.clients, plan.examples)
            self._places = plan, torch.from_numpy(places).to(self._known.device)
        members = torch.arange(self._known.shape[1], device=self._known.device)[:, None]
        return self._known[:, members, self._places[1][step, :, : plan.width[step]]]

    @cached_property
    def by_example(self) -> bool:
        """Is an answer the same whatever its batch, and whenever the example comes?"""
        federation, model = self.cohort.federation, self.cohort.model
        alone = model.context.policy == "tracked" or not any(isinstance(m, BatchNorm2d) for m in model.modules())
        return alone and federation.experiment.augment == "none" and federation.task.reads != "tokens"

    @torch.no_grad()
    def answer(self, x) -> torch.Tensor:
        """Outputs (E, M, B, *out) on ``x``."""
        model = self.cohort.model
        model.put_(self.params)
        exits = {
            j: rows_of([i for i, s in enumerate(self.stack.slices) if j in s.exits])
            for j in range(len(model.exit_units))
        }
        with answering(model.context, ("tracked",)):
            outputs = model(x, Route(self.stack.alive(model.depth), exits)).float()
        model.put_(self.cohort.params)
        return outputs

    def _every_example(self) -> torch.Tensor:
        """Outputs (E, M, examples, C) on every client's own examples in order."""
        cohort, context = self.cohort, self.cohort.model.context
        before, answers = context.weights, []
        for rows, context.weights in in_order(cohort.data, cohort.clients, cohort.experiment.batch_size):
            answers.append(self.answer(cohort.inputs(rows)))
        context.weights = before
        return torch.cat(answers, 2)
