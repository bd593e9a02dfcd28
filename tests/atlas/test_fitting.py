"""Sub-models under caps: the largest that fit, priced as costs are told; who has none is refused by name."""

import numpy as np
import pytest

from fedlib import Experiment
from fedlib.core.clients import Client
from fedlib.engine.federation import budgets_of
from fedlib.methods import build_method
from fedlib_lab.atlas.fitting import SLACK, fit, price
from fedlib_lab.executors.meter import count_training
from fedlib_lab.runs.costs import load_shapes

CAPS = (1 / 8, 1 / 4, 1 / 2, 1.0)
E = Experiment(
    method="depthfl",
    dataset="mnist",
    num_train=400,
    num_clients=8,
    clients_per_round=4,
    num_exits=1,
    finetune="lora",
    augment="none",
)


@pytest.fixture(scope="module")
def macs():
    """MACs of training the first n of deit_micro's twelve units with an exit after each of ``ends``."""

    def count(n, ends):
        e = E.replace(num_exits=len(ends), exit_blocks=tuple(u - 1 for u in ends))
        shapes = load_shapes(e, 10)
        return count_training(e, shapes.method, shapes.setting, shapes.model, Client(-1, len(ends) - 1, 50)).macs

    return count


def test_every_class_has_the_deepest_net_under_its_cap(macs):
    found = fit(E, CAPS, "macs")
    depths, full = [int(size) for size in found.sizes], macs(12, [12])
    assert found.experiment.exit_blocks == tuple(d - 1 for d in depths) and found.experiment.budgets == (0, 1, 2, 3)
    for k, (depth, cap) in enumerate(zip(depths, CAPS, strict=True)):
        share = macs(depth, depths[: k + 1]) / full
        assert found.prices[k] == pytest.approx(share) and share <= cap * (1 + SLACK)
        if depth < 12:  # one unit more is over the cap
            assert macs(depth + 1, [*depths[:k], depth + 1]) / full > cap * (1 + SLACK)


def test_equal_caps_share_a_budget_and_methods_of_one_net_take_the_poorest_class_s():
    assert fit(E, (0.25, 0.25, 1.0), "macs").experiment.budgets == (0, 0, 1)
    alone = fit(E.replace(method="fedavg"), CAPS, "macs")
    assert alone.experiment.budgets == (0, 0, 0, 0) and alone.experiment.num_exits == 1
    assert len(set(alone.prices)) == 1 and alone.prices[0] <= CAPS[0] * (1 + SLACK)


def test_widths_and_bases():
    wide = fit(E.replace(method="heterofl"), (0.25, 1.0), "macs")
    assert wide.experiment.options["rates"] == wide.sizes and wide.prices[1] == 1
    mixed = fit(E.replace(method="splitmix", options={"bases": 4}), (0.25, 1.0), "macs")
    assert mixed.experiment.options["ratios"] == tuple(sorted(set(mixed.sizes)))
    one = price(E.replace(method="splitmix", options={"bases": 4, "ratios": (0.25, 1.0)}), "macs")
    assert one[1] == pytest.approx(4 * one[0])


def test_stages_meet_a_cap_on_memory_and_cannot_meet_one_on_macs():
    e = E.replace(method="fedepth")
    found = fit(e, (0.25, 1.0), "memory")
    assert (np.array(found.prices) <= np.array([0.25, 1.0]) * (1 + SLACK)).all()
    shapes = load_shapes(found.experiment, 10)
    assert len(shapes.method.stages(Client(-1, 0, 50), shapes.setting)) > 2
    with pytest.raises(ValueError, match=r"fedepth has nothing for class 1 under a cap of 0.25 on macs: the smallest"):
        fit(e, (0.25, 1.0), "macs")


def test_levels_are_solved_for_the_caps():
    """It solves them by an estimate, which may say less than training takes: then it is asked for less."""
    found = fit(E.replace(method="scalefl"), (0.25, 1.0), "memory")
    asked = found.experiment.options["ratios"]
    assert asked == found.sizes and 0.2 < asked[0] <= 0.25 and asked[1] == 1 and found.experiment.num_exits == 2
    assert found.prices[0] > 0.2 and (np.array(found.prices) <= np.array([0.25, 1.0]) * (1 + SLACK)).all()


def test_ranks_bases_and_rates_under_a_cap_on_upload():
    """LoRA of rank 32 on q and v of twelve blocks of 64 features: 24 pairs of 2 * 64 numbers a rank, and a head of 778."""
    found = fit(E.replace(method="hetlora"), (0.25, 0.5, 1.0), "upload")
    ranks, whole = [-(-size * 32 // 1) for size in found.sizes], 778 + 24 * 128 * 32
    assert ranks == [8, 16, 32] and found.experiment.options["rank_shares"] == found.sizes
    assert found.prices == pytest.approx(
        [(778 + 24 * 128 * r + 1) / whole for r in ranks]
    )  # and the rank, which is told
    assert (778 + 24 * 128 * 9) / whole > 0.25 * (1 + SLACK)
    with pytest.raises(ValueError, match="flexlora has nothing for class 1 under a cap of 0.125 on macs: the smallest"):
        fit(E.replace(method="flexlora"), (0.125, 1.0), "macs")
    mixed = fit(E.replace(method="splitmix", finetune="full", options={"bases": 4}), (0.25, 1.0), "upload")
    assert mixed.sizes == (0.75, 1.0)  # three bases of a quarter of the width hold less than a quarter of the net
    one, all_four = price(
        mixed.experiment.replace(options={"bases": 4, "ratios": (0.25, 1.0)}, budgets=(0, 1)), "upload"
    )
    assert all_four == pytest.approx(4 * one)
    narrow = fit(E.replace(method="fedrolex", finetune="full"), (0.25, 1.0), "upload")
    assert narrow.prices[0] <= 0.25 * (1 + SLACK) and narrow.prices[1] == pytest.approx(1)


def test_who_offers_nothing_and_what_is_no_cap_is_refused():
    with pytest.raises(ValueError, match="raffm has nothing for class 1 under a cap of 0.25 on macs: it offers no"):
        fit(E.replace(method="raffm"), (0.25, 1.0), "macs")
    with pytest.raises(ValueError, match="nothing for class 1 under a cap of 0.01 on macs: the smallest takes"):
        fit(E, (0.01, 1.0), "macs")
    for caps in ((), (0.5, 0.25), (0.0, 1.0), (0.5, 1.5)):
        with pytest.raises(ValueError, match="caps = "):
            fit(E, caps, "macs")


def test_budgets_may_be_listed_by_class():
    e = E.replace(method="depthfl", num_exits=2, budgets=(0, 0, 1))
    assert budgets_of(e, build_method("depthfl", {})).tolist() == [0, 0, 1, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=r"budgets = \[0, 2\]: depthfl has 2; allowed: 0..1"):
        budgets_of(e.replace(budgets=(0, 2)), build_method("depthfl", {}))
    with pytest.raises(ValueError, match="budgets"):
        E.replace(budgets="some")
