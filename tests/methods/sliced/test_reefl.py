"""ReeFL's loss, by hand."""

import math

import pytest
import torch

from fedlib.methods import build_method
from fedlib.methods.losses import ramp_up
from tests.helpers.two_exits import LN2, LN3, two_exits


@pytest.mark.parametrize(
    "t, eta", [(1, 0.0070), (50, 0.031), (100, 0.108), (150, 0.2865), (200, 0.574), (300, 1), (999, 1)]
)
def test_ramp_up_over_300_rounds(t, eta):
    # exp(-5 (1 - 150/300)^2) = exp(-1.25) = 0.28650
    assert ramp_up(t, 300) == pytest.approx(eta, abs=6e-4 if eta < 0.2 else 5e-4)
    assert ramp_up(150, 300) == pytest.approx(0.2865, abs=5e-5)


def test_local_loss_is_eq5():
    # t = 300 of 1000: eta = 1; ReeFL's teacher is exit 1 (lower loss): ln 2 + ln 4/3 + (3/4 ln 3 - ln 2)
    batch = two_exits()
    batch.t = 300
    expected = LN2 + math.log(4 / 3) + 0.75 * LN3 - LN2
    torch.testing.assert_close(build_method("reefl", {}).local_loss(batch), torch.tensor([expected]))
    plain = build_method("reefl", {"distill": "none"}).local_loss(two_exits())
    torch.testing.assert_close(plain, torch.tensor([LN2 + math.log(4 / 3)]))
