"""What a method asks of an experiment beyond the defaults, and of a net."""

from fedlib.models.registry import OWN
from fedlib.models.vit import ViTSpec

GRANTED = {"feddf": {"public_fraction": 0.1}}
FEW = {
    "fedepth": 12,  # a block must fit into a sixth of the net's memory
    "flexlora": 12,  # its factors amplify rounding, those of fewer blocks more
}


def granted(method):
    """Fields without which ``method`` refuses to run."""
    return GRANTED.get(method, {})


def few_blocks(monkeypatch, method):
    """The name of a ViT of as few blocks as ``method`` and four exits can have: most tests need no more."""
    monkeypatch.setitem(OWN, "few_blocks", ViTSpec(depth=FEW.get(method, 4)))
    return "few_blocks"
