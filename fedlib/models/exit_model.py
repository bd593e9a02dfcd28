"""A backbone with exits, run for one client or a whole cohort in one pass.

The head decides what an exit is: ``Classifiers`` (one per exit) or ``Ree`` (shared, and handing a class token back).
Both answer ``step(unit, feature, past)`` after every unit.
Read next: ``backbone.py``, ``exits.py``, ``parameter_info.py``.
"""

import copy
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..core.slices import STEM, ParamInfo, index_of
from ..layers.context import Policy
from ..layers.norms import BatchNorm2d, set_policy_, statistics
from .backbone import Backbone
from .exits import Head
from .parameter_info import infos_of, slots_of
from .route import PartialForward, Route, pad_members


class ExitModel(nn.Module):
    """``backbone`` and ``head``; parameters may be stacked (see ``layers/linear.py``).

    In a cohort the members are sorted deepest first, so unit l runs for the first of them only.
    """

    def __init__(self, backbone: Backbone, head: Head, exit_units: Sequence[int], batch_norm: Policy = "batch"):
        super().__init__()
        self.backbone, self.head, self.exit_units = backbone, head, tuple(exit_units)
        self.context = set_policy_(self, batch_norm)
        self._slots = slots_of(self)
        backbone.of_block = [[] for _ in range(backbone.spec.depth)]
        backbone.of_stem.clear()
        for name, info in self.infos().items():
            if name.startswith("backbone."):
                of = backbone.of_stem if info.unit == STEM else backbone.of_block[info.unit]
                of.append((*self._slots[name], len(info.shape)))

    @property
    def depth(self) -> int:
        """Units up to the last exit."""
        return self.exit_units[-1] + 1

    def forward(self, x: torch.Tensor | PartialForward, route: Route | None = None, watch: Callable | None = None):
        """Map inputs (K, B, *input_shape), or leading units' output -> outputs (E, K, B, *out).

        Zero for exits not held.

        By default all K members run every unit and every exit. ``watch(unit, z, feature, past, handed_back)`` is told
        of every unit: z before it, what the exits saw, the head's history before its step and what it handed back.
        """
        cached = x if isinstance(x, PartialForward) else PartialForward(0, self.backbone.stem(x))
        z, members = cached.z, cached.z.shape[0]
        route = route or Route([members] * self.depth, dict.fromkeys(range(len(self.exit_units)), slice(0, members)))
        stop = self.depth if route.stop is None else route.stop
        run = [unit for unit in range(stop) if route.alive[unit]]
        first = next((unit for unit in run if unit >= cached.units), stop)
        past: list = []  # the head's history, restarted for every batch
        outputs: list[torch.Tensor | None] = [None] * len(self.exit_units)
        for unit, following in zip(run, [*run[1:], None], strict=True):
            before, on = z, route.alive[following] if following is not None else 0
            if unit < cached.units:
                if unit not in cached.features:
                    continue
                feature, z = cached.features[unit][: route.alive[unit]], cached.z[:on]
            else:
                z = z[: route.alive[unit]] if unit == first and route.alive[unit] < len(z) else z
                with torch.set_grad_enabled(torch.is_grad_enabled() and unit >= route.start):
                    feature, z = self.backbone.advance(z, unit, on)
            at = unit
            if unit == stop - 1 and route.exit is not None:
                at = self.exit_units[route.exit]
                feature = feature if at == unit else self.backbone.bridge(feature, unit)
            exit = self.exit_units.index(at) if at in self.exit_units else None
            rows, seen = route.exits.get(exit, slice(0, 0)), list(past)
            at_rows = rows if isinstance(rows, slice) else index_of(rows, feature.device)
            if self.head.per_exit:
                own = feature if rows == slice(0, len(feature)) else feature[at_rows]  # a slice's gradient is copied
                with self.context.only(rows):
                    out, handed_back = self.head.step(at, own, past)
            else:
                out, handed_back = self.head.step(at, feature, past)
            if watch is not None:
                watch(unit, before, feature, seen, handed_back)
            if out is not None and (isinstance(rows, tuple) or rows.stop > rows.start):
                outputs[exit] = pad_members(out if self.head.per_exit else out[at_rows], rows, members)
            if handed_back is not None and on:
                z = self.backbone.replace(z, unit, handed_back if len(handed_back) == on else handed_back[:on])
        blank = torch.zeros_like(next(o for o in outputs if o is not None))
        return torch.stack([blank if o is None else o for o in outputs])

    def frozen_units(self) -> int:
        """Count the leading units whose output never changes: nothing in or before them is trained or fed back.

        Nor does a batch norm in them go by who shares a batch. Ask before :meth:`put_` replaces the parameters.
        """
        if self.backbone.reads_all:  # all tokens of all units would have to be kept
            return 0
        infos = self.infos()
        trained = [infos[n].unit for n in self.trainable() if n.startswith("backbone.")]
        pieces = enumerate([self.backbone.stem, *self.backbone.blocks], -1)
        trained += [unit for unit, piece in pieces if any(isinstance(m, BatchNorm2d) for m in piece.modules())]
        fed_back = self.backbone.kept_units(self.head.first_hand_back)
        return int(max(0, min([self.backbone.spec.depth, fed_back, *trained])))

    @torch.no_grad()
    def run_leading(
        self, x: torch.Tensor | PartialForward, units: int, without: Container[int] = (),
        alive: Sequence[int] | None = None, keep: Container[int] = (),
    ) -> PartialForward:  # fmt: skip
        """Run the first ``units`` units, but those ``without``, on inputs (K, B, *input_shape).

        Of an ``x`` that earlier units made, only later ones run. Unit l runs for the first ``alive[l]`` members;
        without it, for all. Features are those that the head reads, and those of the units to ``keep``.
        """
        begun = x if isinstance(x, PartialForward) else PartialForward(0, x)
        alive = [len(begun.z)] * units if alive is None else alive
        run = [unit for unit in range(begun.units, units) if unit not in without and alive[unit]]
        z, features = begun.z[: alive[run[0]]] if run else begun.z, dict(begun.features)
        z = z if begun is x else self.backbone.stem(z)
        for unit, following in zip(run, [*run[1:], *run[-1:]], strict=True):
            feature, z = self.backbone.advance(z, unit, alive[following])
            if self.head.reads(unit) or unit in keep:
                features[unit] = feature
        return PartialForward(units, self.backbone.settled(z), features)

    def infos(self) -> dict[str, ParamInfo]:
        """Return axes, kind, unit, exit and full shape of every parameter."""
        return infos_of(self)

    def trainable(self) -> dict[str, torch.Tensor]:
        """Return the tensors that clients change and send, detached: trained ones and batch norm's statistics."""
        return {n: p.detach() for n, p in self.named_parameters() if p.requires_grad} | statistics(self)

    def frozen(self) -> dict[str, torch.Tensor]:
        """Return the tensors that are the same for all clients and rounds, detached."""
        return {n: p.detach() for n, p in self.named_parameters() if not p.requires_grad}

    def twin(self) -> "ExitModel":
        """Copy the modules but not the tensors, for another thread: what is put into one is not in the other."""
        return copy.deepcopy(self, {id(t): t for t in (*self.parameters(), *self.buffers())})

    def put_(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Make ``tensors`` (of any leading client dimension and width) this model's parameters. Copies nothing."""
        for name, tensor in tensors.items():
            tensors_of_module, leaf = self._slots[name]
            tensors_of_module[leaf] = tensor

    @contextmanager
    def holding(self, *tensors: Mapping[str, torch.Tensor]) -> Iterator[None]:
        """Put ``tensors`` in place inside the block, and what was there before back after it."""
        before = {n: self._slots[n][0][self._slots[n][1]] for some in tensors for n in some}
        for some in tensors:
            self.put_(some)
        try:
            yield
        finally:
            self.put_(before)
