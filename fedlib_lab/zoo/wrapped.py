"""Any ``nn.Module`` with cut points as a backbone, whose units are the pieces between the cuts.

``fedlib.wrap`` and timm's nets by name end here. torch.fx follows an image through ``forward`` (of a timm net
``forward_features``) as far as it leads to the cuts: every module without a cut inside is called as it is, whatever its
code. The first unit begins at the image; what follows the last cut is left away, for exits stand there. A cohort runs
under ``vmap`` where a trial shows that it can, else one member after the other (``zoo/members.py``).

Batch norm follows the run's ``batch_norm`` and begins with the net's own statistics. What the owner froze is neither
trained nor sent. Modules are in training while clients train, but those that the owner put in eval mode while others
train, and those that would draw from the global generator: dropout and stochastic depth are off. Refused are layers
that share a parameter, and buffers that the net's code moves: nobody would average them. Widths can be cut where it is
known which layers share them (``traced.py``). What a user wraps is compared with its pieces (``faithful.py``).
Read next: ``maps.py``, ``registry.py``.
"""

import copy
import inspect
import math
import re
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, Literal

import torch
from torch import fx, nn

from fedlib.core.validation import check_known
from fedlib.layers.conv import sample_and_pad
from fedlib.layers.tokens import put_token
from fedlib.models.maps import MapBackbone, MapSpec

from .members import MemberNorm, PerClient
from .traced import Widths

Feature = Literal["map", "tokens"] | Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class WrappedSpec(MapSpec):
    """A net and where it is cut; the shapes follow from a run without values (:meth:`of`).

    Exits read a map, by default the state: a (C, H, W) as it is, tokens (T, d) as (d, T, 1), a vector as (d, 1, 1);
    ``feature`` may be a function (B, *state) -> (B, *any of these). ``feature="tokens"``: they read the first of the
    tokens (T, d), which ReeFL may hand back.
    """

    net: nn.Module  # of the shape, perhaps without values
    make: Callable[[], nn.Module] | None = None  # draws another; None: it begins with its weights
    cuts: tuple[str, ...]
    read: Feature = "map"
    states: tuple[tuple[int, ...], ...] = ()  # of one example after every unit
    features: tuple[tuple[int, ...], ...] = ()  # the same of what exits read
    not_cut: str = ""
    streams: tuple[str, ...] = ()  # the axis of the channels after every unit; empty: no width can be cut
    own_layers: ClassVar[bool] = False
    own_modes: ClassVar[tuple[str, ...]] = ("full", "frozen")
    depth = property(lambda self: len(self.cuts))
    hands_back = property(lambda self: self.read == "tokens")

    @classmethod
    def of(cls, net: nn.Module, cuts: Sequence[str], input_shape: Sequence[int], read: Feature = "map", make=None):
        """Build the spec of ``net``; ``ValueError`` says in a sentence where it cannot be cut, or does not run."""
        sizes = input_shape if isinstance(input_shape, (tuple, list)) else ()
        if [type(n) for n in sizes] != 3 * [int] or sizes[1] != sizes[2]:
            raise ValueError(f"wrap: input_shape = {input_shape!r}; allowed: (channels, pixels, as many pixels)")
        if not isinstance(cuts, (tuple, list)) or not cuts or not all(isinstance(c, str) for c in cuts):
            raise ValueError(f"wrap: cuts = {cuts!r}; allowed: a list of names of modules")
        if isinstance(read, str):
            check_known([read], ("map", "tokens"), "wrap: feature = {} is unknown")
        channels, size, _ = input_shape
        plain = cls(size=size, channels=channels, net=net, make=make, cuts=tuple(cuts), read=read)
        with torch.device("meta"), torch.no_grad():
            backbone, z, states, features = plain.build(), torch.empty(1, 2, *input_shape), [], []
            before = {name: (b, b._version) for name, b in backbone.named_buffers()}
            for unit, cut in enumerate(cuts):
                try:
                    feature, z = backbone.advance(z, unit, 1)
                except Exception as error:  # whatever the net's code raises
                    why = f"up to cut {cut!r} it does not run on shapes alone: {line_of(error)}"
                    if "'tuple' object" in why:
                        what = type(net.get_submodule(cut)).__name__
                        why = f"cut {cut!r}, {what}, gives several tensors; allowed: a module that gives one"
                    raise ValueError(f"wrap: {why}") from error
                features.append(tuple(feature.shape[2:]))
                states.append(tuple(z.shape[2:]))
        for name, b in backbone.named_buffers():
            if name in before and (b is not before[name][0] or b._version != before[name][1]):
                path, _, leaf = name.rpartition(".base_layer.")[2].rpartition(".")
                told = f"wrap: {path!r} moves its buffer {leaf!r} in training, which nobody would average"
                may = "batch norm, a layer that moves none, or this one in eval mode while others train"
                raise ValueError(f"{told}; allowed: {may}")
        if read == "tokens" and len(set(features)) > 1:
            raise ValueError(f"wrap: feature = 'tokens' needs tokens of one width, not of {features}")
        spec = replace(plain, states=tuple(states), features=tuple(features))
        try:
            return replace(spec, streams=spec.streams_of(Widths([piece.base_layer for piece in backbone.blocks])))
        except Exception as error:  # whatever the net's code raises when it meets a placeholder
            return replace(spec, not_cut=line_of(error))

    def streams_of(self, widths: Widths) -> tuple[str, ...]:
        """Return the axes after every unit; ``ValueError`` if exits read something else than these."""
        sizes = [widths.sizes.get(axis) for axis in widths.streams]
        if self.read != "map" or sizes != [feature[0] for feature in self.features]:
            raise ValueError("its exits do not read maps whose channels are those of one layer")
        return tuple(map(str, widths.streams))

    def __deepcopy__(self, memo) -> "WrappedSpec":
        return self  # a value; workers copy models

    @property
    def peft_targets(self) -> tuple[str, ...]:
        """All linear layers, of a net that has none its convolutions of one group."""
        linear = tuple(path for path, m in adaptable(self).items() if isinstance(m, nn.Linear))
        return linear or tuple(path for path, m in adaptable(self).items() if m.groups == 1)

    @property
    def dim(self) -> int:
        """Features of the token that exits read."""
        return self.features[-1][0]

    def stream(self, unit: int) -> str:
        return self.streams[unit] if self.streams else f"cut{unit}"

    def state(self, unit: int) -> tuple[int, ...]:
        return self.states[unit] if unit >= 0 else self.input_shape

    def feature(self, unit: int) -> tuple[int, ...]:
        return self.features[unit]

    def seen(self, z: torch.Tensor) -> torch.Tensor:
        """Return what exits read of states (K, B, *state): (K, B, C, H, W), or a token (K, B, d)."""
        if self.read == "tokens":
            if z.dim() != 4:
                raise ValueError(f"feature = 'tokens' needs a state of tokens (T, d), not {tuple(z.shape[2:])}")
            return z[..., 0, :]
        z = z if self.read == "map" else self.read(z.flatten(0, 1)).unflatten(0, z.shape[:2])
        if not 3 <= z.dim() <= 5:
            raise ValueError(f"exits read maps (C, H, W), tokens (T, d) or vectors (d,), not {tuple(z.shape[2:])}")
        return z if z.dim() == 5 else (z.mT if z.dim() == 4 else z.unsqueeze(-1)).unsqueeze(-1)

    def build(self) -> "Wrapped":
        """Build a backbone with the net's own weights."""
        return Wrapped(self, copy.deepcopy(self.net))

    def drawn(self, seed: int) -> "Wrapped":
        """Build a backbone with other weights, a function of ``seed``: those of another net that is made."""
        with torch.random.fork_rng(devices=[]):
            torch.random.manual_seed(seed)
            return Wrapped(self, self.make())


class Wrapped(MapBackbone):
    """A net in pieces."""

    def __init__(self, spec: WrappedSpec, net: nn.Module):
        still = in_eval(net)
        for path, m in list(net.named_modules()):
            for name, child in m.named_children():
                if isinstance(child, nn.modules.batchnorm._BatchNorm) and child not in still:
                    try:
                        setattr(m, name, MemberNorm(child))
                    except ValueError as error:
                        raise ValueError(f"wrap: {f'{path}.{name}'.lstrip('.')!r}: {error}") from error
        trained = {m for m in net.modules() if m not in still and not isinstance(m, nn.modules.dropout._DropoutNd)}
        pieces = pieces_of(net, spec.cuts, trained)
        if spec.streams:
            Widths(pieces).name_()
        super().__init__(spec, nn.Identity(), map(PerClient, pieces))
        self.trained = [[m for m in piece.modules() if m in trained] for piece in pieces]
        self.alike: set[int] = set()  # units that answer in training as in evaluation
        if torch.empty(0).is_meta:  # in a context that asks for shapes
            self.to("meta")

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        # what answers alike is never in eval mode, where timm's LeViT, for one, goes by what it kept of other weights
        train_(self.trained[unit], unit in self.alike or self.blocks[unit].context.training)
        z = self.blocks[unit](z)
        return self.spec.seen(z), z if on == len(z) else z[:on]

    def kept_units(self, first_hand_back: float) -> float:
        other = (unit for unit in range(self.spec.depth) if unit not in self.alike)
        return min(next(other, math.inf), super().kept_units(first_hand_back))

    def replace(self, z: torch.Tensor, unit: int, feature: torch.Tensor) -> torch.Tensor:
        return put_token(z, feature, 0) if self.spec.hands_back else super().replace(z, unit, feature)

    def bridge(self, feature: torch.Tensor, unit: int) -> torch.Tensor:
        return feature if self.spec.hands_back else sample_and_pad(feature, self.spec.feature(self.spec.depth - 1))

    def try_vmap_(self) -> "Wrapped":
        """See which pieces answer under ``vmap``, forward and backward, as one by one; say so where they do not.

        ``ValueError`` if they draw from the global generator to answer.
        """
        z, off = torch.randn(2, 1, *self.spec.input_shape, generator=torch.Generator().manual_seed(0)), []
        for unit, (piece, trained) in enumerate(zip(self.blocks, self.trained, strict=True)):
            if _try_piece(piece, z, trained)[1]:
                drawing = [m for m in trained if _try_piece(piece, z, [m])[1]]
                off += [type(m).__name__ for m in drawing]
                trained[:] = [m for m in trained if m not in drawing]
            (still, _, piece.writes), (y, draws, _) = (_try_piece(piece, z, modules) for modules in ((), trained))
            if draws:
                why = "wrap: the net draws from PyTorch's global generator to answer"
                raise ValueError(f"{why} (dropout as a function?)")
            # a batch norm, frozen too, goes by the batch in training: nothing after it can be kept
            self.alike |= {unit} if not piece.normalises and torch.allclose(still, y, 1e-4, 1e-5) else set()
            z = piece.try_vmap_(z)
        if what := ", ".join(dict.fromkeys(off)):
            warnings.warn(f"what {what} of the net would draw from the global generator is off", stacklevel=2)
        if where := ", ".join(repr(c) for c, piece in zip(self.spec.cuts, self.blocks, strict=True) if not piece.vmap):
            warnings.warn(f"up to cut {where} clients run one after the other: vmap cannot batch them", stacklevel=2)
        return self


@cache
def adaptable(spec: WrappedSpec) -> dict[str, nn.Module]:
    """Return by path the linear layers and convolutions that the net calls.

    Where it reads their weights instead, what peft puts around a layer would not run.
    """
    called = {}
    with torch.device("meta"), torch.no_grad():
        backbone, z = spec.build(), torch.empty(1, 2, *spec.input_shape)
        for path, m in backbone.named_modules():
            if type(m) in (nn.Linear, nn.Conv2d):
                m.register_forward_hook(lambda m, *_, path=path: called.update({path: m}))
        for unit in range(spec.depth):
            _, z = backbone.advance(z, unit, 1)
    return called


def in_eval(net: nn.Module) -> set[nn.Module]:
    """Return the modules that the owner put in eval mode while others train; none of a net all in eval mode."""
    still = {m for m in net.modules() if not m.training and not isinstance(m, nn.modules.dropout._DropoutNd)}
    still = {m for m in still if getattr(m, "running_mean", m) is not None}  # else it goes by batches in eval mode too
    return still if any(m.training for m in net.modules()) else set()


def train_(modules: Iterable[nn.Module], training: bool) -> None:
    for m in modules:
        if m.training != training:
            m.training = training


@torch.no_grad()
def _try_piece(piece: PerClient, z: torch.Tensor, trained: Iterable[nn.Module]) -> tuple[torch.Tensor, bool, bool]:
    """Return the output of ``piece`` with these of its modules in training, and two flags.

    Does it draw from the global generator, and does it write into what it reads?
    """
    train_(piece.modules(), False)
    train_(trained, True)
    z = z.clone()
    with torch.random.fork_rng(devices=[]):
        before = torch.random.get_rng_state()
        return piece(z), not torch.equal(before, torch.random.get_rng_state()), z._version > 0


class HeldParameter(nn.Module):
    """A parameter that the net reads between its modules."""

    def __init__(self, value: nn.Parameter):
        super().__init__()
        self.value = value

    def forward(self) -> nn.Parameter:
        return self.value


class _CutTracer(fx.Tracer):
    """Follows a net's own code around the cuts, and keeps what every module on the way gave."""

    def __init__(self, net: nn.Module, cuts: Sequence[str]):
        super().__init__()
        self.cuts, self.calls = cuts, {}
        self.traced_func_name = "forward_features" if hasattr(net, "forward_features") else "forward"

    def is_leaf_module(self, m: nn.Module, path: str) -> bool:
        return not any(cut.startswith(f"{path}.") for cut in self.cuts)

    def call_module(self, m: nn.Module, forward: Callable, args: tuple, kwargs: dict):
        out = super().call_module(m, forward, args, kwargs)
        self.calls.setdefault(self.path_of_module(m), []).append(out)
        return out

    def result(self, cut: str) -> fx.Node | None:
        """Return the one tensor that module ``cut`` gave, if it ran once."""
        calls = self.calls.get(cut, [])
        node = getattr(calls[0], "node", calls[0]) if len(calls) == 1 else None
        return node if isinstance(node, fx.Node) else None

    def follow(self, net: nn.Module) -> list[fx.Node]:
        """Trace ``net`` in the mode that it is in; return its nodes."""
        try:
            said = inspect.signature(getattr(net, self.traced_func_name)).parameters.values()  # beside the image
            nodes = list(self.trace(net, {p.name: p.default for p in said if p.default is not p.empty}).nodes)
        except Exception as error:  # whatever the net's code raises when it meets a placeholder
            own = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(torch.__path__[0])]
            at = f"{own[-1].line!r} (line {own[-1].lineno})" if own else ""
            values = "roxy" in str(error) or "traced variables" in str(error)  # fx's words for a tensor without values
            why = "it goes by a tensor's values or size" if values else line_of(error)
            why = f"cannot be followed at {at}: {why}; allowed: this code in a module without a cut inside"
            raise ValueError(f"wrap: the code of {type(net).__name__} around its cuts {why}") from error
        self.calls[""] = [nodes[-1].args[0]]
        return nodes


def pieces_of(net: nn.Module, cuts: Sequence[str], trained: Collection[nn.Module]) -> list[fx.GraphModule]:
    """Cut ``net`` into units, modules of one tensor that share its layers; each ends at a cut, "" is the net's output.

    ``ValueError`` names the cut where nothing was called, or where more than one tensor goes on, what layers share, and
    where the code around the cuts is another while ``trained`` modules are in training.
    """
    net.eval()
    train_(trained, True)
    training = _CutTracer(net, cuts)
    training.follow(net)
    tracer = _CutTracer(net.eval(), cuts)
    nodes = tracer.follow(net)
    ends = [nodes[0]]
    for cut in cuts:
        if (node := tracer.result(cut)) is None:
            known = ", ".join(path for path, _ in net.named_children() if len(tracer.calls.get(path, ())) == 1)
            raise ValueError(f"wrap: cut {cut!r} is no module that runs once and gives one tensor; such are {known}")
        if nodes.index(node) <= nodes.index(ends[-1]):
            raise ValueError(f"wrap: cut {cut!r} does not run after the one before it; name them in this order")
        ends.append(node)
    if _leading_to(training.result(cuts[-1])) != _leading_to(ends[-1]):
        why = f"wrap: the code of {type(net).__name__} around its cuts is another in training (self.training,"
        raise ValueError(f"{why} dropout as a function?); allowed: such code in a module without a cut inside")
    for node in nodes:
        if node.op == "get_attr":
            _hold_(net, node, tracer)
    pieces = [_piece(net, nodes, begin, end, cut) for begin, end, cut in zip(ends[:-1], ends[1:], cuts, strict=True)]
    places: dict[nn.Parameter, tuple] = {}
    for unit, piece in enumerate(pieces):
        for path, m in piece.named_modules():
            for leaf, p in m.named_parameters(path, recurse=False):
                first, *place = places.setdefault(p, (leaf, unit, m))
                if place != [unit, m]:
                    why = f"wrap: {first!r} and {leaf!r} are one parameter that two layers or units share"
                    raise ValueError(f"{why}; allowed: one module, called twice before the same cut")
    return pieces


def _leading_to(node: fx.Node | None) -> list[str]:
    """Return the code that ``node`` follows from; the tensors that it makes are numbered on from trace to trace."""
    needed, code = {node}, []
    for n in reversed(node.graph.nodes if node else ()):
        if n in needed:
            needed.update(n.all_input_nodes)
            code.append(re.sub(r"_tensor_constant\d+", "made", str((n.name, n.op, n.target, n.args, n.kwargs))))
    return code


def _hold_(net: nn.Module, node: fx.Node, tracer: _CutTracer) -> None:
    """Put a parameter that ``node`` reads into a module of its own, so that clients can have their own of it."""
    path, _, leaf = node.target.rpartition(".")
    owner = net.get_submodule(path)
    if isinstance(value := getattr(owner, leaf), nn.Parameter):
        above = [".".join(path.split(".")[:n]) for n in range(1, path.count(".") + 2)]
        if path and any(p in tracer.calls and tracer.is_leaf_module(net, p) for p in above):
            raise ValueError(f"wrap: module {path!r} and the code around the cuts share its parameter {leaf!r}")
        delattr(owner, leaf)
        owner.add_module(leaf, HeldParameter(value))
        node.op = "call_module"


def _piece(net: nn.Module, nodes: list[fx.Node], begin: fx.Node, end: fx.Node, cut: str) -> fx.GraphModule:
    """Build the module that runs after ``begin`` up to ``end``, the cut ``cut``."""
    graph = fx.Graph()
    copies = {begin: graph.placeholder("z")}

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            why = f"wrap: before cut {cut!r} the net reads {node.name!r} of before an earlier cut,"
            raise ValueError(f"{why} beside the one tensor that may go on")
        return copies[node]

    for node in nodes[nodes.index(begin) + 1 : nodes.index(end) + 1]:
        copies[node] = graph.node_copy(node, copied)
    graph.output(copies[end])
    return fx.GraphModule(net, graph)


def line_of(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
