"""The rule behind every verdict: by hand, and on simulated claims where nothing differs."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.stats import norm, t

from fedlib.engine.evaluation import pack_bits
from fedlib_lab.report.verdicts import (
    Difference,
    Measured,
    as_rows,
    at_once,
    differences,
    grade,
    judged,
    orderings,
    paired,
    paired_differences,
)
from fedlib_lab.runs.identity import CENTRAL, kit_rules
from fedlib_lab.runs.store import Run

NOTHING = pd.DataFrame(columns=["finetune", "column", "variant", "mean"])
ALL, MOST = {"table": "table4"}, {"table": "table4", "need": "most"}


def of(*points, variance=0.0, flags=()):
    return Difference(np.array(points, dtype=float), variance, flags)


def test_an_interval_adds_seeds_and_test_examples_in_quadrature():
    d = of(1.0, 2.0, 3.0, variance=0.25)
    seeds, examples = t.isf(0.025, 2) * 1 / 3**0.5, norm.isf(0.025) * 0.5  # SD 1 of three; 4.30 and 1.96
    assert d.interval() == pytest.approx((2 - np.hypot(seeds, examples), 2 + np.hypot(seeds, examples)))
    assert seeds == pytest.approx(2.484, abs=1e-3) and examples == pytest.approx(0.98, abs=1e-3)


@pytest.mark.parametrize(
    "d, found",
    [
        (of(1.0, 1.1, 0.9), "holds"),  # 1 ± 0.25
        (of(1.0, 2.0, 1.0), "undecided"),  # 1.33 ± 1.43: all three agree, which chance does one time in four
        (of(-1.0, -1.1, -0.9), "contradicted"),
        (of(-0.6, -0.7, -0.5), "undecided"),  # below zero, yet -0.6 ± 0.25 reaches into the margin
        (of(-0.3, -0.2, -0.25), "tie"),  # -0.25 ± 0.12: a loss within the margin is none
        (of(0.1, 0.2, 0.3), "tie"),  # 0.2 ± 0.25
        (of(2.0), "not testable"),
        (of(), "not testable"),
    ],
)
def test_one_comparison(d, found):
    assert judged(d)["verdict"] == found


def test_a_claims_own_margin_moves_both_limits():
    """ "Not more than 2 points worse": -1 holds; -1.8 does neither; -3 is contradicted."""
    found = [judged(of(m, m + 0.1, m - 0.1), 2.0)["verdict"] for m in (-1.0, -1.8, -3.0)]
    assert found == ["holds", "undecided", "contradicted"]


def test_all_of_a_claim_hold_or_one_survives_the_number_of_comparisons():
    sure, slight = of(1.0, 1.1, 0.9), of(-1.0, -1.1, -0.9)  # -1 ± 0.25 at 2.5 %; at 2.5 % / 8 a half-width of 1.03
    assert grade([sure] * 8, ALL).verdict == "holds"
    assert grade([sure] * 7 + [of(0.1, 0.9, 0.4)], ALL).verdict == "undecided"
    assert grade([slight], ALL).verdict == "contradicted"
    many = grade([sure] * 7 + [slight], ALL)
    assert (many.verdict, many.numbers) == ("undecided", "8 comparisons: 7 hold, 1 contradicted")
    assert grade([sure] * 7 + [of(-5.0, -5.1, -4.9)], ALL).verdict == "contradicted"
    assert grade([of(0.1, 0.2, 0.3)] * 2, ALL).verdict == "tie"


def test_most_needs_over_half_at_the_level_of_its_place():
    sure, no = of(5.0, 5.1, 4.9), of(-5.0, -5.1, -4.9)
    assert grade([sure] * 3 + [no], MOST).verdict == "holds"
    assert grade([sure] * 2 + [no] * 2, MOST).verdict == "contradicted"  # three of four cannot be
    assert grade([sure] * 2 + [of(-1.0, 1.0, 0.0)] * 2, MOST).verdict == "undecided"


def test_seeds_say_how_much_a_verdict_is_worth():
    assert grade([of(1.0, 1.1, 0.9)], ALL).indicative
    assert not grade([of(1.0, 1.1, 0.9, 1.0, 1.0)], ALL).indicative
    assert grade([of(1.0, 1.1, 0.9, 1.0, 1.0), of(1.0, 1.1)], ALL).indicative
    assert grade([of(1.0)], ALL).numbers == "one seed only" and grade([], ALL).numbers.startswith("no runs")


def test_flagged_comparisons_are_shown_and_not_counted():
    sure, flat = of(1.0, 1.1, 0.9), of(-9.0, -9.1, -8.9, flags=("constant",))
    found = grade([sure, sure, flat, of(2.0)], MOST)
    assert found.verdict == "holds"
    assert found.numbers == (
        "2 comparisons: 2 hold; 1 did not train, with them 3: 2 hold, 1 contradicted; 1 not testable"
    )
    rising = grade([of(1.0, 1.1, 0.9, flags=("rising",))], ALL)
    assert rising.verdict == "not testable"
    assert rising.numbers == "1 still rising; counted all the same: 1 comparison: 1 holds"


@pytest.mark.parametrize("comparisons", [1, 4, 16])
@pytest.mark.parametrize("need", [ALL, MOST], ids=["all", "most"])
@pytest.mark.parametrize("seeds, shared", [(3, 0.0), (3, 0.05), (3, 1.0), (5, 0.3)])
def test_where_nothing_differs_at_most_one_claim_in_twenty_gets_a_verdict(comparisons, need, seeds, shared):
    """Simulated: seeds differ by a point, test examples by ``shared`` times that (the same for all seeds); the paper's
    method stands in every comparison, so that they go together."""
    rng, false, claims = np.random.default_rng(comparisons), 0, 1000
    for _ in range(claims):
        own, rivals = rng.normal(0, 0.7, seeds), rng.normal(0, 0.7, (comparisons, seeds))
        examples = rng.normal(0, shared**0.5, (comparisons, 1))
        made = [Difference(own - r + x, shared) for r, x in zip(rivals, examples, strict=True)]
        false += grade(made, need).verdict in ("holds", "contradicted")
    assert false / claims <= 0.05 + 2 * (0.05 * 0.95 / claims) ** 0.5


def test_a_claim_about_all_does_not_hold_where_a_rival_was_left_out():
    """By a flag anywhere; for want of runs where others have some. The page says which. A loss remains one."""
    sure, flat, tie = of(1.0, 1.1, 0.9), of(9.0, 9.1, 8.9, flags=("constant",)), of(0.1, 0.2, 0.3)
    where = [{"table": "t", "column": c, "comparison": f"A – {r}"} for c, r in (("x", "B"), ("x", "C"), ("y", "C"))]
    for out in (flat, of(2.0), of()):
        found = grade([sure, out], ALL, where[:2])
        assert found.verdict == "undecided" and found.numbers.endswith("left out: A – C")
        assert grade([tie, out], ALL, where[:2]).verdict == "undecided"
        assert grade([of(-5.0, -5.1, -4.9), out], ALL, where[:2]).verdict == "contradicted"
    assert grade([sure, of()], ALL, where[::2]).verdict == "holds"  # a column that nobody ran: other data
    assert grade([sure, sure, flat], MOST).verdict == "holds"


def test_levels_over_budget_say_what_they_cost():
    over = of(1.0, 1.1, 0.9, flags=("over budget: levels of A cost 0.2 where 0.1 of the whole are said",))
    found = grade([over] * 2, ALL)
    assert found.verdict == "not testable" and found.numbers.startswith(
        "2 over budget (levels of A cost 0.2 where 0.1 of the whole are said); counted all the same: 2 comparisons"
    )
    assert judged(over)["flags"] == "over budget"


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
    # 1, 0.9, 1.1 although both spread over 20 points: of two that are looked at, at 2.5 % / 2, then, as it is sure, the
    # other at 2.5 %, and the interval is that of the last step: 1 ± 4.303 x 0.1 / sqrt 3; -1, 2: undecided; one seed
    assert table[["obtained", "interval", "seeds", "verdict"]].values.tolist() == [
        [1.0, "0.75 to 1.25", 3, "first is higher"],
        [0.5, "-18.56 to 19.56", 2, "undecided"],
        [49.0, "–", 1, "not testable"],
    ]


def test_a_seed_that_stands_twice_is_refused():
    """The last of its rows counted: 10 points above became 10 below."""
    frame = frame_of(reefl=[70.0, 71.0, 69.0], depthfl=[60.0, 61.0, 59.0])
    twice = pd.concat([frame, frame[:1].assign(accuracy=10.0)])
    with pytest.raises(ValueError, match="seed 0 stands twice where accuracy is compared; allowed: a row a seed"):
        paired_differences(twice, [("reefl", "depthfl")])


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


def test_the_rows_of_a_table_are_judged_at_once():
    """1 ± 0.75 alone, 1 ± 1.33 among three (t of 2 degrees at 2.5 % / 3 is 7.65): of three such rows none is sure."""
    alone = of(0.7, 1.3, 1.0)
    assert [row["verdict"] for row in at_once([alone])] == ["holds"]
    assert [row["verdict"] for row in at_once([alone] * 3)] == ["undecided"] * 3
    sure = of(10.0, 10.1, 9.9)
    assert [row["verdict"] for row in at_once([sure] * 2 + [alone])] == ["holds"] * 3  # Holm: two are out of the way
    flagged = of(0.7, 1.3, 1.0, flags=("rising",))
    assert [row["verdict"] for row in at_once([alone, *[flagged] * 4])] == ["holds"] + ["still rising"] * 4


def test_four_rows_tell_one_another_how_much_differences_vary():
    """An SD of 0.3 of all, of four degrees of freedom: t at 2.5 % / 4 is 4.31; and none has less than the median."""
    alone, shaky = of(0.7, 1.3, 1.0), of(-2.0, 4.0, 1.0)
    rows = at_once([alone] * 4)
    assert [row["verdict"] for row in rows] == ["holds"] * 4
    assert rows[0]["low"] == round(1 - t.isf(0.025, 4) * 0.3 / 3**0.5, 2)  # Holm's last step
    steady, *_, wild = at_once([of(0.99, 1.01, 1.0), *[shaky] * 3, of(-30.0, 30.0, 0.0)])
    half = t.isf(0.025 / 5, 4) / 3**0.5
    assert steady["verdict"] == "undecided" and steady["high"] == round(1 + 3 * half, 2)
    assert wild["high"] == round(30 * half, 2)  # its own is larger, and does not count for the others


@pytest.mark.parametrize("spread", [0.0, 0.6, 1.2])
def test_a_table_of_rows_that_are_alike_hardly_ever_has_a_false_verdict(spread):
    """However unlike their variances are; and rows two SDs apart are told apart, for which three seeds each are few."""
    rng, false, told, draws = np.random.default_rng(0), 0, 0, 120
    for _ in range(draws):
        rows = rng.normal(size=(8, 3)) * np.exp(spread * rng.normal(size=(8, 1))) + rng.normal(0, 3, 3)
        judge = lambda x: at_once([of(*(x[i] - x[j])) for i in range(8) for j in range(i)])  # noqa: E731
        false += any(row["verdict"] in ("holds", "contradicted") for row in judge(rows))
        told += sum(row["verdict"] in ("holds", "contradicted") for row in judge(rows + 4 * np.arange(8)[:, None])) / 28
    assert false / draws < 0.05 and told / draws > (0.3 if spread < 1 else 0.1)


def run_of(tiny, seed, right, **record):
    """A run whose test examples it gets right as ``right`` says: 1 or 0, of one exit."""
    e = tiny.replace(seed=seed + 1, num_test=len(right), num_exits=1)
    bits = pack_bits(torch.tensor([right], dtype=torch.bool))
    accuracy = 100 * float(np.mean(right))
    summary = {"accuracy": accuracy, "exits": [accuracy], "status": "finished", "num_test": len(right), "right": bits}
    return Run(e, None, summary, [], record)


def with_runs(frame, runs):
    return frame.assign(found=[runs[v][s] for v, s in zip(frame.variant, frame.seed, strict=True)])


def test_a_table_counts_test_examples_as_claims_do(tiny):
    """Three seeds that agree to the example, 10 of 40 apart: sure over seeds, +25 points, not over test examples."""
    one, other = [1] * 20 + [0] * 20, [1] * 10 + [0] * 30
    runs = {"reefl": [run_of(tiny, s, one) for s in range(3)], "depthfl": [run_of(tiny, s, other) for s in range(3)]}
    frame = with_runs(frame_of(reefl=[50.0] * 3, depthfl=[25.0] * 3), runs)
    row = orderings(frame, NOTHING, [("reefl", "depthfl")]).iloc[0]
    half = norm.isf(0.025) * 100 * (0.25 * 0.75 * 40 / 39 / 40) ** 0.5  # a quarter of the examples differ
    assert row.interval == f"{25 - half:.2f} to {25 + half:.2f}" and row.verdict == "first is higher"
    few = {m: [run_of(tiny, s, r[18:22]) for s in range(3)] for m, r in (("reefl", one), ("depthfl", other))}
    frame = with_runs(frame_of(reefl=[50.0] * 3, depthfl=[0.0] * 3), few)  # 2 of 4 apart: 50 ± 57
    assert orderings(frame, NOTHING, [("reefl", "depthfl")]).verdict.tolist() == ["undecided"]
    assert orderings(frame.drop(columns="found"), NOTHING, [("reefl", "depthfl")]).verdict.tolist() == [
        "first is higher"
    ]


def test_where_runs_do_not_say_which_they_got_right_the_variance_is_a_bound(tiny):
    told = [Measured.of(run_of(tiny, s, [1, 0, 1, 0]), "accuracy", np.array([50.0])) for s in range(2)]
    unsaid = [replace(m, right=None) for m in told]
    assert not differences(told)[0].bound and differences(unsaid)[0].bound
    assert as_rows([{}], differences(unsaid), ALL).bound.tolist() == [True]


def test_one_seed_that_says_which_it_got_right_bounds_the_variance_of_all(tiny):
    """10 of 40 examples apart at that seed: 0.25 x 0.75 x 40 / 39 / 40, and not 2 x 0.25 / 40 of independent answers."""
    one, other = [1] * 20 + [0] * 20, [1] * 10 + [0] * 30
    seeds = [Measured.of(run_of(tiny, s, one), "accuracy", np.array([50.0])) for s in range(3)]
    rivals = [Measured.of(run_of(tiny, s, other), "accuracy", np.array([25.0])) for s in range(3)]
    rivals[1:] = [replace(m, right=None) for m in rivals[1:]]
    found = differences([*paired(dict(enumerate(seeds)), dict(enumerate(rivals))).values()])[0]
    assert found.variance == pytest.approx(1e4 * 0.25 * 0.75 * 40 / 39 / 40) and not found.bound


@pytest.mark.parametrize("told", [1, 2, 3])
def test_false_verdicts_are_rare_however_many_seeds_say_which_they_got_right(told):
    """Two methods that are alike in the mean, of answers that seeds share in part: at most 5 % on both sides."""
    rng, wrong, draws = np.random.default_rng(0), 0, 1500
    for _ in range(draws):
        shared, own = rng.normal(size=300), rng.normal(size=(3, 300))  # by test example, of all seeds and of each
        right = 30 * np.sign(3 * shared + own) * (rng.random(300) < 0.4) + rng.normal(0, 0.1, (3, 1))  # seeds differ
        by_seed = [Measured(r.mean(keepdims=True), np.zeros(1), r[None] if s < told else None)
                   for s, r in enumerate(right)]  # fmt: skip
        low, high = differences(by_seed)[0].interval()
        wrong += low > 0 or high < 0
    assert wrong / draws < 0.06


def client_run(tiny, seed, by_client, **fields):
    """A run of clients who get ``by_client`` of examples of their own."""
    own = {"accuracy": float(np.mean(by_client)), "by_client": {str(k): float(x) for k, x in enumerate(by_client)}}
    summary = {"accuracy": 50.0, "exits": [50.0], "status": "finished", "num_test": 500, "personal": own}
    return Run(tiny.replace(**{"seed": seed + 1, "test_split": "like_train"} | fields), None, summary, [], {})


def test_what_clients_get_apart_tells_what_their_test_examples_leave_open(tiny):
    """Of 25 clients two methods differ by 1 to 5 points: variance 2 x 25 / 24 / 25; one alone would have 2 x 0.25 / 500."""
    base, more = np.linspace(20, 80, 25), np.tile(np.arange(1.0, 6.0), 5)
    of = lambda x, **f: Measured.of(client_run(tiny, 0, x, **f), "clients", np.array([x.mean()]))  # noqa: E731
    found = differences([of(base + more) - of(base)])[0]
    assert found.points[0] == 3 and found.variance == pytest.approx(2 * 25 / 24 / 25) and not found.bound
    for other in (
        of(base, test_split="labels"),
        of(base[:24]),
        Measured.of(client_run(tiny, 0, base), "clients", np.array([1.0])),
    ):
        bounded = differences([of(base + more) - other])[0]  # tests overlap; another number of clients; of another mean
        assert bounded.bound and bounded.variance > 5
    assert Measured.of(client_run(tiny, 0, base[:19]), "clients", base[:19].mean(keepdims=True)).clients is None
    apart_ = differences([of(np.roll(base, 12)) - of(base)])[
        0
    ]  # clients who differ more than chance could: at most the bound
    assert apart_.variance == pytest.approx(2 * 2500 / 500)


def test_false_verdicts_of_clients_are_rare_though_seeds_share_their_test_examples():
    """Each seed divides the same 800 examples anew among 40 clients, who prefer one method or the other by chance."""
    rng, wrong, draws = np.random.default_rng(0), 0, 1500
    for _ in range(draws):
        shared, by_seed = rng.choice([-100.0, 0.0, 100.0], 800, p=[0.1, 0.8, 0.1]), []
        for _ in range(3):
            prefer = rng.normal(0, 2, 40)
            clients = rng.permutation(shared).reshape(40, 20).mean(1) + prefer - prefer.mean() + rng.normal(0, 0.05)
            one, other = (Measured(x.mean(keepdims=True), np.full(1, 9.0), clients=x) for x in (clients, 0 * clients))
            by_seed.append(one - other)
        low, high = differences(by_seed)[0].interval()
        wrong += low > 0 or high < 0
    assert 0.01 < wrong / draws < 0.06


def test_of_runs_of_an_older_rule_no_verdict_is_told_where_the_rule_concerns_the_value(tiny):
    """Batch norm's view of the test set concerns no client's own."""
    e = tiny.replace(method="fedavg", backbone="resnet8", finetune="full", finetune_options={})
    old = {"inputs": {"kit": {k: v for k, v in kit_rules(e).items() if k != CENTRAL}, "method": {}}}
    summary = {"accuracy": 50.0, "exits": [50.0], "status": "finished"}
    runs = {v: [Run(e, None, summary, [], old if (v, s) == ("depthfl", 1) else {}) for s in range(3)]
            for v in ("reefl", "depthfl", "fedavg")}  # fmt: skip
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[9.0, 19.1, 28.9], fedavg=[0.0, 10.0, 20.0])
    frame = with_runs(frame.assign(clients=frame.accuracy), runs)
    pairs = [("reefl", "depthfl"), ("reefl", "fedavg")]
    assert orderings(frame, NOTHING, pairs).verdict.tolist() == ["of an older rule", "first is higher"]
    assert orderings(frame, NOTHING, pairs, "clients").verdict.tolist() == ["first is higher"] * 2


def test_orderings_without_printed_numbers_compare_alone():
    frame = frame_of(reefl=[50.0, 60.0, 70.0], depthfl=[49.0, 59.1, 68.9])
    table = orderings(frame, NOTHING, [("reefl", "depthfl"), ("depthfl", "reefl")])
    assert table[["claim", "obtained", "verdict"]].values.tolist() == [
        ["ReeFL against DepthFL", 1.0, "first is higher"], ["DepthFL against ReeFL", -1.0, "second is higher"],
    ]  # fmt: skip
    assert "reported" not in table  # nothing stands there
