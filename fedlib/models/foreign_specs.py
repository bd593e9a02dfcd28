"""Shapes of transformers' models, and those that the papers use by name.

Read next: ``foreign.py`` (what runs them), ``foreign_families.py`` (where their parts are).
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from .foreign_families import FAMILIES, Family
from .vit import token_numbers

if TYPE_CHECKING:
    from .foreign import Foreign


@dataclass(frozen=True)
class ForeignSpec:
    """Family, source and shape of a model of transformers; sizes in tokens (pixels of images) and features."""

    family: str
    source: str | None = None  # of its weights: a repository of the hub, or a folder; None: there are none
    length: int = 128  # tokens of a row; longer ones are cut
    positions: int = 512
    vocab_size: int = 30_522
    dim: int = 768
    depth: int = 12  # units; of T5 the encoder's, then as many of the decoder
    heads: int = 12
    ffn_dim: int = 3072
    head_dim: int | None = None  # None: dim / heads
    padding: int | None = 0  # the token id that fills short rows
    img_size: int = 224
    patch_size: int = 16
    tuners: ClassVar[tuple[str, ...]] = ("lora",)
    own_modes: ClassVar[tuple[str, ...]] = ("full", "frozen")
    prefix_tokens: ClassVar[int] = 1
    hands_back: ClassVar[bool] = False  # exits cannot put another token in place of the one that they read
    ends_normalised: ClassVar[bool] = True  # by the family's own pooler or norm

    def __post_init__(self):
        if self.family not in FAMILIES:
            raise ValueError(f"foreign: family = {self.family!r} is unknown; allowed: {', '.join(FAMILIES)}")
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"foreign: dim = {self.dim} does not divide among heads = {self.heads}")
        if self.reads == "images":
            return
        if self.padding is None:
            raise ValueError(
                f"foreign: {self.source or self.family} has no pad token, so rows of unequal length cannot be read "
                "together; name one (pad_token_id in its config.json)"
            )
        usable = self.positions - (self.padding + 1 if self.family == "roberta" else 0)  # whose first are never used
        if self.length > usable:
            raise ValueError(f"foreign: length = {self.length} exceeds the {usable} positions of the model")

    @property
    def kind(self) -> Family:
        return FAMILIES[self.family]

    @property
    def reads(self) -> str:
        return "images" if self.family == "vit" else "tokens"

    @property
    def tokenizer(self) -> str | None:
        """What its words come from: its source; None: MiniLM's tokenizer, which BERT and DistilBERT share."""
        return None if self.family in ("bert", "distilbert", "vit") else self.source

    @property
    def causal(self) -> bool:
        return self.kind.causal

    @property
    def rotary(self) -> bool:
        return self.kind.rotary

    @property
    def shares_heads(self) -> bool:
        return self.kind.shares_heads

    @property
    def peft_targets(self) -> tuple[str, ...]:
        return self.kind.targets

    @property
    def num_patches(self) -> int:
        """Tokens beside the first."""
        return (self.img_size // self.patch_size) ** 2 if self.reads == "images" else self.length - 1

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (3, self.img_size, self.img_size) if self.reads == "images" else (self.length,)

    @property
    def streams(self) -> int:
        """Sequences in the state: T5 has two."""
        return len(self.kind.blocks)

    def feature(self, unit: int) -> tuple[int]:
        return (self.dim,)

    def state(self, unit: int) -> tuple[int, int]:
        return (self.streams * (self.num_patches + 1), self.dim)

    def numbers(self, examples: int) -> tuple[int, int]:
        return token_numbers(self, examples, self.ffn_dim)

    def build(self) -> "Foreign":
        """A backbone of this shape, without weights."""
        from .foreign import Foreign, build_model

        return Foreign(self, build_model(self))


BERT = ForeignSpec("bert", "google-bert/bert-base-uncased")
FOREIGN: dict[str, ForeignSpec] = {
    "bert_base": BERT,
    "bert_large": replace(
        BERT, source="google-bert/bert-large-uncased-whole-word-masking", dim=1024, depth=24, heads=16, ffn_dim=4096
    ),
    "roberta_base": ForeignSpec("roberta", "FacebookAI/roberta-base", vocab_size=50_265, positions=514, padding=1),
    "distilbert": ForeignSpec("distilbert", "distilbert/distilbert-base-uncased", depth=6),
    "flan_t5_small": ForeignSpec(
        "t5", "google/flan-t5-small", vocab_size=32_128, dim=512, depth=16, heads=6, ffn_dim=1024, head_dim=64
    ),
    "flan_t5_base": ForeignSpec("t5", "google/flan-t5-base", vocab_size=32_128, depth=24, ffn_dim=2048, head_dim=64),
    "vit_b16": ForeignSpec("vit", "google/vit-base-patch16-224-in21k"),
    "llama2_7b": ForeignSpec(
        "llama", "meta-llama/Llama-2-7b-hf", positions=4096, vocab_size=32_000, dim=4096, depth=32, heads=32,
        ffn_dim=11_008, padding=2,  # it has no pad token: the end of a sentence fills rows
    ),
    "llama_tiny": ForeignSpec("llama", length=96, dim=64, depth=4, heads=4, ffn_dim=172),
}  # fmt: skip
FOREIGN |= {f"{name}.384": replace(s, length=384) for name, s in FOREIGN.items() if s.source and s.reads == "tokens"}
