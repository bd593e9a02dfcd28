"""Attention maps of the class token, before and after Ree (ReeFL, Appendix E, Eqs. 7-9; Figures 1b and 11).

``attentionMap^l(a, b)`` is the first row, without its first element, of block l's softmax attention over LN1([a, b]).
The paper averages it over heads; heads are kept here, so that each can be looked at. Nothing is normalised again.
Everything is recomputed from a block's own q and k while the model runs piece by piece.

The equations and Figure 1b differ by a block: Eq. 8 sends m_l^l through the block that made it, the figure's caption
compares z_cls^l with m_l^l over the tokens of block l, which block l+1 reads. ``x`` (Eq. 7) beside ``read`` is the
latter, ``x`` beside ``m`` and ``c`` the former.
"""

from dataclasses import dataclass

import torch
from torch import nn

from ..engine.evaluation import put_slice_
from ..engine.federation import Federation
from ..methods import Server
from ..models.exit_model import ExitModel

MAPS = {
    "x": "before Ree, Eq. 7",
    "read": "what the block reads",
    "m": "exploration token, Eq. 8",
    "c": "exploitation token, Eq. 9",
}


@dataclass(frozen=True)
class Attention:
    """``maps[name]`` (B, blocks, heads, side, side), NaN where Ree does not run; ``logits`` (E, B, C).

    ``x``: the class token as block l-1 left it; ``read``: what replaced it; ``m`` and ``c``: Eqs. 8 and 9, with Ree
    only.
    """

    maps: dict[str, torch.Tensor]
    logits: torch.Tensor
    exit_units: tuple[int, ...]

    def earliest_correct(self, labels: torch.Tensor) -> torch.Tensor:
        """The first exit (B,) that classifies each image correctly; -1 if none does."""
        right = self.logits.argmax(-1) == labels  # (E, B)
        return torch.where(right.any(0), right.int().argmax(0), -1)


def attention_row(block: nn.Module, token: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Softmax attention (K, B, heads, T) of ``token`` (K, B, d) in place of the class token of ``z`` (K, B, T, d)."""
    h = block.norm1(torch.cat((token.unsqueeze(-2), z[..., 1:, :]), -2))
    attn = block.attn
    while hasattr(attn, "base_layer"):  # an adapter around the attention
        attn = attn.base_layer
    q, k = (f(h).unflatten(-1, (attn.heads, -1)).transpose(-2, -3) for f in (attn.q, attn.k))  # (K, B, heads, T, a)
    return (q[..., :1, :] @ k.mT * q.shape[-1] ** -0.5).softmax(-1).squeeze(-2)


@torch.inference_mode()
def attention_maps(model: ExitModel, images: torch.Tensor) -> Attention:
    """All maps of ``images`` (1, B, 3, H, W) for the parameters that ``model`` holds."""
    vit, head, config = model.backbone, model.head, model.backbone.spec
    side, maps, logits, past = config.img_size // config.patch_size, {name: [] for name in MAPS}, [], []

    def add(name: str, block: nn.Module, token: torch.Tensor | None, z: torch.Tensor) -> None:
        if token is None:
            maps[name].append(torch.full_like(maps["x"][0], torch.nan))
        else:
            row = attention_row(block, token, z)[0, ..., config.prefix_tokens :]
            maps[name].append(row.unflatten(-1, (side, side)))

    z = vit.stem(images)
    raw = z[..., 0, :]  # the class token as the block before left it
    for i, block in enumerate(vit.blocks[: model.exit_units[-1] + 1]):
        add("x", block, raw, z)
        add("read", block, z[..., 0, :], z)
        before, z = z, vit.run(z, i, i + 1)
        raw = z[..., 0, :]
        runs = hasattr(head, "tokens") and (i in model.exit_units or not head.only_at_exits)
        m_0, m_l = head.tokens(raw, past) if runs else (None, None)
        add("m", block, m_l, before)
        add("c", block, m_0 + raw if runs else None, before)
        out, handed_back = head.step(i, raw, past)
        if i in model.exit_units:
            logits.append(out[0])
        if handed_back is not None:
            z = torch.cat((handed_back.unsqueeze(-2), z[..., 1:, :]), -2)
    return Attention({n: torch.stack(m, 1) for n, m in maps.items()}, torch.stack(logits), model.exit_units)


def run_attention(f: Federation, server: Server, rows: torch.Tensor) -> Attention:
    """The maps of the test images ``rows`` under the trained global model."""
    from ..data.transforms import render

    put_slice_(f, server, f.method.model_for(f.setting.num_exits - 1, f.setting))
    size = f.model.backbone.spec.img_size
    return attention_maps(f.model, render(f.data.test_images[rows], None, size, f.data.mean, f.data.std)[None])
