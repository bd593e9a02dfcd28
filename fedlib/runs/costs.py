"""Costs without training: parameters, upload, MACs and training memory per exit, from shapes alone (meta device)."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.slices import Slice, take
from ..engine.federation import build_model, setting_of
from ..engine.forward import Forward
from ..methods import Method, Round, Server, Setting, build_method
from ..models.exit_model import ExitModel

MIB = 2**20


@dataclass(frozen=True)
class Shapes:
    """An experiment's model, on the meta device unless it is to be timed, with its method and setting."""

    method: Method
    setting: Setting
    model: ExitModel
    everything: dict[str, torch.Tensor]
    trainable: dict[str, torch.Tensor]

    @property
    def budgets(self) -> int:
        """How many there are; by default one per exit."""
        return self.method.num_budgets(self.setting.num_exits)

    def slice_for(self, budget: int) -> Slice:
        """What a client of ``budget`` holds."""
        client = Client(-1, budget, 0)
        return self.method.slice_for(client, Server(0, self.trainable, {}), Round(1, (client,), self.setting))

    def held(self, part: Slice, names=None) -> dict[str, torch.Tensor]:
        """The parameters (of ``names``, default all) that ``part`` holds, cut to size."""
        params = self.everything if names is None else names
        infos = self.setting.infos
        return {n: take(p, infos[n], part) for n, p in params.items() if part.holds(infos[n])}


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
    return Shapes(method, setting, model, everything, model.trainable())


def upload_parameters(e: Experiment, num_classes: int) -> list[int]:
    """Parameters a client of each budget sends back per round."""
    shapes = load_shapes(e, num_classes)
    return [_count(shapes, s) for s in _budget_slices(shapes)]


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
    slices = _budget_slices(shapes)
    if convention == "honest":
        eligible = shapes.method.eligible(np.arange(len(slices)), shapes.setting)
        sizes = [_mib(shapes, slices[b]) for b in eligible]
    else:
        if shapes.method.compress != "none":
            raise ValueError(
                f"convention = 'paper' counts float32, not compress = {shapes.method.compress!r}; use 'honest'"
            )
        depth, nested = shapes.setting.spec.depth, len(slices[-1].exits) > 1
        charged = load_shapes(e, num_classes, tuple(range(depth)))
        exits = [tuple(range(s.depth)) if nested else (s.depth - 1,) for s in slices]
        sizes = [_mib(charged, replace(s, exits=x)) for s, x in zip(slices, exits, strict=True)]
    return sum(sizes) / len(sizes)


def _budget_slices(shapes: Shapes) -> list[Slice]:
    return [shapes.slice_for(b) for b in range(shapes.budgets)]


def _count(shapes: Shapes, part: Slice) -> int:
    return sum(p.numel() for p in shapes.held(part, shapes.trainable).values())


def _mib(shapes: Shapes, part: Slice) -> float:
    held = shapes.held(part, shapes.trainable).values()
    return shapes.method.upload_bits(p.numel() for p in held) / 8 / MIB


def exit_macs(e: Experiment, num_classes: int, exits: Sequence[int] | None = None) -> list[int]:
    """MACs of one example per exit (of ``exits``), up to and with this exit and those of its sub-model before it.

    From torch's flop counter (2 FLOPs a MAC): matrix products and Vim's scan, not elementwise work (norms, activations,
    Vim's 4-tap convolution). Blocks count whole, as on a device that may go on. A method whose sub-models have
    only their own exit pays for that one.
    """
    shapes = load_shapes(e, num_classes)
    return [_macs(shapes, j) for j in (range(shapes.budgets) if exits is None else exits)]


def _hold_exit_(shapes: Shapes, j: int) -> tuple[Slice, dict[str, torch.Tensor], Forward]:
    """Put the sub-model of exit ``j`` in place: its slice, its parameters, and what runs it."""
    part, model = shapes.slice_for(j), shapes.model
    model.backbone.whole_blocks = True
    held = shapes.held(part)
    own = {n: p.detach().requires_grad_(n in shapes.trainable) for n, p in held.items()}
    return part, held, Forward(model, [part], own).place_(training=True)


def _example(shapes: Shapes, device: str = "meta") -> torch.Tensor:
    return torch.ones(1, 1, *shapes.setting.spec.input_shape, device=device)


def _macs(shapes: Shapes, j: int) -> int:
    from torch.utils.flop_counter import FlopCounterMode

    _, _, forward = _hold_exit_(shapes, j)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        forward(_example(shapes))
    return counter.get_total_flops() // 2


def exit_costs(e: Experiment, num_classes: int, batch_size: int = 32) -> list[dict]:
    """Per exit: ``parameters`` of its sub-model, ``macs`` of one image, ``training_memory_mib`` at ``batch_size``.

    MACs as in :func:`exit_macs`. Training memory is parameters, gradients of the trainable ones, and every activation
    autograd keeps, in float32.
    """
    from torch.utils.flop_counter import FlopCounterMode

    shapes = load_shapes(e, num_classes)
    out = []
    for j in range(shapes.budgets):
        part, held, forward = _hold_exit_(shapes, j)
        trainable = [n for n in held if n in shapes.trainable]
        kept: dict[int, torch.UntypedStorage] = {}

        def keep(t: torch.Tensor, kept=kept) -> torch.Tensor:
            kept[t.untyped_storage()._cdata] = t.untyped_storage()
            return t

        examples = _example(shapes).expand(1, batch_size, *shapes.setting.spec.input_shape)
        saved = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with FlopCounterMode(display=False) as counter, saved:
            forward(examples)
        weights = {p.untyped_storage()._cdata for p in held.values()}
        activations = sum(s.nbytes() for i, s in kept.items() if i not in weights)
        memory = sum(p.numel() for p in held.values()) + sum(held[n].numel() for n in trainable)
        out.append(
            {
                "exit": j + 1,
                "block": part.depth,
                "parameters": sum(p.numel() for p in held.values()),
                "upload_mib": _mib(shapes, part),
                "macs": counter.get_total_flops() // (2 * batch_size),
                "training_memory_mib": (4 * memory + activations) / MIB,
            }
        )
    return out


def product_macs_per_second(device: str = "cpu", seconds: float = 0.3) -> float:
    """MACs in plain matrix products, on one thread or GPU: what training gets within 40 % (DeiT-S, ViT-B, measured)."""
    n = 1024 if device == "cpu" else 4096
    a = torch.ones(n, n, device=device)
    return n**3 * _steps_per_second(lambda: a @ a, device, seconds)


def timed_macs_per_second(e: Experiment, num_classes: int, device: str = "cpu", seconds: float = 0.3) -> float:
    """MACs in training (a step is counted as three forward passes) of ``e``'s middle exit, on one thread or GPU.

    Timed on batches of one client; weights are random and inputs ones, so neither is fetched.
    """
    e = e.replace(pretrained=False)
    j = build_method(e.method, e.options).num_budgets(e.num_exits) // 2
    macs = 3 * exit_macs(e, num_classes, [j])[0] * e.batch_size
    shapes = load_shapes(e, num_classes, device=device)
    _, _, forward = _hold_exit_(shapes, j)
    x = _example(shapes, device).expand(1, e.batch_size, *shapes.setting.spec.input_shape)
    trainable = [p for p in shapes.model.parameters() if p.requires_grad]

    step = lambda: torch.autograd.grad(forward(x).sum(), trainable, allow_unused=True)  # noqa: E731
    return macs * _steps_per_second(step, device, seconds)


def _steps_per_second(step: Callable[[], object], device: str, seconds: float) -> float:
    """How often ``step`` can be done, one after the other."""

    def whole_step() -> None:
        step()
        if device != "cpu":
            torch.cuda.synchronize()

    threads, steps = torch.get_num_threads(), 0
    torch.set_num_threads(1)  # as in the workers: threads that wait for each other tell less of the machine
    try:
        whole_step()  # slower than those that follow
        clock = time.thread_time if device == "cpu" else time.perf_counter  # others may be busy on the same cores
        began = clock()
        while clock() - began < seconds:
            whole_step()
            steps += 1
        return steps / (clock() - began)
    finally:
        torch.set_num_threads(threads)
