"""SplitMix (Hong et al., ICLR 2022): narrow base networks, of which a client trains as many as it has memory for.

Client (share r of the memory, B bases): r B bases, the first from a shuffled round robin over all clients and rounds,
so that every base is trained, the others at random; each minimises its own cross-entropy on the same batches. Server:
the mean by examples of each base over those who trained it. Served at width r: the mean logits of the first r B bases.
Base b is the b-th chunk of every hidden axis of one wide net, with what no axis cuts as a copy of its own.
Three choices of the release, each an option: convolutions start from U(-1/sqrt(fan-in), 1/sqrt(fan-in)) (``init``); a
fan-in is the wide net's (``rescale_init``) or the base's own; all that leaves a convolution, stem and shortcut too, is
divided by the base's width (``scaler``).
Read next: ``heterofl.py``, ``core/slices.py`` (``Axis.chunk``).

Deviations: where B does not divide a number of channels, the remainder is in no base. Bases are not sorted by
validation accuracy before they are mixed. Bases answer as they are trained, divided by their width; the release does so
in training only, which behind a norm is the same but for the norm's eps. Without norms, and in a transformer, it would
be another net. A transformer starts as it does everywhere.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar, Literal

import torch

from ...core.annotations import Count, Positive, When
from ...core.rng import numpy_generator, torch_generator
from ...models.maps import MapSpec
from ..base import Batch, Client, ExitModel, Experiment, Sizes, Slice, cross_entropies
from ..memory_budgets import MemoryBudgets
from ..values import Member, Round, Server, Serving, Setting
from ..widths import check_cuttable


@dataclass(frozen=True)
class SplitMix(MemoryBudgets):
    """``bases`` of width 1 / bases; the paper's ratios."""

    label, color, marker = "SplitMix", "#39b4ef", "h"

    version: ClassVar[int] = 2  # what is trained is what is served; convolutions start as released
    one_slice: ClassVar[bool] = False

    scenario: Literal["own", "fair", "lack", "surplus"] = "own"
    ratios: Annotated[tuple[Positive, ...] | None, When(scenario="own")] = (1 / 8, 1 / 4, 1 / 2, 1.0)
    bases: Count = 8
    scaler: bool = True
    init: Literal["uniform", "own"] = "uniform"  # of convolutions; own: the backbone's, by He or from a checkpoint
    rescale_init: bool = True  # weights of a base start as the wide net's; False: larger, by the base's own fan-in
    masked: bool = False  # the cross-entropy sees zero for classes that a batch does not have

    @property
    def needs_classes(self) -> str:
        return "masked = True" if self.masked else ""

    def exit_units(self, depth: int, num_exits: int) -> tuple[int, ...]:
        return (depth - 1,)

    def configure(self, model: ExitModel) -> None:
        model.context.scaled = ("conv", "shortcut")

    def check(self, setting: Setting, e: Experiment) -> None:
        check_cuttable(setting, e, 1 / self.bases)
        convolutions = isinstance(setting.spec, MapSpec)
        if convolutions and e.pretrained and not (self.init == "own" and self.rescale_init):
            raise ValueError("splitmix: init would change the pre-trained weights; allowed: own and rescaled")
        if not convolutions and not self.rescale_init:
            raise ValueError(f"splitmix: rescale_init = False is of convnets; {e.backbone!r} is none")
        if setting.axes:
            self.base(0, setting)

    def init_server(self, params: dict[str, torch.Tensor], setting: Setting) -> Server:
        """Copy for each base what no axis cuts, such as the last layer's biases."""
        params = self.start(params, setting) if isinstance(setting.spec, MapSpec) else params
        copies = [(alias, n) for b in range(self.bases) for n, alias in self.base(b, setting).aliases.items()]
        return Server(0, params | {alias: params[n].clone() for alias, n in copies if n in params}, {})

    def start(self, params: dict[str, torch.Tensor], setting: Setting) -> dict[str, torch.Tensor]:
        """Return ``params`` of a convnet, with weights as ``init`` and ``rescale_init`` say."""
        generator, kept, out = torch_generator(setting.seed, "bases init"), self.base(0, setting).index, dict(params)
        for name, info in ((n, i) for n, i in setting.infos.items() if n in params):  # what is trained
            if info.kind == "backbone" and len(info.shape) == 4 and self.init == "uniform":
                bound = math.prod(info.shape[1:]) ** -0.5
                drawn = torch.empty(info.shape).uniform_(-bound, bound, generator=generator)
                out[name] = drawn.to(params[name].device)
            if len(info.shape) > 1 and (cut := kept.get(info.axes[1] or "")) is not None and not self.rescale_init:
                out[name] = out[name] * (info.shape[1] / len(cut)) ** 0.5
        return out

    def prepare(self, server: Server, r: Round) -> dict[str, torch.Tensor]:
        """Choose the first base of each sampled client: the round robin goes on where the last round's ended."""
        seed, served = r.setting.seed, (r.t - 1) * len(r.clients)  # of every round the same number
        order = cache(lambda cycle: numpy_generator(seed, "bases", cycle).permutation(self.bases).tolist())
        places = [divmod(served + i, self.bases) for i in range(len(r.clients))]
        return {"first": torch.tensor([order(cycle)[place] for cycle, place in places])}

    def slice_for(self, client: Client, server: Server, r: Round) -> Slice:
        return self.base(0, r.setting)

    def members(self, client: Client, server: Server, r: Round) -> list[Member]:
        first = int(r.notes["first"][r.clients.index(client)])
        others = r.generator("bases", client.id).permutation([b for b in range(self.bases) if b != first])
        chosen = [first, *others.tolist()][: self.count(client)]
        return [Member(client, self.base(b, r.setting), f"base{b}") for b in chosen]

    def local_loss(self, batch: Batch) -> torch.Tensor:
        return cross_entropies(zero_absent_in_batch(batch) if self.masked else batch).sum(0)

    def model_for(self, exit: int, server: Server, r: Round) -> tuple[Slice, ...]:
        """Mix all bases."""
        return tuple(self.base(b, r.setting) for b in range(self.bases))

    def serve(self, client: Client, server: Server, r: Round) -> Serving:
        """Serve the net of width r: its bases, as they are trained, mixed."""
        return Serving(tuple(Member(client, self.base(b, r.setting), f"base{b}") for b in range(self.count(client))))

    def count(self, client: Client) -> int:
        """Count the bases that a client has memory for."""
        return min(self.bases, max(1, int(self.shares[client.budget] * self.bases + 1e-9)))

    def travels(self, shared: Mapping[str, int], client: Client, setting: Setting, e: Experiment) -> Sizes:
        """Of one base, for each that the client trains."""
        sizes = [*shared.values()] * self.count(client)
        return sizes, sizes

    def sizes(self, depth: int) -> Sequence[float]:
        return [(b + 1) / self.bases for b in range(self.bases)]

    def base(self, b: int, setting: Setting) -> Slice:
        """Cut chunk b of every hidden axis, with its own copies of what none cuts (base 0: what the wide net has)."""
        index = {a.name: a.chunk(b, self.bases, even=False) for a in setting.axes.values() if a.permutable}
        uncut = [n for n, i in setting.infos.items() if not set(i.axes) & set(index)] if b else []
        aliases = {n: f"base{b}/{n}" for n in uncut}
        return replace(setting.full(), index=index, aliases=aliases, scale=1 / self.bases if self.scaler else 1.0)


def zero_absent_in_batch(batch: Batch) -> Batch:
    """Zero the outputs of classes without an example in the member's batch."""
    present = batch.outputs.new_zeros(batch.labels.shape[0], batch.outputs.shape[-1])  # (M, C)
    present.scatter_reduce_(1, batch.labels, (batch.weights > 0).to(present.dtype), "amax")
    return replace(batch, outputs=batch.outputs * present[:, None])
