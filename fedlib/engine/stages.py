"""A stage of a local training: what it trains, what it runs, and what comes ahead of it, computed once."""

import math
from collections.abc import Sequence

import torch

from ..core.clients import Client
from ..core.devices import free_memory
from ..core.slices import STEM, ParamInfo
from ..core.validation import check_known
from ..methods.values import Stage
from ..models.route import PartialForward, Route
from .batches import Batches, in_order, positions_of
from .federation import Federation
from .forward import Forward, by_example
from .frozen_cache import SHARE_OF_FREE_MEMORY


def check_stage(stage: Stage, depth: int, exit_units: Sequence[int]) -> None:
    """Raise ``ValueError`` if ``stage`` names a unit or an exit that is not there, or nothing in it answers."""
    exits, last = range(-len(exit_units), len(exit_units)), depth if stage.units is None else stage.units.stop
    check_known((*(stage.units or ()), *stage.without), range(depth), "Stage: unit {} is not there")
    check_known(() if stage.exit is None else (stage.exit,), exits, "Stage: exit = {} is not there")
    if last - 1 in stage.without if stage.exit is not None else last <= min(exit_units):
        raise ValueError(f"Stage: nothing answers at the end of units = {stage.units}; allowed: an exit that runs")


def is_trained(stage: Stage, info: ParamInfo, exits: int) -> bool:
    """Return whether ``stage`` trains this parameter of a model of so many ``exits``.

    The stem goes with the first unit.
    """
    if info.kind == "statistic":
        return False
    if stage.trains is not None:
        return stage.trains(info)
    if stage.units is None:
        return True
    if info.exit is not None:
        return stage.exit is None or info.exit == range(exits)[stage.exit]
    return info.unit in stage.units or (info.unit == STEM and not runs_frozen_units(stage))


def route_of(stage: Stage, whole: Route, exits: int) -> Route:
    """Return which members run which units and exits in ``stage``; ``whole`` in a local training without stages."""
    if stage.units is None:
        return whole
    alive = [0 if unit in stage.without else n for unit, n in enumerate(whole.alive)]
    exit = None if stage.exit is None else range(exits)[stage.exit]
    answer = whole.exits if exit is None else {exit: whole.exits[exit]}
    return Route(alive, answer, stage.units.start, stage.units.stop, exit)


def runs_frozen_units(stage: Stage) -> bool:
    """Return whether any unit runs before those of ``stage``, frozen."""
    return stage.units is not None and any(u not in stage.without for u in range(stage.units.start))


def units_ahead(f: Federation, forward: Forward, clients: Sequence[Client], stage: Stage, names: Sequence[str]) -> int:
    """Return how many leading units run once for all epochs of ``stage``, which trains the parameters ``names``.

    All before its own of a stage of FeDepth that says so, where they are not frozen anyway; all there are where exits
    alone are trained (FedRep, FedRoD, FedPAC), more than once on the same features. None with augmentation.
    """
    e, model, infos, cache = f.experiment, forward.model, f.setting.infos, forward.cache
    if e.augment != "none":
        return 0
    # FeDepth: ``cached`` says that memory suffices. What the frozen backbone's cache has is not kept a second time
    if stage.units is not None:
        known = cache.units if cache is not None else 0
        return stage.units.start if stage.cached and runs_frozen_units(stage) and stage.units.start > known else 0
    epochs = e.local_epochs if stage.epochs is None else stage.epochs
    if epochs == 1 or cache is not None or any(infos[n].exit is None for n in names):
        return 0
    if model.backbone.reads_all or not by_example(model, e.batch_norm, training=True, features=True):
        return 0
    # Exits alone: worth it from the second epoch on, if features depend on nothing that moves and all of them fit
    spec, examples = model.backbone.spec, len(clients) * max(c.num_examples for c in clients)
    numbers = sum(math.prod(spec.feature(u)) for u in range(model.depth) if model.head.reads(u))
    return model.depth if 4 * numbers * examples <= SHARE_OF_FREE_MEMORY * free_memory(f.device) else 0


class PrecomputedUnits:
    """What the first ``units`` units, frozen, make of the examples in ``batches``: their output, or if there is no
    other the features that the exits read. Nothing may be augmented.

    It is computed in batches of a client's examples (``batches.client_rows``), so that is what batch norm with batch
    statistics sees of them, whatever the stage's own batches are: z_{j-1} of FeDepth's Eq. 1. Where the stage
    ``before`` has kept its own, only the units that it trained run.
    """

    @torch.no_grad()
    def __init__(
        self, f: Federation, forward: Forward, clients: Sequence[Client], stage: Stage, units: int, batches: Batches,
        before: "PrecomputedUnits | None" = None,
    ):  # fmt: skip
        size, model, self.units = f.experiment.batch_size, forward.model, units
        alone = by_example(model, "batch", training=False)
        spec, most = model.backbone.spec, max(c.num_examples for c in clients)
        self.kept: dict[int | None, torch.Tensor] = {}  # (M, examples, ...): features by unit; None: what goes on
        for step, (rows, weights) in enumerate(in_order(f.data, clients, size, alone)):
            x = forward.inputs(rows) if before is None else before.part(step, size)
            made = forward.leading(x, units, weights, stage.without)
            for unit, x in (made.features if units == model.depth else {None: made.z}).items():
                if unit not in self.kept:
                    shape = spec.state(units - 1) if unit is None else x.shape[2:]  # perhaps cut in width
                    self.kept[unit] = x.new_zeros(len(x), most, *shape, dtype=torch.float32)
                to = self.kept[unit][:, step * size : (step + 1) * size]
                to[:, :, : x.shape[2]] = x[:, : to.shape[1]]  # sentences end with the longest of their batch
        self.places = torch.from_numpy(positions_of(f.data, clients, batches.examples, alone)).to(f.device)
        self.members = torch.arange(len(clients), device=f.device)[:, None]

    def part(self, step: int, size: int) -> PartialForward:
        """Return what was kept of every client's examples in order: part ``step`` of ``size``, filled up with zeros."""
        z = self.kept[None][:, step * size : (step + 1) * size]
        return PartialForward(self.units, torch.cat([z, z.new_zeros(len(z), size - z.shape[1], *z.shape[2:])], 1))

    def __call__(self, places: torch.Tensor) -> PartialForward:
        """Return what the members read in one step: of ``places`` (M, B), a step of the stage's."""
        seen = {u: x[self.members[: len(x)], places[: len(x)]] for u, x in self.kept.items()}
        features = {u: x for u, x in seen.items() if u is not None}
        return PartialForward(self.units, seen.get(None, torch.zeros(*places.shape, 0, device=places.device)), features)
