"""Exits that read tokens: one classifier per exit (every method but ReeFL), one shared by all, or two side by side.

A :class:`Head` is all exits of a model. It is asked after every unit (``step``), and says what it is: does each exit
own its parameters (``per_exit``), after which unit does it first hand a token back (``first_hand_back``), does it look
at what a unit makes (``reads``), where stand its parameters (``place``)? Read next: ``map_exits.py``, ``ree.py``.
"""

import math
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from ..core.slices import STEM
from ..layers.linear import Linear, init_normal_
from ..layers.norms import LayerNorm


class Head(nn.Module):
    """One module of ``exits`` after each of ``exit_units``, (K, B, *feature) -> (K, B, classes); no token goes back."""

    per_exit = True
    first_hand_back = math.inf

    def __init__(self, exit_units: Sequence[int], exits: Iterable[nn.Module] = ()):
        super().__init__()
        self.exit_units, self.exits = tuple(exit_units), nn.ModuleList(exits)

    def init_(self, generator: torch.Generator) -> "Head":
        init_normal_(self, generator)
        return self

    def reads(self, unit: int) -> bool:
        return unit in self.exit_units

    def step(self, unit: int, feature: torch.Tensor, past: list) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Run after ``unit``; return (logits (K, B, classes) or None, a token to hand back or None)."""
        if unit not in self.exit_units or not len(feature):
            return None, None
        return self.exits[self.exit_units.index(unit)](feature), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        """Return (kind, unit, exit) of the parameter at ``path`` inside this head."""
        j = int(path[1])
        return "head", self.exit_units[j], j


class Classifier(nn.Module):
    """LN (eps 1e-5), then Linear d -> C. The backbone's own final norm is not used; if it is, there is no LN."""

    def __init__(self, dim: int, num_classes: int, norm: bool = True):
        super().__init__()
        self.norm = LayerNorm(dim) if norm else nn.Identity()
        self.linear = Linear(dim, num_classes, axes=("classes", "residual"))

    def forward(self, token: torch.Tensor) -> torch.Tensor:  # (K, B, d) -> (K, B, C)
        return self.linear(self.norm(token))


class Classifiers(Head):
    """One classifier per exit on the raw class token of the exit's unit.

    The exit after unit ``bare`` reads what is normalised already.
    """

    def __init__(self, dim: int, num_classes: int, exit_units: Sequence[int], bare: int | None = None):
        super().__init__(exit_units, (Classifier(dim, num_classes, unit != bare) for unit in exit_units))


class SharedClassifier(Head):
    """One classifier shared by all exits, without Ree (the decomposition of ReeFL's Appendix G)."""

    per_exit = False

    def __init__(self, dim: int, num_classes: int, exit_units: Sequence[int]):
        super().__init__(exit_units)
        self.classifier = Classifier(dim, num_classes)

    def step(self, unit: int, feature: torch.Tensor, past: list):
        return (self.classifier(feature) if unit in self.exit_units else None), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        return "head", STEM, None


class Pooler(nn.Module):
    """tanh of a square linear layer on the class token (BERT's pooler), then linear d -> classes: ScaleFL's exits."""

    def __init__(self, dim: int, num_classes: int):
        super().__init__()
        self.pool = Linear(dim, dim, axes=("/pooled", "residual"))
        self.linear = Linear(dim, num_classes, axes=("classes", "/pooled"))

    def forward(self, token: torch.Tensor) -> torch.Tensor:  # (K, B, d) -> (K, B, classes)
        return self.linear(torch.tanh(self.pool(token)))


class PairedExits(Head):
    """Two heads of one kind side by side: every exit answers generic + personal, (K, B, classes) (FedRoD).

    Clients share the first; parameters of the second, each client's own, have the kind ``personal``.
    """

    def __init__(self, generic: Head, personal: Head):
        super().__init__(generic.exit_units)
        self.generic, self.personal = generic, personal
        self.per_exit, self.first_hand_back = generic.per_exit, generic.first_hand_back

    def init_(self, generator: torch.Generator) -> "PairedExits":
        self.generic.init_(generator)
        self.personal.init_(generator)
        return self

    def reads(self, unit: int) -> bool:
        return self.generic.reads(unit)

    def step(self, unit: int, feature: torch.Tensor, past: list):
        out, _ = self.generic.step(unit, feature, past)
        return None if out is None else out + self.personal.step(unit, feature, past)[0], None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        kind, unit, exit = getattr(self, path[0]).place(path[1:])
        return "personal" if path[0] == "personal" else kind, unit, exit


class EveryToken(Head):
    """The exits ``each`` on every token of a row of ``length``: features (K, B, T, d) -> outputs (K, B, length, C).

    For spans and next tokens, where the backbone hands all its tokens to the exits (``Backbone.reads_all``). Padding,
    the zero vector, answers ``blank``: minus infinity where tokens compete (spans), else zero. ``ValueError`` for exits
    that hand a class token back.
    """

    def __init__(self, each: Head, length: int, compete: bool):
        super().__init__(each.exit_units)
        if each.first_hand_back != math.inf:
            name = type(each).__name__
            raise ValueError(f"experiment: exits that hand the class token back ({name}) cannot answer at every token")
        self.each, self.length, self.blank = each, length, -math.inf if compete else 0.0
        self.per_exit = each.per_exit

    def init_(self, generator: torch.Generator) -> "EveryToken":
        self.each.init_(generator)
        return self

    def reads(self, unit: int) -> bool:
        return self.each.reads(unit)

    def step(self, unit: int, feature: torch.Tensor, past: list):
        out, _ = self.each.step(unit, feature.flatten(1, 2), past)
        if out is None:
            return None, None
        padding = ~(feature != 0).any(-1, keepdim=True)
        out = out.unflatten(1, feature.shape[1:3]).masked_fill(padding, self.blank)
        return F.pad(out, (0, 0, 0, self.length - out.shape[2]), value=self.blank), None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        return self.each.place(path[1:])
