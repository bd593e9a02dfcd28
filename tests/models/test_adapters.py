"""Adapters: where they sit, what they train, and peft's own to the bit."""

import math

import pytest
import torch

from fedlib.core.rng import numpy_generator
from fedlib.models.adapters import apply_finetune_
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.registry import backbone_spec, build_backbone
from fedlib.models.vit import ViT, ViTSpec

DEIT_S = ViTSpec(224, 16, 384, 12, 6, 1536)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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
def test_lora_trains_low_rank_products_alone_on_the_axes_of_their_layers(name, options):
    spec = backbone_spec(name)
    backbone = spec.build().init_(generator())
    apply_finetune_(backbone, Classifiers(spec.dim, 10, (spec.depth - 1,)), "lora", options, 7)
    trained = {n for n, p in backbone.named_parameters() if p.requires_grad}
    assert trained and trained == {n for n, _ in backbone.named_parameters() if "lora_" in n}
    layers = [m for m in backbone.modules() if hasattr(m, "lora_A")]
    assert len(layers) == spec.depth * len(spec.peft_targets)
    for m in layers:
        (out_axis, in_axis), down, up = m.base_layer.axes["weight"], m.lora_A["default"], m.lora_B["default"]
        rank = down.axes["weight"][0]
        assert down.axes["weight"] == (rank, in_axis) and up.axes["weight"] == (out_axis, rank)
        assert m.scaling["default"] == 2 and not up.weight.any()  # 64 / 32, or 6 / 3
    down, up = layers[0].lora_A["default"].weight, layers[0].lora_B["default"].weight
    with torch.random.fork_rng():  # the first layer's numbers, on which stored runs rest: A is drawn, then B, A again
        torch.manual_seed(int(numpy_generator(7, "peft init").integers(2**62)))
        again, other = torch.empty_like(down), torch.empty_like(up)
        for weight in (again, other, again):
            torch.nn.init.kaiming_uniform_(weight, a=math.sqrt(5))
    assert torch.equal(down, again)


@pytest.mark.parametrize("name", ["deit_micro", "vim_micro", "transformer4"])
def test_lora_without_further_options_is_pefts_to_the_bit(name):
    """``bias="none"`` is what peft does anyway, and lets it do it: one layer after the other, its names and numbers."""
    own, pefts = (backbone_spec(name).build().init_(generator()) for _ in range(2))
    for backbone, options in ((own, {"r": 3}), (pefts, {"r": 3, "bias": "none"})):
        apply_finetune_(backbone, Classifiers(backbone.spec.dim, 10, (1,)), "lora", options, 7)
    told = [[(n, p.requires_grad) for n, p in b.named_parameters()] for b in (own, pefts)]
    assert told[0] == told[1]
    assert all(torch.equal(a, b) for a, b in zip(own.parameters(), pefts.parameters(), strict=True))
    for p in (*own.parameters(), *pefts.parameters()):
        p.data.normal_(0, 0.1, generator=generator(sum(p.shape)))
    layers = [[m for m in b.modules() if hasattr(m, "lora_A")] for b in (own, pefts)]
    x = torch.randn(1, 2, 5, layers[0][0].lora_A["default"].in_features, generator=generator(1))
    assert torch.equal(layers[0][0](x), layers[1][0](x))


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
