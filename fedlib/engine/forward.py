"""The one way to run a model: tensors put in place, layers told who runs, the route, inputs and outputs.

Nothing else puts tensors into the skeleton or sets its context. Training, teachers, what runs ahead of a stage,
evaluation, serving and the server's lab are its users.
Read next: ``models/exit_model.py`` (the skeleton), ``layers/context.py`` (what layers are told).
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from ..core.devices import to_device
from ..core.slices import Slice
from ..data.federated import FederatedData
from ..layers.context import Padding, Policy, evaluation_mode
from ..layers.dropout import Dropout
from ..layers.norms import BatchNorm2d, recomputed_statistics, settled_statistics
from ..models.exit_model import ExitModel
from ..models.route import PartialForward, Route
from .frozen_cache import FrozenCache


class Forward:
    """The members ``parts``, deepest first, with their ``tensors``: stacked, or once where all share them.

    Inputs are rows of those in ``data`` (``test``: of its test set), or what leading units made of them where
    there is a ``cache``. ``bfloat16``: products are computed so.
    """

    def __init__(
        self, model: ExitModel, parts: Sequence[Slice], *tensors: Mapping[str, torch.Tensor],
        data: FederatedData = None,  # pyright: ignore[reportArgumentType]: None where shapes alone are priced
        test: bool = False, cache: FrozenCache | None = None, bfloat16: bool = False,
    ):  # fmt: skip
        self.model, self.parts, self.tensors, self.data = model, tuple(parts), tensors, data
        self.test, self.cache, self.bfloat16 = test, cache, bfloat16
        device = data.device if data is not None else torch.device("cpu")
        self.route, scales = Route.of(parts, model.depth), [p.scale for p in parts]
        self.scale = scales[0] if len(set(scales)) == 1 else torch.tensor(scales, device=device)

    def place_(self, training: bool = False, generators: Sequence[torch.Generator] | None = None) -> "Forward":
        """Put the tensors in place, for good, and tell the layers whether members train and how narrow each is."""
        context = self.model.context
        for tensors in self.tensors:
            self.model.put_(tensors)
        context.training, context.generators, context.scale = training, generators, self.scale
        context.pad(None)
        return self

    def fill(self, examples: np.ndarray) -> None:
        """Make sure that the cache holds ``examples``; the tensors must be in place."""
        if self.cache is not None:
            self.cache.fill(self.model, examples)

    def inputs(self, rows: torch.Tensor, views: torch.Tensor | None = None) -> torch.Tensor | PartialForward:
        """Return what the model reads of each member's ``rows`` (M, B), in their ``views`` (M, B, 5)."""
        if self.cache is not None:
            return self.cache(to_device(rows, self.data.device))
        return self._seen(self.data.test_inputs if self.test else self.data.inputs, rows, views)

    def _seen(self, inputs: torch.Tensor, rows: torch.Tensor, views: torch.Tensor | None = None) -> torch.Tensor:
        views = views.reshape(-1, 5) if views is not None else None
        x = self.data.view(inputs, self.model.backbone.spec.input_shape, rows.reshape(-1), views)
        return x.view(*rows.shape, *x.shape[1:])

    def __call__(
        self, x: torch.Tensor | PartialForward, weights: Padding = None, route: Route | None = None,
        watch: Callable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Return outputs (E, M, B, *out) on ``x``; rows of ``weights`` (M, B) zero, in host memory, are padding.

        ``weights`` may come with the same on the device, so that nothing is copied there.
        """
        self.model.context.pad(weights)
        with self._precision():
            return self.model(x, route or self.route, watch).float()

    @torch.no_grad()
    def answer(
        self, x: torch.Tensor | PartialForward, weights: Padding = None,
        kept: Sequence[Policy] = ("tracked", "local"), watch: Callable | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Compute outputs as a served model's, by batch norm's statistics where the policy is among ``kept``.

        Whatever is in place, in the middle of its training too, is put back.
        """
        context = self.model.context
        scale, seen, context.scale = context.scale, (context.weights, context.device_weights), self.scale
        with self.model.holding(*self.tensors), evaluation_mode(context, kept):
            out = self(x, weights, watch=watch)
        context.scale, (context.weights, context.device_weights) = scale, seen
        return out

    @torch.no_grad()
    def leading(
        self, x: torch.Tensor | PartialForward, units: int, weights: Padding = None, without: Collection[int] = ()
    ) -> PartialForward:
        """Run the first ``units`` units, but those ``without``, on ``x``."""
        self.model.context.pad(weights)
        with self._precision():
            return self.model.run_leading(x, units, without, self.route.alive)

    @torch.no_grad()
    def together(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return outputs (E, 1, N, *out) of one member on ``batches``, rows (1, B).

        Batch norm sees all of them at once.

        Of several batches a unit runs for all before the next one does.
        """
        seen, depth = [self.inputs(rows) for rows in batches], self.model.depth
        if len(seen) == 1:
            with evaluation_mode(self.model.context, ()):
                return self(seen[0])
        backbone, by_unit = self.model.backbone, self.model.head.first_hand_back == math.inf
        with settled_statistics(self.model) as settle:
            for unit in range(1, depth + 1) if by_unit and backbone.spec.one_state and not backbone.reads_all else ():
                seen = settle(lambda x, unit=unit: self.leading(x, unit), seen)
            return torch.cat(settle(self, seen), 2)

    def _precision(self) -> torch.autocast:
        device = self.data.device.type if self.data is not None else "cpu"
        return torch.autocast(device if device != "meta" else "cpu", torch.bfloat16, enabled=self.bfloat16)

    def recompute_(self, batches: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
        """Give batch norm the statistics of ``batches``: rows (M, B) of the training examples, and their weights."""
        with recomputed_statistics(self.model):
            for rows, weights in batches:
                self(self._seen(self.data.inputs, rows), weights)

    def shares_backbone(self) -> bool:
        """Return whether all members run one uncut backbone whose outputs do not depend on who shares a batch."""
        backbone, context = self.model.backbone, self.model.context
        places = [place for places in (*backbone.of_block, backbone.of_stem) for place in places]
        alike = all(own[leaf].dim() == dims for own, leaf, dims in places)
        exits = {p.exits for p in self.parts} == {tuple(range(len(self.model.exit_units)))}
        whole = exits and min(self.route.alive) == len(self.parts)
        return alike and whole and by_example(self.model, context.policy, context.training, features=True)

    def as_one(self, x: torch.Tensor | PartialForward, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Run the examples (M, B, ...) of all through one backbone as one batch; each member's own exits answer."""
        assert isinstance(x, torch.Tensor)  # without a cache
        self.model.context.pad(weights)
        backbone = self.model.backbone
        z, outputs = backbone.stem(x.flatten(0, 1).unsqueeze(0)), []
        for unit in range(self.model.depth):
            feature, z = backbone.advance(z, unit, 1)
            if unit in self.model.exit_units:
                outputs.append(self.model.head.step(unit, feature.squeeze(0).unflatten(0, x.shape[:2]), [])[0])
        return torch.stack(outputs)


def by_example(model: ExitModel, policy: Policy, training: bool, features: bool = False) -> bool:
    """Return whether the output of ``model`` for an example depends on it alone, not on chance or its batch.

    ``features``: what exits read, not what they answer.
    """
    layers = list((model.backbone if features else model).modules())
    norms = (training or policy == "batch") and any(isinstance(m, BatchNorm2d) for m in layers)
    chance = training and any(isinstance(m, (Dropout, nn.Dropout)) and m.p for m in layers)
    return not norms and not chance and not (features and model.head.first_hand_back < math.inf)
