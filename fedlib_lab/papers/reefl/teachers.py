"""Which exit teaches: ReeFL's choice of teacher, counted while clients train (Appendix C, Figure 7)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from fedlib.engine.cohort import Cohort
from fedlib.engine.federation import Federation
from fedlib.methods import Round, Server, Stage
from fedlib.methods.losses import Batch, cross_entropies
from fedlib.methods.sliced.reefl import running_best_exit

from ...report.style import axes_of, color_of, finish, plain, styled


class _CountingCohort(Cohort):
    """A cohort that counts, after every mini-batch, which exit each estimate of the loss would choose as teacher."""

    def watch(self, zetas: Sequence[float]) -> None:
        self.scratches = {zeta: {} for zeta in zetas}
        self.counts = {zeta: torch.zeros(self.held.shape, dtype=torch.int64) for zeta in zetas}  # (E, K)

    def train(self, local_loss, stage=Stage(), gradient=None) -> None:
        def watched(batch: Batch) -> torch.Tensor:
            loss, ce = local_loss(batch), cross_entropies(batch).detach()
            active = (batch.weights.sum(-1) > 0).cpu()
            for zeta, scratch in self.scratches.items():
                teacher = running_best_exit(replace(batch, scratch=scratch), ce, zeta).cpu()
                self.counts[zeta][teacher, torch.arange(len(teacher))] += active
            return loss

        super().train(watched, stage, gradient)


def count_teachers(
    f: Federation, server: Server, zetas: Sequence[float] = (0.2, 1.0), cohort_size: int = 10
) -> dict[float, np.ndarray]:
    """Count per estimate of the loss how often each exit teaches, (E,), in one round of all top-budget clients.

    They train from ``server`` in the round after its last, or in its last if that was the experiment's; the result is
    thrown away. All estimates watch the same training, in which the method's own ``zeta`` chooses: 1 is the
    mini-batch's loss, 0.2 the paper's running estimate.
    """
    members = f.clients(np.where((f.budgets == f.budgets.max()) & (f.data.num_examples > 0))[0])
    t, totals = min(server.t + 1, f.experiment.rounds), {zeta: 0 for zeta in zetas}
    r = Round(t, tuple(members), f.setting)
    for i in range(0, len(members), cohort_size):
        part = [m for c in members[i : i + cohort_size] for m in f.method.members(c, server, r)]
        cohort = _CountingCohort(f, f.model, server, r, part, {})
        cohort.watch(zetas)
        f.method.local_update(cohort)
        totals = {zeta: total + cohort.counts[zeta].sum(1).numpy() for zeta, total in totals.items()}
    return totals


@styled
def plot_teachers(counts: Mapping[str, np.ndarray], subject: str, ax=None):
    """Plot how often each exit is the teacher, in percent; ``counts`` maps an estimate's name to (E,)."""
    import seaborn

    ax, shares = axes_of(ax), {name: 100 * np.asarray(count) / max(np.sum(count), 1) for name, count in counts.items()}
    rows = [(plain(n), e + 1, share) for n, of in shares.items() for e, share in enumerate(of)]
    rows = pd.DataFrame(rows, columns=["estimate", "exit", "batches"])
    most = int(np.argmax(next(iter(shares.values()))))
    said = ", ".join(f"{of[most]:.0f} % by {name}" for name, of in shares.items())
    title = f"Exit {most + 1} teaches most: {said}\n{subject}"
    colors = [color_of("reefl"), color_of("exclusivefl"), color_of("depthfl")][: len(counts)]
    seaborn.barplot(rows, x="exit", y="batches", hue="estimate", palette=colors, saturation=1, ax=ax)
    finish(ax, "exit", "mini-batches with this teacher (%)", title)
    return ax
