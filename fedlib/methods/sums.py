"""What a cohort sends, and sums of it: uploads are summed where they are made, so that no model travels.

Sums run in float64 and are rounded once. Entries that no client held keep their value and their server state.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from ..core.clients import Client
from ..core.slices import NOTHING, ParamInfo, Slice, is_cut, scatter_add_, take, within

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Update:
    """What a cohort sends back: ``params[name]`` stacks the tensors of its models ``rows[name]``.

    Of model i, ``clients[i]`` owns it, ``slices[i]`` is what it held, ``uploads[i]`` what of that is sent.
    """

    clients: tuple[Client, ...]
    slices: tuple[Slice, ...]
    params: Tensors
    rows: Mapping[str, Sequence[int]]
    uploads: tuple[Slice, ...] | None = None  # None: all of it

    def weights(self, by: Literal["examples", "clients"]) -> list[float]:
        """Return each model's weight in the mean: its client's examples, or 1; 0 where it sends nothing."""
        sent = [s is not NOTHING for s in self.uploads or self.slices]
        return [float(s * (c.num_examples if by == "examples" else 1)) for c, s in zip(self.clients, sent, strict=True)]

    def nonfinite(self) -> dict[int, str]:
        """Map a client's id to the first of its tensors with a NaN or infinity."""
        names, k = list(self.params), len(self.clients)
        finite = torch.ones(len(names), k, dtype=torch.bool, device=self.params[names[0]].device)
        for i, name in enumerate(names):
            finite[i, list(self.rows[name])] = self.params[name].flatten(1).isfinite().all(1)
        out: dict[int, str] = {}
        for i, k in (~finite.cpu()).nonzero().tolist():
            out.setdefault(self.clients[k].id, names[i])
        return out

    def without(self, ids: Container[int]) -> "Update":
        """Return the update of the other clients."""
        kept = [i for i, c in enumerate(self.clients) if c.id not in ids]
        place = {i: new for new, i in enumerate(kept)}
        params, rows = {}, {}
        for name, held in self.rows.items():
            if found := [k for k, i in enumerate(held) if i in place]:
                params[name], rows[name] = self.params[name][found], [place[held[k]] for k in found]
        uploads = None if self.uploads is None else tuple(self.uploads[i] for i in kept)
        return Update(tuple(self.clients[i] for i in kept), tuple(self.slices[i] for i in kept), params, rows, uploads)

    def model(self, i: int, kinds: Mapping[str, torch.dtype]) -> dict[str, torch.Tensor]:
        """Return what model ``i`` sends, by its local names, in the precision ``kinds``."""
        held = {n: list(rows).index(i) for n, rows in self.rows.items() if i in rows}
        return {n: self.params[n][row].to(kinds[n], copy=True) for n, row in held.items()}


def finite_sums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return whether the sums of all are finite, (). Then all numbers are, and seldom are they if the sums are not."""
    return torch.stack([x.sum() for x in tensors]).isfinite().all()


def all_finite(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether every number is finite. One transfer from the device, where the answer is yes."""
    tensors = list(tensors)
    if not tensors or bool(finite_sums(tensors)):  # a cohort may send nothing
        return True
    return bool(torch.stack([x.isfinite().all() for x in tensors]).all())  # finite numbers may have an infinite sum


class MaskedMean:
    """Per-entry weighted mean over the clients that hold the entry, as sums that can be merged.

    theta = sum_i w_i theta_i / sum_i w_i, the early-exit FedAvg (w_i = number of examples) and, with width slices,
    the coordinate-wise mean (w_i = 1). ``weight`` and ``count`` (holders) are scalars until a cut tensor arrives.

    Those are two lines, ``total[entries] += w theta`` and ``weight[entries] += w``, with three savings: models that
    write to the same entries are added by one product, whatever their number; their weights are scalars as long as
    nobody has cut a tensor; and what a narrow client alone has sent stays cut, which is all that has to travel, until
    another's is added or somebody looks. Else a whole model would travel for each of a hundred narrow clients.
    """

    def __init__(self, infos: Mapping[str, ParamInfo]):
        self.infos = infos
        self._stores: tuple[dict[str, torch.Tensor], ...] = ({}, {}, {})  # total, weight, count
        self._cut: dict[str, tuple[str, Slice]] = {}  # of sums that stay cut: the local name, and what is held
        self._own: set[str] = set()  # whole tensors that nobody else has

    @property
    def total(self) -> dict[str, torch.Tensor]:
        """sum_i w_i theta_i by parameter."""
        return self._whole(0)

    @property
    def weight(self) -> dict[str, torch.Tensor]:
        """sum_i w_i of the holders."""
        return self._whole(1)

    @property
    def count(self) -> dict[str, torch.Tensor]:
        """Number of holders of an entry."""
        return self._whole(2)

    def move_(self, device: torch.device) -> None:
        """Copy the sums to ``device``."""
        self._stores = tuple({n: x.to(device, copy=True) for n, x in store.items()} for store in self._stores)

    def named(self, names: Mapping[str, str]) -> "MaskedMean":
        """Return the sums of the tensors that have a name in ``names``, whole, under it."""
        out = MaskedMean(self.infos)
        out._stores = tuple({new: self._whole(k)[n] for n, new in names.items()} for k in range(3))
        return out

    def _whole(self, which: int) -> dict[str, torch.Tensor]:
        for target in list(self._cut):
            self._expand(target)
        return self._stores[which]

    def _expand(self, target: str) -> None:
        """Expand a cut sum to whole tensors: zero where the cut holds nothing, as nobody held that."""
        if target in self._cut:
            (name, part), sums = self._cut.pop(target), [store[target] for store in self._stores]
            for store in self._stores:
                store[target] = store[target].new_zeros(())
            self._spread_(target, sums, name, part)

    def _spread_(self, target: str, sums: Sequence[torch.Tensor], name: str, part: Slice) -> None:
        """Add ``sums`` in the entries that ``part`` keeps of ``name``."""
        for store, x in zip(self._stores, sums, strict=True):
            if target not in self._own:  # a copy: groups share weights and counts
                store[target] = store[target].expand(self.infos[name].shape).clone()
            scatter_add_(store[target], x, self.infos[name], part)
        self._own.add(target)

    def add(self, update: Update, weights: Iterable[float] | torch.Tensor) -> None:
        """Add every model of ``update`` with its weight; one of zero leaves it out.

        A float64 tensor of weights may lie on a device; it is not searched for zeros.
        """
        told = isinstance(weights, torch.Tensor)
        each = weights if told else torch.tensor(list(weights), dtype=torch.float64)
        counts = [True] * len(each) if told else each.bool().tolist()
        uploads = update.uploads or update.slices
        # numbers for index sets, compared once a model and not once a tensor
        cuts: dict[tuple, int] = {}
        cut = [cuts.setdefault(tuple(sorted(s.index.items())), len(cuts)) for s in uploads]
        sizes: dict[tuple[int, ...], tuple[torch.Tensor, ...]] = {}  # of equal groups, the same tensors
        for name, stack in update.params.items():
            rows = update.rows[name]
            groups: dict[tuple[str, int], list[int]] = {}  # models that write to the same entries of a server tensor
            for k, i in enumerate(rows):
                if counts[i]:
                    groups.setdefault((uploads[i].source(name), cut[i]), []).append(k)
            for (target, _), places in groups.items():
                if (key := tuple(rows[k] for k in places)) not in sizes:
                    w = each[list(key)].to(stack.device)
                    sizes[key] = w, w.sum(), torch.tensor(float(len(w)), dtype=torch.float64, device=stack.device)
                w, weight, count = sizes[key]
                value = torch.tensordot(w, (stack if len(places) == len(rows) else stack[places]).double(), 1)
                # what a client holds may be more than it sends (HeteroFL's rows of classes)
                part, whole = uploads[key[0]], update.slices[key[0]]
                if part is not whole:
                    value = take(value, replace(self.infos[name], shape=tuple(value.shape)), within(part, whole))
                self._add(target, name, value, weight, count, part)

    def _add(
        self, target: str, name: str, value: torch.Tensor, weight: torch.Tensor, count: torch.Tensor, part: Slice | None
    ) -> None:
        """Add a sum under the server's name ``target``; ``part``: it is cut as that says."""
        new, cut = (value, weight, count), part if part and is_cut(self.infos[name], part) else None
        if target not in self._stores[0]:
            for store, x in zip(self._stores, new, strict=True):
                store[target] = x
            if cut:
                self._cut[target] = name, cut
            return
        self._expand(target)
        if cut:
            self._spread_(target, new, name, cut)
            return
        for store, x in zip(self._stores, new, strict=True):
            store[target] = store[target] + x

    def merge(self, other: "MaskedMean") -> None:
        """Add the sums of other clients."""
        self.infos = self.infos or other.infos
        for target in other._stores[0]:
            total, weight, count = (store[target] for store in other._stores)
            name, part = other._cut.get(target, (target, None))
            self._add(target, name, total, weight, count, part)

    def result(self, old: Tensors) -> dict[str, torch.Tensor]:
        """Return the mean of what arrived; entries nobody held are ``old``'s."""
        out = {}
        for name, total in self.total.items():
            weight = self.weight[name]
            if not weight.dim():  # somebody held all of it
                out[name] = (total / weight).to(old[name].dtype)
                continue
            mean = total / weight.clamp(min=torch.finfo(torch.float64).tiny)
            out[name] = torch.where(weight > 0, mean.to(old[name].dtype), old[name])
        return out
