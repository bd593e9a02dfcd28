"""Eqs. 5-6 and the rivals' losses, against values worked out by hand."""

import math

import torch

from fedlib.data.tasks import IGNORED, NextToken, Regression
from fedlib.methods.losses import Batch, cross_entropies, kl_to_teacher, last_exit
from tests.helpers.two_exits import LN2, LN3, two_exits


def test_cross_entropy_per_exit_ignores_padding_and_missing_exits():
    # exit 0: -ln 1/2 = ln 2; exit 1: -ln 3/4
    ce = cross_entropies(two_exits())
    torch.testing.assert_close(ce, torch.tensor([[LN2], [math.log(4 / 3)]]))
    assert cross_entropies(two_exits(held=((1.0,), (0.0,))))[1] == 0


def test_a_regressions_exits_learn_the_teachers_number():
    """Squared differences to exit 1, 4 and 16, at weights 1/4 and 3/4: 13."""
    outputs = torch.tensor([[[[3.0], [1.0]]], [[[1.0], [5.0]]]], requires_grad=True)
    batch = Batch(
        outputs, torch.zeros(1, 2), torch.tensor([[0.25, 0.75]]), torch.ones(2, 1), task=Regression()
    )  # fmt: skip
    loss = kl_to_teacher(batch, torch.tensor([1]))
    loss.sum().backward()
    assert loss.tolist() == [13.0]
    assert outputs.grad.flatten().tolist() == [1.0, -6.0, 0.0, 0.0]  # 2 (3 - 1) / 4, 2 (1 - 5) 3/4; none to the teacher


def test_exits_at_every_token_learn_where_a_token_is_asked():
    outputs, labels = torch.zeros(2, 1, 1, 3, 2), torch.tensor([[[0, 1, IGNORED]]])
    outputs[1, 0, 0, :, 0] = LN3  # the teacher says (3/4, 1/4) everywhere, the other (1/2, 1/2)
    batch = Batch(outputs, labels, torch.ones(1, 1), torch.ones(2, 1), task=NextToken())
    torch.testing.assert_close(kl_to_teacher(batch, torch.tensor([1])), torch.tensor([0.75 * LN3 - LN2]))


def test_kl_to_teacher_eq6():
    # KL(p_1 || p_0) = 3/4 ln(3/4 / 1/2) + 1/4 ln(1/4 / 1/2) = 3/4 ln 3 - ln 2 (exit 1 teaches exit 0)
    batch = two_exits()
    torch.testing.assert_close(kl_to_teacher(batch, torch.tensor([1])), torch.tensor([0.75 * LN3 - LN2]))
    # KL(p_0 || p_1) = 1/2 ln(2/3) + 1/2 ln 2 = ln 2 - 1/2 ln 3
    torch.testing.assert_close(kl_to_teacher(batch, torch.tensor([0])), torch.tensor([LN2 - 0.5 * LN3]))


def test_kl_scales_with_squared_temperature():
    # tau = 2: p_1 = softmax(ln 3 / 2, 0) = (s, 1) / (1 + s), s = sqrt 3; KL(p_1 || 1/2) = ln 2 - H(p_1); times 4
    s = math.sqrt(3)
    p = (s / (1 + s), 1 / (1 + s))
    expected = 4 * (LN2 + sum(x * math.log(x) for x in p))
    torch.testing.assert_close(kl_to_teacher(two_exits(), torch.tensor([1]), 2.0), torch.tensor([expected]))


def test_teacher_gets_no_gradient_from_distillation():
    batch = two_exits()
    batch.outputs.requires_grad_(True)
    kl_to_teacher(batch, torch.tensor([1])).sum().backward()
    assert batch.outputs.grad[1].abs().max() < 1e-7
    # d KL(t || softmax z) / dz = p - t at exit 0: (1/2 - 3/4, 1/2 - 1/4)
    torch.testing.assert_close(batch.outputs.grad[0, 0, 0], torch.tensor([-0.25, 0.25]))


def test_teachers_are_held():
    batch = two_exits(held=((1.0,), (0.0,)))
    assert last_exit(batch).item() == 0 and last_exit(two_exits()).item() == 1
