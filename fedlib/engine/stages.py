"""A stage of a local training: what it trains, what it runs, and what comes ahead of it, computed once (FeDepth)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from ..core.slices import STEM, ParamInfo
from ..methods.jobs import Stage
from ..models.route import Prefix, Route, Rows
from .batches import Batches, in_order, places_of

if TYPE_CHECKING:
    from .cohort import Cohort


def trains(stage: Stage, info: ParamInfo, exits: int) -> bool:
    """Does ``stage`` train this parameter of a model of so many ``exits``? The stem goes with the first unit."""
    if info.kind == "statistic":
        return False
    if stage.trains is not None:
        return stage.trains(info)
    if stage.units is None:
        return True
    if info.exit is not None:
        return stage.exit is None or info.exit == range(exits)[stage.exit]
    return info.unit in stage.units or (info.unit == STEM and not runs_ahead(stage))


def route_of(stage: Stage, alive: Sequence[int], exit_rows: Mapping[int, Rows]) -> Route:
    """Which members run which units and exits in ``stage``."""
    if stage.units is None:
        return Route(alive, exit_rows)
    alive = [0 if unit in stage.without else n for unit, n in enumerate(alive)]
    exit = None if stage.exit is None else range(len(exit_rows))[stage.exit]
    exits = exit_rows if exit is None else {exit: exit_rows[exit]}
    return Route(alive, exits, stage.units.start, stage.units.stop, exit)


def runs_ahead(stage: Stage) -> bool:
    """Does any unit run before those of ``stage``, frozen?"""
    return stage.units is not None and any(u not in stage.without for u in range(stage.units.start))


class Ahead:
    """Outputs of the frozen units before ``stage.units``, for the batches of ``plan``; nothing may be augmented.

    They are computed in batches of a client's examples in order, so that is what batch norm with batch statistics sees
    of them, whatever the stage's own batches are: z_{j-1} of FeDepth's Eq. 1.
    """

    @torch.no_grad()
    def __init__(self, cohort: "Cohort", stage: Stage, plan: Batches):
        e, self.units = cohort.experiment, stage.units.start
        z: torch.Tensor | None = None  # (M, examples, *state)
        most = max(c.num_examples for c in cohort.clients)
        for step, (rows, weights) in enumerate(in_order(cohort.data, cohort.clients, e.batch_size)):
            cohort.model.context.weights = weights
            with torch.autocast(rows.device.type, torch.bfloat16, enabled=e.precision == "bfloat16"):
                made = cohort.model.prefix(cohort.inputs(rows), self.units, stage.without).z.float()
            if z is None:
                z = made.new_zeros(len(made), most, *cohort.model.backbone.spec.state(self.units - 1))
            to = z[:, step * e.batch_size : (step + 1) * e.batch_size]
            to[:, :, : made.shape[2]] = made[:, : to.shape[1]]  # sentences end with the longest of their batch
        self.z, self.members = z, torch.arange(len(z), device=z.device)[:, None]
        self.places = torch.from_numpy(places_of(cohort.data, cohort.clients, plan.examples)).to(z.device)

    def __call__(self, step: int, width: int) -> Prefix:
        """What the members read in one step."""
        return Prefix(self.units, self.z[self.members, self.places[step, :, :width]])
