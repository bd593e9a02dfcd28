"""Learning rates by round and step: values by hand, and torch's schedulers."""

import math

import numpy as np
import pytest
import torch

from fedlib import Experiment
from fedlib.engine.checks import check_experiment
from fedlib.engine.schedules import check_schedule, round_rate, step_rates


def experiment(**fields):
    return Experiment(**{"rounds": 10, "lr": 0.1, "min_lr": 0.0, **fields})


def rates(e):
    return [round_rate(e, t) for t in range(1, e.rounds + 1)]


def of_torch(scheduler, rounds=10, **options):
    """The rate of each round by a scheduler of torch that steps after every round."""
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)
    schedule, out = getattr(torch.optim.lr_scheduler, scheduler)(optimiser, **options), []
    for _ in range(rounds):
        out.append(schedule.get_last_lr()[0])
        optimiser.step()
        schedule.step()
    return out


def test_cosine_falls_to_its_floor():
    e = Experiment(rounds=7, lr=0.05, min_lr=0.004)
    assert rates(e) == [max(0.004, 0.5 * 0.05 * (1 + math.cos(math.pi * t / 7))) for t in range(1, 8)]
    assert rates(e)[-1] == 0.004


def test_constant_has_no_floor_to_fall_to():
    assert rates(experiment(schedule="constant", rounds=1)) == [0.1]
    assert rates(Experiment(schedule="constant", rounds=1, lr=1e-4)) == [1e-4]  # whatever the cosine's floor is


@pytest.mark.parametrize("milestones", [(4, 7), (0.4, 0.7)], ids=["rounds", "shares"])
def test_step_as_torch(milestones):
    e = experiment(schedule="step", milestones=milestones, decay=0.1)
    np.testing.assert_allclose(rates(e), of_torch("MultiStepLR", milestones=[4, 7], gamma=0.1))
    np.testing.assert_allclose(rates(e), [0.1] * 4 + [0.01] * 3 + [0.001] * 3)  # rounds 1-4, 5-7, 8-10
    assert rates(e.replace(min_lr=0.05)) == rates(e)  # the floor is the cosine's


def test_shares_of_a_few_rounds_are_rounded_up():
    e = experiment(schedule="step", milestones=(0.4, 0.6), decay=0.5, rounds=2)  # after rounds 1 and 2
    assert rates(e) == [0.1, 0.05]
    e = experiment(schedule="step", milestones=(0.29,), decay=0.5, rounds=100)  # 0.29 * 100 = 28.999999999999996
    assert rates(e).index(0.05) == 29


def test_exponential_as_torch():
    np.testing.assert_allclose(
        rates(experiment(schedule="exponential", decay=0.99)), of_torch("ExponentialLR", gamma=0.99)
    )
    every = experiment(schedule="exponential", decay=0.98, decay_every=5)
    np.testing.assert_allclose(rates(every), of_torch("StepLR", step_size=5, gamma=0.98))


@pytest.mark.parametrize("warmup", [4, 0.4])
def test_warm_up_rises_to_the_schedules_rate(warmup):
    e = experiment(schedule="constant", warmup_rounds=warmup)
    np.testing.assert_allclose(rates(e), [0.02, 0.04, 0.06, 0.08] + [0.1] * 6)
    cosine = experiment(min_lr=0.05)
    np.testing.assert_allclose(rates(cosine.replace(warmup_rounds=warmup))[4:], rates(cosine)[4:])
    assert rates(cosine.replace(warmup_rounds=warmup))[0] == pytest.approx(rates(cosine)[0] / 5)


def test_a_local_training_falls_linearly_by_each_members_own_steps():
    e, steps = experiment(local_schedule="linear"), np.array([4, 2, 0])
    got = step_rates(e, 0.2, steps).numpy()
    np.testing.assert_allclose(got[:, 0], [0.2, 0.15, 0.1, 0.05])
    np.testing.assert_allclose(got[:, 1], [0.2, 0.1, 0.0, 0.0])
    assert step_rates(experiment(), 0.2, steps) == [0.2] * 4


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "step", "decay": 0.1}, "milestones = None with schedule = 'step'; allowed: rounds, or shares"),
        ({"schedule": "step", "decay": 0.1, "milestones": ()}, r"milestones = \[\] with schedule = 'step'"),
        ({"milestones": (3,)}, "has no effect with schedule = 'cosine'; it needs schedule = 'step'"),
        (
            {"schedule": "step", "milestones": (3,)},
            r"decay = None with schedule = 'step'; allowed: a factor in \(0, 1\]",
        ),
        ({"schedule": "exponential", "decay": 1.5}, "decay = 1.5 must be above 0 and at most 1"),
        ({"schedule": "exponential", "decay": 0.0}, "decay = 0.0"),
        ({"decay": 0.5}, "decay = 0.5 has no effect with schedule = 'cosine'"),
        (
            {"decay_every": 5},
            "decay_every = 5 has no effect with schedule = 'cosine'; it needs schedule = 'exponential'",
        ),
        ({"schedule": "exponential", "decay": 0.9, "decay_every": 0}, "decay_every = 0 must be at least 1"),
        ({"warmup_rounds": 10}, "warmup_rounds = 10 with rounds = 10; allowed: increasing whole rounds in 1..9, or"),
        ({"warmup_rounds": 2.5}, "warmup_rounds = 2.5"),
        ({"warmup_rounds": -1}, "warmup_rounds = -1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        check_experiment(experiment(**fields))


@pytest.mark.parametrize("milestones", [(10,), (3, 3), (5, 2), (0,), (-1,), (2.5,), (0.5, 3), (0.7, 0.2)])
def test_milestones_are_increasing_rounds_or_shares(milestones):
    with pytest.raises(ValueError, match="milestones = .* with rounds = 10; allowed: increasing whole rounds in 1..9"):
        check_schedule(experiment(schedule="step", decay=0.1, milestones=milestones))


@pytest.mark.parametrize(
    "fields",
    [{}, {"schedule": "step", "decay": 0.1, "milestones": (1, 9)}, {"schedule": "constant", "warmup_rounds": 9}],
)
def test_schedules_that_make_sense_pass(fields):
    check_schedule(experiment(**fields))


def test_learning_rate_is_a_cosine_with_a_floor():
    e = Experiment(rounds=1000, lr=0.05, min_lr=0.001)
    assert round_rate(e, 910) == 0.001 and round_rate(e, 909) > 0.001
    assert round_rate(e, 500) == pytest.approx(0.025)
    f = Experiment(rounds=1000, lr=0.1, min_lr=0.01)
    assert round_rate(f, 796) == 0.01 and round_rate(f, 795) > 0.01
