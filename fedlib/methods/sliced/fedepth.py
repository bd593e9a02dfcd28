"""FeDepth (Zhang et al., AAAI 2024): every client trains the whole net, block by block, in the memory it has.

Client (memory r times what training the whole net takes): blocks are packed into stages that fit. For each stage in
turn, with a fresh optimiser: earlier stages are frozen and only run forward, later ones not at all; the stage's blocks
and the head are trained, which reads the stage's output through a skip without parameters (Eq. 1), or through an
auxiliary head of the stage's own (m-FeDepth). Leading blocks that fit no stage are not trained (partial training).
z_{j-1}, what earlier stages make of a client's examples, is kept where it fits beside the stage (``buffered``) and made
of z_{j-2}; elsewhere it is computed anew in every step. ``mu`` is FedProx's term, which the paper joins it with.
With memory for M > 1 models a client trains M that teach each other, and sends one. Server: the mean by examples, of
blocks too that came back untrained (Alg. 1).
Read next: ``packing.pack``, ``losses.peer_kl``, ``engine/stages.py``, ``fedepth/block_inference.py``.

Deviations from the release: a stage trains its own parameters only (there, momentum and decay go on moving frozen
ones); every group trains its last blocks; the stem and a ViT's embeddings belong to the first stage alone; an auxiliary
head is averaged over those who trained it; each client keeps peers of its own. A loss is CE + KL for each model (the
paper divides CE by M, KL not). A ViT's exits have a fresh norm, not the pre-trained last one. Left-out blocks run
forward, as in the paper; ``partial="absent"`` is the release, where the stem feeds the first trained block.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import torch
from torch import nn

from ...core.clients import Client
from ...core.slices import STEM, Slice
from ...core.validation import AtLeast, Positive
from ...models.backbone import Spec
from ...models.map_exits import PooledClassifiers, classifiers
from ..base import Method
from ..jobs import Member, Round, Server, Serving, Setting, Stage
from ..losses import Batch, cross_entropies, peer_kl
from ..packing import Decomposition, staged_effort
from ..peers import fresh_peers, peer_members


@dataclass(frozen=True)
class FeDepth(Decomposition, Method):
    """Table 2; ``heads="auxiliary"`` is m-FeDepth."""

    label, color, marker = "FeDepth", "#6b006f", "o"

    version: ClassVar[int] = 2  # what is kept ahead of a stage counts as memory

    scenario: Literal["fair", "lack", "surplus", "own"] = "fair"
    heads: Literal["skip", "auxiliary"] = "skip"
    average: Literal["all", "trained"] = "all"  # trained: the mean over those who trained a block
    buffered: bool = True  # z_{j-1} of Eq. 1 is computed once a stage, where it fits and nothing is augmented
    mu: Annotated[float, AtLeast(0)] = 0.0  # FedProx's: mu/2 |theta - w|^2 in every stage, on what it trains
    kd_weight: Annotated[float, AtLeast(0)] = 1.0  # of mutual distillation
    temperature: Positive = 1.0
    peers: Literal["fresh", "served"] = "fresh"  # a client's further models start at random, or as what it is served

    @property
    def needs_classes(self) -> str:
        return "mutual distillation" if self.kd_weight and self.models(max(self.shares)) > 1 else ""

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """The head; with auxiliary ones an exit after every block: clients hold those that end their stages."""
        return (depth - 1,) if self.heads == "skip" else tuple(range(depth))

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> nn.Module:
        if self.heads == "skip" or len(spec.feature(0)) == 1:
            return classifiers(spec, num_classes, exit_units)
        return PooledClassifiers(spec, num_classes, exit_units, early=spec.exit_head or "norm", final="norm")

    def check(self, setting: Setting, e) -> None:
        if self.peers == "fresh" and e.pretrained and e.finetune == "full" and max(self.shares) >= 2:
            raise ValueError("fedepth: peers = 'fresh' would start without the pre-trained weights; allowed: served")
        self.check_decomposition(setting, skips=self.heads == "skip")
        if setting.exit_units != self.exit_units(setting.spec.depth, setting.num_exits):
            raise ValueError(f"fedepth: exit_blocks = {list(setting.exit_units)} are not the method's; allowed: null")

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """What peers start from the first time stands beside the model."""
        count = self.models(max(self.shares)) - 1 if self.peers == "fresh" else 0
        classes = setting.axes["classes"].size
        heads = [self.build_head(setting.spec, classes, setting.exit_units) for _ in range(count)]
        return super().init_server(params | fresh_peers(params, setting, heads), setting)

    def effort(self, client: Client, setting: Setting, e) -> float:
        """M models, each stage for all local epochs, and the units before it forward."""
        stages, models = self.stages(client, setting), self.models(self.shares[client.budget])
        return models * staged_effort(stages, setting, e.local_epochs, e.augment == "none")

    def stages(self, client: Client, setting: Setting) -> list[Stage]:
        plan = self.plan(self.shares[client.budget], setting)
        left_out = range(plan[0].start) if self.partial == "absent" else ()
        exits = [0 if self.heads == "skip" else setting.exit_units.index(units.stop - 1) for units in plan]
        kept = self.kept(plan, client, setting) if self.buffered else [False] * len(plan)
        each = zip(plan, exits, kept, strict=True)
        return [Stage(units=units, exit=exit, without=left_out, cached=cached) for units, exit, cached in each]

    def program(self, client: Client, setting: Setting) -> tuple[Stage, ...]:
        return tuple(self.stages(client, setting))

    def skips(self, setting: Setting) -> set[int]:
        """The units that end a stage: their features skip to the head."""
        return {units.stop - 1 for share in self.shares for units in self.plan(share, setting)}

    def local_update(self, cohort) -> None:
        held_back = (lambda name, p: self.mu * (p - cohort.start[name])) if self.mu else None
        for stage in self.stages(cohort.clients[0], cohort.setting):
            cohort.train(self.local_loss, stage, held_back)

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """CE_m + 1/(M-1) sum_{m' != m} KL(p_m' || p_m), (M,); the second is zero for a client of one model."""
        return cross_entropies(batch).sum(0) + self.kd_weight * peer_kl(batch, self.temperature)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """The whole net, with the heads that end the client's stages."""
        return r.setting.full().only(exits={stage.exit for stage in self.stages(client, r.setting)})

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part, stages = self.slice_for(client, server, r), self.stages(client, r.setting)
        trained = {unit for stage in stages for unit in stage.units}
        stem = {STEM} if 0 in trained or self.partial == "absent" else set()
        main = Member(client, part, upload=part.only(units=trained | stem) if self.average == "trained" else None)
        names = r.setting.infos if self.peers == "fresh" else ()
        return [main, *peer_members(client, part, self.models(self.shares[client.budget]) - 1, names)]

    @property
    def remembers(self) -> bool:
        """Peers stay with their clients."""
        return max(self.shares) >= 2 or super().remembers

    def answering(self, num_exits: int) -> range:
        """The whole net's own head."""
        return range(num_exits - 1, num_exits)

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, r.setting.full()),))
