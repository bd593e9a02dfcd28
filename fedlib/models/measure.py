"""What a part of a model costs: parameters, multiply-accumulates (MACs), memory of training. Counted, never timed.

Everything runs on PyTorch's ``meta`` device, where tensors have shapes and no values.
"""

import copy
import math
from collections import Counter
from collections.abc import Hashable
from dataclasses import replace
from functools import cached_property, reduce
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from ..core.slices import ParamInfo, Slice, take_all
from ..layers.norms import BatchNorm2d
from ..layers.overrides import FLOPS
from .bert import Embedding
from .exit_model import ExitModel
from .route import Route

MIB = 2**20
FLOAT = 4  # bytes
aten = torch.ops.aten
FLOPS |= {getattr(aten, f"{x}_"): flop_registry[getattr(aten, x)] for x in ("addmm", "baddbmm")}
FLOPS |= {op: lambda *args, i=i, **_: 2 * args[i].numel() for op, i in ((aten.mv, 0), (aten.dot, 0), (aten.addmv, 1))}


def flops_of_trilinear(*args: Any, **_: Any) -> int:
    """Count a multiplication and an addition for each product of three entries, as ``nn.Bilinear`` adds them up."""
    for_all = zip(args[:3], args[3:6], strict=True)
    return 2 * math.prod(torch.broadcast_shapes(*(reduce(torch.unsqueeze, new, x).shape for x, new in for_all)))


FLOPS[aten._trilinear] = flops_of_trilinear


class Macs(TorchDispatchMode):
    """Counts the MACs of every matrix product and convolution, and of the scan of Mamba."""

    macs = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if (count := FLOPS.get(kind := func._overloadpacket, flop_registry.get(kind))) is not None:
            self.macs += count(*args, **(kwargs or {}), out_val=out) / 2
        return out


class Measure:
    """Parameters, MACs and memory of slices of ``model``, fresh or on the ``meta`` device; it is copied."""

    def __init__(self, model: ExitModel):
        self.model = copy.deepcopy(model).to("meta")
        self.model.backbone.whole_blocks = True  # a device that may go on computes them whole
        for norm in (m for m in self.model.modules() if isinstance(m, BatchNorm2d)):
            norm.forward = lambda x: x  # it costs nothing
        self.spec, self.infos = model.backbone.spec, self.model.infos()
        self._trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        self._full = {n: p.detach() for n, p in self.model.named_parameters()}

    @cached_property
    def shapes(self) -> Hashable:
        """What its answers depend on: two models alike in it cost the same."""
        held = tuple((n, tuple(p.shape), n in self._trained) for n, p in self._full.items())
        return self.spec, type(self.model.head), self.model.exit_units, self.model.context.whole_heads, held

    def parameters(self, part: Slice) -> int:
        """Count the numbers that ``part`` holds, statistics of batch norm excluded."""
        return self._numbers(part, self._full)

    def _numbers(self, part: Slice, names) -> int:
        """Count the numbers that ``part`` holds of the parameters ``names``, from the lengths of its indices alone."""
        sizes = {axis: len(kept) for axis, kept in part.index.items()}
        held = (self.infos[n] for n in names if part.holds(self.infos[n]))
        return sum(math.prod(map(sizes.get, i.axes, i.shape)) for i in held)

    def cost(self, of: Literal["parameters", "memory", "macs", "upload"], part: Slice) -> float:
        """Return a cost: all parameters, MiB of training, MACs of an example, or the trained parameters."""
        if of in ("macs", "memory"):
            return self.macs(part) if of == "macs" else self.training_mib(part)
        return self._numbers(part, self._full if of == "parameters" else self._trained)

    def macs(self, part: Slice) -> int:
        """Count the MACs of one example through the units and exits of ``part``.

        Norms, activations and pooling cost none.
        """
        with self.model.holding(take_all(self._full, self.infos, replace(part, aliases={}))), Macs() as counted:
            self._run(part)
        return int(counted.macs)

    def training_mib(self, part: Slice, batch: int = 32) -> float:
        """Estimate the memory of training ``part`` with Adam, in MiB.

        4 bytes * (parameters, of trained ones also the gradient and two moments, and per example the outputs of every
        layer with parameters, forward and backward).
        """
        sizes = {axis: len(kept) for axis, kept in part.index.items()}
        outputs = sum(
            count * sizes.get(axis, whole) // whole
            for own, axis, whole, count in self._layers
            if all(part.holds(info) for info in own)
        )
        kept = self.parameters(part) + 3 * self._numbers(part, self._trained)
        return FLOAT * (kept + 2 * batch * outputs) / MIB

    @cached_property
    def _layers(self) -> list[tuple[list[ParamInfo], str | None, int, int]]:
        """Of every layer with parameters: these, the axis of its output, that axis's size, and the output's numbers."""
        out, paths = [], {m: path for path, m in self.model.named_modules()}
        for m, count in self._whole_outputs.items():
            own = {n: self.infos[f"{paths[m]}.{n}" if paths[m] else n] for n, _ in m.named_parameters(recurse=False)}
            if own:
                info, tables = own.get("weight", next(iter(own.values()))), (nn.Embedding, Embedding)
                dim = 0 if "weight" in own and not isinstance(m, tables) else -1
                out.append((list(own.values()), info.axes[dim], info.shape[dim], count))
        return out

    def activation_mib(self, unit: int, batch: int) -> float:
        """Estimate the memory of training block ``unit`` (FeDepth), in MiB: activations, gradients, parameters.

        2 * 4 bytes * batch * (outputs of every layer with parameters, and of the block) + 4 bytes * parameters.
        """
        block = self.model.backbone.blocks[unit]
        layers = [block, *(m for m in block.modules() if m is not block and list(m.parameters(recurse=False)))]
        return self._mib(layers, batch)

    def total_mib(self, batch: int) -> float:
        """Estimate the memory of training all units, stem and exits in MiB, without norms outside units (FeDepth)."""
        outside = [*self.model.backbone.stem.modules(), *self.model.head.modules()]
        layers = [m for m in outside if any(p.dim() > 1 for p in m.parameters(recurse=False))]
        return self._mib(layers, batch) + sum(self.activation_mib(unit, batch) for unit in range(self.spec.depth))

    def _mib(self, layers: list[nn.Module], batch: int) -> float:
        parameters = sum(p.numel() for m in layers for p in m.parameters(recurse=False))
        return FLOAT * (2 * batch * sum(self._whole_outputs[m] for m in layers) + parameters) / MIB

    @cached_property
    def _whole_outputs(self) -> Counter[nn.Module]:
        """Numbers that each layer of the whole model puts out for one example."""
        outputs: Counter[nn.Module] = Counter()
        hook = lambda m, args, out: outputs.update({m: out.numel() if isinstance(out, torch.Tensor) else 0})  # noqa: E731
        hooks = [m.register_forward_hook(hook) for m in self.model.modules()]
        self._run(Slice.prefix(self.model.depth, range(len(self.model.exit_units))))
        for h in hooks:
            h.remove()
        return outputs

    @torch.no_grad()
    def _run(self, part: Slice) -> None:
        """Run one example through ``part``. ``ValueError`` for layers of a tuner that look at values to run."""
        dtype = torch.long if self.spec.reads == "tokens" else torch.float32
        example = torch.empty(1, 1, *self.spec.input_shape, dtype=dtype, device="meta")
        try:
            self.model(example, Route.of([part], self.model.depth))
        except NotImplementedError as error:
            raise ValueError("this finetune's layers look at values, so what they cost cannot be counted") from error
