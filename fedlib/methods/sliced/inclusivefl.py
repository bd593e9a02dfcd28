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

from ...core.annotations import Fraction, When
from ..base import Arrived, Client, Experiment, Member, Round, Server, Setting, Slice
from ..server import ServerStep


@dataclass(frozen=True)
class InclusiveFL(ServerStep):
    """Table 1 uses momentum distillation with FedAdam; Table 3's rows are ``momentum_distill`` x ``aggregation``."""

    label, color, marker = "InclusiveFL", "#e69f00", "D"

    version: ClassVar[int] = 2  # an exit without a client so far is served the shared block, as released

    aggregation: Literal["mean", "feddyn", "fedadam"] = "fedadam"
    momentum_distill: bool = True
    beta: Annotated[Fraction, When(momentum_distill=True)] = 0.2  # of the deeper stage's momentum

    def check(self, setting: Setting, e: Experiment) -> None:
        if self.momentum_distill and self.aggregation == "feddyn":
            why = "needs momentum_distill = False; allowed: mean, fedadam"
            raise ValueError(f"inclusivefl: aggregation = 'feddyn' {why}")
        blocks: dict[int, set[str]] = {}
        for name, info in setting.infos.items():
            if name.startswith("backbone.blocks."):
                blocks.setdefault(info.unit, set()).add(sub_key(name))
        unlike = len(setting.spec.feature(0)) != 1 or (blocks and not set.intersection(*blocks.values()))
        if self.momentum_distill and unlike:
            why = f"adds up what blocks of equal shape learnt, and those of backbone = {e.backbone!r} differ"
            raise ValueError(f"inclusivefl: momentum_distill = True {why}; allowed: False, or a ViT, Vim or BERT")

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Cut the prefix up to the client's exit; its last block is the exit's own, once the exit has had a client."""
        last, setting = r.setting.exit_units[client.budget], r.setting
        own = {n: a for n, a in self._own_block(client.budget, setting).items() if a in server.params}
        return Slice.prefix(last + 1, (client.budget,), aliases=own)

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part = self.slice_for(client, server, r)
        sent = replace(part, aliases=self._sent(client.budget, r.setting)) if self.momentum_distill else None
        return [Member(client, part, upload=sent)]

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Assemble sub-model e from the shared parameters and its own."""
        return self.slice_for(Client(-1, r.setting.at_hand(exit), 0), server, r)

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        if not self.momentum_distill:
            return super().aggregate(server, arrived, r)
        exits = {e: self._sent(e, r.setting) for e in range(r.setting.num_exits)}
        own = {e: self._own_block(e, r.setting) for e in exits}  # starts as the shared one
        start = {sent: server.params.get(own[e].get(n, n), server.params[n])
                 for e, names in exits.items() for n, sent in names.items() if sent in arrived.mean.total}  # fmt: skip
        mean = arrived.mean.result(start)
        memory = {k: v for k, v in server.memory.items() if not k.startswith("momentum/")}
        proposals: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for e, names in exits.items():
            delta = {n: start[sent] - mean[sent] for n, sent in names.items() if sent in mean}  # (1)
            for n in own[e].keys() & delta.keys():  # (2)
                deeper = server.memory.get(f"momentum/{e + 1}/{sub_key(n)}", torch.zeros_like(delta[n]))
                delta[n] = self.beta * deeper + (1 - self.beta) * delta[n]
            memory |= self._stage_momentum(e, delta, r.setting)
            for n, d in delta.items():  # (3)
                sent = names[n]
                stepped = start[sent] - d
                if self.aggregation == "fedadam":
                    held = torch.ones_like(d, dtype=torch.bool)
                    stepped, moments = self.adam_step(sent, start[sent], d, memory, held)
                    memory |= moments
                proposals.setdefault(own[e].get(n, n), []).append((arrived.mean.count[sent], stepped))
        new = dict(server.params)
        for name, found in proposals.items():  # (4); personal entries have one proposal
            new[name] = sum((n * p for n, p in found), torch.zeros(())) / sum(n for n, _ in found)
        return replace(server, t=r.t, params=new, memory=memory)

    def _own_block(self, e: int, setting: Setting) -> dict[str, str]:
        """Name the last block of exit e's sub-model as on the server; the deepest has none of its own."""
        if not self.momentum_distill or e == setting.num_exits - 1:
            return {}
        last = setting.exit_units[e]
        return {n: f"exit{e}/{n}" for n, i in setting.infos.items() if i.unit == last and i.exit is None}

    def _sent(self, e: int, setting: Setting) -> dict[str, str]:
        """Name what the clients of exit e send, which is averaged among them alone."""
        part, own = Slice.prefix(setting.exit_units[e] + 1, (e,)), self._own_block(e, setting)
        return {n: f"{e}/{own.get(n, n)}" for n, i in setting.infos.items() if part.holds(i)}

    @staticmethod
    def _stage_momentum(e: int, delta: dict[str, torch.Tensor], setting: Setting) -> dict:
        """Return M_e: the mean of Delta_e over the blocks after exit e-1, by position inside a block."""
        first = setting.exit_units[e - 1] + 1 if e else 0
        found: dict[str, list[torch.Tensor]] = {}
        for name, info in setting.infos.items():
            if info.unit >= first and info.exit is None and name in delta:
                found.setdefault(sub_key(name), []).append(delta[name])
        return {f"momentum/{e}/{k}": torch.stack(v).mean(0) for k, v in found.items()}


def sub_key(name: str) -> str:
    """Return a block parameter's name inside its block: ``backbone.blocks.3.attn.q.weight`` -> ``attn.q.weight``."""
    return name.split(".", 3)[3]
