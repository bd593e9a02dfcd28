"""Vision Mamba (Zhu et al., ICML 2024): blocks of two selective scans, one each way, class token in the middle.

A :class:`Vim` has the interface of ``vit.ViT``: ``stem``, ``run(z, a, b)``, ``config``, cohort-shaped parameters.
``load_vim`` reads the published checkpoints of Vim-T (``bimamba_type="v2"``, both directions' mean, mean pooling unused
because of the class token). The published blocks carry a residual and the last mixer's output apart, to fuse addition
and norm; z = z + mixer(norm(z)) on their sum is the same function. The final norm is gone: each exit has its own.
Read next: ``selective_scan.py``, ``exit_model.py``.

Deviations: by default (``reads_update``) an exit reads, and Eq. 4 replaces, what its block *added* to the class token
(the mixer's output), as ReeFL's release does on Vim; ``reads_update=False`` (the backbones ``*.stream``) is the class
token itself, as on a ViT and as Eqs. 2-4 read.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fedlib.layers.linear import Linear, per_client
from fedlib.models.backbone import TokenBackbone, TokenSpec, load_published_, shapes
from fedlib.models.vit import patchify

from .selective_scan import causal_conv, selective_scan


@dataclass(frozen=True)
class VimSpec(TokenSpec):
    """Shape of a Vision Mamba; sizes in pixels, tokens and features. Every block has the same state size."""

    img_size: int = 32
    patch_size: int = 8
    dim: int = 64
    depth: int = 12
    state_dim: int = 16  # N, states per channel
    expand: int = 2  # channels of the mixer per feature of the residual stream
    conv_width: int = 4
    eps: float = 1e-5
    reads_update: bool = True  # see the module's deviations
    channels: ClassVar[int] = 3
    not_cut: ClassVar[str] = "what its input projections make has no named axis"
    peft_targets: ClassVar[tuple[str, ...]] = ("in_proj", "out_proj")
    inner_dim = property(lambda self: self.expand * self.dim)

    @property
    def class_token(self) -> int:
        """Position of the class token in the sequence."""
        return self.num_patches // 2

    @property
    def dt_rank(self) -> int:
        """Rank of the projection that makes the step sizes."""
        return math.ceil(self.dim / 16)

    @property
    def widest(self) -> int:
        """The scan's states of a token."""
        return self.inner_dim * self.state_dim

    def build(self) -> "Vim":
        """Build a backbone of this shape, without weights."""
        return Vim(self)


VIMS = shapes(VimSpec)
VIMS |= {f"{name}.stream": replace(config, reads_update=False) for name, config in VIMS.items()}


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.eps, self.weight, self.axes = eps, nn.Parameter(torch.ones(dim)), {"weight": ("residual",)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], eps=self.eps) * per_client(self.weight, x)


class Direction(nn.Module):
    """One pass along the sequence: short convolution, then a scan whose step, B and C depend on the token."""

    def __init__(self, c: VimSpec):
        super().__init__()
        self.sizes = (c.dt_rank, c.state_dim, c.state_dim)
        self.conv_weight = nn.Parameter(torch.zeros(c.conv_width, c.inner_dim))
        self.conv_bias = nn.Parameter(torch.zeros(c.inner_dim))
        self.x_proj = Linear(c.inner_dim, sum(self.sizes), bias=False, axes=(None, "/inner"))
        self.dt_proj = Linear(c.dt_rank, c.inner_dim, axes=("/inner", None))
        self.A_log = nn.Parameter(torch.zeros(c.inner_dim, c.state_dim))
        self.D = nn.Parameter(torch.ones(c.inner_dim))
        self.axes = {"conv_weight": (None, "/inner"), "A_log": ("/inner", None)}
        self.axes |= dict.fromkeys(("conv_bias", "D"), ("/inner",))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, T, inner)
        x = causal_conv(x, self.conv_weight, self.conv_bias)
        dt, b, c = self.x_proj(x).split(self.sizes, -1)
        return selective_scan(x, self.dt_proj(dt), -self.A_log.exp(), b, c, self.D)


class Mixer(nn.Module):
    """The mean of a pass ahead and a pass back, gated: both read the same projection of the tokens."""

    def __init__(self, c: VimSpec):
        super().__init__()
        self.in_proj = Linear(c.dim, 2 * c.inner_dim, bias=False, axes=(None, "residual"))
        self.ahead, self.back = Direction(c), Direction(c)
        self.out_proj = Linear(c.inner_dim, c.dim, bias=False, axes=("residual", "/inner"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, T, d)
        x, gate = self.in_proj(x).chunk(2, -1)
        return self.out_proj((self.ahead(x) + self.back(x.flip(-2)).flip(-2)) * F.silu(gate) / 2)


class VimBlock(nn.Module):
    """z + mixer(norm(z))."""

    def __init__(self, c: VimSpec):
        super().__init__()
        self.norm, self.mixer = RMSNorm(c.dim, c.eps), Mixer(c)

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        return z + self.mixer(self.norm(z))


class VimStem(nn.Module):
    """Tokenizer: patches with the class token in their middle, positional embedding in the order of the sequence."""

    def __init__(self, c: VimSpec):
        super().__init__()
        self.spec = c
        self.patch_embed = Linear(3 * c.patch_size**2, c.dim, axes=("residual", None))
        self.class_token = nn.Parameter(torch.zeros(1, c.dim))
        self.pos_embed = nn.Parameter(torch.zeros(c.num_patches + 1, c.dim))
        self.axes = {"class_token": (None, "residual"), "pos_embed": (None, "residual")}

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (K, B, 3, H, W) -> (K, B, T, d)
        x, middle = self.patch_embed(patchify(images, self.spec.patch_size)), self.spec.class_token
        token = per_client(self.class_token, x, 2).expand(*x.shape[:2], 1, -1)
        x = torch.cat((x[..., :middle, :], token, x[..., middle:, :]), -2)
        return x + per_client(self.pos_embed, x, 2)


class Stream(NamedTuple):
    """The tokens after a block, and the class token before it, of which exits read the update."""

    tokens: torch.Tensor
    origin: torch.Tensor


class Vim(TokenBackbone):
    """A stem and blocks."""

    def __init__(self, config: VimSpec):
        super().__init__(config, VimStem(config), (VimBlock(config) for _ in range(config.depth)))

    def run_to_token(self, z: torch.Tensor, block: int) -> torch.Tensor:
        """Return the class token (K, B, d) after ``block``; the scans read the whole sequence, so nothing is saved."""
        return self.run(z, block, block + 1)[..., self.spec.class_token, :]

    def advance(self, z: torch.Tensor | Stream, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor | Stream]:
        if not self.spec.reads_update:
            return super().advance(z, unit, on)
        z = self.settled(z)
        origin = z[..., self.spec.class_token, :]
        token, z = self._advance(z, unit, on)
        return token - origin, Stream(z, origin if on == len(origin) else origin[:on])

    def replace(self, z: torch.Tensor | Stream, unit: int, feature: torch.Tensor) -> torch.Tensor:
        if not self.spec.reads_update:
            return super().replace(z, unit, feature)
        return super().replace(z.tokens, unit, z.origin + feature)

    def settled(self, z: torch.Tensor | Stream) -> torch.Tensor:
        return z.tokens if isinstance(z, Stream) else z

    def kept_units(self, first_hand_back: float) -> float:
        """Return how many leading units can be kept: the class token before a handed-back one is asked for."""
        return first_hand_back + (0 if self.spec.reads_update else 1)

    @torch.no_grad()
    def init_(self, generator: torch.Generator) -> "Vim":
        """Initialise in place as Vim and Mamba do: steps log-uniform in [0.001, 0.1], A = -1..-N, out_proj small."""

        def uniform_(p: torch.Tensor, bound: float, shrink: float = 1.0) -> None:
            p.uniform_(-bound * shrink, bound * shrink, generator=generator)

        self.stem.patch_embed.weight.normal_(0, self.stem.patch_embed.in_features**-0.5, generator=generator)
        for p in (self.stem.class_token, self.stem.pos_embed):
            p.normal_(0, 0.02, generator=generator)
        for mixer in (block.mixer for block in self.blocks):
            uniform_(mixer.in_proj.weight, mixer.in_proj.in_features**-0.5)
            uniform_(mixer.out_proj.weight, mixer.out_proj.in_features**-0.5, self.spec.depth**-0.5)
            for way in (mixer.ahead, mixer.back):
                for p in (way.conv_weight, way.conv_bias):
                    uniform_(p, len(way.conv_weight) ** -0.5)
                uniform_(way.x_proj.weight, way.x_proj.in_features**-0.5)
                uniform_(way.dt_proj.weight, way.dt_proj.in_features**-0.5)
                dt = way.dt_proj.bias.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
                dt += torch.log(-torch.expm1(-dt))  # softplus of the bias is the step
                way.A_log.copy_(torch.arange(1, way.A_log.shape[1] + 1).log())
        return self


UNUSED = {"norm_f.weight", "head.weight", "head.bias"}  # every exit has its own norm and classifier


def load_vim(state: Mapping[str, torch.Tensor], config: VimSpec) -> Vim:
    """Load a :class:`Vim` of shape ``config`` from a published state dict; ``ValueError`` says what does not fit."""
    vim = Vim(config)
    load_published_(vim, state, published_name, _converted, "Vision Mamba", unused=UNUSED)
    return vim


def published_name(name: str) -> str:
    """Translate a name: ``blocks.3.mixer.back.x_proj.weight`` -> ``layers.3.mixer.x_proj_b.weight``."""
    if name.startswith("stem."):
        fixed = {"stem.class_token": "cls_token", "stem.pos_embed": "pos_embed"}
        return fixed.get(name) or name.replace("stem.patch_embed", "patch_embed.proj")
    name = name.replace("blocks.", "layers.").replace(".conv_", ".conv1d.")
    if ".back." not in name:
        return name.replace(".ahead.", ".")
    block, own = name.split(".back.")
    first, *rest = own.split(".")
    return ".".join((block, "A_b_log" if first == "A_log" else f"{first}_b", *rest))


def _converted(name: str, value: torch.Tensor) -> torch.Tensor:
    """Bring a published tensor into this kit's layout."""
    if name.endswith(".conv_weight"):
        return value.squeeze(1).mT  # (inner, 1, W) -> (W, inner)
    if name == "stem.patch_embed.weight":
        return value.flatten(1)
    return value[0] if name in ("stem.class_token", "stem.pos_embed") else value
