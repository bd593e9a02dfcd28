"""Intervals, paired differences, adaptive inference, per-client accuracy, teachers: against hand-computed values."""

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import build_federation
from fedlib.engine.evaluation import served_parts
from fedlib.papers.reefl.teachers import count_teachers
from fedlib.report.early_leaving import adaptive_curve, adaptive_inference, leave_early, served_macs, single_exits
from fedlib.report.statistics import bootstrap_interval, correct, orderings, paired_differences
from fedlib.report.tables import best_runs, mean_sd
from fedlib.runs.trained import all_logits, class_accuracies, client_accuracies, load_trained


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


def test_orderings_without_printed_numbers_compare_alone():
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9])
    nothing = pd.DataFrame(columns=["finetune", "column", "variant", "mean"])
    table = orderings(frame, nothing, [("reefl", "depthfl"), ("depthfl", "reefl")])
    assert table[["claim", "obtained", "verdict"]].values.tolist() == [
        ["ReeFL against DepthFL", 1.0, "first is higher"], ["DepthFL against ReeFL", -1.0, "second is higher"],
    ]  # fmt: skip
    assert "reported" not in table  # nothing stands there


def test_best_runs_and_mean_sd():
    frame = frame_of(reefl=[50.0, 60.0, 58.0])
    assert best_runs(frame).ensemble.tolist() == [61.0]
    row = mean_sd(frame).iloc[0]  # mean 56, SD sqrt((36 + 16 + 4) / 2) = 5.2915
    assert (row["mean"], round(row.sd, 4), row.seeds) == (56.0, 5.2915, 3)


def logits_of(*confidences):
    """Two classes: each entry (predicted class, confidence) as logits."""
    rows = [[(np.log(p), np.log(1 - p)) if c == 0 else (np.log(1 - p), np.log(p)) for c, p in e] for e in confidences]
    return torch.tensor(rows, dtype=torch.float32)


def test_early_exit_by_hand():
    # 3 exits, 3 examples of class 0
    logits = logits_of([(0, 0.9), (1, 0.8), (1, 0.6)], [(0, 0.9), (0, 0.7), (1, 0.6)], [(1, 0.9), (0, 0.9), (0, 0.6)])
    assert leave_early(logits, 0.75).tolist() == [0, 0, 2]
    labels, macs = torch.zeros(3, dtype=torch.long), [10, 20, 30]
    rows = adaptive_curve(logits, labels, macs, (0.0, 0.75, 0.85, 1.0))
    # threshold 0: all leave at exit 1, one of three right; 0.75: right, wrong, right; 0.85: exits 1, 3, 3, all right
    assert [round(r["accuracy"], 2) for r in rows] == [33.33, 66.67, 100.0, 66.67]
    assert [r["macs"] for r in rows] == pytest.approx([10, 50 / 3, 70 / 3, 30])
    assert rows[2]["share"] == pytest.approx([1 / 3, 0, 2 / 3])


def test_costs_of_exits_increase_and_every_exit_is_a_point_of_its_own():
    logits = logits_of([(0, 0.9), (1, 0.8)], [(0, 0.9), (0, 0.7)])
    labels = torch.zeros(2, dtype=torch.long)
    assert single_exits(logits, labels, [10, 20]) == [
        {"exit": 1, "accuracy": 50.0, "macs": 10.0}, {"exit": 2, "accuracy": 100.0, "macs": 20.0},
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r"a later exit must cost more: \[20, 10\]"):
        adaptive_curve(logits, labels, [20, 10])


def test_an_exit_costs_what_was_served_not_what_a_client_of_its_level_holds(tiny):
    """ResNet-20 whole, as the server answers with it, exits of three convolutions after blocks 6, 7, 8 and of none.

    By hand, in thousands of MACs: stem 442; a block of 16, 32, 64 channels 4,719 each; the two that narrow 3,539 and
    a projection of 131; exits 7,078 each of 64 channels on 8 x 8 pixels, 32 on 16 x 16 likewise; a classifier's 0.64.
    """
    f = build_federation(
        tiny.replace(method="scalefl", backbone="resnet20", finetune="full", finetune_options={}, rounds=1)
    )
    assert [u + 1 for u in f.setting.exit_units] == [6, 7, 8, 9]
    plain, narrowing, early = 2 * 2_359_296, 1_179_648 + 2_359_296 + 131_072, 3 * 2_359_296
    after = 442_368 + np.cumsum([*[plain] * 3, narrowing, plain, plain, narrowing, plain, plain])
    exits = np.cumsum([early + 320, early + 640, early + 640, 640])
    want = after[5:] + exits
    assert served_macs(f, f.server).tolist() == want.tolist()
    assert (want / 1e6).round(1).tolist() == [34.8, 45.5, 57.3, 62.0]


def test_an_example_that_goes_on_pays_for_every_model_that_it_starts_again_with(tiny):
    f = build_federation(tiny.replace(method="inclusivefl"))
    own = [f.setting.measure.macs(p) for p in served_parts(f, f.server)]
    assert served_macs(f, f.server).tolist() == np.cumsum(own).tolist()


def test_class_and_client_accuracies_by_hand(tiny):
    # exit 0 right on 1 of 2 examples of class 0 and none of 1 of class 1; exit 1 right on all
    logits = logits_of([(0, 0.9), (1, 0.9), (0, 0.9)], [(0, 0.9), (0, 0.9), (1, 0.9)])
    labels = torch.tensor([0, 0, 1])
    assert class_accuracies(logits, labels).tolist() == [[50.0, 0.0], [100.0, 100.0]]
    assert correct(logits, labels).tolist() == [100.0, 50.0, 50.0]

    f = build_federation(tiny)
    by_class = torch.nn.functional.one_hot(f.data.test_labels, 10).float()
    half = by_class * (f.data.test_labels < 5)[:, None].float()  # right on classes 0-4, else class 0
    mine = client_accuracies(f, half.expand(4, -1, -1))
    counts = f.data.label_counts()
    assert np.allclose(mine, 100 * counts[:, :5].sum(1) / counts.sum(1))


@pytest.mark.parametrize("method", ["reefl", "inclusivefl"])
def test_trained_models_answer_as_recorded(tiny, method, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    e = tiny.replace(method=method)
    f, server = load_trained(e)
    logits = all_logits(f, server)
    exits = (logits.argmax(-1) == f.data.test_labels).double().mean(1) * 100
    from fedlib.runs.store import find_run, run_path

    assert exits.tolist() == pytest.approx(find_run(e).summary["exits"], abs=1e-3)
    last = adaptive_inference(e, (0.0, 1.0))
    assert [r.get("exit") for r in last] == [None, None, 1, 2, 3, 4]
    assert last[0]["accuracy"] == pytest.approx(exits[0].item()) and last[0]["share"][0] == 1
    assert last[1]["macs"] > last[0]["macs"]

    (run_path(e) / "checkpoint.safetensors").unlink()  # a run stored without its weights is trained again, beside it
    again = all_logits(*load_trained(e))
    assert torch.allclose(again, logits, atol=1e-4) and (tmp_path / "retrained").is_dir()


def test_teachers_are_counted_once_a_batch(tiny):
    f = build_federation(tiny)
    counts = count_teachers(f, f.server, cohort_size=2)
    top = [i for i in range(tiny.num_clients) if i % 4 == 3 and f.data.num_examples[i]]
    batches = sum(-(-int(f.data.num_examples[i]) // tiny.batch_size) for i in top)
    assert {z: int(c.sum()) for z, c in counts.items()} == {0.2: batches, 1.0: batches}
    same = count_teachers(f, f.server, cohort_size=1)
    assert all((same[z] == counts[z]).all() for z in counts)


def test_accuracies_per_budget_by_hand():
    from fedlib.report.statistics import budget_accuracies
    from fedlib.report.tables import mean_sd

    row = {"finetune": "lora", "column": "a", "variant": "reefl", "label": "ReeFL"}
    exits = [[10.0, 20.0, 60.0], [20.0, 40.0, 60.0]]
    frame = pd.DataFrame([row | {"seed": s, "exits": x, "accuracy": sum(x) / 3} for s, x in enumerate(exits)])
    table = budget_accuracies(pd.concat([frame, pd.DataFrame([row | {"seed": 9, "accuracy": np.nan}])]))
    assert table.budget.tolist() == [1, 2, 3, 1, 2, 3]
    assert table.deepest.tolist() == exits[0] + exits[1]
    assert table.held.tolist() == [10.0, 15.0, 30.0, 20.0, 30.0, 40.0]
    means = mean_sd(table, "held", ("variant", "budget"))
    assert means["mean"].tolist() == [15.0, 22.5, 35.0] and means.seeds.tolist() == [2, 2, 2]
