"""Backbones, Ree and adapters against timm, peft, explicit loops and the numbers of the released code."""

import pytest
import torch

from fedlib import Experiment
from fedlib.engine.federation import build_model
from fedlib.methods import METHODS, build_method
from fedlib.methods.sliced.scalefl_vit import width_index
from fedlib.models.adapters import _inject_peft_, apply_finetune_
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.ree import Ree
from fedlib.models.registry import WEIGHTS, backbone_spec, build_backbone, load_timm
from fedlib.models.vit import ViT, ViTSpec

SMALL = ViTSpec(img_size=8, patch_size=4, dim=16, depth=4, heads=2, ffn_dim=32)
DEIT_S = ViTSpec(224, 16, 384, 12, 6, 1536)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "name, options",
    [
        ("deit_tiny_patch16_224", {"img_size": 32}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32}),
        ("deit3_small_patch16_224", {"img_size": 32, "depth": 3}),  # LayerScale, unembedded class token
        ("vit_small_patch14_reg4_dinov2", {"img_size": 28, "depth": 3}),  # registers
        ("vit_base_patch32_clip_224", {"img_size": 64, "depth": 3}),  # norm before the first block
    ],
)
def test_vit_equals_timm(name, options):
    import timm

    model = timm.create_model(name, pretrained=False, **options).eval()
    for i, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, 0.1, 0.1, generator=generator(i))
    vit = load_timm(model)
    x = torch.randn(2, 3, vit.spec.img_size, vit.spec.img_size, generator=generator())
    with torch.no_grad():
        ours = model.norm(vit.run(vit.stem(x[None]), 0, vit.spec.depth))[0]
        torch.testing.assert_close(ours, model.forward_features(x), rtol=1e-4, atol=1e-4)


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


@pytest.mark.parametrize(
    "mode, block, stem, classifier, trained",
    [
        ("full", 1_774_464, 371_328, 39_268, 371_328 + 12 * 1_774_464 + 4 * 39_268),
        ("frozen", 0, 0, 39_268, 157_072),
        ("lora", 49_152, 0, 39_268, 12 * 49_152 + 157_072),
        ("pa", 49_984, 0, 39_268, 12 * 49_984 + 157_072),
        ("sa", 49_984, 0, 39_268, 12 * 49_984 + 157_072),
        ("ssf", 8_448, 768, 40_036, 768 + 12 * 8_448 + 4 * 40_036),
    ],
)
def test_trained_parameters_of_each_mode_at_deit_small(mode, block, stem, classifier, trained):
    with torch.device("meta"):
        vit, head = ViT(DEIT_S), Classifiers(384, 100, (2, 5, 8, 11))
        apply_finetune_(vit, head, mode, {}, 0)
        model = ExitModel(vit, head, (2, 5, 8, 11))
    infos, params = model.infos(), model.trainable()
    by_unit = lambda unit, heads: sum(  # noqa: E731
        p.numel() for n, p in params.items() if infos[n].unit == unit and (infos[n].exit is not None) == heads
    )
    assert by_unit(0, False) == block and by_unit(-1, False) == stem and by_unit(2, True) == classifier
    assert sum(p.numel() for p in params.values()) == trained


@pytest.mark.parametrize("mode", ["lora", "pa", "sa", "ssf", "ia3", "loha", "hra"])
def test_adapters_keep_or_barely_move_the_pretrained_function(mode):
    vit = build_backbone("deit_micro", pretrained=False, seed=3)
    x = torch.randn(1, 2, 3, 32, 32, generator=generator())
    with torch.no_grad():
        before = vit.run(vit.stem(x), 0, 12)
        apply_finetune_(
            vit, Classifiers(64, 10, (11,)), mode, {"r": 4} if mode in ("lora", "loha", "pa", "sa") else {}, 0
        )
        after = vit.run(vit.stem(x), 0, 12)
    moved = (after - before).abs().max() / before.abs().max()
    assert moved < 1e-5 if mode in ("lora", "ia3", "loha", "hra") else 0 < moved < 1.0


def test_lora_is_y_plus_two_b_a_x():
    vit = build_backbone("deit_micro", pretrained=False)
    apply_finetune_(vit, Classifiers(64, 10, (11,)), "lora", {}, 0)
    layer = vit.blocks[0].attn.q
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert a.shape == (32, 64) and not b.any() and a.abs().max() <= 64**-0.5  # kaiming(a=sqrt 5) = U(+-1/sqrt(in))
    torch.nn.init.normal_(b, generator=generator())
    x = torch.randn(1, 2, 5, 64, generator=generator(1))
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 2 * x @ a.T @ b.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["deit_micro", "vim_micro", "transformer4"])
@pytest.mark.parametrize("options", [{}, {"r": 3, "lora_alpha": 6.0}])
def test_plain_lora_is_pefts_to_the_bit(name, options):
    spec = backbone_spec(name)
    one, two = (spec.build().init_(generator()) for _ in range(2))
    head = Classifiers(spec.dim, 10, (spec.depth - 1,))
    apply_finetune_(one, head, "lora", options, 7)
    _inject_peft_(two, "lora", options, 7)
    ours, pefts = dict(one.named_parameters()), dict(two.named_parameters())
    assert ours.keys() == pefts.keys() and any("lora_A" in n for n in ours)
    assert all(torch.equal(ours[n], pefts[n]) for n in ours)
    assert {n for n, p in ours.items() if p.requires_grad} == {n for n in ours if "lora_" in n}
    down = [m for n, m in one.named_modules() if n.endswith("lora_A.default")]
    theirs = [m for n, m in two.named_modules() if n.endswith("lora_A.default")]
    assert [m.axes for m in down] == [m.axes for m in theirs]


def test_loras_dropout_drops_while_clients_train_from_their_own_generators():
    """0.5 of what enters A, from the client's generator, and nothing in an answer."""
    vit = build_backbone("deit_micro", pretrained=False)
    apply_finetune_(vit, Classifiers(64, 10, (11,)), "lora", {"lora_dropout": 0.5}, 0)
    layer = vit.blocks[0].attn.q
    drop, up = layer.lora_dropout["default"], layer.lora_B["default"].weight
    torch.nn.init.normal_(up, generator=generator())
    x = torch.randn(1, 2, 5, 64, generator=generator(1))
    plain = layer(x)
    drop.context.training, drop.context.generators = True, [generator(3)]
    kept = drop(torch.ones_like(x))[0]
    assert set(kept.flatten().tolist()) == {0.0, 2.0} and 0.4 < kept.mean() / 2 < 0.6
    drop.context.generators = [generator(3)]
    a = layer.lora_A["default"].weight
    torch.testing.assert_close(layer(x), layer.base_layer(x) + 2 * (x * kept) @ a.T @ up.T, rtol=1e-4, atol=1e-4)
    drop.context.training = False
    assert torch.equal(layer(x), plain)


def test_adapters_are_a_function_of_the_seed_and_leave_the_global_generator_alone():
    def lora(seed):
        vit = build_backbone("deit_micro", pretrained=False)
        apply_finetune_(vit, Classifiers(64, 10, (11,)), "lora", {}, seed)
        return vit.blocks[5].attn.v.lora_A["default"].weight

    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert torch.equal(lora(1), lora(1)) and not torch.equal(lora(1), lora(2))
    assert torch.equal(torch.get_rng_state(), state)


SCALEFL_WIDTHS = {
    0.25: (96, 96), 0.3: (115, 120), 0.35: (134, 138), 0.4: (153, 156), 0.48: (184, 186), 0.55: (211, 216),
    0.61: (234, 234), 0.69: (264, 264), 0.75: (288, 288), 0.84: (322, 324), 0.92: (353, 354), 1.0: (384, 384),
}  # fmt: skip


@pytest.mark.parametrize("width, sizes", SCALEFL_WIDTHS.items())
def test_scalefl_widths_round_attention_up_to_the_heads(width, sizes):
    index = width_index(DEIT_S, width)
    assert (len(index["residual"]), len(index["3/qk"])) == sizes and index["0/vo"] == index["11/qk"]
    assert len(index["3/ffn"]) == 4 * sizes[0]


def test_scalefl_at_full_width_keeps_an_ffn_that_is_no_multiple_of_the_width():
    index = width_index(ViTSpec(dim=16, depth=2, heads=2, ffn_dim=24), 1.0)
    assert index["0/ffn"] == range(24) and index["residual"] == range(16)
    assert len(width_index(ViTSpec(dim=16, depth=2, heads=2, ffn_dim=24), 0.5)["1/ffn"]) == 12


@pytest.mark.parametrize("method", METHODS)
def test_every_parameter_has_a_place(method):
    e = Experiment(method=method, finetune="ssf")
    infos = build_model(e, build_method(method, {}), 10, meta=True).infos()
    assert all(len(i.axes) == len(i.shape) for i in infos.values())
    assert {i.unit for i in infos.values()} == set(range(-1, 12))
    assert infos["backbone.blocks.10.mlp.fc1.base_layer.weight"].unit == 10
    assert infos["backbone.blocks.1.mlp.fc1.scale"].kind == "adapter"


def test_shipped_weights_are_small_and_load():
    assert WEIGHTS["deit_micro"].stat().st_size < 4_000_000
    vit = build_backbone("deit_micro")
    assert sum(p.numel() for p in vit.parameters()) < 1_000_000 and backbone_spec("deit_micro") == vit.spec


def test_unavailable_weights_give_one_clear_sentence(monkeypatch):
    import timm

    def offline(name, pretrained=False, **kwargs):
        raise OSError("no route")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConnectionError, match="weights of 'deit_tiny_patch16_224' are not cached and could not be"):
        build_backbone("deit_tiny_patch16_224")
