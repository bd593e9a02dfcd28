"""The widths of ReeFL's form of ScaleFL."""

import math

import pytest
import torch

from fedlib import build_federation
from fedlib.engine.serving import client_outputs
from fedlib.methods import Round, build_method
from fedlib.methods.losses import kl_to_teacher
from fedlib.methods.sliced.scalefl_vit import width_index
from fedlib.models.vit import ViTSpec
from fedlib_lab.runs.trained import all_logits
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


def test_an_exit_answers_centrally_at_its_own_level(tiny):
    """Exits after blocks 4, 6, 9 and 12 of widths 0.4, 0.55, 0.75 and 1: of 64 features 25, 35, 48 and 64."""
    f = build_federation(
        tiny.replace(method="scalefl_vit", finetune="full", finetune_options={}, test_split="like_train")
    )
    parts = [f.method.model_for(j, f.server, Round(1, (), f.setting)) for j in range(4)]
    assert [(p.depth, len(p.index["residual"]), p.exits) for p in parts] == [
        (4, 25, (0,)), (6, 35, (0, 1)), (9, 48, (0, 1, 2)), (12, 64, (0, 1, 2, 3))
    ]  # fmt: skip
    central = all_logits(f, f.server)
    for (client,), outputs, *_ in (x for c in range(4) for x in client_outputs(f, f.server, {}, [c])):
        own = f.budgets[client]  # what a client of the level answers is what its exit does
        torch.testing.assert_close(outputs[own, 0], central[own, f.data.client_test(client)], rtol=1e-4, atol=1e-5)


def test_scalefl_weighs_its_last_exit_by_a_constant():
    batch = two_exits()
    expected = LN2 + math.log(4 / 3) + 0.05 * kl_to_teacher(batch, torch.tensor([1]), 3.0)
    torch.testing.assert_close(build_method("scalefl_vit", {}).local_loss(batch), expected)
