"""Vision transformers (Eq. 1) whose blocks can be run one at a time, for one client or a cohort.

Any timm ``VisionTransformer`` with a class token becomes a :class:`ViT` through ``timm_nets.load_timm``: q, k and v are
apart, the final norm is gone (each exit has its own), and every parameter dimension names its axis.
Read next: ``exits.py`` (what happens after a block), ``ree.py``.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..core.slices import Axis
from ..layers.attention import attend
from ..layers.context import Context, Scaler
from ..layers.linear import Linear, init_normal_, per_client
from ..layers.norms import LayerNorm
from .backbone import TokenBackbone, TokenSpec


@dataclass(frozen=True)
class ViTSpec(TokenSpec):
    """Shape of a pre-norm vision transformer; sizes in pixels, tokens and features."""

    img_size: int = 32
    patch_size: int = 8
    dim: int = 64
    depth: int = 12
    heads: int = 4
    ffn_dim: int = 256
    eps: float = 1e-6
    qkv_bias: bool = True
    extra_tokens: int = 1  # class token first, then distillation or register tokens
    extra_positions: bool = True  # False: extra tokens get no positional embedding (DeiT-III, DINOv2 registers)
    norm_pre: bool = False  # CLIP's norm before the first block
    layer_scale: bool = False
    channels: int = 3
    own_modes: ClassVar[tuple[str, ...]] = ("full", "frozen", "pa", "sa", "ssf")
    ssf_stem: ClassVar[str] = "patch_embed"  # the stem's layer that ssf scales and shifts
    peft_targets: ClassVar[tuple[str, ...]] = ("q", "v")

    def build(self) -> "ViT":
        """Build a backbone of this shape, without weights."""
        return ViT(self)


def patchify(images: torch.Tensor, patch: int) -> torch.Tensor:
    """Cut into patches by rows, (K, B, C, H, W) -> (K, B, H/patch * W/patch, C * patch**2), as a conv's weight lies."""
    channels, (rows, columns) = images.shape[-3], (n // patch for n in images.shape[-2:])
    x = images.reshape(-1, channels, rows, patch, columns, patch).permute(0, 2, 4, 1, 3, 5)
    return x.reshape(*images.shape[:-3], rows * columns, channels * patch**2)


class Attention(nn.Module):
    """Multi-head self-attention with q, k, v apart. The number of heads is fixed, the head width follows q's rows;
    the reverse where whole heads are cut (``Context.whole_heads``)."""

    def __init__(self, c: ViTSpec):
        super().__init__()
        self.all_heads, self.width, self.context = c.heads, c.dim // c.heads, Context()
        self.q, self.k, self.v = (
            Linear(c.dim, c.dim, bias=c.qkv_bias, axes=(axis, "residual")) for axis in ("/qk", "/qk", "/vo")
        )
        self.proj = Linear(c.dim, c.dim, axes=("residual", "/vo"))
        self.scale = Scaler("conv", "norm")

    @property
    def heads(self) -> int:
        """How many there are, of the tensors in place."""
        if not self.context.whole_heads:
            return self.all_heads
        layer = self.q
        while hasattr(layer, "base_layer"):
            layer = layer.base_layer
        return layer.weight.shape[-2] // self.width

    def forward(self, x: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map x (K, B, T, d) -> (K, B, T, d), or only its ``first`` tokens, which attend to all."""

        q, k, v = (self.scale(y) for y in (self.q(x[..., :first, :]), self.k(x), self.v(x)))
        return self.scale(self.proj(attend(self.heads, q, k, v, mask=self.mask(x))))

    def mask(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the mask of tokens that are attended to; None: all, as of an image."""
        return None


class MLP(nn.Module):
    """Linear, exact GELU, Linear."""

    def __init__(self, dim: int, hidden: int, axes=("/ffn", "residual")):
        super().__init__()
        self.fc1 = Linear(dim, hidden, axes=axes)
        self.fc2 = Linear(hidden, dim, axes=axes[::-1])
        self.scale = Scaler("conv", "norm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale(self.fc2(F.gelu(self.scale(self.fc1(x)))))


class LayerScale(nn.Module):
    """LayerScale: a learned factor per feature of a sub-layer's output."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.axes = {"gamma": ("residual",)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * per_client(self.gamma, x)


class Block(nn.Module):
    """One transformer block, Eq. 1: z + MSA(LN1(z)), then z + MLP(LN2(z))."""

    def __init__(self, c: ViTSpec):
        super().__init__()
        self.norm1 = LayerNorm(c.dim, c.eps)
        self.attn = Attention(c)
        self.ls1 = LayerScale(c.dim) if c.layer_scale else nn.Identity()
        self.norm2 = LayerNorm(c.dim, c.eps)
        self.mlp = MLP(c.dim, c.ffn_dim)
        self.ls2 = LayerScale(c.dim) if c.layer_scale else nn.Identity()

    def forward(self, z: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map z (K, B, T, d) -> (K, B, T, d), or only its ``first`` tokens."""
        z = z[..., :first, :] + self.ls1(self.attn(self.norm1(z), first))
        return z + self.ls2(self.mlp(self.norm2(z)))


class Stem(nn.Module):
    """Tokenizer: patches, class token (and other extra tokens), positional embedding."""

    def __init__(self, c: ViTSpec):
        super().__init__()
        self.spec = c
        self.patch_embed = Linear(c.channels * c.patch_size**2, c.dim, axes=("residual", None))
        self.prefix = nn.Parameter(torch.zeros(c.extra_tokens, c.dim))  # as weights are stored
        rows = c.num_patches + (c.extra_tokens if c.extra_positions else 0)
        self.pos_embed = nn.Parameter(torch.zeros(rows, c.dim))
        self.norm_pre = LayerNorm(c.dim, c.eps) if c.norm_pre else nn.Identity()
        self.scale = Scaler("conv", "norm")
        self.axes = {"prefix": (None, "residual"), "pos_embed": (None, "residual")}

    def forward(self, images: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, T, d)
        c, lead = self.spec, images.shape[:-3]
        x = self.patch_embed(patchify(images, c.patch_size))
        extra, pos = per_client(self.prefix, x, 2), per_client(self.pos_embed, x, 2)
        if not c.extra_positions:
            x = x + pos
        x = torch.cat((extra.expand(*lead, -1, -1), x), -2)
        return self.norm_pre(self.scale(x + pos if c.extra_positions else x))


class ViT(TokenBackbone):
    """A stem and blocks."""

    def __init__(self, config: ViTSpec):
        super().__init__(config, Stem(config), (Block(config) for _ in range(config.depth)))

    def axis(self, name: str, size: int) -> Axis:
        return head_axis(name, size, self.spec.heads)

    def init_(self, generator: torch.Generator) -> "ViT":
        """Initialise in place as ViT does: N(0, 0.02) everywhere."""
        init_normal_(self, generator, tables=(self.stem.prefix, self.stem.pos_embed))
        return self


def head_axis(name: str, size: int, heads: int) -> Axis:
    """Return the axis of a transformer: features of queries, keys and values are cut head by head.

    ``ValueError`` if they do not divide among the heads.
    """
    if not name.endswith(("/qk", "/vo")):
        return Axis(name, (size,))
    if size % heads:
        raise ValueError(f"axis {name}: {size} features do not divide among {heads} heads")
    return Axis(name, (size // heads,) * heads)
