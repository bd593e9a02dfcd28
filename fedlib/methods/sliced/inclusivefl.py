"""InclusiveFL (Liu et al., KDD 2022): one classifier per sub-model, knowledge flows down by momentum distillation.

Client (budget r): blocks up to exit r and classifier r only; cross-entropy of that exit. Server, per exit r:
(1) Delta_r = theta - mean of the clients of budget r; (2) in the sub-model's last block, Delta_r <- beta M_{r+1} +
(1 - beta) Delta_r, M_{r+1} the mean update of the next deeper stage's blocks in the previous round; (3) a FedAvg or
FedAdam step per exit; (4) what the exits share is averaged by number of clients. A sub-model's last block is personal
to its exit (``aliases``), while deeper sub-models see a shared block in its place.

Deviations: as released, M is zero if the deeper exit had no client in the previous round. M is taken after step 2,
which neither source settles. ``momentum_distill=False`` is the release's other structure: nested prefixes and the plain
mean (or sparse FedAdam).
"""

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal

import torch
from annotated_types import Ge, Le

from ...core.clients import Client
from ...core.experiment import Experiment
from ...core.slices import Slice
from ...core.validation import When
from ..base import Method
from ..jobs import Arrived, Member, Round, Server, Setting
from ..server import ServerStep


@dataclass(frozen=True)
class InclusiveFL(ServerStep, Method):
    """Table 1 uses momentum distillation with FedAdam; Table 3's rows are ``momentum_distill`` x ``aggregation``."""

    label, color, marker = "InclusiveFL", "#e69f00", "D"

    version: ClassVar[int] = 2  # an exit without a client so far is served the shared block, as released

    aggregation: Literal["mean", "feddyn", "fedadam"] = "fedadam"
    momentum_distill: bool = True
    beta: Annotated[float, Ge(0), Le(1), When(momentum_distill=True)] = 0.2  # of the deeper stage's momentum

    def check(self, setting: Setting, e: Experiment) -> None:
        if self.momentum_distill and self.aggregation == "feddyn":
            raise ValueError(
                "inclusivefl: aggregation = 'feddyn' needs momentum_distill = False; allowed: mean, fedadam"
            )
        blocks: dict[int, set[str]] = {}
        for name, info in setting.infos.items():
            if name.startswith("backbone.blocks."):
                blocks.setdefault(info.unit, set()).add(sub_key(name))
        unlike = len(setting.spec.feature(0)) != 1 or (blocks and not set.intersection(*blocks.values()))
        if self.momentum_distill and unlike:
            raise ValueError(
                "inclusivefl: momentum_distill = True adds up what blocks of equal shape learnt, and those of backbone "
                f"= {e.backbone!r} differ; allowed: False, or a ViT, Vim or BERT"
            )

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """The prefix up to the client's exit; its last block is the exit's own, once the exit has had a client."""
        part = self._sends(client.budget, r.setting)
        return replace(part, aliases={n: a for n, a in part.aliases.items() if a in server.params})

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part = self.slice_for(client, server, r)
        return [Member(client, part, upload=self._sends(client.budget, r.setting))]

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Sub-model e is assembled from the shared parameters and its own."""
        return self.slice_for(Client(-1, exit, 0), server, r)

    def group_of(self, client: Client) -> int:
        return client.budget if self.momentum_distill else 0

    def start_of(self, name: str, server: Server) -> torch.Tensor:
        """An exit's own block starts as the shared one."""
        return server.params[name if name in server.params else name.split("/", 1)[1]]

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if not self.momentum_distill:
            return super().aggregate(server, arrived, r)
        memory = {k: v for k, v in server.memory.items() if not k.startswith("momentum/")}
        proposals: dict[str, list[tuple[float, torch.Tensor]]] = {}
        for e, mean in sorted(arrived.sums.items()):
            part = self._sends(e, r.setting)
            start = {n: self.start_of(n, server) for n in mean.total}
            delta = {n: start[n] - v for n, v in mean.result(start).items()}  # (1)
            for name, alias in part.aliases.items():  # (2)
                if alias in delta:
                    deeper = server.memory.get(f"momentum/{e + 1}/{sub_key(name)}", torch.zeros_like(start[alias]))
                    delta[alias] = self.beta * deeper + (1 - self.beta) * delta[alias]
            memory |= self._stage_momentum(e, delta, part, r.setting)
            for name, d in delta.items():  # (3)
                stepped = start[name] - d
                if self.aggregation == "fedadam":
                    held = torch.ones_like(d, dtype=torch.bool)
                    stepped, moments = self.adam_step(f"{e}/{name}", start[name], d, memory, held)
                    memory |= moments
                proposals.setdefault(name, []).append((mean.clients, stepped))
        new = dict(server.params)
        for name, found in proposals.items():  # (4); personal entries have one proposal
            new[name] = sum((n * p for n, p in found), torch.zeros(())) / sum(n for n, _ in found)
        return replace(server, t=r.t, params=new, memory=memory)

    def _sends(self, budget: int, setting: Setting) -> Slice:
        """What a client of this budget sends: its sub-model's last block to its exit's own."""
        aliases = {}
        if self.momentum_distill and budget < setting.num_exits - 1:
            last = setting.exit_units[budget]
            aliases = {n: f"exit{budget}/{n}" for n, i in setting.infos.items() if i.unit == last and i.exit is None}
        return Slice.prefix(setting.exit_units[budget] + 1, (budget,), aliases=aliases)

    @staticmethod
    def _stage_momentum(e: int, delta: dict[str, torch.Tensor], part: Slice, setting: Setting) -> dict:
        """M_e: the mean of Delta_e over the blocks after exit e-1, by position inside a block."""
        first = setting.exit_units[e - 1] + 1 if e else 0
        found: dict[str, list[torch.Tensor]] = {}
        for name, info in setting.infos.items():
            source = part.source(name)
            if info.unit >= first and info.exit is None and source in delta:
                found.setdefault(sub_key(name), []).append(delta[source])
        return {f"momentum/{e}/{k}": torch.stack(v).mean(0) for k, v in found.items()}


def sub_key(name: str) -> str:
    """A block parameter's name inside its block: ``backbone.blocks.3.attn.q.weight`` -> ``attn.q.weight``."""
    return name.split(".", 3)[3]
