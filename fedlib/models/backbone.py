"""What a backbone is: a stem and units that run one at a time for K clients. Only it looks inside its state ``z``.

A spec (a frozen dataclass) says all that is known before any weight exists: ``depth`` (units), ``input_shape``,
the shapes of one example's ``feature`` and ``state``, ``numbers`` of activations (the size of a cohort follows from
them), ``build()``, and what it can do, where that differs from what :class:`Spec` says by default.
Read next: ``vit.py``, ``resnet.py`` (two backbones), ``exit_model.py`` (who runs them).
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import nn

from ..core.paths import named_folder
from ..core.slices import Axis
from ..core.tables import read_table
from ..layers.context import Context
from ..layers.tokens import put_token, take_token


class Spec(Protocol):
    """Shape of a backbone: all that is known before any weight exists. A backbone's own inherits the defaults."""

    depth: int
    input_shape: tuple[int, ...]
    reads: Literal["images", "tokens"] = "images"
    causal: bool = False  # does a token see only those before it?
    heads: int = 0  # of attention, each chunk of its features one; 0: there are none
    grouped: bool = False  # do heads share keys and values? Then attention is never cut
    rotary: bool = False  # are queries and keys rotated in pairs by position? Then heads keep their width
    shares_heads: bool = False  # do layers share tensors per head?
    not_cut: str = ""  # why no width can be cut
    class_token: int = 0  # its position in the sequence
    extra_tokens: int = 1  # that stand for no part of the input
    hands_back: bool = True  # can another token stand in place of the one that exits read?
    averaged: bool = False  # do exits read the mean of all tokens?
    centred: bool = False  # is what exits read standardised by constants of the whole width?
    ends_normalised: bool = False  # has the last unit's feature passed a norm or pooler?
    one_state: bool = True  # is what goes on one tensor? Several cannot be kept (``Backbone.settled``)
    own_modes: tuple[str, ...] = ("full", "frozen")  # fine-tuning modes that make sense, of ``adapters.OWN_MODES``
    peft_targets: tuple[str, ...] = ()  # the layers that peft adapts; none: it cannot
    own_layers: bool = True  # are these the kit's, which take stacked tensors?
    tuners: tuple[str, ...] | None = None  # of peft's, those that fit; None: all
    source: str | None = None  # where published weights are; None: nowhere, or the registry knows
    vocab_size: int  # of what reads words: how many it knows,
    padding: int | None  # and which of them stands for none
    tokenizer: str | None = None  # what its words come from; None: MiniLM's, or it reads none
    pixels: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # mean and SD of its images in pre-training
    as_trained: bool = False  # are images normalised so, and is dropped what was dropped then?

    def feature(self, unit: int) -> tuple[int, ...]:
        """Return the shape of what an exit after ``unit`` reads of one example: (d,) or (C, H, W)."""

    def state(self, unit: int) -> tuple[int, ...]:
        """Return the shape of ``Backbone.settled(z)`` of one example after ``unit``."""

    def numbers(self, examples: int) -> tuple[int, int]:
        """Count the numbers in the widest activation of ``examples`` examples, and in all that autograd keeps."""

    def build(self) -> "Backbone": ...


def shapes(spec: type) -> dict[str, Any]:
    """Return the kit's named shapes of this kind (``shapes.yaml``)."""
    named = read_table(Path(__file__).with_name("shapes.yaml"))[spec.__name__]
    return {name: spec(**said) for name, said in named.items()}


class TokenSpec(Spec):
    """Shape of blocks on tokens of ``dim`` features, by default the patches of a square image and a class token."""

    img_size: int
    patch_size: int
    channels: int
    dim: int
    ffn_dim: int
    streams: int = 1  # sequences in the state

    @property
    def num_patches(self) -> int:
        """Tokens that stand for a part of the input."""
        return (self.img_size // self.patch_size) ** 2

    @property
    def input_shape(self) -> tuple[int, ...]:
        """One image."""
        return (self.channels, self.img_size, self.img_size)

    @property
    def widest(self) -> int:
        """Numbers of a token in the widest activation."""
        return self.ffn_dim

    def feature(self, unit: int) -> tuple[int]:
        return (self.dim,)

    def state(self, unit: int) -> tuple[int, int]:
        return (self.streams * (self.num_patches + self.extra_tokens), self.dim)

    def numbers(self, examples: int) -> tuple[int, int]:
        tokens = examples * (self.num_patches + self.extra_tokens)
        return tokens * self.widest, tokens * self.depth * (8 * self.dim + 2 * self.widest)


class Backbone(nn.Module):
    """A stem, (K, B, *input_shape) -> z, and units, run one at a time for K clients; the exits live elsewhere.

    Stacked parameters (``layers/linear.py``) may differ between clients.
    """

    whole_blocks = False  # compute all of a client's last unit, as plain implementations do
    drawn: tuple[str, ...] = ()  # parameters that a checkpoint lacked, drawn from the experiment's seed
    reads_all = False  # exits see every token, not one: features are (K, B, T, d)

    def __init__(self, spec: Spec, stem: nn.Module, blocks: Iterable[nn.Module]):
        super().__init__()
        self.spec, self.stem, self.blocks = spec, stem, nn.ModuleList(blocks)
        self.of_block: list[list[tuple[dict, str, int]]] = []  # per unit (module's, leaf, dims unstacked)
        self.of_stem: list[tuple[dict, str, int]] = []  # of what belongs to no unit

    def init_(self, generator: torch.Generator) -> "Backbone":
        """Draw all weights."""
        raise NotImplementedError

    def advance(self, z, unit: int, on: int) -> tuple[torch.Tensor, object]:
        """Run ``unit``: what the exits see (K, B, *feature), and z of the first ``on`` clients, which go on."""
        raise TypeError(f"{type(self).__name__} cannot run one unit at a time")

    def replace(self, z, unit: int, feature: torch.Tensor):
        """Return z with ``feature`` in place of what the exits saw after ``unit`` (ReeFL, Eq. 4)."""
        raise TypeError(f"exits of {type(self).__name__} read maps: there is no token to hand back")

    def bridge(self, feature: torch.Tensor, unit: int) -> torch.Tensor:
        """Bring what exits see after ``unit`` to the shape of the last unit's (FeDepth's skip)."""
        return feature

    def settled(self, z) -> torch.Tensor:
        """Return as one tensor what a later unit reads of ``z``; ``TypeError`` where z is several."""
        return z

    def axis(self, name: str, size: int) -> Axis:
        """Return axis ``name`` of ``size`` entries; by default one segment whose order means nothing."""
        return Axis(name, (size,))

    def kept_units(self, first_hand_back: float) -> float:
        """Return how many leading units do not depend on a token handed back after ``first_hand_back`` or later."""
        return first_hand_back + 1


class TokenBackbone(Backbone):
    """A backbone of ``blocks`` on tokens (K, B, T, d) whose exits read one class token.

    ``run(z, a, b)`` applies blocks a..b-1; ``run_to_token(z, block)`` gives the class token alone.
    """

    def __init__(self, spec: TokenSpec, stem: nn.Module, blocks: Iterable[nn.Module]):
        super().__init__(spec, stem, blocks)
        self.context = Context()
        self.register_buffer("origins", None, persistent=False)  # where exits read the class token after each block,
        self.register_buffer("scales", None, persistent=False)  # and in what units; None: as it is

    def run(self, z: torch.Tensor, a: int, b: int) -> torch.Tensor:
        for block in self.blocks[a:b]:
            z = block(z)
        return z

    def run_to_token(self, z: torch.Tensor, block: int) -> torch.Tensor:
        """Return the class token (K, B, d) after ``block`` for clients that go no further: no other is computed."""
        return self.blocks[block](z, 1)[..., 0, :]

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.reads_all:
            z = feature = self.run(z, unit, unit + 1)
            z = z if on == len(z) else z[:on]
        else:
            feature, z = self._advance(z, unit, on)
        if self.origins is not None:
            padding = (feature == 0).all(-1, keepdim=True) if self.reads_all else False
            feature = (feature - self.origins[unit]) / self.scales[unit]
            feature = feature.masked_fill(padding, 0.0) if self.reads_all else feature
        return feature, z

    def replace(self, z: torch.Tensor, unit: int, feature: torch.Tensor) -> torch.Tensor:
        if self.origins is not None:
            feature = self.origins[unit] + self.scales[unit] * feature
        return put_token(z, feature, self.spec.class_token)

    def _advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the class token (K, B, d) after ``unit`` of all clients, and all tokens of the first ``on``."""
        at = self.spec.class_token
        if on == len(z) or self.whole_blocks:
            token, z = take_token(self.run(z, unit, unit + 1), at)
            return token, z if on == len(z) or not on else z[:on]
        if not on:
            return self.run_to_token(z, unit), z
        with self._clients_of(unit, slice(0, on)):
            further = self.run(z[:on], unit, unit + 1)
        with self._clients_of(unit, slice(on, len(z))):
            ending = self.run_to_token(z[on:], unit)
        token, further = take_token(further, at)
        return torch.cat((token, ending)), further

    @contextmanager
    def _clients_of(self, unit: int, rows: slice):
        """Restrict ``unit`` to the clients ``rows`` inside the block: stacked parameters and context."""
        stacked = [(own, leaf, p) for own, leaf, dims in self.of_block[unit] if (p := own[leaf]).dim() > dims]
        for own, leaf, p in stacked:
            own[leaf] = p[rows]
        try:
            with self.context.only(rows):
                yield
        finally:
            for own, leaf, p in stacked:
                own[leaf] = p


def load_published_(
    backbone: Backbone, state: Mapping[str, torch.Tensor], name_of: Callable[[str], str], converted: Callable, of: str,
    besides: Collection[str] = (), unused: Collection[str] | None = None,
) -> None:  # fmt: skip
    """Load the checkpoint ``state`` ``of`` a published net, where a tensor is called ``name_of`` its own name.

    ``converted(own name, tensor)`` brings it into this kit's layout. ``ValueError`` names keys that are missing (some
    ``besides`` tensors' are needed), not known (nor ``unused``; None: there may be any), or of another shape.
    """
    names = {own: name_of(own) for own in backbone.state_dict()}
    needed = {*names.values(), *besides}
    odd = {"missing": needed - set(state), "unknown": set() if unused is None else set(state) - needed - {*unused}}
    if any(odd.values()):
        says = "; ".join(f"{what} {', '.join(sorted(keys))[:200]}" for what, keys in odd.items() if keys)
        raise ValueError(f"not a {of} checkpoint of {backbone.spec.depth} blocks: {says}")
    tensors = {own: converted(own, state[published].float()) for own, published in names.items()}
    for own, p in backbone.state_dict().items():
        if tensors[own].shape != p.shape:
            found = tuple(state[names[own]].shape)
            raise ValueError(f"{of} checkpoint: {names[own]} {found} does not become {tuple(p.shape)}")
    backbone.load_state_dict(tensors)


class Family:
    """Backbones of one kind; what a module of ``doors.BACKBONES`` lists as ``FAMILIES`` (``registry.py`` asks all)."""

    specs: Mapping[str, Spec] = {}  # by name

    def find(self, name: str, known: Spec | None, folder: Path | None) -> Spec | None:
        """Return the shape of ``name``, given what is registered (``known``) and a checkpoint's ``folder``, or None.

        ``ValueError`` for a name that nobody can have meant.
        """

    def load(self, name: str, spec: Spec, seed: int) -> Backbone | None:
        """Load ``name`` with its published weights; None: not mine. What they lack is drawn from ``seed``."""

    def draw(self, spec: Spec, generator: torch.Generator) -> Backbone | None:
        """Build a backbone with fresh weights; None: as most do."""

    def check(self, name: str, spec: Spec, pretrained: bool) -> bool:
        """Return whether there are weights of ``name``.

        ``ValueError`` may say why it cannot begin with or without them.
        """
        return bool(spec.source)

    def fetch(self, name: str, spec: Spec) -> bool:
        """Download the weights of ``name`` if that needs less than :meth:`load`.

        Return whether it is of this family.
        """
        return False


OWN: dict[str, Spec] = {}  # all that there is, by name; the registry fills it, and a user's nets are put here
SHIPPED: dict[str, Spec] = {}  # the kit's and the lab's, whatever is put into ``OWN`` later


def folder_of(name: str) -> Path | None:
    """Return the checkpoint folder ``$FEDLIB_DATA/backbones/<name up to the first dot>`` of a backbone, or None."""
    plain = name[:1] not in ("", ".", "/") and ".." not in Path(name).parts
    folder = (data := named_folder("FEDLIB_DATA")) and data / "backbones" / name.split(".")[0]
    return folder if folder and plain and (folder / "config.json").is_file() else None
