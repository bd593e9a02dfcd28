"""Optimisers on stacked leaves against torch.optim, one client at a time."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from fedlib import Experiment
from fedlib.engine.checks import check_experiment
from fedlib.engine.optimisers import build_optimiser, clip_norms

ROWS = [range(4), range(1, 3), (0, 3), range(4)]  # members of each leaf, of four; not all follow one another
SHAPES = [(3, 2), (5,), (), (2, 2, 2)]
MEMBERS, STEPS = 4, 6
OF_TORCH: dict[str, Callable] = {
    "sgd": lambda ps, e, lr: torch.optim.SGD(ps, lr, momentum=e.momentum, weight_decay=e.weight_decay),
    "adam": lambda ps, e, lr: torch.optim.Adam(ps, lr, weight_decay=e.weight_decay),
    "adamw": lambda ps, e, lr: torch.optim.AdamW(ps, lr, weight_decay=e.weight_decay),
}
KINDS = {
    "plain sgd": {},
    "momentum": {"momentum": 0.9},
    "decayed sgd": {"momentum": 0.9, "weight_decay": 0.1, "clip_norm": 1.5},
    "adam": {"optimiser": "adam"},
    "decayed adam": {"optimiser": "adam", "weight_decay": 0.1, "clip_value": None, "clip_norm": 1.5},
    "adamw": {"optimiser": "adamw", "weight_decay": 0.1},
}


def experiment(**fields):
    return Experiment(**{"clip_value": 0.8, **fields})


def drawn(seed):
    """A leaf's worth of numbers for every leaf, stacked over its members."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(len(r), *s, generator=generator) for r, s in zip(ROWS, SHAPES, strict=True)]


def gradients(step, skipped):
    """Step's gradients; None for the leaves in ``skipped``."""
    return [None if i in skipped else 2 * g for i, g in enumerate(drawn(100 + step))]


def alone(e, member, active, rates, skipped, leaves):
    """One run of a member's own rows by torch.optim: it skips steps without a batch, and leaves without a gradient."""
    mine = [i for i, r in enumerate(ROWS) if member in r]
    params = [leaves[i][ROWS[i].index(member)].clone().requires_grad_() for i in mine]
    optimiser = OF_TORCH[e.optimiser](params, e, 1.0)
    for step in range(STEPS):
        if not active[step, member]:
            continue
        drawn_now = gradients(step, skipped[step])
        for p, i in zip(params, mine, strict=True):
            p.grad = None if drawn_now[i] is None else drawn_now[i][ROWS[i].index(member)].clone()
        if e.clip_value is not None and any(p.grad is not None for p in params):
            torch.nn.utils.clip_grad_value_(params, e.clip_value)
        if e.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(params, e.clip_norm)
        optimiser.param_groups[0]["lr"] = rates[step] if np.ndim(rates[step]) == 0 else rates[step][member]
        optimiser.step()
    return dict(zip(mine, (p.detach() for p in params), strict=True))


def stacked(e, active, rates, skipped, leaves):
    optimiser = build_optimiser(e, leaves, ROWS)
    for step in range(STEPS):
        optimiser.step_(gradients(step, skipped[step]), rates[step], active[step])


ALWAYS = np.ones((STEPS, MEMBERS), bool)
SOMETIMES = np.array([[1, 1, 1, 1], [1, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 1], [0, 1, 1, 1], [0, 0, 0, 1]], bool)
RATES = [0.1, 0.1, 0.05, 0.05, 0.02, 0.01]
OWN_RATES = [np.array([0.1, 0.2, 0.3, 0.4]) / (s + 1) for s in range(STEPS)]
NEVER, NOW_AND_THEN = [()] * STEPS, [(1,), (), (0, 1), (3,), (), (0, 1, 2, 3)]


@pytest.mark.parametrize("skipped", [NEVER, NOW_AND_THEN], ids=["all leaves", "some leaves"])
@pytest.mark.parametrize("rates", [RATES, OWN_RATES], ids=["one rate", "own rates"])
@pytest.mark.parametrize("active", [ALWAYS, SOMETIMES], ids=["always", "sometimes"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_steps_as_torch_does_for_each_client_twice_in_a_row(kind, active, rates, skipped):
    e = experiment(**KINDS[kind])
    leaves = drawn(1)
    for _ in range(2):  # the second optimiser is fresh: no moments of the first
        wanted = [alone(e, m, active, rates, skipped, leaves) for m in range(MEMBERS)]
        stacked(e, active, rates, skipped, leaves)
        for m, rows in enumerate(wanted):
            for i, p in rows.items():
                torch.testing.assert_close(leaves[i][ROWS[i].index(m)], p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["plain sgd", "momentum"])
def test_sgd_is_bit_equal_to_torchs(kind):
    e, leaves = experiment(**KINDS[kind], weight_decay=0.1), drawn(1)
    wanted = [alone(e, m, ALWAYS, RATES, NEVER, leaves) for m in range(MEMBERS)]
    stacked(e, ALWAYS, RATES, NEVER, leaves)
    assert all(torch.equal(leaves[i][ROWS[i].index(m)], p) for m, rows in enumerate(wanted) for i, p in rows.items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_stack_is_bit_equal_to_members_one_by_one(kind):
    e, many = experiment(**KINDS[kind]), drawn(1)
    ones = [[p[[r.index(m)]].clone() for p, r in zip(many, ROWS, strict=True) if m in r]
            for m in range(MEMBERS)]  # fmt: skip
    stacked(e, SOMETIMES, OWN_RATES, NEVER, many)
    for m, leaves in enumerate(ones):
        mine = [i for i, r in enumerate(ROWS) if m in r]
        optimiser = build_optimiser(e, leaves, [(0,)] * len(leaves))
        for step in range(STEPS):
            grads = [gradients(step, ())[i][ROWS[i].index(m)][None] for i in mine]
            optimiser.step_(grads, OWN_RATES[step][m : m + 1], SOMETIMES[step, m : m + 1])
        for i, p in zip(mine, leaves, strict=True):
            torch.testing.assert_close(many[i][ROWS[i].index(m)], p[0], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_an_inactive_member_and_its_moments_stand_still_whatever_its_gradient(kind):
    e, leaves = experiment(**{**KINDS[kind], "clip_value": None}), drawn(1)
    optimiser = build_optimiser(e, leaves, ROWS)
    optimiser.step_(gradients(0, ()), 0.1, ALWAYS[0])
    before = [[x.clone() for x in xs] for xs in (leaves, *optimiser.moments)]
    grads = gradients(1, ())
    for g, r in zip(grads, ROWS, strict=True):
        if 1 in r:
            g[r.index(1)] = math.nan
    optimiser.step_(grads, 0.1, np.array([True, False, True, True]))
    for old, new in zip(before, (leaves, *optimiser.moments), strict=True):
        for x, y, r in zip(old, new, ROWS, strict=True):
            for row, m in enumerate(r):
                assert torch.equal(x[row], y[row]) == (m == 1)


def test_a_leaf_that_the_loss_does_not_reach_gets_no_decay_and_no_momentum():
    e, leaves = experiment(momentum=0.9, weight_decay=0.1), drawn(1)
    optimiser, before = build_optimiser(e, leaves, ROWS), drawn(1)
    optimiser.step_([None] * 4, 0.1, ALWAYS[0])
    assert all(torch.equal(p, q) for p, q in zip(leaves, before, strict=True))
    optimiser.step_(gradients(0, (1,)), 0.1, ALWAYS[0])
    after = leaves[0].clone()
    optimiser.step_(gradients(1, (0, 1)), 0.1, ALWAYS[0])
    assert torch.equal(leaves[1], before[1]) and torch.equal(leaves[0], after)
    assert not torch.equal(leaves[3], before[3])


def test_leaves_of_the_first_members_alone_step_too():
    """A stage may train only what not all members hold."""
    leaves = [torch.ones(2, 3)]
    optimiser = build_optimiser(experiment(optimiser="adamw"), leaves, [range(2)])
    optimiser.step_([torch.ones(2, 3)], np.array([0.1, 0.2, 0.3, 0.4]), np.array([True, True, True, False]))
    torch.testing.assert_close(leaves[0], torch.tensor([[0.9] * 3, [0.8] * 3]))


def test_norms_are_clipped_for_each_member_over_all_its_leaves():
    grads = [torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[4.0], [0.4]])]  # norms 5 and 0.5
    scaled = clip_norms(grads, [torch.tensor([0, 2])] * 2, 3, 1.0)
    torch.testing.assert_close(scaled[0], torch.tensor([[0.6, 0.0], [0.3, 0.0]]))
    torch.testing.assert_close(scaled[1], torch.tensor([[0.8], [0.4]]))
    assert grads[0][0, 0] == 3.0  # gradients may share memory
    scaled = clip_norms([torch.tensor([[math.nan], [3.0]])], [torch.arange(2)], 2, 1.0)[0]
    assert scaled[0].isnan() and scaled[1] == pytest.approx(1.0)  # a diverged member is no other's business


def test_options_without_effect_are_refused():
    with pytest.raises(
        ValueError, match="momentum = 0.9 has no effect with optimiser = 'adam'; it needs optimiser = 'sgd'"
    ):
        check_experiment(Experiment(optimiser="adam", momentum=0.9))
    with pytest.raises(ValueError, match="clip_norm = 0.0 must be above 0"):
        check_experiment(Experiment(clip_norm=0.0))
    with pytest.raises(ValueError, match="optimiser = 'adm' is not possible; did you mean 'adam'"):
        Experiment(optimiser="adm")


def test_new_fields_rename_no_stored_run():
    assert Experiment().identity() == {}
    assert Experiment(optimiser="sgd", clip_norm=None, schedule="cosine").hash == Experiment().hash


@pytest.mark.parametrize("optimiser", ["sgd", "adam"])
def test_members_of_a_leaf_need_not_follow_one_another(optimiser):
    """Leaf 0 is of all three members, leaf 1 of the first and the last; the last stands still in the second step."""
    e = experiment(optimiser=optimiser, momentum=0.9 if optimiser == "sgd" else 0.0, clip_norm=0.7)
    leaves = [torch.ones(3, 2), torch.ones(2, 2)]
    apart = [([torch.ones(1, 2)] + [torch.ones(1, 2)] * (i != 1)) for i in range(3)]
    together = build_optimiser(e, leaves, [range(3), (0, 2)])
    each = [build_optimiser(e, [p.clone() for p in own], [range(1)] * len(own)) for own in apart]
    for step, active in enumerate(([True, True, True], [True, True, False])):
        grads = [torch.tensor([[1.0, -2], [3, 4], [-5, 6]]) / (step + 1), torch.tensor([[0.5, 1], [2, -1]])]
        together.step_([g.clone() for g in grads], 0.1, np.array(active))
        for i in range(3):
            own = [grads[0][i : i + 1].clone()] + ([grads[1][i // 2 : i // 2 + 1].clone()] if i != 1 else [])
            each[i].step_(own, 0.1, np.array(active[i : i + 1]))
    for i, alone in enumerate(each):
        torch.testing.assert_close(leaves[0][i], alone.leaves[0][0])
        if i != 1:
            torch.testing.assert_close(leaves[1][i // 2], alone.leaves[1][0])
