"""Local training: every client alone, with its own whole model; nothing is communicated.

Client: local epochs on its own model, whenever it is sampled (one round in ten, if a tenth is). Server: nothing, so the
global model stays the initial one, which is also what a client that was never sampled answers with.
Read next: ``fedper.py``.

Deviations: none known.
"""

from dataclasses import dataclass
from typing import ClassVar

from ..base import NOTHING, Client, JointExits, Member, Round, Server


@dataclass(frozen=True)
class Local(JointExits):
    """Each client its own model."""

    label, color, marker = "Local", "#acbac0", "v"

    sends_model: ClassVar[bool] = False

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        return [Member(client, r.setting.full(), keeps="all", upload=NOTHING)]
