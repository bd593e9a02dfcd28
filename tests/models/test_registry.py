"""Backbones by name: shipped weights load, lacking ones are told of."""

import subprocess
import sys

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


FIRST = """
import fedlib
from torch import nn
class Net(nn.Sequential):
    pass
wrap = lambda name: fedlib.wrap(Net(nn.Conv2d(3, 4, 3, 4), nn.Flatten(1), nn.Linear(256, 2)), ["0"], (3, 32, 32), name=name)
assert wrap("net") == wrap("net") == "net"
from fedlib.models.registry import OWN, SHIPPED
assert "net" in OWN and "net" not in SHIPPED
try:
    wrap("resnet20")
except ValueError as error:
    print(error)
"""


def test_a_net_that_is_wrapped_before_anything_else_is_no_net_of_the_kit():
    """Else what another net of its name was stored as would be taken for it, and it could not be wrapped again."""
    done = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("wrap: name = 'resnet20' is a backbone of the kit's")
