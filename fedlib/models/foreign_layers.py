"""What the layers of transformers' models are told before they run: their sizes, the names of their axes, what to drop.

Read next: ``foreign.py`` (what runs them).
"""

import torch
from torch import nn

from ..layers.dropout import TokenDropout
from .backbone import TokenSpec
from .foreign_families import Family

DROPPING = "fedlib"  # the name of :func:`attend` among transformers' ways to attend


def fit_(module: nn.Module, spec: TokenSpec, whole_heads: bool = False) -> None:
    """Tell the layers of ``module`` the sizes of the tensors that are in place: those of norms and heads."""
    kind = spec.kind
    for m in module.modules():
        if isinstance(m, nn.LayerNorm):
            m.normalized_shape = tuple(m.weight.shape)
        elif hasattr(m, kind.head_width) and hasattr(m, kind.query):
            full = spec.head_dim or spec.dim // spec.heads
            width = full if whole_heads else getattr(m, kind.query).weight.shape[0] // spec.heads
            setattr(m, kind.head_width, width)
            if kind.scaled:
                m.scaling = width**-0.5


def drop_here_(model: nn.Module, kind: Family) -> None:
    """Let every layer of ``model`` that drops do so as the kit's do, by its own rate; attention, too."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(DROPPING, attend)
    AttentionMaskInterface.register(DROPPING, sdpa_mask)
    for m in list(model.modules()):
        for name, child in list(m.named_children()):
            if isinstance(child, nn.Dropout):
                setattr(m, name, TokenDropout(child.p))
        if hasattr(m, kind.query):
            rate = next(r for name in ("attention_dropout", "dropout") if (r := getattr(m, name, None)) is not None)
            m.drop = rate if isinstance(rate, nn.Module) else TokenDropout(rate)
            m.config._attn_implementation = DROPPING


def attend(module, query, key, value, attention_mask, scaling=None, position_bias=None, **unused):
    """Attention (B, heads, T, d) whose probabilities ``module.drop`` drops; transformers' own while nothing is."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    context = module.drop.context
    if not module.drop.p or not context.training or context.generators is None:
        told = {"scaling": scaling, "position_bias": position_bias}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **told)
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = query @ key.transpose(-1, -2) * scaling
    scores = sum((x for x in (position_bias, attention_mask) if x is not None), scores)
    return (module.drop(scores.softmax(-1)) @ value).transpose(1, 2), None


def name_axes_(backbone: nn.Module, spec: TokenSpec) -> None:
    """Give every layer with parameters the names of its axes; ``ValueError`` for one that the family does not know."""
    kind, whole = spec.kind, ("/qk", "/vo") if spec.grouped else ()
    for path, m in backbone.named_modules():
        leaves = [leaf for leaf, p in m._parameters.items() if p is not None]
        if not leaves or hasattr(m, "axes"):
            continue
        known = [key for key in kind.axes if path == key or path.endswith(f".{key}")]
        if not known:
            raise ValueError(f"foreign: {kind.model} has a layer {path!r} whose axes are not known")
        axes = tuple(None if axis in whole else axis for axis in kind.axes[max(known, key=len)])
        m.axes = {leaf: axes[: m._parameters[leaf].dim()] for leaf in leaves}


def seen(real: torch.Tensor, causal: bool, dtype: torch.dtype) -> torch.Tensor:
    """What is added to attention's scores: (B, 1, 1, T), or (B, 1, T, T) if a token sees only those before it."""
    allowed = real[:, None, None]
    if causal:
        t = real.shape[1]
        allowed = allowed & torch.ones(t, t, dtype=torch.bool, device=real.device).tril()
    return torch.zeros(allowed.shape, dtype=dtype, device=real.device).masked_fill(~allowed, torch.finfo(dtype).min)
