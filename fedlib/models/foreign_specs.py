"""Transformers' models that the papers use, by name.

Read next: ``foreign_shapes.py`` (what is known of them), ``foreign.py`` (what runs them).
"""

from dataclasses import dataclass, replace

from .foreign import Foreign
from .foreign_loading import build_model
from .foreign_shapes import ForeignShape


@dataclass(frozen=True)
class ForeignSpec(ForeignShape):
    """A shape that can be built."""

    def build(self) -> Foreign:
        """A backbone of this shape, without weights."""
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
    "vit_b16": ForeignSpec("vit", "google/vit-base-patch16-224-in21k", pixels=((0.5,) * 3, (0.5,) * 3)),
    "llama2_7b": ForeignSpec(
        "llama", "meta-llama/Llama-2-7b-hf", positions=4096, vocab_size=32_000, dim=4096, depth=32, heads=32,
        ffn_dim=11_008, padding=2,  # it has no pad token: the end of a sentence fills rows
    ),
    "llama_tiny": ForeignSpec("llama", length=96, dim=64, depth=4, heads=4, ffn_dim=172),
}  # fmt: skip
FOREIGN |= {f"{name}.plain": replace(s, as_trained=False) for name, s in FOREIGN.items() if s.source}
FOREIGN |= {f"{name}.384": replace(s, length=384) for name, s in FOREIGN.items() if s.source and s.reads == "tokens"}
