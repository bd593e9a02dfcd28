"""The largest sub-models that a method can give under caps: one mechanism for all methods, priced as costs are told.

A device class's cap is a share of what local training of the whole model, with its last exit alone, takes, as it is
counted (``executors/meter.py``). A method
offers sizes, smallest first (``Method.sizes``), and the fields of an experiment that give its budgets these sizes
(``Method.of_sizes``). Caps are met from the poorest class on, each by the largest size with which no class is over its
cap. Read next: ``methods/base.py``, ``runs/costs.py``.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from fedlib.core.experiment import Experiment
from fedlib.methods import METHODS, build_method
from fedlib.models.registry import backbone_spec

from ..runs.costs import MIB, Shapes, kind_of, load_shapes, taken
from ..runs.params import Cell

SLACK = 0.05  # of a cap: exits are not free, and the whole model has one
Cost = Literal["macs", "memory", "upload"]


@dataclass(frozen=True)
class Fitted:
    """``experiment`` has a budget for each class of devices; its size, and its price as a share of the whole's."""

    experiment: Experiment
    sizes: tuple[float, ...]
    prices: tuple[float, ...]


def fit(e: Experiment, caps: Sequence[float], of: Cost) -> Fitted:
    """Fit to each class of devices the largest sub-model of ``e`` under its cap on ``of``, a share in ``caps``.

    ``macs``: of a client's local training; ``memory``: its peak; ``upload``: what it sends in a round. Client i is
    of class i mod the number of caps.
    Raises ``ValueError`` for caps that decrease or leave (0, 1], for a method that offers no sizes, and for one whose
    smallest sub-model is over a cap, naming the class.
    """
    if not caps or list(caps) != sorted(caps) or not 0 < caps[0] <= caps[-1] <= 1:
        raise ValueError(f"fit: caps = {list(caps)} must not decrease, within (0, 1]")
    build_method(e.method, dict(e.options)).check_backbone(backbone_spec(e.backbone, e.exit_head), e)
    found = _Search(e, tuple(caps), of, price(plain(e), of)[0]).fitted()
    setting = load_shapes(found.experiment).setting
    if setting.exit_units == (setting.spec.depth - 1,):  # no exit before the last, which has one kind of head
        found = replace(found, experiment=found.experiment.replace(exit_head=None))
    return found


def fitted_cells(cells: Sequence[Cell], caps: Mapping, method: str, options: Mapping | None = None) -> list[Cell]:
    """Make cells of ``method`` for each column and seed in a task's ``cells``, with what it can give under ``caps``.

    ``caps``: a params file's, ``of`` what is capped and ``shares`` of the whole's by class of devices.
    """
    its, fitted = {"method": method, "options": dict(options or {})}, {}
    for column, c in {c.column: c for c in cells}.items():
        fitted[column] = fit(plain(c.experiment).replace(**its), caps["shares"], caps["of"]).experiment
    label = getattr(METHODS[method], "label", method)
    return [
        Cell(c.finetune, method, method, label, c.column, c.seed, fitted[c.column].replace(seed=c.seed))
        for c in {(c.column, c.seed): c for c in cells}.values()
    ]


def plain(e: Experiment) -> Experiment:
    """Return ``e`` with the whole model for all clients."""
    return e.replace(method="fedavg", options={}, num_exits=1, exit_blocks=None, budgets="uniform", exit_head=None)


def price(e: Experiment, of: Cost, shapes: Shapes | None = None) -> list[float]:
    """Return what local training takes with each budget: MACs of an example, its peak or upload in MiB."""
    if of == "upload":
        shapes = shapes or load_shapes(e)
        return [shapes.upload_mib(part, b) for b, part in enumerate(shapes.slices)]
    return [t.macs if of == "macs" else t.peak / MIB for t in taken(kind_of(e))]


@dataclass(frozen=True)
class _Search:
    e: Experiment
    caps: tuple[float, ...]
    of: Cost
    whole: float  # what the whole model takes
    tried: dict[tuple[float, ...], tuple[float, ...] | str] = field(default_factory=dict)  # str: why it is refused

    def fitted(self) -> Fitted:
        method, asked = build_method(self.e.method, dict(self.e.options)), np.array(self.caps)
        while (fields := method.at_caps(asked.tolist(), self.of, SLACK)) is not None:  # solved by its own estimate
            found = self.having(fields, range(len(asked)))
            prices = tuple(p / self.whole for p in price(found, self.of))
            over = np.array(prices) / self.caps
            if (over <= 1 + SLACK).all():
                return Fitted(found, tuple(asked.tolist()), prices)
            if over[-1] > 1 + SLACK:  # by its exits
                raise self.nothing(len(over) - 1, f"its level takes {prices[-1]:.3g} of the whole")
            asked = np.where(over > 1 + SLACK, asked / over, asked)
        offered, chosen = list(method.sizes(load_shapes(plain(self.e)).setting.spec.depth)), ()
        for place in range(len(self.caps)):
            chosen += (self.largest([s for s in offered if not chosen or s >= chosen[-1]], chosen, place),)
        return Fitted(self.of_classes(chosen), chosen, tuple(map(float, self.prices(chosen))))

    def largest(self, sizes: list[float], chosen: tuple[float, ...], place: int) -> float:
        """Return the largest of ``sizes`` for class ``place``, where the poorer ones have ``chosen``."""
        why = "it offers no sizes"
        while sizes and isinstance(found := self.prices((*chosen, sizes[0])), str):
            why = found
            sizes.pop(0)  # too small for the method itself
        fitting = bisect_left(sizes, True, key=lambda size: self.over((*chosen, size)))  # larger ones cost more
        if not fitting:
            if sizes:
                why = f"the smallest takes {self.prices((*chosen, sizes[0]))[-1]:.3g} of the whole"
            raise self.nothing(place, why)
        return sizes[fitting - 1]

    def over(self, classes: tuple[float, ...]) -> bool:
        """Return whether a class is over its cap."""
        prices = self.prices(classes)
        return isinstance(prices, str) or any(p > cap * (1 + SLACK) for p, cap in zip(prices, self.caps, strict=False))

    def prices(self, classes: tuple[float, ...]) -> tuple[float, ...] | str:
        """Return each class's price where classes have these sizes, or why the method refuses them."""
        if (sizes := tuple(sorted(set(classes)))) not in self.tried:
            try:
                self.tried[sizes] = tuple(p / self.whole for p in price(self.of_classes(classes), self.of))
            except ValueError as error:
                self.tried[sizes] = str(error)
        found = self.tried[sizes]
        return found if isinstance(found, str) else tuple(found[sizes.index(size)] for size in classes)

    def of_classes(self, classes: Sequence[float]) -> Experiment:
        sizes, method = sorted(set(classes)), build_method(self.e.method, dict(self.e.options))
        return self.having(method.of_sizes(sizes), [sizes.index(size) for size in classes])

    def having(self, fields: dict, budgets: Sequence[int]) -> Experiment:
        options = {**self.e.options, **fields.get("options", {})}
        return self.e.replace(**{**fields, "options": options, "budgets": tuple(budgets)})

    def nothing(self, place: int, why: str) -> ValueError:
        cap = f"class {place + 1} under a cap of {self.caps[place]:.3g} on {self.of}"
        return ValueError(f"fit: {self.e.method} has nothing for {cap}: {why}")
