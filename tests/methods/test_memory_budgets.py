"""Budgets that follow from what memory holds."""

import pytest

from fedlib import Experiment, build_federation


def test_memory_budgets_need_a_tuner_whose_memory_can_be_counted():
    e = Experiment(method="fedepth", num_exits=1, finetune="waveft", num_train=200, num_test=20)
    with pytest.raises(
        ValueError,
        match="fedepth: scenario = 'fair', r = 0.167: this finetune's layers look at values, so what they cost cannot be counted",
    ):
        build_federation(e)
