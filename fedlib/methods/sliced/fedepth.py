"""FeDepth (Zhang et al., AAAI 2024): every client trains the whole net, block by block, in the memory it has.

Client (memory r times what training the whole net takes): blocks are packed into stages that fit. For each stage in
turn, with a fresh optimiser: earlier stages are frozen and only run forward, later ones not at all; the stage's blocks
and the head are trained, which reads the stage's output through a skip without parameters (Eq. 1), or through an
auxiliary head of the stage's own (m-FeDepth). Leading blocks that fit no stage are not trained (partial training).
z_{j-1}, what earlier stages make of a client's examples, is kept where it fits beside the stage (``buffered``) and made
of z_{j-2}; elsewhere it is computed anew in every step. ``mu`` is FedProx's term, which the paper joins it with.
With memory for M > 1 models a client trains M that teach each other, and sends one. Server: the mean by examples, of
blocks too that came back untrained (Alg. 1).
Read next: ``memory_budgets.py``, ``engine/stages.py``, ``fedepth/block_inference.py``.

Deviations from the release: a stage trains its own parameters only (there, momentum and decay go on moving frozen
ones); every group trains its last blocks; the stem and a ViT's embeddings belong to the first stage alone; an auxiliary
head is averaged over those who trained it; each client keeps peers of its own. A loss is CE + KL for each model (the
paper divides CE by M, KL not). A ViT's exits have a fresh norm, not the pre-trained last one. Left-out blocks run
forward, as in the paper; ``partial="absent"`` is the release, where the stem feeds the first trained block.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from ...core.annotations import NotNegative, Positive
from ...core.rng import torch_generator
from ...core.slices import STEM
from ...models.map_exits import PooledClassifiers
from ...models.maps import MapSpec
from ...models.measure import FLOAT, MIB
from ..base import NOTHING, Client, Cohort, ExitModel, Experiment, Head, Slice, Spec, classifiers
from ..losses import Batch, cross_entropies
from ..memory_budgets import SLACK, MemoryBudgets, memory_of, usable
from ..values import Member, Round, Server, Serving, Setting, Stage


@dataclass(frozen=True)
class FeDepth(MemoryBudgets):
    """Table 2; ``heads="auxiliary"`` is m-FeDepth."""

    label, color, marker = "FeDepth", "#6b006f", "o"

    version: ClassVar[int] = 2  # what is kept ahead of a stage counts as memory
    last_answers: ClassVar[bool] = True  # the whole net's own head, not the auxiliary ones

    scenario: Literal["fair", "lack", "surplus", "own"] = "fair"
    slack: NotNegative = SLACK
    partial: Literal["forward", "absent", "refused"] = "forward"  # what blocks that fit no stage do
    heads: Literal["skip", "auxiliary"] = "skip"
    average: Literal["all", "trained"] = "all"  # trained: the mean over those who trained a block
    buffered: bool = True  # z_{j-1} of Eq. 1 is computed once a stage, where it fits and nothing is augmented
    mu: NotNegative = 0.0  # FedProx's: mu/2 |theta - w|^2 in every stage, on what it trains
    kd_weight: NotNegative = 1.0  # of mutual distillation
    temperature: Positive = 1.0
    peers: Literal["fresh", "served"] = "fresh"  # a client's further models start at random, or as what it is served

    @property
    def needs_classes(self) -> str:
        return "mutual distillation" if self.kd_weight and self.models(max(self.shares)) > 1 else ""

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        """Place the head; with auxiliary ones an exit after every block: clients hold those that end their stages."""
        return (depth - 1,) if self.heads == "skip" else tuple(range(depth))

    def build_head(self, spec: Spec, num_classes: int, exit_units: tuple[int, ...]) -> Head:
        if self.heads == "skip" or not isinstance(spec, MapSpec):
            return classifiers(spec, num_classes, exit_units)
        return PooledClassifiers(spec, num_classes, exit_units, early=spec.exit_head or "norm", final="norm")

    def check(self, setting: Setting, e: Experiment) -> None:
        if self.peers == "fresh" and e.pretrained and e.finetune == "full" and max(self.shares) >= 2:
            raise ValueError("fedepth: peers = 'fresh' would start without the pre-trained weights; allowed: served")
        for share in self.shares if setting.measure is not None else ():
            try:
                check_stages(*memory_of(share, setting), self.slack, self.partial != "refused")
                blocks = self.blocks(share, setting)
                if self.heads == "skip":
                    check_skips(setting.spec, [units.stop - 1 for units in blocks])
                if self.partial == "absent":
                    check_left_out(setting.spec, blocks[0].start)
            except ValueError as error:
                raise ValueError(f"fedepth: scenario = {self.scenario!r}, r = {share:.3g}: {error}") from None
        if setting.exit_units != self.exit_units(setting.spec.depth, setting.num_exits):
            raise ValueError(f"fedepth: exit_blocks = {list(setting.exit_units)} are not the method's; allowed: null")

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """Keep what peers start from the first time, random models, beside the model as ``peer<i>/<name>``.

        What a random model does not have, such as adapters, is the model's.
        """
        beside, count = {}, self.models(max(self.shares)) - 1 if self.peers == "fresh" else 0
        for i in range(1, count + 1):
            head = self.build_head(setting.spec, setting.axes["classes"].size, setting.exit_units)
            generator = torch_generator(setting.seed, "peer", client=i)
            model = ExitModel(setting.spec.build().init_(generator), head.init_(generator), setting.exit_units)
            own = model.trainable()
            beside |= {f"peer{i}/{n}": own[n].to(p.device) if n in own else p.clone() for n, p in params.items()}
        return super().init_server(params | beside, setting)

    def blocks(self, share: float, setting: Setting) -> tuple[range, ...]:
        """Return the stages of a client with this share of the memory, as ranges of blocks."""
        return pack(*memory_of(share, setting), self.slack)

    def stages(self, client: Client, setting: Setting) -> list[Stage]:
        """Return the client's stages; ``cached``: z_{j-1} of all its examples fits beside what the stage trains.

        In steps of its own size, of the share of the memory that these take for the whole net. While one z is made
        of another, both are held.
        """
        measure, share, examples = setting.measure, self.shares[client.budget], client.num_examples
        room = usable(min(share, 1) * measure.total_mib(setting.batch_size), self.slack)
        blocks, stages, before = self.blocks(share, setting), [], 0.0
        left_out = range(blocks[0].start) if self.partial == "absent" else ()
        for units in blocks:
            z = kept_mib(units.start, examples, setting)
            trained = sum(measure.activation_mib(unit, min(setting.batch_size, examples)) for unit in units)
            cached = self.buffered and units.start > 0 and setting.spec.one_state and z + max(trained, before) <= room
            before = z if cached else 0.0
            exit = 0 if self.heads == "skip" else setting.exit_units.index(units.stop - 1)
            stages.append(Stage(units=units, exit=exit, without=left_out, cached=cached))
        return stages

    def models(self, share: float) -> int:
        """Count M, the whole models that fit."""
        return max(1, int(share))

    def program(self, client: Client, setting: Setting) -> tuple[Stage, ...]:
        return tuple(self.stages(client, setting))

    def skips(self, setting: Setting) -> set[int]:
        """List the units that end a stage: their features skip to the head."""
        return {units.stop - 1 for share in self.shares for units in self.blocks(share, setting)}

    def local_update(self, cohort: Cohort) -> None:
        held_back = (lambda name, p: self.mu * (p - cohort.start[name])) if self.mu else None
        for stage in self.stages(cohort.clients[0], cohort.setting):
            cohort.train(self.local_loss, stage, held_back)

    def local_loss(self, batch: Batch) -> torch.Tensor:
        """Return CE_m + 1/(M-1) sum_{m' != m} KL(p_m' || p_m), (M,); the second is zero for a client of one model."""
        return cross_entropies(batch).sum(0) + self.kd_weight * peer_kl(batch, self.temperature)

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        """Return the whole net, with the heads that end the client's stages."""
        return r.setting.full().only(exits={s.exit for s in self.stages(client, r.setting) if s.exit is not None})

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        part, stages = self.slice_for(client, server, r), self.stages(client, r.setting)
        trained = {unit for stage in stages for unit in stage.units or ()}
        stem = {STEM} if 0 in trained or self.partial == "absent" else set()
        main = Member(client, part, upload=part.only(units=trained | stem) if self.average == "trained" else None)
        members = [main]
        for i in range(1, self.models(self.shares[client.budget])):
            start = replace(part, aliases={n: f"peer{i}/{n}" for n in r.setting.infos if self.peers == "fresh"})
            members.append(Member(client, start, f"peer{i}", upload=NOTHING, keeps="all"))
        return members

    @property
    def remembers(self) -> bool:
        """Whether clients keep memory across rounds: their peers."""
        return max(self.shares) >= 2 or super().remembers

    def model_for(self, exit: int, server: Server, r: Round) -> Slice:
        """Return the whole net: blocks that no client has memory to train run forward while the others learn."""
        return r.setting.full()

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        return Serving((Member(client, r.setting.full()),))

    # --- what it costs -------------------------------------------------------------------------------------------


def peer_kl(batch: Batch, temperature: float = 1.0) -> torch.Tensor:
    """Return mutual learning's loss of a client's n models, (M,): tau^2 * 1/(n-1) * sum_{j != m} KL(p_j || p_m).

    p_j is detached; the sum over exits is not divided. Zero for a client of one model.
    """
    if (client := batch.client) is None:
        return batch.outputs.new_zeros(batch.outputs.shape[1])
    peers = (client[:, None] == client).to(batch.outputs.dtype).fill_diagonal_(0)  # (M, M)
    logp = (batch.outputs / temperature).log_softmax(-1)  # (E, M, B, C)
    p = logp.detach().exp()
    negative_entropy = torch.einsum("mn,enb->emb", peers, (p * logp.detach()).sum(-1))
    kl = negative_entropy - (torch.einsum("mn,enbc->embc", peers, p) * logp).sum(-1)
    return ((kl * batch.weights).sum(-1) * batch.held).sum(0) * temperature**2 / peers.sum(1).clamp(min=1)


def pack(needs: Sequence[float], budget: float, slack: float = SLACK) -> tuple[range, ...]:
    """Pack blocks into stages, as ranges: in order, a stage takes blocks as long as their sum fits the budget.

    ``needs`` and ``budget`` are in one unit; 5 % ``slack`` gives the released stages. A block that alone exceeds the
    budget is in no stage (partial training): it runs forward only. Raises ``ValueError`` if none fits.
    """
    limit = usable(budget, slack)
    stages, start, held = [], None, 0.0
    for block, need in enumerate(needs):
        if start is not None and held + need > limit:
            stages.append(range(start, block))
            start = None
        if need > limit:
            continue
        if start is None:
            start, held = block, 0.0
        held += need
    if start is not None:
        stages.append(range(start, len(needs)))
    if not stages:
        raise ValueError(f"packing: no block fits a budget of {budget:g}; the smallest needs {min(needs):g}")
    return tuple(stages)


def kept_mib(unit: int, examples: int, setting: Setting) -> float:
    """Return the memory that keeps what ``unit`` reads of so many examples, MiB; inputs are the client's anyway."""
    return FLOAT * examples * math.prod(setting.spec.state(unit - 1)) / MIB if unit else 0.0


def check_stages(needs: Sequence[float], budget: float, slack: float, leaves_out: bool) -> None:
    """Raise ``ValueError`` if stages do not cover all blocks, but leading ones where the method ``leaves_out`` those.

    So the last block is always trained.
    """
    large = [block for block, need in enumerate(needs) if need > usable(budget, slack)]
    allowed = range(len(needs) - 1) if leaves_out else range(0)
    why = "only blocks before the first trained one may be left out" if leaves_out else "no block may be left out"
    for place, block in enumerate(large):
        if block != place or block not in allowed:
            short = f"needs {needs[block]:.2f} MiB, the budget is {budget:.2f} MiB with {slack:.0%} slack, and {why}"
            raise ValueError(f"block {block + 1} of {len(needs)} {short}")


def check_skips(spec: Spec, ends: Sequence[int]) -> None:
    """Raise ``ValueError`` if what one of the units ``ends`` gives cannot stand for what the last unit gives.

    Tokens can where they are as wide; maps where they are no wider, and as large or a whole multiple.
    """
    last = spec.feature(spec.depth - 1)
    for unit in ends:
        own = spec.feature(unit)
        fits = own[0] <= last[0] and all(a % b == 0 for a, b in zip(own[1:], last[1:], strict=True))
        if not (fits if len(own) > 1 else own == last):
            here, there = (" x ".join(map(str, shape)) for shape in (own, last))
            raise ValueError(f"what comes after block {unit + 1}, {here}, cannot skip to the head, which reads {there}")


def check_left_out(spec: Spec, first: int) -> None:
    """Raise ``ValueError`` if unit ``first`` cannot read what the stem gives."""
    if first and spec.state(-1) != spec.state(first - 1):
        stem, wanted = (" x ".join(map(str, spec.state(u))) for u in (-1, first - 1))
        raise ValueError(f"block {first + 1} reads {wanted} and cannot read the stem's {stem}")
