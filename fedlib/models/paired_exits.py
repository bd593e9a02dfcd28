"""Exits of two parts, one that clients share and one of each client's own, whose logits are added (FedRoD)."""

import torch
from torch import nn


class PairedExits(nn.Module):
    """Two heads of one kind side by side: every exit answers generic + personal, (K, B, classes).

    Parameters of the second have the kind ``personal``.
    """

    def __init__(self, generic: nn.Module, personal: nn.Module):
        super().__init__()
        self.generic, self.personal = generic, personal
        self.exit_units = generic.exit_units
        self.per_exit, self.first_hand_back = generic.per_exit, generic.first_hand_back

    def init_(self, generator: torch.Generator) -> "PairedExits":
        self.generic.init_(generator)
        self.personal.init_(generator)
        return self

    def reads(self, unit: int) -> bool:
        return self.generic.reads(unit)

    def step(self, unit: int, feature: torch.Tensor, past: list):
        """After ``unit``: (the sum of both logits (K, B, classes) or None, nothing to hand back)."""
        out, _ = self.generic.step(unit, feature, past)
        if out is None:
            return None, None
        return out + self.personal.step(unit, feature, past)[0], None

    def place(self, path: list[str]) -> tuple[str, int, int | None]:
        """(kind, unit, exit) of the parameter at ``path`` inside this head."""
        kind, unit, exit = getattr(self, path[0]).place(path[1:])
        return "personal" if path[0] == "personal" else kind, unit, exit
