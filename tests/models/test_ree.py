"""Ree against an explicit loop over blocks and the numbers of the released code."""

import pytest
import torch

from fedlib import Experiment
from fedlib.engine.federation import build_model
from fedlib.methods import build_method
from fedlib.models.exit_model import ExitModel
from fedlib.models.ree import Ree
from fedlib.models.vit import ViT, ViTSpec

SMALL = ViTSpec(img_size=8, patch_size=4, dim=16, depth=4, heads=2, ffn_dim=32)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_ree_has_the_released_parameter_count():
    with torch.device("meta"):
        for classes, count in ((100, 469_914), (62, 455_284), (35, 444_889)):
            assert sum(p.numel() for p in Ree(384, 12, classes, (2, 5, 8, 11)).parameters()) == count
        parts = {n: p.numel() for n, p in Ree(384, 12, 100, (11,)).named_parameters()}
    assert parts["positions"] == 4992 and parts["attn.qkv.weight"] + parts["attn.qkv.bias"] == 18_480
    assert parts["mlp.fc1.weight"] + parts["mlp.fc1.bias"] == 199_430 and len(parts) == 18


def explicit_ree(ree, rows):
    """Ree written out once more for (B, n, d) tokens, with a full softmax at scale 0.25."""
    import torch.nn.functional as F

    n, w, h = rows.shape[1], ree.attn.width, ree.attn.heads
    x = torch.cat((ree.meta_token.expand(len(rows), 1, -1), rows), 1) + ree.positions[: n + 1]
    y = F.layer_norm(x, x.shape[-1:], ree.norm1.weight, ree.norm1.bias, 1e-5)
    q, k, v = (y @ ree.attn.qkv.weight.T + ree.attn.qkv.bias).split(w, -1)
    heads = []
    for i in range(h):
        part = slice(i * w // h, (i + 1) * w // h)
        attention = ((q[..., part] @ k[..., part].mT) * 0.25).softmax(-1)
        heads.append(attention @ v[..., part])
    x = x + torch.cat(heads, -1) @ ree.attn.out.weight.T + ree.attn.out.bias
    y = F.layer_norm(x, x.shape[-1:], ree.norm2.weight, ree.norm2.bias, 1e-5)
    return x + F.gelu(y @ ree.mlp.fc1.weight.T + ree.mlp.fc1.bias) @ ree.mlp.fc2.weight.T + ree.mlp.fc2.bias


@pytest.mark.parametrize("modulate, history", [(True, "modulated"), (True, "raw"), (False, "raw")])
@pytest.mark.parametrize("only_at_exits", [False, True])
def test_ree_equals_an_explicit_loop_over_blocks(modulate, history, only_at_exits):
    vit = ViT(SMALL).init_(generator(1))
    ree = Ree(16, 4, 5, (1, 3), modulate=modulate, history=history, only_at_exits=only_at_exits).init_(generator(2))
    for p in ree.parameters():
        torch.nn.init.normal_(p, 0.0, 0.3, generator=generator(p.numel()))
    x = torch.randn(3, 3, 8, 8, generator=generator(3))
    with torch.no_grad():
        logits = ExitModel(vit, ree, (1, 3))(x[None])[:, 0]
        z, past, expected = vit.stem(x[None])[0], [], []
        for block in range(4):
            z = vit.run(z[None], block, block + 1)[0]
            if only_at_exits and block not in (1, 3):
                continue
            token = z[:, 0]
            m = explicit_ree(ree, torch.stack([*past, token], 1))
            if block in (1, 3):
                expected.append(ree.classifier(m[:, 0] + token))  # Eq. 3, the raw token
            past.append(m[:, -1] if modulate and history == "modulated" else token)
            if modulate:
                z = torch.cat((m[:, -1:], z[:, 1:]), 1)  # Eq. 4
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_raw_and_modulated_history_differ():
    options = [{"history": h} for h in ("modulated", "raw")]
    images = torch.randn(1, 2, 3, 32, 32, generator=generator())
    outs = []
    for o in options:
        e = Experiment(method="reefl", options=o, pretrained=False)
        model = build_model(e, build_method("reefl", o), 10)
        for n, p in model.head.named_parameters():
            torch.nn.init.normal_(p.data, 0, 0.2, generator=generator(len(n)))
        with torch.no_grad():
            outs.append(model(images))
    assert (outs[0] - outs[1]).abs().max() > 1e-2
