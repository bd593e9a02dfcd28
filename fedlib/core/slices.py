"""The part of the global model a client holds. ``take`` and ``scatter_add_`` are the only code that touches indices.

Every dimension of every parameter lies on a named axis (``residual``, ``heads``, ``ffn``, ``classes`` ...; None is
never cut). A :class:`Slice` keeps some units (blocks), some exits, and some indices per axis.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

STEM = -1  # the unit of everything every client holds: tokenizer, Ree


@dataclass(frozen=True)
class ParamInfo:
    """What a parameter is: its axis names, its role (backbone, adapter, ree, exit:j), its unit, its full shape."""

    axes: tuple[str | None, ...]
    role: str
    unit: int
    shape: tuple[int, ...]

    @property
    def exit(self) -> int | None:
        """The exit this parameter belongs to, if any."""
        return int(self.role[5:]) if self.role.startswith("exit:") else None


@dataclass(frozen=True)
class Slice:
    """Units and exits held; kept indices per axis (a ``range`` or a tuple; absent: all); local name -> server name."""

    units: frozenset[int]
    exits: tuple[int, ...]
    index: Mapping[str, Sequence[int]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def prefix(cls, depth: int, exits: Sequence[int], **kwargs) -> "Slice":
        """The first ``depth`` blocks (and the stem) with ``exits``."""
        return cls(frozenset(range(STEM, depth)), tuple(exits), **kwargs)

    @property
    def depth(self) -> int:
        """Number of blocks a forward pass runs through."""
        return max(self.units) + 1

    def holds(self, info: ParamInfo) -> bool:
        return info.unit in self.units and (info.exit is None or info.exit in self.exits)

    def source(self, name: str) -> str:
        """The server's name of local parameter ``name``."""
        return self.aliases.get(name, name)

    def same_width(self) -> tuple:
        """Equal for slices whose tensors have equal shapes."""
        return tuple(sorted((a, tuple(i)) for a, i in self.index.items()))


def _cuts(info: ParamInfo, part: Slice) -> list[tuple[int, Sequence[int]]]:
    """(dimension, kept indices) for the dimensions that ``part`` really cuts."""
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
    """Does ``part`` keep less than the whole parameter, or all of it in another order?"""
    return bool(_cuts(info, part))


def take(tensor: torch.Tensor, info: ParamInfo, part: Slice) -> torch.Tensor:
    """The sub-tensor of a parameter that ``part`` keeps (a view where the kept indices are contiguous)."""
    for dim, kept in _cuts(info, part):
        if isinstance(kept, range) and kept.step == 1:
            tensor = tensor.narrow(dim, kept.start, len(kept))
        else:
            tensor = tensor.index_select(dim, torch.as_tensor(kept, device=tensor.device))
    return tensor


def take_all(params: Mapping[str, torch.Tensor], infos: Mapping[str, ParamInfo], part: Slice) -> dict:
    """Every parameter that ``part`` holds, cut to size, under its local name."""
    return {n: take(params[part.source(n)], i, part) for n, i in infos.items() if n in params and part.holds(i)}


def scatter_add_(total: torch.Tensor, value: torch.Tensor, info: ParamInfo, part: Slice) -> None:
    """Add ``value`` (or a scalar tensor) to the entries of ``total`` that ``part`` keeps: the adjoint of ``take``."""
    cuts = _cuts(info, part)
    if not cuts:
        total += value
        return
    index = [torch.arange(n, device=total.device) for n in info.shape]
    for dim, kept in cuts:
        index[dim] = torch.as_tensor(kept, device=total.device)
    total[torch.meshgrid(*index, indexing="ij")] += value
