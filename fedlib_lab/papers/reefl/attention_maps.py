"""Attention maps of the class token, before and after Ree (ReeFL, Appendix E, Eqs. 7-9; Figures 1b and 11).

``attentionMap^l(a, b)`` is the first row, without its first element, of block l's softmax attention over LN1([a, b]).
The paper averages it over heads; heads are kept here, so that each can be looked at. Nothing is normalised again.
Everything is recomputed from a block's own q and k while the model runs, watched unit by unit.

The equations and Figure 1b differ by a block: Eq. 8 sends m_l^l through the block that made it, the figure's caption
compares z_cls^l with m_l^l over the tokens of block l, which block l+1 reads. ``x`` (Eq. 7) beside ``read`` is the
latter, ``x`` beside ``m`` and ``c`` the former.
"""

import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from fedlib.data.transforms import render
from fedlib.engine.evaluation import central_forward, served_parts
from fedlib.engine.federation import Federation
from fedlib.methods import Server
from fedlib.models.exit_model import ExitModel

from ...formats.decode import Layout
from ...formats.images import decode_pixels
from ...runs.record import Run
from ...runs.trained import load_trained

MAPS = {"x": "before Ree, Eq. 7", "read": "what the block reads"}
MAPS |= {"m": "exploration token, Eq. 8", "c": "exploitation token, Eq. 9"}


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
        """Return the first exit (B,) that classifies each image correctly; -1 if none does."""
        right = self.logits.argmax(-1) == labels  # (E, B)
        return torch.where(right.any(0), right.int().argmax(0), -1)


def pick_by_exit(first: torch.Tensor, labels: torch.Tensor, num_exits: int, groups: int = 3) -> torch.Tensor:
    """Pick one example per class and group of exits, (classes present, groups): rows of ``labels``, -1 if none.

    ``first`` is :meth:`Attention.earliest_correct`. Of the examples of a class whose earliest correct exit lies in a
    group (early, middle, late thirds), the first is taken: none is picked for its looks.
    """
    group = torch.where(first >= 0, first * groups // num_exits, -1)
    first_of = lambda c, g: next(iter(torch.where((labels == c) & (group == g))[0].tolist()), -1)  # noqa: E731
    return torch.tensor([[first_of(c, g) for g in range(groups)] for c in labels.unique()])


def attention_row(block: nn.Module, token: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """Return attention (K, B, heads, T) of ``token`` (K, B, d) in place of the class token of ``z`` (K, B, T, d)."""
    h = block.norm1(torch.cat((token.unsqueeze(-2), z[..., 1:, :]), -2))
    attn = block.attn
    while hasattr(attn, "base_layer"):  # an adapter around the attention
        attn = attn.base_layer
    q, k = (f(h).unflatten(-1, (attn.heads, -1)).transpose(-2, -3) for f in (attn.q, attn.k))  # (K, B, heads, T, a)
    return (q[..., :1, :] @ k.mT * q.shape[-1] ** -0.5).softmax(-1).squeeze(-2)


@torch.inference_mode()
def attention_maps(model: ExitModel, images: torch.Tensor) -> Attention:
    """Compute all maps of ``images`` (1, B, 3, H, W) for the parameters in ``model``, in one watched forward pass."""
    backbone, head, spec = model.backbone, model.head, model.backbone.spec
    side, maps = spec.img_size // spec.patch_size, {name: [] for name in MAPS}
    left = []  # the class token as each unit left it

    def row(block: nn.Module, token: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return attention_row(block, token, z)[0, ..., spec.extra_tokens :].unflatten(-1, (side, side))

    def watch(unit: int, z: torch.Tensor, token: torch.Tensor, past: list, handed_back: torch.Tensor | None) -> None:
        block, reads = backbone.blocks[unit], z[..., 0, :]
        maps["x"].append(row(block, left[-1] if left else reads, z))
        maps["read"].append(row(block, reads, z))
        left.append(token)
        runs = hasattr(head, "tokens") and (unit in model.exit_units or not head.only_at_exits)
        m_0, m_l = head.tokens(token, past) if runs else (None, None)
        nothing = torch.full_like(maps["x"][0], torch.nan)
        maps["m"].append(row(block, m_l, z) if runs else nothing)
        maps["c"].append(row(block, m_0 + token, z) if runs else nothing)

    logits = model(images, watch=watch)[:, 0]
    return Attention({n: torch.stack(m, 1) for n, m in maps.items()}, logits, model.exit_units)


def run_attention(f: Federation, server: Server, pictures: torch.Tensor) -> Attention:
    """Compute the maps of ``pictures`` (B, C, H, W), uint8 as the test set's, under the trained global model."""
    central_forward(f, server, served_parts(f, server)[-1]).place_()
    seen = render(pictures, None, f.model.backbone.spec.img_size, f.data.mean, f.data.std)
    return attention_maps(f.model, seen[None])


def attention_of(run: Run, picture: str | os.PathLike) -> tuple[np.ndarray, Attention]:
    """Compute the maps of a picture file of your own under the model that ``run`` trained.

    It is read as data are: turned as its camera says, what is transparent on white, grey of 16 bits scaled to 8.
    Return the picture (side, side, 3) in the size of the run's data, 0 to 255, and its maps:
    ``plot_blocks(*attention_of(run, "cat.png"), 0, "a cat")`` draws them.
    """
    f, server = load_trained(run.experiment)
    channels, side = f.data.test_inputs.shape[1:3]
    cell, layout = {"bytes": None, "path": os.path.abspath(picture)}, Layout(os.fspath(picture), "images", "label")
    mode, whites = "L" if channels == 1 else "RGB", {"I": 65_535, "F": 1}  # of grey of more than 8 bits
    pixels = decode_pixels(cell, mode, (side, side), whites, layout, "picture", 0)
    pixels = pixels if pixels.ndim == 3 else np.stack([pixels] * 3, 2)
    return pixels, run_attention(f, server, torch.from_numpy(pixels).permute(2, 0, 1)[None, :channels].to(f.device))
