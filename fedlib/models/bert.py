"""BERT encoders (Devlin et al., NAACL 2019) for one sentence at a time, read through the class token.

A :class:`Bert` has the interface of ``vit.ViT``: ``stem``, ``run(z, a, b)``, ``config``, cohort-shaped parameters.
``load_bert`` reads Hugging Face's BERT checkpoints; ``minilm`` is all-MiniLM-L6-v2 (6 layers, width 384), of which
by default only the class token is used, though it was tuned to be averaged over tokens. The pooler is gone: each exit
has its own norm.
Read next: ``vit.py`` (attention, MLP), ``exit_model.py``.

Padding is the zero vector: the stem writes it, every block reads its mask off its input and writes it again. So the
mask travels wherever tokens go (cohorts, frozen caches), and nothing outside this file knows of it. A real token is a
layer norm's output, or Ree's, and never exactly zero.

Deviations: nothing is dropped in training (MiniLM's config says a tenth; ``foreign.py``'s nets drop what theirs
say). By default (``centred``) an exit reads, and Eq. 4 replaces, the class token standardised: less the mean of
one-word sentences after the same block, over their spread, both constants of the weights before training. MiniLM's
early blocks give all sentences nearly the same class token: SST-2's differ from an empty sentence's by a norm of 0.03
in 8 after block 2 and of 0.2 in 11 after block 4. In 300 steps of SGD a frozen exit there finds nothing; standardised,
it learns at any depth in 100.
``centred=False`` (the backbones ``*.stream``) is the class token itself, as on a ViT. ``averaged`` (``*.mean``) is the
mean of a sentence's tokens, for nets that are cut in width, of which no constants of the whole width hold.
Token type 0, the only one of a single sentence, is added to the positions when a checkpoint is loaded, and positions
that no sentence reaches are dropped; fully trained, both are one tensor. How CAFEDistill starts its transformer is not
said: with N(0, 0.02) two sentences without a common word differ by 1 % at the class token of ``transformer4_slim``,
too little to learn from; with 1/sqrt(inputs) by half.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ..core.slices import Axis
from ..layers.context import Scaler
from ..layers.linear import init_normal_, per_client
from ..layers.norms import LayerNorm
from .backbone import TokenBackbone, TokenSpec, load_published_, shapes
from .vit import MLP, Attention, head_axis


@dataclass(frozen=True)
class BertSpec(TokenSpec):
    """Shape of a post-norm BERT encoder; sizes in tokens and features."""

    length: int = 32  # tokens of a sentence, class token included; longer ones are cut
    vocab_size: int = 30_522
    dim: int = 64
    depth: int = 3
    heads: int = 4
    ffn_dim: int = 256
    eps: float = 1e-12
    marks: tuple[int, ...] = (101, 102)  # token ids around a sentence: [CLS], [SEP]
    centred: bool = True  # see the module's deviations
    averaged: bool = False  # exits read the mean of a sentence's tokens, not its class token
    init_sd: float | None = 0.02  # of random matrices; None: 1/sqrt(inputs), for what is trained from random weights
    qkv_bias: ClassVar[bool] = True
    padding: ClassVar[int] = 0  # the token id that fills short sentences
    reads: ClassVar[str] = "tokens"
    own_modes: ClassVar[tuple[str, ...]] = ("full", "frozen", "pa", "sa", "ssf")
    ssf_stem: ClassVar[str] = "norm"
    peft_targets: ClassVar[tuple[str, ...]] = ("q", "v")

    @property
    def num_patches(self) -> int:
        """Tokens beside the class token."""
        return self.length - 1

    @property
    def input_shape(self) -> tuple[int]:
        """One sentence: its token ids."""
        return (self.length,)

    def build(self) -> "Bert":
        """Build a backbone of this shape, without weights."""
        return Bert(self)


WORDS = 256  # one-word sentences, from which exits take their units
BERTS = shapes(BertSpec)
CENTRED = {name: config for name, config in BERTS.items() if config.centred}
BERTS |= {f"{name}.stream": replace(config, centred=False) for name, config in CENTRED.items()}
BERTS |= {f"{name}.mean": replace(config, centred=False, averaged=True) for name, config in CENTRED.items()}


def is_token(z: torch.Tensor) -> torch.Tensor:
    """Return True where ``z`` (..., T, d) is a token, False where it is padding: (..., T)."""
    return (z != 0).any(-1)


class Embedding(nn.Module):
    """Rows of a table by token id; each client may have its own table."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.weight, self.axes = nn.Parameter(torch.zeros(rows, dim)), {"weight": (None, "residual")}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (K, B, T) -> (K, B, T, d)
        table = self.weight
        if table.dim() == 3:  # one long table, client k's rows after those of the k clients before it
            ids = ids + table.shape[1] * torch.arange(len(ids), device=ids.device).view(-1, 1, 1)
            table = table.flatten(0, 1)
        return F.embedding(ids, table)


class BertAttention(Attention):
    """Self-attention that no padding takes part in."""

    def mask(self, x: torch.Tensor) -> torch.Tensor:
        return is_token(x).flatten(0, 1)[:, None, None]  # (K*B, 1, 1, T): keys, for every head and query


class BertBlock(nn.Module):
    """One post-norm block: z = LN1(z + MSA(z)), then LN2(z + MLP(z))."""

    def __init__(self, c: BertSpec):
        super().__init__()
        self.attn, self.norm1 = BertAttention(c), LayerNorm(c.dim, c.eps)
        self.mlp, self.norm2 = MLP(c.dim, c.ffn_dim), LayerNorm(c.dim, c.eps)

    def forward(self, z: torch.Tensor, first: int | None = None) -> torch.Tensor:
        """Map z (K, B, T, d) -> (K, B, T, d), or only its ``first`` tokens."""
        kept = z[..., :first, :]
        h = self.norm1(kept + self.attn(z, first))
        return self.norm2(h + self.mlp(h)) * is_token(kept).unsqueeze(-1)


class BertStem(nn.Module):
    """Embeddings of words and positions, normalised; zero where the sentence has ended."""

    def __init__(self, c: BertSpec):
        super().__init__()
        self.spec = c
        self.words = Embedding(c.vocab_size, c.dim)
        self.pos_embed = nn.Parameter(torch.zeros(c.length, c.dim))
        self.norm, self.scale = LayerNorm(c.dim, c.eps), Scaler("conv", "norm")
        self.axes = {"pos_embed": (None, "residual")}

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # (K, B, T) -> (K, B, T, d)
        ids = ids.long()
        x = self.words(ids)
        x = self.norm(self.scale(x + per_client(self.pos_embed[..., : ids.shape[-1], :], x, 2)))
        return x * (ids != self.spec.padding).unsqueeze(-1)


class Bert(TokenBackbone):
    """A stem and blocks."""

    def __init__(self, config: BertSpec):
        super().__init__(config, BertStem(config), (BertBlock(config) for _ in range(config.depth)))
        if config.centred:
            self.register_buffer("origins", torch.zeros(config.depth, config.dim), persistent=False)
            self.register_buffer("scales", torch.ones(config.depth, 1), persistent=False)

    def run(self, z: torch.Tensor, a: int, b: int) -> torch.Tensor:
        """Run units, on a CPU without tokens that are padding in every sentence (a GPU would wait for the answer)."""
        if z.device.type == "cpu" and not torch.compiler.is_exporting():  # a graph is of one length
            z = z[..., : 1 + int(is_token(z).flatten(0, 1).any(0).nonzero().max()), :]
        return super().run(z, a, b)

    def advance(self, z: torch.Tensor, unit: int, on: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.spec.averaged or self.reads_all:
            return super().advance(z, unit, on)
        z = self.run(z, unit, unit + 1)
        return z.sum(-2) / is_token(z).sum(-1, keepdim=True), z if on == len(z) else z[:on]

    def replace(self, z: torch.Tensor, unit: int, feature: torch.Tensor) -> torch.Tensor:
        if self.spec.averaged:
            raise TypeError("exits read the mean of a sentence's tokens: there is no token to hand back")
        return super().replace(z, unit, feature)

    def axis(self, name: str, size: int) -> Axis:
        return head_axis(name, size, self.spec.heads)

    @torch.no_grad()
    def centre_(self) -> "Bert":
        """Measure ``origins`` (depth, d) and ``scales`` (depth, 1): mean and SD over one-word sentences."""
        if self.spec.centred:
            words = torch.linspace(1, self.spec.vocab_size - 1, WORDS).long()  # evenly over the vocabulary
            first, last = (torch.full_like(words, mark) for mark in self.spec.marks)
            z = self.stem(torch.stack((first, words, last), 1)[None])
            for block in range(self.spec.depth):
                z = self.run(z, block, block + 1)
                tokens = z[0, :, 0]
                self.origins[block] = tokens.mean(0)
                self.scales[block] = tokens.var(0).mean().sqrt()
        return self

    def init_(self, generator: torch.Generator) -> "Bert":
        """Initialise in place as BERT does: N(0, 0.02) everywhere; matrices as ``init_sd`` says."""
        init_normal_(self, generator, self.spec.init_sd, (self.stem.words.weight, self.stem.pos_embed))
        return self.centre_()


POSITIONS, TYPES = "embeddings.position_embeddings.weight", "embeddings.token_type_embeddings.weight"
PUBLISHED = {
    "stem.words": "embeddings.word_embeddings", "stem.norm": "embeddings.LayerNorm",
    "attn.q": "attention.self.query", "attn.k": "attention.self.key", "attn.v": "attention.self.value",
    "attn.proj": "attention.output.dense", "norm1": "attention.output.LayerNorm",
    "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense", "norm2": "output.LayerNorm",
}  # fmt: skip


def load_bert(state: Mapping[str, torch.Tensor], config: BertSpec) -> Bert:
    """Load a :class:`Bert` of shape ``config`` from Hugging Face's ``BertModel``'s state dict, without its pooler.

    ``ValueError`` names keys that are missing, or of another shape.
    """

    def converted(name: str, value: torch.Tensor) -> torch.Tensor:
        return value[: config.length] + state[TYPES][0].float() if name == "stem.pos_embed" else value

    bert = Bert(config)
    load_published_(bert, state, published_name, converted, "BERT", besides=[TYPES])
    return bert.centre_()


def published_name(name: str) -> str:
    """Translate a name: ``blocks.3.attn.q.weight`` -> ``encoder.layer.3.attention.self.query.weight``."""
    if name == "stem.pos_embed":
        return POSITIONS
    module, leaf = name.rsplit(".", 1)
    if name.startswith("stem."):
        return f"{PUBLISHED[module]}.{leaf}"
    _, block, layer = module.split(".", 2)
    return f"encoder.layer.{block}.{PUBLISHED[layer]}.{leaf}"
