"""Teachers of a cohort answer as served models do, without gradients."""

import copy
from dataclasses import replace

import pytest
import torch

from fedlib import build_federation
from fedlib.engine.cohort import Cohort
from fedlib.engine.executors import plan_round
from fedlib.engine.teacher import Teacher
from fedlib.methods import Round
from fedlib.models.resnet import ResNetSpec
from tests.helpers.plain_personal import OWN, experiment

OWN["tiny_resnet"] = ResNetSpec(blocks=(1, 1), widths=(4, 8), size=12)


def cohort_of(e):
    f = build_federation(e)
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    r = replace(r, notes=f.method.prepare(f.server, r))
    (members,) = plan_round(f, f.server, r, 1, None)
    return f, Cohort(f, f.model, f.server, r, members, {})


@pytest.mark.parametrize("policy", ["tracked", "batch", "static", "local"])
def test_a_teacher_answers_as_a_served_model_and_moves_no_statistics(policy):
    """``tracked``: by the running statistics received. Without any at the server: by those of the batch."""
    e = experiment("cafedistill", backbone="tiny_resnet", batch_norm=policy, num_exits=2)
    f, cohort = cohort_of(e)
    if policy == "tracked":  # statistics that differ from every batch's
        for n, i in f.setting.infos.items():
            if i.kind == "statistic":
                f.server.params[n] = torch.full_like(f.server.params[n], 0.7)
        f, cohort = f, Cohort(f, f.model, f.server, cohort.round, plan_round(f, f.server, cohort.round, 1, None)[0], {})
    x = torch.randn(3, 5, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    cohort.model.put_(cohort.params)
    cohort.model.context.weights, cohort.model.context.training = torch.full((3, 5), 0.2), True
    before = {n: p.clone() for n, p in cohort.params.items()}
    answer = cohort.teachers["teacher"].answer(x)
    assert cohort.model.context.training and cohort.model.context.policy == policy
    plain = copy.deepcopy(cohort.model)
    plain.put_({n: p for n, p in f.server.params.items()})
    plain.context.weights, plain.context.training = None, False
    plain.context.policy = "tracked" if policy == "tracked" else "batch"
    with torch.no_grad():
        expected = plain(x)[-1]
    torch.testing.assert_close(answer[-1], expected, rtol=0, atol=1e-5)
    assert answer[0].abs().max() == 0  # a teacher has its last exit alone
    f.method.local_update(cohort)
    statistics = [n for n, i in f.setting.infos.items() if i.kind == "statistic"]
    assert bool(statistics) == (policy in ("tracked", "local"))
    assert all(not torch.equal(cohort.params[n], before[n]) for n in statistics)  # the students' own do move


@pytest.mark.parametrize(
    "changes, once",
    [({"batch_norm": "tracked"}, True), ({"batch_norm": "batch"}, False),
     ({"batch_norm": "tracked", "augment": "crop_flip", "crop_pad": 1}, False)],
)  # fmt: skip
def test_a_teacher_looks_once_at_every_example_where_that_is_enough(changes, once, monkeypatch):
    """3 epochs; clients of unequal size; at every step the answers are those on the step's own batch."""
    e = experiment("cafedistill", backbone="tiny_resnet", num_exits=2, num_train=70, local_epochs=3, batch_size=8, **changes)  # fmt: skip
    f, cohort = cohort_of(e)
    assert len({c.num_examples for c in cohort.clients}) > 1
    at, answer, looks, steps = Teacher.at, Teacher.answer, [], []

    def watched_at(self, batches, step, x):
        given = at(self, batches, step, x)
        looked = len(looks)
        weights = batches.weights[step, :, : batches.width[step]]
        real = weights[..., None].sign()
        torch.testing.assert_close(given * real, answer(self, x, weights) * real, rtol=0, atol=1e-5)
        assert len(looks) == looked
        steps.append(step)
        return given

    monkeypatch.setattr(Teacher, "at", watched_at)
    monkeypatch.setattr(Teacher, "answer", lambda self, *args: (looks.append(1), answer(self, *args))[1])
    f.method.local_update(cohort)
    most = max(c.num_examples for c in cohort.clients)
    assert len(steps) == 3 * -(-most // 8)
    assert len(looks) == (-(-most // 8) if once else len(steps))
