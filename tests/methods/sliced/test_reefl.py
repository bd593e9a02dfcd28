"""ReeFL's loss and its teacher, by hand."""

import math

import pytest
import torch

from fedlib.methods import build_method
from fedlib.methods.losses import ramp_up
from fedlib.methods.sliced.reefl import running_best_exit
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


def test_running_best_exit_keeps_an_estimate_from_zero():
    # zeta = 0.2, two exits. CE (1, 2): L = (0.2, 0.4) -> 0. CE (4, 1): L = (0.96, 0.52) -> 1. The batch alone also says 1.
    # CE (0.5, 1.5): L = (0.868, 0.716) -> 1 although the batch alone says 0.
    batch, batch_only = two_exits(), two_exits()
    chosen, alone = [], []
    for ce in ([1.0, 2.0], [4.0, 1.0], [0.5, 1.5]):
        values = torch.tensor(ce).unsqueeze(1)
        chosen.append(running_best_exit(batch, values, 0.2).item())
        alone.append(running_best_exit(batch_only, values, 1.0).item())
    assert chosen == [0, 1, 1] and alone == [0, 1, 0]
    torch.testing.assert_close(batch.scratch["running_loss"], torch.tensor([[0.868], [0.716]]))


def test_the_best_exit_is_held():
    batch = two_exits(held=((1.0,), (0.0,)))
    assert running_best_exit(batch, torch.tensor([[5.0], [0.0]]), 0.2).item() == 0
