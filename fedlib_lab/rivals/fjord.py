"""FjORD (Horvath et al., NeurIPS 2021): ordered dropout, a width drawn anew for every mini-batch.

Client (p_max, its rate): holds the first ceil(p_max n) of every n channels, the whole depth, one exit; in every step
draws p uniformly among the rates up to p_max and trains the first ceil(p n) alone; with self-distillation on
(1 - a) CE(p) + a tau^2 KL(p_max || p), where p_max teaches without gradient, and beside it on CE(p_max). Server: every
entry is the mean by examples over the clients that hold it. Budgets are the rates.
Read next: ``heterofl.py``.

Deviations: clients of one rate draw the same width in a step, so that they train as one program; each client's
distribution is the paper's. ``distill=False`` is the default of the public code. As there, an optimiser's decay and
momentum also move what a step did not draw. The public code keeps batch norm's running statistics for each width; here
they are the batch's, or the experiment's ``batch_norm="static"``. Centrally the largest width that clients
hold answers.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch

from fedlib.core.annotations import Fraction, Positive, Share, When
from fedlib.core.rng import numpy_generator
from fedlib.methods.base import Batch, Client, Cohort, Experiment, Round, Server, Setting, Slice, cross_entropies
from fedlib.methods.widths import Rates

TAUGHT = When(distill=True)


@dataclass(frozen=True)
class FjORD(Rates):
    """The paper's five widths."""

    label, color, marker = "FjORD", "#160b37", "^"

    version: ClassVar[int] = 2  # where no rate is 1, the whole net answered, of which a part was never trained

    rates: tuple[Share, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    distill: bool = True
    kd_weight: Annotated[Fraction, TAUGHT] = 1.0  # a
    temperature: Annotated[Positive, TAUGHT] = 1.0  # tau

    def check(self, setting: Setting, e: Experiment) -> None:
        super().check(setting, e)
        if e.batch_norm in ("tracked", "local") and any(i.kind == "statistic" for i in setting.infos.values()):
            why = f"fjord: batch_norm = {e.batch_norm!r}: widths would share statistics"
            raise ValueError(f"{why}; allowed: batch, static")

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.part(client.budget, r.setting)

    def part(self, budget: int, setting: Setting) -> Slice:
        return setting.cut(partial(self.kept, self.rates[budget]))

    def program(self, client: Client, setting: Setting) -> int:
        """Return the key of those who draw from the same widths."""
        return client.budget

    def local_update(self, cohort: Cohort) -> None:
        budget = cohort.clients[0].budget
        views = [cohort.narrow(self.part(j, cohort.setting)) for j in range(budget + 1)]
        rng = numpy_generator(cohort.experiment.seed, "width", cohort.t, budget)
        loss = self.taught if self.distill else self.local_loss
        cohort.train(loss, view=lambda step: views[rng.integers(len(views))])

    def taught(self, batch: Batch) -> torch.Tensor:
        """Return (1 - a) CE(p) + a tau^2 KL(p_max || p) + CE(p_max), (M,), of one exit."""
        whole, tau = batch.whole(), self.temperature
        kl = batch.task.kl(whole.detach(), batch.outputs, batch.labels, tau)  # (1, M, B)
        kl = (kl * batch.weights).sum(-1) * tau**2
        ce = (1 - self.kd_weight) * cross_entropies(batch) + self.kd_weight * kl
        return (ce + cross_entropies(replace(batch, outputs=whole))).sum(0)
