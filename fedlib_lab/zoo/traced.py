"""Which layers of a net share a width, followed with torch.fx from the image on: chains of layers, sums with shortcuts.

Known are convolutions of one group, linear layers, batch norm, and what treats every channel alike; no weights that are
computed of others. What HeteroFL, ScaleFL and SplitMix divide by a width ratio has no place in a net of one's own;
before a batch norm it would not count.
Read next: ``wrapped.py``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import fx, nn

from fedlib.core.tables import read_table

from .members import MemberNorm

KNOWN = read_table(Path(__file__).with_suffix(".yaml"))
EACH = tuple(getattr(nn, name) for name in KNOWN["modules"])
FLATTEN = ("flatten", 1), ("mean", (2, 3)), ("mean", (-2, -1))  # what is called on a map, and over which dimensions


@dataclass(frozen=True)
class Channels:
    """The second dimension of a tensor: its axis, None of an image; ``flat``: there is no third."""

    axis: str | None = None
    flat: bool = False


class _Layers(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return isinstance(m, MemberNorm) or super().is_leaf_module(m, path)


class Widths:
    """The axes of the layers of ``pieces``, which run in this order; ``ValueError`` names what cannot be followed."""

    def __init__(self, pieces: Sequence[nn.Module]):
        self.same: dict[str | None, str | None] = {}  # an axis that turned out to be another one
        self.sizes: dict[str | None, int] = {}
        self.layers: dict[nn.Module, tuple[str | None, str | None]] = {}  # the axes of outputs and inputs
        self.streams: list[str | None] = []  # the axis after every piece
        after = Channels()
        for piece in pieces:
            seen: dict[fx.Node, Channels] = {}
            for node in _Layers().trace(piece).nodes:
                if node.op == "output":
                    after = seen[node.args[0]]  # pyright: ignore
                else:
                    seen[node] = after if node.op == "placeholder" else self._after(piece, node, seen)
            self.streams.append(after.axis)
        self.streams = [self.root(axis) for axis in self.streams]

    def root(self, axis: str | None) -> str | None:
        while axis in self.same:
            axis = self.same[axis]
        return axis

    def name_(self) -> None:
        """Tell every layer its axes."""
        for layer, (out, into) in self.layers.items():
            out, into = self.root(out), self.root(into)
            vectors = dict.fromkeys(("bias", "running_mean", "running_var"), (out,))
            layer.axes = vectors | {"weight": (out, into, None, None)[: layer.weight.dim()]}

    def _after(self, piece: nn.Module, node: fx.Node, seen: dict[fx.Node, Channels]) -> Channels:
        inputs = [seen[n] for n in node.all_input_nodes]
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        if node.op == "call_module":
            layer = piece.get_submodule(str(node.target))
            if type(layer) in EACH:
                return inputs[0]
            if type(layer) is nn.Flatten and layer.start_dim == 1:
                return Channels(inputs[0].axis, True)
            if layer not in self.layers and not hasattr(layer, "parametrizations") and self._fits(layer, inputs[0]):
                own = inputs[0].axis if isinstance(layer, MemberNorm) else f"width{len(self.layers)}"
                self.sizes[own], self.layers[layer] = len(layer.weight), (own, inputs[0].axis)  # pyright: ignore
                return Channels(own, inputs[0].flat)
            name = f"{type(layer).__name__} {node.target!r}"
        elif name in KNOWN["functions"] and len(inputs) == 1:
            return inputs[0]
        elif (name, *node.args[1:]) in FLATTEN:
            return Channels(inputs[0].axis, True)
        elif name in KNOWN["together"] and all(self.root(c.axis) is not None for c in inputs):
            first, *others = (self.root(c.axis) for c in inputs)
            self.same |= {other: first for other in others if other != first}
            return inputs[0]
        raise ValueError(f"which widths its layers share is not known: {name} cannot be followed")

    def _fits(self, layer: nn.Module, into: Channels) -> bool:
        """Return whether each entry of ``into`` goes into one input of ``layer``."""
        if isinstance(layer, nn.Conv2d):
            return layer.groups == 1
        if isinstance(layer, nn.Linear):
            return into.flat and layer.in_features == self.sizes.get(into.axis)
        return isinstance(layer, MemberNorm) and len(layer.weight) == self.sizes.get(into.axis)
