"""Intervals, paired differences, adaptive inference, per-client accuracy, teachers: against hand-computed values."""

import numpy as np
import pandas as pd
import pytest

from fedlib_lab.report.statistics import bootstrap_interval, orderings, paired_differences
from fedlib_lab.report.tables import mean_sd


def test_bootstrap_interval_of_three_seeds_is_their_range():
    # all three draws equal: probability 1/27 = 3.7 % on each side, more than 2.5 %
    assert bootstrap_interval(np.array([1.0, 2.0, 6.0])) == (1.0, 6.0)
    low, high = bootstrap_interval(np.array([1.0, 2.0, 6.0]), confidence=0.5)
    assert 1 < low < 3 < high < 6


def test_bootstrap_interval_agrees_with_the_normal_one_and_covers():
    rng = np.random.default_rng(0)
    x = rng.normal(3, 2, 400)
    low, high = bootstrap_interval(x)
    half = 1.96 * x.std(ddof=1) / 20  # the textbook interval of a mean of 400
    assert abs(low - (x.mean() - half)) < 0.05 and abs(high - (x.mean() + half)) < 0.05
    covered = sum(lo <= 0 <= hi for lo, hi in (bootstrap_interval(rng.normal(0, 1, 20), 0.9, 500) for _ in range(200)))
    assert 0.8 < covered / 200 < 0.96


def test_bootstrap_over_seeds_and_examples_is_wider_than_over_examples_alone():
    rng = np.random.default_rng(1)
    right = (rng.random((3, 300)) < np.array([[0.3], [0.5], [0.7]])) * 100.0
    both, one = bootstrap_interval(right, resamples=500), bootstrap_interval(right[:1], resamples=500)
    half = 1.96 * 100 * (0.3 * 0.7 / 300) ** 0.5  # examples alone: 5.2 points
    assert both[1] - both[0] > 30 > 2.6 * half > one[1] - one[0] > 1.4 * half
    with pytest.raises(ValueError, match="expected"):
        bootstrap_interval(np.zeros((0,)))


def frame_of(**accuracies):
    rows = [
        {"finetune": "lora", "column": "a", "variant": v, "label": v, "seed": s, "accuracy": a, "ensemble": a + 1}
        for v, values in accuracies.items() for s, a in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_paired_differences_remove_what_seeds_share():
    frame = frame_of(
        reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9], scalefl_vit=[51.0, 58.0, np.nan], fedavg=[1.0]
    )
    table = paired_differences(frame, [("reefl", "depthfl"), ("reefl", "scalefl_vit"), ("reefl", "fedavg")])
    # 1, 0.9, 1.1: 1 ± 4.303 x 0.1 / sqrt 3 although both spread over 20 points; -1, 2: undecided; one seed: no interval
    assert table[["mean", "low", "high", "seeds", "verdict"]].values.tolist()[0] == [1.0, 0.75, 1.25, 3, "better"]
    assert table[["mean", "seeds", "verdict"]].values.tolist()[1] == [0.5, 2, "undecided"]
    assert table.verdict[2] == "not testable" and np.isnan(table.low[2])


def test_orderings_follow_the_interval_and_the_reported_sign():
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9], scalefl_vit=[51.0, 58.0, 70.0], fedavg=[1.0])
    printed = {"reefl": 80.0, "depthfl": 81.0, "scalefl_vit": 79.0, "fedavg": 10.0, "inclusivefl": 3.0}
    reported = pd.DataFrame([{"finetune": "lora", "column": "a", "variant": v, "mean": m} for v, m in printed.items()])
    rivals = [("reefl", other) for other in ("depthfl", "scalefl_vit", "fedavg", "inclusivefl")]
    table = orderings(frame, reported, rivals).set_index("claim")
    # 1, 0.9, 1.1 although the paper prints -1; -1, 2, 0 holds zero; one seed has no interval; inclusivefl was not run
    assert table.verdict.to_dict() == {
        "ReeFL < DepthFL": "contradicted", "ReeFL > ScaleFL": "undecided", "ReeFL > FedAvg": "not testable",
    }  # fmt: skip
    assert table.loc["ReeFL < DepthFL", ["reported", "obtained", "interval", "seeds"]].tolist() == [
        -1, 1.0, "0.75 to 1.25", 3,
    ]  # fmt: skip
    turned = orderings(frame, reported, [("depthfl", "reefl")])
    assert turned[["claim", "obtained", "verdict"]].values.tolist() == [["DepthFL > ReeFL", -1.0, "contradicted"]]


def test_of_runs_of_an_older_rule_no_verdict_is_told_where_the_rule_concerns_the_value():
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9], fedavg=[40.0, 50.0, 60.0])
    frame["older"] = [["how batch norm sees the test set"] * (v == "depthfl" and s == 1) for v, s in zip(frame.variant, frame.seed, strict=True)]  # fmt: skip
    frame["clients"] = frame.accuracy
    nothing = pd.DataFrame(columns=["finetune", "column", "variant", "mean"])
    pairs = [("reefl", "depthfl"), ("reefl", "fedavg")]
    assert orderings(frame, nothing, pairs).verdict.tolist() == ["of an older rule", "first is higher"]
    assert paired_differences(frame, pairs).verdict.tolist() == ["of an older rule", "better"]
    assert paired_differences(frame, pairs, "clients").verdict.tolist() == ["better", "better"]


def test_orderings_without_printed_numbers_compare_alone():
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9])
    nothing = pd.DataFrame(columns=["finetune", "column", "variant", "mean"])
    table = orderings(frame, nothing, [("reefl", "depthfl"), ("depthfl", "reefl")])
    assert table[["claim", "obtained", "verdict"]].values.tolist() == [
        ["ReeFL against DepthFL", 1.0, "first is higher"], ["DepthFL against ReeFL", -1.0, "second is higher"],
    ]  # fmt: skip
    assert "reported" not in table  # nothing stands there


def test_accuracies_per_budget_by_hand():
    from fedlib_lab.report.statistics import budget_accuracies

    row = {"finetune": "lora", "column": "a", "variant": "reefl", "label": "ReeFL"}
    exits = [[10.0, 20.0, 60.0], [20.0, 40.0, 60.0]]
    frame = pd.DataFrame([row | {"seed": s, "exits": x, "accuracy": sum(x) / 3} for s, x in enumerate(exits)])
    table = budget_accuracies(pd.concat([frame, pd.DataFrame([row | {"seed": 9, "accuracy": np.nan}])]))
    assert table.budget.tolist() == [1, 2, 3, 1, 2, 3]
    assert table.deepest.tolist() == exits[0] + exits[1]
    assert table.held.tolist() == [10.0, 15.0, 30.0, 20.0, 30.0, 40.0]
    means = mean_sd(table, "held", ("variant", "budget"))
    assert means["mean"].tolist() == [15.0, 22.5, 35.0] and means.seeds.tolist() == [2, 2, 2]
