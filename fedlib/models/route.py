"""Which members of a cohort run which units and exits."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from ..core.slices import Slice, index_of

Rows = slice | tuple[int, ...]  # of a cohort: a run of members, or their numbers


@dataclass(frozen=True)
class Route:
    """Unit l runs for the first ``alive[l]`` members, exit j for those of ``exits[j]`` (absent: nobody).

    A unit that is alive for nobody is left out: the next one reads what came before it.

    ``start``: earlier units run without gradients. ``stop``: later ones not at all, and ``exit`` answers for the last
    one that runs, through the backbone's bridge where it is another's (a stage of FeDepth).
    """

    alive: Sequence[int]
    exits: Mapping[int, Rows]
    start: int = 0
    stop: int | None = None
    exit: int | None = None

    @classmethod
    def of(cls, parts: Sequence[Slice], depth: int) -> "Route":
        """Build the route of the members ``parts`` of ``depth`` units.

        ``ValueError`` unless the first ones run each unit.
        """
        alive = []
        for unit in range(depth):
            runs = [unit in s.units for s in parts]
            if runs != sorted(runs, reverse=True):
                raise ValueError(f"unit {unit}: members of a cohort may leave units out only where all of them do")
            alive.append(sum(runs))
        held = sorted({j for s in parts for j in s.exits})
        return cls(alive, {j: member_rows([i for i, s in enumerate(parts) if j in s.exits]) for j in held})


@dataclass(frozen=True)
class PartialForward:
    """What leading ``units`` made of a batch: z after the last of them, and the features that the head reads."""

    units: int
    z: torch.Tensor
    features: Mapping[int, torch.Tensor] = field(default_factory=dict)  # by unit, (K, B, *feature)


def pad_members(out: torch.Tensor, rows: Rows, members: int) -> torch.Tensor:
    """Place ``out`` of the members ``rows`` among zeros for all others."""
    if isinstance(rows, slice):
        return F.pad(out, (0, 0) * (out.dim() - 1) + (rows.start, members - rows.stop))
    return out.new_zeros(members, *out.shape[1:]).index_copy(0, index_of(rows, out.device), out)


def member_rows(members: Sequence[int]) -> Rows:
    """Return ``members`` (increasing) as a slice where they follow one another, else as a tuple."""
    if not members:
        return slice(0, 0)
    return slice(members[0], members[-1] + 1) if members[-1] - members[0] + 1 == len(members) else tuple(members)
