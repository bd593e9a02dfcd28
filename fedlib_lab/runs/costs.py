"""Costs without training: parameters, upload, MACs and training memory per exit, from shapes alone (meta device)."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.profiling import kept_by_autograd
from fedlib.core.slices import Slice, take
from fedlib.engine.federation import build_model, setting_of
from fedlib.engine.forward import Forward
from fedlib.methods import Method, Round, Server, Setting, build_method
from fedlib.models.exit_model import ExitModel

MIB = 2**20


@dataclass(frozen=True)
class Shapes:
    """An experiment's model, on the meta device unless it is to be timed, with its method and setting."""

    experiment: Experiment
    method: Method
    setting: Setting
    model: ExitModel
    everything: dict[str, torch.Tensor]
    trainable: dict[str, torch.Tensor]

    @property
    def budgets(self) -> int:
        """How many there are; by default one per exit."""
        return self.method.num_budgets(self.setting.num_exits)

    @property
    def slices(self) -> list[Slice]:
        """What a client of each budget holds."""
        return [self.slice_for(b) for b in range(self.budgets)]

    def slice_for(self, budget: int) -> Slice:
        """What a client of ``budget`` holds."""
        client = Client(-1, budget, 0)
        return self.method.slice_for(client, Server(0, self.trainable, {}), Round(1, (client,), self.setting))

    def held(self, part: Slice, names: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """The parameters (of ``names``, default all) that ``part`` holds, cut to size."""
        params = self.everything if names is None else names
        infos = self.setting.infos
        return {n: take(p, infos[n], part) for n, p in params.items() if part.holds(infos[n])}

    def upload_mib(self, part: Slice, budget: int = 0) -> float:
        """What a client of ``budget`` that holds ``part`` sends back, compressed as the method's options say."""
        _, sizes = self.travels(part, budget)
        return self.method.upload_bits(sizes) / 8 / MIB

    def download_mib(self, part: Slice, budget: int = 0) -> float:
        """What such a client receives."""
        sizes, _ = self.travels(part, budget)
        return 4 * sum(sizes) / MIB

    def travels(self, part: Slice, budget: int = 0) -> tuple[Collection[int], Collection[int]]:
        """Sizes of the tensors that such a client receives, and sends."""
        held, infos = self.held(part, self.trainable), self.setting.infos
        shared = {n: p.numel() for n, p in held.items() if not self.method.personal(infos[n])}
        return self.method.travels(shared, Client(-1, budget, 0), self.setting, self.experiment)

    def forward(self, part: Slice) -> Forward:
        """What runs ``part``, blocks whole as on a device that may go on, its trained parameters wanting gradients."""
        self.model.backbone.whole_blocks = True
        own = {n: p.detach().requires_grad_(n in self.trainable) for n, p in self.held(part).items()}
        return Forward(self.model, [part], own).place_(training=True)

    def kept(self, part: Slice, batch: int) -> tuple[Mapping[str, torch.Tensor], int]:
        """``part``'s tensors, and bytes of what autograd keeps beside them of ``batch`` examples."""
        forward = self.forward(part)
        (held,) = forward.tensors
        with kept_by_autograd(held.values()) as kept:
            forward(self.examples(batch))
        return held, sum(x.untyped_storage().nbytes() for x in kept.values())

    def examples(self, count: int) -> torch.Tensor:
        """So many, all ones, for one client."""
        shape, device = self.setting.spec.input_shape, next(iter(self.everything.values())).device
        return torch.ones(1, 1, *shape, device=device).expand(1, count, *shape)


def load_shapes(
    e: Experiment, num_classes: int, exit_units: tuple[int, ...] | None = None, device: str = "meta"
) -> Shapes:
    """Build ``e``'s model, with exits elsewhere if ``exit_units``; on ``meta`` without weights or memory."""
    if exit_units is not None:
        e = e.replace(num_exits=len(exit_units), exit_blocks=exit_units)
    method = build_method(e.method, e.options)
    model = build_model(e, method, num_classes, meta=device == "meta").to(device)
    setting = setting_of(e, model)
    if exit_units is None:  # a method need not be able to train the exits that it is only charged for
        method.check(setting, e)
    everything = {n: p.detach() for n, p in model.named_parameters()}
    return Shapes(e, method, setting, model, everything, model.trainable())


def upload_parameters(e: Experiment, num_classes: int) -> list[int]:
    """Parameters a client of each budget sends back per round."""
    shapes = load_shapes(e, num_classes)
    return [sum(p.numel() for p in shapes.held(s, shapes.trainable).values()) for s in shapes.slices]


def upload_mib(e: Experiment, num_classes: int, convention: str = "honest") -> float:
    """Mean upload per participating client and round, MiB (2^20 bytes).

    ``honest``: uniform mean over the budgets that may take part, compressed as the method's options say. ``paper``: the
    convention behind the communication column of ReeFL's Tables 1 and 2, inferred from exact agreement: mean over all
    budgets (also for ExclusiveFL), and methods whose clients hold all exits up to their own are charged one classifier
    per block; float32, so compressed uploads are refused.
    """
    if convention not in ("honest", "paper"):
        raise ValueError(f"convention = {convention!r}; allowed: honest, paper")
    shapes = load_shapes(e, num_classes)
    slices = shapes.slices
    if convention == "honest":
        eligible = shapes.method.eligible(np.arange(len(slices)), shapes.setting)
        sizes = [shapes.upload_mib(slices[b]) for b in eligible]
    else:
        if shapes.method.compress != "none":
            raise ValueError(
                f"convention = 'paper' counts float32, not compress = {shapes.method.compress!r}; use 'honest'"
            )
        depth, nested = shapes.setting.spec.depth, len(slices[-1].exits) > 1
        charged = load_shapes(e, num_classes, tuple(range(depth)))
        exits = [tuple(range(s.depth)) if nested else (s.depth - 1,) for s in slices]
        sizes = [charged.upload_mib(replace(s, exits=x)) for s, x in zip(slices, exits, strict=True)]
    return sum(sizes) / len(sizes)


def exit_costs(e: Experiment, num_classes: int, batch_size: int = 32) -> list[dict]:
    """Per exit: ``parameters`` of its sub-model, ``macs`` of one image, ``training_memory_mib`` at ``batch_size``.

    MACs (``models/measure.py``) are those up to and with this exit and those of its sub-model before it, blocks whole;
    a method whose sub-models have only their own exit pays for that one. Training memory is parameters, gradients of
    the trainable ones, and every activation autograd keeps, in float32.
    """
    shapes, out = load_shapes(e, num_classes), []
    for j, part in enumerate(shapes.slices, 1):
        held, activations = shapes.kept(part, batch_size)
        parameters = sum(p.numel() for p in held.values())
        gradients = sum(p.numel() for p in held.values() if p.requires_grad)
        memory = (4 * (parameters + gradients) + activations) / MIB
        out.append({"exit": j, "block": part.depth, "parameters": parameters, "upload_mib": shapes.upload_mib(part),
                    "download_mib": shapes.download_mib(part), "macs": shapes.setting.measure.macs(part),
                    "training_memory_mib": memory})  # fmt: skip
    return out
