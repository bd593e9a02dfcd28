"""Central pre-training: resumes exactly, exports what the loader reads, and its shipped result is worth something."""

import dataclasses

import pytest
import torch

from fedlib.data.datasets import load_dataset
from fedlib.models.registry import build_backbone, load_weights_
from fedlib.models.vit import ViT, ViTSpec
from fedlib.runs.pretraining import Recipe, export_backbone, linear_probe, load_upstream, train_upstream

CONFIG = ViTSpec(dim=16, depth=2, heads=2, ffn_dim=32)
RECIPE = Recipe(epochs=2, batch_size=64, warmup_epochs=0.5, augment="crop")


@pytest.fixture(scope="module")
def few_digits():
    data = load_dataset("mnist")
    return dataclasses.replace(data, train_images=data.train_images[::10], train_labels=data.train_labels[::10])


def test_an_interrupted_pretraining_equals_an_uninterrupted_one(few_digits, tmp_path):
    whole = list(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "whole"))
    next(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "parts"))  # stopped after one epoch
    parts = list(train_upstream(CONFIG, few_digits, RECIPE, tmp_path / "parts"))
    assert parts == whole and [r["epoch"] for r in whole] == [1, 2]
    a, b = (load_upstream(CONFIG, 10, tmp_path / x).state_dict() for x in ("whole", "parts"))
    assert all(torch.equal(a[k], b[k]) for k in a)
    with pytest.raises(ValueError, match="belongs to another recipe"):
        next(train_upstream(CONFIG, few_digits, dataclasses.replace(RECIPE, lr=1.0), tmp_path / "parts"))


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


def test_shipped_features_beat_random_ones_on_digits():
    digits = load_dataset("mnist")
    trained, random = (linear_probe(build_backbone("deit_micro", pretrained=p), digits, 1000) for p in (True, False))
    assert trained > random + 8
