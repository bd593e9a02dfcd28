"""Backbones by name: shipped weights load, lacking ones are told of."""

import pytest

from fedlib.models.registry import WEIGHTS, backbone_spec, build_backbone


def test_shipped_weights_are_small_and_load():
    assert WEIGHTS["deit_micro"].stat().st_size < 4_000_000
    vit = build_backbone("deit_micro")
    assert sum(p.numel() for p in vit.parameters()) < 1_000_000 and backbone_spec("deit_micro") == vit.spec


def test_unavailable_weights_give_one_clear_sentence(monkeypatch):
    import timm

    create = timm.create_model

    def offline(name, pretrained=False, **kwargs):
        if pretrained:
            raise OSError("no route")
        return create(name, **kwargs)

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConnectionError, match="weights of 'deit_tiny_patch16_224' are not cached and could not be"):
        build_backbone("deit_tiny_patch16_224")
