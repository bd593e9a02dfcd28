"""A small spec of every family of transformers, and weights that are all different."""

import torch

from fedlib_lab.zoo.foreign_specs import ForeignSpec

SMALL = dict(vocab_size=40, dim=24, heads=4, ffn_dim=20, length=9, positions=16)
TINY = {
    "bert": ForeignSpec("bert", depth=2, **SMALL),
    "roberta": ForeignSpec("roberta", depth=2, padding=1, **SMALL),
    "distilbert": ForeignSpec("distilbert", depth=2, **SMALL),
    "t5": ForeignSpec("t5", depth=4, **SMALL | {"head_dim": 8}),
    "vit": ForeignSpec("vit", dim=24, heads=4, ffn_dim=20, depth=2, img_size=16, patch_size=8),
    "llama": ForeignSpec("llama", depth=2, **SMALL),
    "mistral": ForeignSpec("mistral", depth=2, kv_heads=2, **SMALL),
    "qwen2": ForeignSpec("qwen2", depth=2, kv_heads=2, **SMALL),
    "qwen3": ForeignSpec("qwen3", depth=2, kv_heads=1, head_dim=8, **SMALL),
    "gemma": ForeignSpec("gemma", depth=2, kv_heads=1, head_dim=8, **SMALL),
}  # fmt: skip


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def spread_(module):
    """Weights, biases and norms that are all different from their initial values."""
    for p in module.parameters():
        p.data = p.data + 0.2 * torch.randn(p.shape, generator=generator(p.numel()))
    return module.requires_grad_(False)
