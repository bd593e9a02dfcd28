"""Central pre-training: resumes exactly, exports what the loader reads, and its shipped result is worth something."""

import dataclasses
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from fedlib.data.datasets import load_dataset
from fedlib.models import registry
from fedlib.models.registry import build_backbone, load_weights_
from fedlib.models.vit import ViT, ViTSpec, patchify
from pretraining import __main__ as pretrain
from pretraining import training
from pretraining.training import (
    RECIPES,
    Recipe,
    export_backbone,
    linear_probe,
    load_upstream,
    tokens_of,
    train_upstream,
)

CONFIG = ViTSpec(dim=16, depth=2, heads=2, ffn_dim=32)
RECIPE = Recipe(epochs=2, batch_size=64, warmup_epochs=0.5, augment="crop")


@pytest.fixture(scope="module")
def few_digits():
    data = load_dataset("mnist")
    return dataclasses.replace(data, train_inputs=data.train_inputs[::10], train_labels=data.train_labels[::10])


def test_an_interrupted_pretraining_equals_an_uninterrupted_one(few_digits, tmp_path):
    whole = list(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "whole"))
    next(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "parts"))  # stopped after one epoch
    parts = list(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "parts"))
    assert parts == whole and [r["epoch"] for r in whole] == [1, 2]
    a, b = (load_upstream(CONFIG, 10, tmp_path / x).state_dict() for x in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(ValueError, match="belongs to another recipe"):
        next(train_upstream(CONFIG, few_digits, dataclasses.replace(RECIPE, lr=1.0), tmp_path / "parts"))


def test_bfloat16_products_learn_nearly_the_same_weights_in_float32(few_digits, tmp_path):
    states = []
    for precision in ("float32", "bfloat16"):
        recipe = dataclasses.replace(RECIPE, precision=precision)
        list(train_upstream(CONFIG, few_digits, recipe, tmp_path / precision))
        states.append(load_upstream(CONFIG, 10, tmp_path / precision).state_dict())
    start = training.build_upstream(CONFIG, 10, RECIPE.seed).state_dict()
    assert all(x.dtype is torch.float32 for x in states[1].values())
    flat = [torch.cat([x.flatten() for x in state.values()]) for state in (start, *states)]
    moved, apart = (flat[1] - flat[0]).norm(), (flat[2] - flat[1]).norm()
    assert 0 < apart < 0.3 * moved


def test_export_is_half_precision_and_loads(tmp_path):
    vit = ViT(CONFIG).init_(torch.Generator().manual_seed(0))
    export_backbone(vit, tmp_path / "w.safetensors")
    loaded = load_weights_(ViT(CONFIG), tmp_path / "w.safetensors")
    for p, q in zip(vit.parameters(), loaded.parameters(), strict=True):
        torch.testing.assert_close(q, p.half().float())


def test_shipped_features_beat_random_ones_by_a_wide_margin(shared_data):
    cifar = load_dataset(str(shared_data / "cifar10"))
    trained, random = (linear_probe(build_backbone("deit_micro", pretrained=p), cifar, 3000) for p in (True, False))
    assert trained > random + 12


def test_the_stronger_backbones_features_beat_those_of_the_smaller(shared_data):
    cifar = load_dataset(str(shared_data / "cifar100"))
    few = dataclasses.replace(cifar, test_inputs=cifar.test_inputs[::10], test_labels=cifar.test_labels[::10])
    micro, mini = (linear_probe(build_backbone(name), few, 1500) for name in ("deit_micro", "deit_mini"))
    assert mini > micro + 2


def test_shipped_features_beat_random_ones_on_digits():
    digits = load_dataset("mnist")
    trained, random = (linear_probe(build_backbone("deit_micro", pretrained=p), digits, 1000) for p in (True, False))
    assert trained > random + 8


HALF = dataclasses.replace(RECIPE, epochs=3, half_size_epochs=1)


def test_interrupted_within_an_epoch_it_goes_on_from_the_last_saved_step(few_digits, tmp_path, monkeypatch):
    whole = list(train_upstream(CONFIG, few_digits, HALF, tmp_path / "whole"))
    calls, real = [], training.render

    def render(*arguments):
        calls.append(arguments)
        if len(calls) == 18:  # 7 steps and one evaluation an epoch: in the middle of the third
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as m:
        m.setattr(training, "render", render)
        with pytest.raises(KeyboardInterrupt):
            list(train_upstream(CONFIG, few_digits, HALF, tmp_path / "parts", save_seconds=0))
    with safe_open(tmp_path / "parts/state.safetensors", "pt") as f:
        assert f.metadata()["step"] == "1" and len(json.loads(f.metadata()["history"])) == 2
    assert list(train_upstream(CONFIG, few_digits, HALF, tmp_path / "parts")) == whole
    a, b = (load_upstream(CONFIG, 10, tmp_path / x).state_dict() for x in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a)


def test_images_of_half_the_side_see_positions_averaged_over_two_by_two_cells():
    vit = ViT(CONFIG).init_(torch.Generator().manual_seed(0))
    images = torch.rand(1, 2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    tokens = tokens_of(vit, images)
    grid = vit.stem.pos_embed[1:].view(2, 2, 2, 2, 16)  # rows (cell, within), columns (cell, within)
    patches = vit.stem.patch_embed(patchify(images, 8)) + grid.mean((1, 3)).reshape(4, 16)
    first = (vit.stem.prefix + vit.stem.pos_embed[:1]).expand(1, 2, 1, 16)
    torch.testing.assert_close(tokens, torch.cat((first, patches), 2))
    whole = torch.rand(1, 2, 3, 32, 32)
    assert torch.equal(tokens_of(vit, whole), vit.stem(whole))


def test_a_state_of_before_half_sizes_goes_on(few_digits, tmp_path):
    """Recipes that were stored without a later field mean its default."""
    next(train_upstream(CONFIG, few_digits, RECIPE, tmp_path))
    file = tmp_path / "state.safetensors"
    with safe_open(file, "pt") as f:
        metadata = f.metadata()
    old = {k: v for k, v in json.loads(metadata["recipe"]).items() if k != "half_size_epochs"}
    save_file(load_file(file), file, {"recipe": json.dumps(old), "history": metadata["history"]})
    assert [r["epoch"] for r in train_upstream(CONFIG, few_digits, RECIPE, tmp_path)] == [1, 2]


def test_pre_training_from_a_terminal_in_two_goes(few_digits, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(pretrain.RECIPES, "deit_mini", RECIPE)
    monkeypatch.setitem(pretrain.OWN, "deit_mini", CONFIG)
    monkeypatch.setattr(pretrain, "load_dataset", lambda name: few_digits)
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    pretrain.main(["deit_mini", "--source", "mnist", "--minutes", "0"])
    assert "not finished" in capsys.readouterr().out
    pretrain.main(["deit_mini", "--source", "mnist", "--probe", "mnist"])
    out = capsys.readouterr().out
    assert "'epoch': 2" in out and "linear probe, deit_mini on mnist" in out and "random deit_mini on mnist" in out
    load_weights_(ViT(CONFIG), tmp_path / "pretraining/deit_mini/deit_mini.safetensors")
    with pytest.raises(ValueError, match="backbone = 'resnet20' has no recipe; allowed: deit_micro, "):
        pretrain.main(["resnet20"])


def test_weights_are_found_beside_the_data_and_their_absence_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(registry.WEIGHTS, "deit_mini", tmp_path / "package" / "deit_mini.safetensors")
    monkeypatch.delenv("FEDLIB_DATA", raising=False)
    assert registry.weights_file("deit_mini") is None and registry.weights_file("resnet20") is None
    with pytest.raises(ConnectionError, match="weights of 'deit_mini' are not at hand: put deit_mini.safetensors into"):
        build_backbone("deit_mini")
    vit = build_backbone("deit_mini", pretrained=False, seed=5)
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    export_backbone(vit, tmp_path / "backbones" / "deit_mini.safetensors")
    loaded = build_backbone("deit_mini").state_dict()
    assert all(torch.equal(x.half().float(), loaded[name]) for name, x in vit.state_dict().items())
    export_backbone(vit, tmp_path / "package" / "deit_mini.safetensors")  # the package's own comes first
    assert registry.weights_file("deit_mini").parent.name == "package"
    assert (tmp_path / "backbones" / "deit_mini.safetensors").stat().st_size < 10_000_000


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_of_a_backbone_that_can_be_loaded_by_name(name):
    assert name in registry.WEIGHTS and name in registry.VITS
    assert RECIPES[name].half_size_epochs < RECIPES[name].epochs
