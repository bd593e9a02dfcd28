"""ScaleFL: its loss by hand, and a round against a plain loop with index lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run_rounds
from fedlib.methods import Round, build_method
from fedlib.methods.losses import Batch
from fedlib.methods.sliced.scalefl import exit_shares
from tests.helpers.plain_levels import WIDTHS, check, local_training, mean_over_holders, whole

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)


def outputs():
    return torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])[:, None, None]  # three exits, one member, one example


def by_hand(gamma, tau, classes=1.0):
    """(CE_i + gamma tau^2 KL(last || i)), exits 1..3, label 0."""
    z = outputs()[:, 0, 0].double()
    p = [(x / tau).softmax(-1) for x in z]
    ce = [-x.log_softmax(-1)[0] for x in z]
    kl = [(p[2] * (p[2] / q).log()).sum() for q in p]
    return ce, [gamma * tau**2 * k / classes for k in kl]


@pytest.mark.parametrize(
    "options, classes", [({}, 1), ({"kl_mean": "all"}, 2), ({"objective": "paper", "kd_weight": 0.3}, 1)]
)
def test_the_loss_by_hand(options, classes):
    method = build_method("scalefl", options)
    batch = Batch(outputs(), torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), t=27, rounds=100)
    ce, kl = by_hand(method.kd_weight, 3.0, classes)
    if method.objective == "paper":
        want = sum(i * (kl[i - 1] + 0.7 * ce[i - 1]) for i in (1, 2, 3)) / 12
    else:
        want = sum(i / 6 * (ce[i - 1] + kl[i - 1]) for i in (1, 2, 3))
    assert method.local_loss(batch).item() == pytest.approx(want.item(), abs=1e-6)
    early = method.local_loss(replace(batch, t=26)).item()  # the first quarter is without distillation
    share = 12 if method.objective == "paper" else 6
    assert early == pytest.approx(sum(i * ce[i - 1] for i in (1, 2, 3)).item() / share, abs=1e-6)


@pytest.mark.parametrize("rounds, first", [(100, 27), (60, 17), (30, 9), (4, 3), (2, 2), (1, None)])
def test_distillation_starts_in_the_first_round_that_has_more_than_a_quarter_behind_it(rounds, first):
    """The release counts rounds from 0 and starts at index > 0.25 R: of 100 rounds at index 26, the twenty-seventh."""
    method = build_method("scalefl", {"kd_weight": 1.0})
    plain = build_method("scalefl", {"kd_weight": 0.0})
    batch = Batch(outputs(), torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), rounds=rounds)
    at = (replace(batch, t=t) for t in range(1, rounds + 1))
    distils = [b.t for b in at if method.local_loss(b).item() != plain.local_loss(b).item()]
    assert distils == (list(range(first, rounds + 1)) if first else [])


@pytest.mark.parametrize("detach", [True, False])
def test_the_teacher_learns_from_its_pupils_only_if_asked(detach):
    """With one pupil exit of no weight in the cross-entropy, what the last exit's gradient has beside CE's is the KL's."""
    z = outputs().requires_grad_()
    batch = Batch(z, torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), t=2, rounds=2)
    method = build_method("scalefl", {"detach": detach, "kd_weight": 1.0})
    (grad,) = torch.autograd.grad(method.local_loss(batch).sum(), z)
    alone = z.detach()[2].requires_grad_()
    (own,) = torch.autograd.grad(0.5 * F.cross_entropy(alone[0], torch.tensor([0])), alone)
    assert torch.allclose(grad[2], own) == detach


def test_shares_of_members_of_unequal_depth():
    held = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    want = torch.tensor([[1 / 6, 1.0, 0.0], [2 / 6, 0.0, 1 / 3], [3 / 6, 0.0, 2 / 3]])
    torch.testing.assert_close(exit_shares(held), want)


def scaled_loss(logits, labels):
    """Sum over exits i = 1..j of i / (j (j+1) / 2) (CE_i + 0.05 * 9 * KL(last || i at temperature 3))."""
    j = len(logits)
    teacher = (logits[-1].detach() / 3).softmax(-1)
    terms = [
        i / (j * (j + 1) / 2)
        * (F.cross_entropy(z, labels) + 0.45 * F.kl_div((z / 3).log_softmax(-1), teacher, reduction="batchmean"))
        for i, z in enumerate(logits, 1)
    ]  # fmt: skip
    return sum(terms)


def test_a_round_of_scalefl_equals_a_plain_loop_with_index_lists(convnet):
    f = build_federation(convnet.replace(options={"widths": WIDTHS, "distill_from": 0.0}))
    clients = f.sample_clients(1)
    assert sorted(c.budget for c in clients) == [0, 1, 2]
    start = whole(f)
    trained = [local_training(f, c, WIDTHS[c.budget], c.budget + 1, start, scaled_loss) for c in clients]
    for size in (1, 3):
        (last,) = run_rounds(f, Execution(workers=1, cohort_size=size))
        check(last, mean_over_holders(start, trained))


def test_full_widths_are_fedavg_with_the_same_exits(convnet):
    """Maximum budgets, no distillation: the whole model with the exit-weighted loss, by the plain loop of FedAvg."""
    f = build_federation(convnet.replace(options={"widths": WIDTHS, "kd_weight": 0.0}, budgets="maximum"))

    def weighted(logits, labels):
        return sum(i / 6 * F.cross_entropy(z, labels) for i, z in enumerate(logits, 1))

    start = whole(f)
    trained = [local_training(f, c, 1.0, 3, start, weighted)[0] for c in f.sample_clients(1)]
    (last,) = run_rounds(f, ONE)
    check(last, {n: np.mean([t[n] for t in trained], 0) for n in start})
    assert {m.part for c in f.clients(range(3)) for m in f.method.members(c, f.server, Round(1, (), f.setting))} == {f.setting.full()}  # fmt: skip
