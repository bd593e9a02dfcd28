"""The server's step against values worked out by hand: FedDyn and FedAdam."""

import pytest
import torch

from fedlib.methods.server import fedadam, feddyn_gradient, feddyn_server


def test_feddyn_server_by_hand():
    # alpha 0.1, share 2/4, theta 1, mean 0.6, h 0.02: h' = 0.02 - 0.1 * 0.5 * (0.6 - 1) = 0.04; theta' = 0.6 - 0.4 = 0.2
    theta, h = feddyn_server(*(torch.tensor(x) for x in (1.0, 0.6, 0.02, 0.5)), alpha=0.1)
    assert theta.item() == pytest.approx(0.2) and h.item() == pytest.approx(0.04)


def test_feddyn_leaves_unheld_entries_alone():
    theta, h = feddyn_server(
        *(torch.tensor([1.0, -2.0]), torch.zeros(2), torch.tensor([0.3, 0.3])), torch.tensor([0.0, 1.0]), 0.1
    )
    assert theta[0] == 1 and h[0] == pytest.approx(0.3)


def test_feddyn_gradient_is_that_of_its_penalty():
    p, start, g = torch.tensor([0.5, -1.0], requires_grad=True), torch.tensor([0.1, 0.4]), torch.tensor([0.3, -0.2])
    penalty = -(p * g).sum() + 0.1 / 2 * ((p - start) ** 2).sum()
    (expected,) = torch.autograd.grad(penalty, p)
    torch.testing.assert_close(feddyn_gradient(p.detach(), start, g, 0.1), expected)


def test_fedadam_by_hand():
    # theta 1, delta -0.5, m 0.2, v 0.01: m' = 0.18 - 0.05 = 0.13; v' = 0.00999 + 0.00025 = 0.01024; sqrt = 0.101193
    # theta' = 1 - 0.001 * 0.13 / (0.101193 + 1e-6) = 1 - 0.00128466
    theta, m, v = fedadam(
        *(torch.tensor(x, dtype=torch.float64) for x in (1.0, -0.5, 0.2, 0.01)), 1e-3, 0.9, 0.999, 1e-6
    )
    assert m.item() == pytest.approx(0.13) and v.item() == pytest.approx(0.01024)
    assert theta.item() == pytest.approx(1 - 0.00128466, abs=1e-8)
