"""The part of the global model a client holds. ``take`` and ``scatter_add_`` are the only code that touches indices.

Every dimension of every parameter lies on a named :class:`Axis` (None is never cut): ``residual`` and ``classes`` are
shared by the whole model, ``3/ffn`` or ``3/qk`` belong to one unit. A :class:`Slice` keeps some units, some exits and
some indices per axis. Nothing is ever permuted: a ranked slice is the same as permuting the net and cutting a prefix.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate, chain
from typing import Any

import torch

STEM = -1  # the unit of everything every client holds: tokenizer, Ree

RANK = ".rank"  # ends the name of the axis between a layer's two low-rank factors

Indices = range | tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """A dimension that parameters share. ``segments``: sizes cut apart (heads; the inputs of a concatenation)."""

    name: str
    segments: tuple[int, ...]
    permutable: bool = True  # False: order means something (pixels, classes, rotary pairs)
    tied: bool = False  # a concatenation of what has axes of its own: cut alike, it cannot be ranked by itself

    @property
    def size(self) -> int:
        return sum(self.segments)

    def leading(self, keep: Callable[[int], int]) -> Indices:
        """Keep the first ``keep(size)`` of every segment: ScaleFL, HeteroFL. ``ValueError`` for an empty segment."""
        return self.rolling(0, keep)

    def chunk(self, i: int, of: int, even: bool = True) -> Indices:
        """Keep part ``i`` of ``of`` equal ones of every segment: SplitMix's base.

        ``ValueError`` if they cannot be equal.

        Not ``even``: what is left over is in none of them.
        """
        if any(size % of if even else size < of for size in self.segments):
            raise ValueError(f"axis {self.name}: {list(self.segments)} cannot be cut into {of} equal parts")
        parts = (range(start + i * (n // of), start + (i + 1) * (n // of)) for start, n in self._placed)
        return as_range(tuple(chain.from_iterable(parts)))

    def rolling(self, start: int, keep: Callable[[int], int]) -> Indices:
        """Keep ``keep(size)`` entries of every segment from entry ``start`` on, wrapping around its end: FedRolex."""
        return _rolling(self.segments, tuple(self._kept(keep, size) for size in self.segments), start)

    def ranked(self, scores: torch.Tensor, keep: Callable[[int], int]) -> Indices:
        """Keep the ``keep(size)`` highest of every segment, best first (of equal ones the first): RaFFM.

        ``scores`` (size,). The same as permuting the net by rank within segments, then :meth:`leading`.
        """
        if not self.permutable:
            raise ValueError(f"axis {self.name} cannot be ranked: the order of its entries means something")
        if self.tied:
            raise ValueError(f"axis {self.name} cannot be ranked alone: it is a concatenation of others")
        parts = zip(self._placed, scores.split(list(self.segments)), strict=True)
        order = [(start + s.argsort(descending=True, stable=True))[: self._kept(keep, n)] for (start, n), s in parts]
        return as_range(tuple(torch.cat(order).tolist()))

    def whole(self, segments: Sequence[int]) -> Indices:
        """Keep all entries of ``segments`` (their numbers), in this order: RaFFM's whole heads."""
        return as_range(tuple(start + i for start, n in (self._placed[s] for s in segments) for i in range(n)))

    @cached_property
    def _placed(self) -> list[tuple[int, int]]:
        """The first entry and the size of every segment."""
        return list(zip(accumulate(self.segments[:-1], initial=0), self.segments, strict=True))

    def _kept(self, keep: Callable[[int], int], size: int) -> int:
        if not 0 < (n := int(keep(size))) <= size:
            raise ValueError(f"axis {self.name}: {n} of {size} entries cannot be kept; allowed: 1 to {size}")
        return n


@lru_cache(maxsize=4096)  # a random sub-model is drawn many times before one meets its constraint
def _rolling(segments: tuple[int, ...], kept: tuple[int, ...], start: int) -> Indices:
    """Keep ``kept[i]`` entries of every segment i from its entry ``start`` on, around its end."""
    windows = zip(accumulate(segments[:-1], initial=0), segments, kept, strict=True)
    return as_range(tuple(first + (start + i) % size for first, size, n in windows for i in range(n)))


def as_range(indices: tuple[int, ...]) -> Indices:
    """Return ``indices`` as a range where they follow one another, else as they are."""
    if indices and indices == tuple(range(indices[0], indices[0] + len(indices))):
        return range(indices[0], indices[0] + len(indices))
    return indices


@dataclass(frozen=True)
class ParamInfo:
    """What a parameter is: its axis names, its kind, its unit, its full shape, the exit that owns it if one does."""

    axes: tuple[str | None, ...]
    kind: str  # backbone, adapter, head, statistic (of batch norm), or a head's own word (ree, personal)
    unit: int
    shape: tuple[int, ...]
    exit: int | None = None
    of: str = ""  # the kind; of a statistic that of the weights beside it


@dataclass(frozen=True)
class Slice:
    """Units and exits held; kept indices per axis (absent: all); local name -> server name. Hashable."""

    units: frozenset[int]
    exits: tuple[int, ...]
    index: Mapping[str, Indices] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    scale: float = 1.0  # outputs of cut layers are divided by it (HeteroFL's scaler)

    @classmethod
    def prefix(cls, depth: int, exits: Sequence[int], **kwargs: Any) -> "Slice":
        """Return the slice of the first ``depth`` units (and the stem) with ``exits``."""
        return cls(frozenset(range(STEM, depth)), tuple(exits), **kwargs)

    def __hash__(self) -> int:
        return hash((self.units, self.exits, tuple(sorted(self.index)), len(self.aliases), self.scale))

    @property
    def depth(self) -> int:
        """Number of units a forward pass runs through."""
        return max(self.units, default=STEM) + 1

    def holds(self, info: ParamInfo) -> bool:
        return info.unit in self.units and (info.exit is None or info.exit in self.exits)

    def source(self, name: str) -> str:
        """Return the server's name of local parameter ``name``."""
        return self.aliases.get(name, name)

    def shape_key(self) -> Hashable:
        """Return a key that is equal for slices whose tensors have equal shapes, so that they can stack."""
        gaps = tuple(u for u in range(self.depth) if u not in self.units)
        return tuple(sorted((axis, len(i)) for axis, i in self.index.items())), gaps, self.scale

    def only(self, units: Iterable[int] | None = None, exits: Iterable[int] | None = None, **index: Indices) -> "Slice":
        """Return a part of this slice, for an upload that is less than the download. ``index`` names whole axes."""
        return replace(
            self,
            units=self.units if units is None else self.units & frozenset(units),
            exits=self.exits if exits is None else tuple(j for j in self.exits if j in set(exits)),
            index={**self.index, **index},
        )


NOTHING = Slice(frozenset(), ())


def within(part: Slice, whole: Slice) -> Slice:
    """Return ``part`` relative to ``whole``: its indices become positions among those that ``whole`` keeps."""
    index = {}
    for axis, kept in part.index.items():
        if (held := whole.index.get(axis)) is None:
            index[axis] = kept
        elif held != kept:
            place = {i: k for k, i in enumerate(held)}
            if not set(kept) <= set(place):
                raise ValueError(f"axis {axis}: what is sent must be among what is held")
            index[axis] = as_range(tuple(place[i] for i in kept))
    return replace(part, index=index)


def _cuts(info: ParamInfo, part: Slice) -> list[tuple[int, Indices]]:
    """Return (dimension, kept indices) for the dimensions that ``part`` really cuts."""
    cuts = []
    for dim, axis in enumerate(info.axes):
        kept = part.index.get(axis) if axis is not None else None
        if kept is None:
            continue
        if len(kept) and (max(kept) >= info.shape[dim] or min(kept) < 0):
            raise IndexError(f"axis {axis!r} has {info.shape[dim]} entries; the slice keeps up to index {max(kept)}")
        if not (isinstance(kept, range) and kept == range(info.shape[dim])):
            cuts.append((dim, kept))
    return cuts


def is_cut(info: ParamInfo, part: Slice) -> bool:
    """Return whether ``part`` keeps less than the whole parameter, or all of it in another order."""
    return bool(_cuts(info, part))


def take(tensor: torch.Tensor, info: ParamInfo, part: Slice) -> torch.Tensor:
    """Return the sub-tensor of a parameter that ``part`` keeps, a view where the kept indices are contiguous."""
    for dim, kept in _cuts(info, part):
        if isinstance(kept, range) and kept.step == 1:
            tensor = tensor.narrow(dim, kept.start, len(kept))
        else:
            tensor = tensor.index_select(dim, index_of(tuple(kept), tensor.device))
    return tensor


@lru_cache(maxsize=4096)
def index_of(kept: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return ``kept`` as an index tensor on ``device``, cached so that no step repeats the copy from the host."""
    return torch.tensor(kept, dtype=torch.long, device=device)


def take_all(params: Mapping[str, torch.Tensor], infos: Mapping[str, ParamInfo], part: Slice) -> dict:
    """Cut every parameter that ``part`` holds to size, by its local name."""
    return {n: take(params[part.source(n)], i, part) for n, i in infos.items() if n in params and part.holds(i)}


def scatter_add_(total: torch.Tensor, value: torch.Tensor, info: ParamInfo, part: Slice) -> None:
    """Add ``value`` (or a scalar tensor) to the entries of ``total`` that ``part`` keeps: the adjoint of ``take``."""
    scattered = []
    # contiguous indices first: ``narrow`` is a view, so adding to it adds to ``total``; indexing by a tensor copies,
    # and only the assignment at the end writes back. So leading slices, the usual ones, never meet an index tensor
    for dim, kept in _cuts(info, part):
        if isinstance(kept, range) and kept.step == 1:
            total = total.narrow(dim, kept.start, len(kept))
        else:
            scattered.append((dim, torch.as_tensor(kept, dtype=torch.long, device=total.device)))
    if not scattered:
        total += value
        return
    index: list = [slice(None)] * total.dim()
    if len(scattered) > 1:  # as ``numpy.ix_``: every dimension is indexed, and the indices span a grid
        index = [torch.arange(n, device=total.device) for n in total.shape]
    for dim, kept in scattered:
        index[dim] = kept
    if len(scattered) > 1:
        index = [i.view(-1, *(1,) * (total.dim() - 1 - dim)) for dim, i in enumerate(index)]
    total[tuple(index)] += value
