"""The widths of ReeFL's form of ScaleFL."""

import math

import pytest
import torch

from fedlib.methods import build_method
from fedlib.methods.losses import kl_to_teacher
from fedlib.methods.sliced.scalefl_vit import width_index
from fedlib.models.vit import ViTSpec
from tests.helpers.two_exits import LN2, two_exits

DEIT_S = ViTSpec(224, 16, 384, 12, 6, 1536)
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


def test_scalefl_weighs_its_last_exit_by_a_constant():
    batch = two_exits()
    expected = LN2 + math.log(4 / 3) + 0.05 * kl_to_teacher(batch, torch.tensor([1]), 3.0)
    torch.testing.assert_close(build_method("scalefl_vit", {}).local_loss(batch), expected)
