"""What a part of a model costs: parameters, multiply-accumulates (MACs), memory of training. Counted, never timed.

Everything runs on PyTorch's ``meta`` device, where tensors have shapes and no values.
"""

import copy

import torch
from torch import nn

from ..core.slices import Slice, take_all
from ..layers.norms import set_policy_
from .exit_model import ExitModel
from .route import Route

MIB = 2**20
FLOAT = 4  # bytes


class Measure:
    """Parameters, MACs and memory of slices of ``model``, fresh or on the ``meta`` device; it is copied."""

    def __init__(self, model: ExitModel):
        self.model = copy.deepcopy(model).to("meta")
        self.model.backbone.whole_blocks = True  # a device that may go on computes them whole
        set_policy_(self.model, "batch")  # statistics cost nothing
        self.spec, self.infos = model.backbone.spec, self.model.infos()
        self._full = {n: p.detach() for n, p in self.model.named_parameters()}

    def parameters(self, part: Slice) -> int:
        """How many numbers ``part`` holds, statistics of batch norm not counted."""
        return sum(p.numel() for p in take_all(self._full, self.infos, part).values())

    def macs(self, part: Slice) -> int:
        """MACs of one example through the units and exits of ``part``; norms, activations and pooling cost none.

        PyTorch's own counter sees every matrix product and convolution, and counts two operations a MAC.
        """
        from torch.utils.flop_counter import FlopCounterMode

        self.model.put_(take_all(self._full, self.infos, part))
        try:
            with FlopCounterMode(display=False) as counter:
                self._run(part)
        finally:
            self.model.put_(self._full)
        return counter.get_total_flops() // 2

    def activation_mib(self, unit: int, batch: int) -> float:
        """Memory of training block ``unit`` (FeDepth): forward and backward activations, and parameters, in MiB.

        2 * 4 bytes * batch * (outputs of every layer with parameters, and of the block) + 4 bytes * parameters.
        """
        block = self.model.backbone.blocks[unit]
        layers = [block, *(m for m in block.modules() if m is not block and list(m.parameters(recurse=False)))]
        return self._mib(layers, batch)

    def total_mib(self, batch: int) -> float:
        """Memory of training all units, the stem and the exits; norms outside the units are not counted (FeDepth)."""
        outside = [*self.model.backbone.stem.modules(), *self.model.head.modules()]
        layers = [m for m in outside if any(p.dim() > 1 for p in m.parameters(recurse=False))]
        return self._mib(layers, batch) + sum(self.activation_mib(unit, batch) for unit in range(self.spec.depth))

    def training_mib(self, part: Slice, batch: int = 32) -> float:
        """Memory of training ``part``: activations of layers with parameters, forward and backward, and weights."""
        layers = [m for m in self.model.modules() if list(m.parameters(recurse=False))]
        self.model.put_(take_all(self._full, self.infos, part))
        try:
            outputs = self._outputs(layers, part)
        finally:
            self.model.put_(self._full)
        return FLOAT * (2 * batch * outputs + self.parameters(part)) / MIB

    def upload_mib(self, part: Slice) -> float:
        """What a client of ``part`` sends: its trained parameters."""
        trained = {n for n, p in self.model.named_parameters() if p.requires_grad}
        held = take_all({n: self._full[n] for n in trained}, self.infos, part)
        return FLOAT * sum(p.numel() for p in held.values()) / MIB

    def _mib(self, layers: list[nn.Module], batch: int) -> float:
        outputs = self._outputs(layers, Slice.prefix(self.model.depth, range(len(self.model.exit_units))))
        parameters = sum(p.numel() for m in layers for p in m.parameters(recurse=False))
        return FLOAT * (2 * batch * outputs + parameters) / MIB

    def _outputs(self, layers: list[nn.Module], part: Slice) -> int:
        """Numbers that ``layers`` give out for one example of ``part``."""
        outputs: list[int] = []
        hooks = [m.register_forward_hook(lambda m, args, out: outputs.append(out.numel())) for m in layers]
        try:
            self._run(part)
        finally:
            for hook in hooks:
                hook.remove()
        return sum(outputs)

    @torch.no_grad()
    def _run(self, part: Slice) -> None:
        """One example through ``part``."""
        dtype = torch.long if self.spec.reads == "tokens" else torch.float32
        x = torch.empty(1, 1, *self.spec.input_shape, dtype=dtype, device="meta")
        self.model(x, Route.of(part, self.model.depth))
