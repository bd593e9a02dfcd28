"""What a part of a model costs: parameters, multiply-accumulates (MACs), memory of training. Counted, never timed.

:class:`Measure` runs on PyTorch's ``meta`` device, where tensors have shapes and no values.
"""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..core.slices import ParamInfo, Slice, take_all
from .backbone import Spec

MIB = 2**20
FLOAT = 4  # bytes


@cache
def kept_numbers(spec: Spec) -> tuple[int, int]:
    """Numbers of one example in the backbone's widest activation, and in all that autograd keeps of it."""
    backbone = spec.build()
    one, two = (_kept_sizes(backbone, examples) for examples in (1, 2))
    return max(one), sum(two) - sum(one)  # the rest, such as a norm's means, is as large for any number of examples


def _kept_sizes(backbone: nn.Module, examples: int) -> list[int]:
    """The size of every tensor that autograd keeps beside the parameters."""
    parameters = {p.untyped_storage()._cdata for p in backbone.parameters()}
    kept: dict[int, torch.Tensor] = {}  # by storage; the tensors stay, so that no storage gets a second one's address

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()._cdata) not in parameters:
            kept.setdefault(storage, x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        z = backbone.stem(torch.zeros(1, examples, *backbone.spec.input_shape))
        for unit in range(backbone.spec.depth):
            _, z = backbone.advance(z, unit, 1)
    return [x.numel() for x in kept.values()]


def answer(backbone: nn.Module, head: nn.Module, x: torch.Tensor, depth: int, exits: frozenset[int] | None = None):
    """Outputs of ``exits`` (None: all) by unit, of the first ``depth`` units for inputs x (1, B, *input_shape)."""
    z, past, outputs = backbone.stem(x), [], {}
    for unit in range(depth):
        feature, z = backbone.advance(z, unit, 1)
        if not head.reads(unit) or (exits is not None and head.per_exit and head.exit_units.index(unit) not in exits):
            continue
        out, handed_back = head.step(unit, feature, past)
        if out is not None:
            outputs[unit] = out
        if handed_back is not None and unit < depth - 1:
            z = backbone.replace(z, unit, handed_back)
    return outputs


class Measure:
    """Parameters, MACs and memory of slices of one model: a ``backbone``, a ``head`` and where their parameters stand.

    ``infos`` names a parameter ``head.<path>`` or ``<anything>.<path in the backbone>``. The modules are copied, and
    the copies live on the ``meta`` device.
    """

    def __init__(self, backbone: nn.Module, head: nn.Module, infos: Mapping[str, ParamInfo]):
        self.spec, self.infos = backbone.spec, infos
        self.backbone, self.head = (copy.deepcopy(m).to("meta") for m in (backbone, head))
        self._full = {n: torch.empty(i.shape, device="meta") for n, i in infos.items()}

    def parameters(self, part: Slice) -> int:
        """How many numbers ``part`` holds, statistics of batch norm not counted."""
        return sum(p.numel() for n, p in take_all(self._full, self.infos, part).items() if not _is_statistic(n))

    def macs(self, part: Slice) -> int:
        """MACs of one example through the units and exits of ``part``; norms, activations and pooling cost none.

        PyTorch's own counter sees every matrix product and convolution, and counts two operations a MAC.
        """
        with self._cut(part), FlopCounterMode(display=False) as counter, torch.no_grad():
            answer(self.backbone, self.head, self._input(), part.depth, frozenset(part.exits))
        return counter.get_total_flops() // 2

    def activation_mib(self, unit: int, batch: int) -> float:
        """Memory of training block ``unit`` (FeDepth): forward and backward activations, and parameters, in MiB.

        2 * 4 bytes * batch * (outputs of every layer with parameters, and of the block) + 4 bytes * parameters.
        """
        block = self.backbone.blocks[unit]
        layers = [block, *(m for m in block.modules() if m is not block and _own_parameters(m))]
        return self._mib(layers, batch, block.parameters())

    def total_mib(self, batch: int) -> float:
        """Memory of training all units, the stem and the exits; norms outside the units are not counted (FeDepth)."""
        outside = [
            m
            for part in (self.backbone.stem, self.head)
            for m in part.modules()
            if any(p.dim() > 1 for p in m.parameters(recurse=False))
        ]
        parameters = [p for m in outside for p in m.parameters(recurse=False)]
        units = sum(self.activation_mib(unit, batch) for unit in range(self.spec.depth))
        return units + self._mib(outside, batch, parameters)

    def _mib(self, layers: list[nn.Module], batch: int, parameters) -> float:
        outputs: list[int] = []
        hooks = [m.register_forward_hook(lambda m, args, out: outputs.append(out.numel())) for m in layers]
        try:
            with torch.no_grad():
                answer(self.backbone, self.head, self._input(), self.spec.depth)
        finally:
            for hook in hooks:
                hook.remove()
        return FLOAT * (2 * batch * sum(outputs) + sum(p.numel() for p in parameters)) / MIB

    def _input(self) -> torch.Tensor:
        """One example."""
        dtype = torch.long if self.spec.reads == "tokens" else torch.float32
        return torch.empty(1, 1, *self.spec.input_shape, dtype=dtype, device="meta")

    @contextmanager
    def _cut(self, part: Slice) -> Iterator[None]:
        """Inside, the model's tensors are those of ``part``."""
        before = []
        for name, tensor in take_all(self._full, self.infos, part).items():
            root, _, path = name.partition(".")
            path, _, leaf = path.rpartition(".")
            owner = (self.head if root == "head" else self.backbone).get_submodule(path)
            slots = owner._parameters if leaf in owner._parameters else owner._buffers
            before.append((slots, leaf, slots[leaf]))
            slots[leaf] = tensor
        try:
            yield
        finally:
            for slots, leaf, tensor in before:
                slots[leaf] = tensor


def _own_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_statistic(name: str) -> bool:
    return name.endswith((".running_mean", ".running_var"))
