"""What titles say: the message of the runs that are drawn, and what these are."""

import pandas as pd
import pytest

from fedlib_lab.report.plots import (
    plot_exit_accuracies,
    plot_learning_curves,
    plot_modes,
    plot_series,
    saved_by_leaving,
)
from fedlib_lab.report.titles import about, apart, figure_title, leads
from tests.helpers.figures import frame, legible

pytestmark = pytest.mark.usefixtures("strict")
METHODS = [("reefl", "reefl", "reefl"), ("depthfl", "depthfl", "depthfl"), ("fedavg", "fedavg", "fedavg")]


def test_a_subject_is_data_mode_net_and_seeds():
    runs = frame(METHODS, modes=("frozen",), columns=("cifar10_alpha1",)).assign(backbone="deit_micro")
    assert about(runs) == "CIFAR-10, Dirichlet 1, frozen, DeiT-micro, 2 seeds"
    fewer = runs.drop(runs[(runs.variant == "reefl") & (runs.seed == 2)].index)
    assert about(fewer).endswith("1–2 seeds (compared: common ones)")
    missing = runs.assign(accuracy=runs.accuracy.where(runs.seed == 1))
    assert about(missing).endswith(", 1 seed")  # a run that is not stored is not counted
    assert about(pd.concat([runs, runs.assign(column="cifar100"), runs.assign(column="sst2")])).startswith(
        "3 data sets, "
    )
    bare = runs.drop(columns=["column", "dataset"], errors="ignore")
    assert about(bare) == "frozen, DeiT-micro, 2 seeds"  # what a table does not say is not made up


def test_the_message_is_of_means_against_the_best_rival():
    three = {"modes": ("frozen",), "seeds": (1, 2, 3)}
    runs = frame(METHODS, **three)  # means 42, 43, 44; the same differences at each seed
    assert leads(runs) == "FedAvg leads DepthFL by 1.0 points"
    assert leads(runs, "reefl") == "ReeFL trails FedAvg by 2.0 points"
    assert leads(runs[runs.variant == "reefl"]) == "ReeFL reaches 42.0"
    assert leads(runs.assign(accuracy=float("nan"))) == "No run is stored yet"
    both = frame(METHODS, seeds=(1, 2, 3))
    assert leads(both, "reefl") == "ReeFL against FedAvg, in points: Frozen −2.0, LoRA −2.0 (trails)"
    other = both.assign(accuracy=both.accuracy - 1.5 * ((both.variant == "fedavg") & (both.finetune == "lora")))
    said = "Frozen: ReeFL trails FedAvg by 2.0 points; LoRA: ReeFL trails DepthFL by 1.0 points"
    assert leads(other, "reefl") == said  # the best rival is another
    alone = both[both.variant == "reefl"]
    assert leads(alone) == "Frozen: ReeFL reaches 42.0; LoRA: ReeFL reaches 42.0"


def test_a_title_says_no_more_than_the_verdict():
    """By hand: 1.9, 0.1 and 1.0 points at three seeds have a 95 % interval of 1.0 ± 2.2; two seeds rank nothing."""
    runs = frame(METHODS, modes=("frozen",), seeds=(1, 2, 3))
    noisy = runs.assign(accuracy=runs.accuracy + 0.9 * ((runs.variant == "fedavg") & (runs.seed == 1)) - 0.9 * ((runs.variant == "fedavg") & (runs.seed == 2)))  # fmt: skip
    assert leads(noisy) == "FedAvg is 1.0 points above DepthFL (undecided)"
    assert leads(noisy, "reefl") == "ReeFL is 2.0 points below FedAvg (undecided)"
    assert leads(runs[runs.seed == 1]) == "FedAvg is 1.0 points above DepthFL (one seed: not ranked)"
    assert leads(runs[runs.seed < 3]) == "FedAvg is 1.0 points above DepthFL (two seeds: not ranked)"
    assert leads(runs[runs.seed < 3], "reefl") == "ReeFL is 2.0 points below FedAvg (two seeds: not ranked)"
    few = runs.drop(runs[(runs.variant == "reefl") & (runs.seed == 2)].index)
    assert leads(few) == "FedAvg is 1.0 points above DepthFL (two seeds: not ranked)"  # not sure of every rival
    assert leads(few[few.variant != "reefl"]) == "FedAvg leads DepthFL by 1.0 points"
    assert apart("a", "b", 0.04, "undecided") == "a is level with b"
    assert apart("a", "b", -0.3, "of an older rule") == "a is 0.3 points below b (of an older rule)"


def test_exits_of_a_run_are_one_number_of_a_seed():
    runs = frame(METHODS[:2], modes=("frozen",), seeds=(1, 2, 3))
    per_exit = pd.concat([runs.assign(accuracy=runs.accuracy - 5), runs.assign(accuracy=runs.accuracy + 5)])
    assert leads(per_exit) == "DepthFL leads ReeFL by 1.0 points"


def test_a_variant_is_compared_with_another_method_where_there_is_one():
    runs = frame([("reefl_a", "reefl", "ReeFL, a"), *METHODS[:2]], modes=("frozen",), seeds=(1, 2, 3))
    assert leads(runs, "reefl") == "ReeFL trails DepthFL by 1.0 points"
    assert leads(runs[runs.method == "reefl"], "reefl") == "ReeFL leads ReeFL, a by 1.0 points"


def test_what_leaving_early_saves_is_the_least_cost_within_half_a_point():
    curve = [{"macs": m, "accuracy": a} for m, a in ((10, 50.0), (40, 59.4), (60, 59.6), (100, 60.0))]
    rings = [{"exit": 1, "macs": 1, "accuracy": 60.0}]
    assert (
        saved_by_leaving({"reefl": curve + rings}) == "Within half a point of the last exit: ReeFL at 60 % of its MACs"
    )


@pytest.mark.parametrize("many", [3, 9])
def test_figures_are_read_and_say_their_seeds(many):
    """Of more than six methods a row of dots, or small panels in which two have a colour."""
    runs = frame([(f"m{i}", m, f"{m}, variant {i}") for i, m in enumerate(["reefl", "depthfl", "fedavg"] * 3)][:many])
    one = runs[runs.finetune == "lora"]
    ax = plot_exit_accuracies(one, title=figure_title(leads(one), one), hero="reefl")
    assert legible(ax.figure, 2) and len(ax.get_yticks()) == (9 if many > 6 else len(ax.get_yticks()))
    assert legible(plot_modes(runs)[0].figure, 2)
    curves = {row.label: [{"t": t, "accuracy": t + row.accuracy} for t in (10, 20, 30)] for row in one.itertuples()}
    drawn = plot_learning_curves(curves, title=figure_title(leads(one), one), hero="reefl")
    axes = drawn if many > 6 else [drawn]
    assert legible(axes[0].figure, 2) and len(axes) == (8 if many > 6 else 1)
    if many > 6:
        colours = [{line.get_color() for line in ax.lines} for ax in axes]
        assert all(len(c) == 3 for c in colours)  # ReeFL's, the rival's, grey


def test_a_line_goes_by_rising_cost_and_numbers_its_points():
    rows = pd.DataFrame({"method": "scalefl", "level": [1, 2, 3], "macs": [5.0, 9.0, 7.0], "accuracy": [1.0, 3.0, 2.0]})
    ax = plot_series(rows, "macs", "accuracy", "MACs", "accuracy", "1 seed", names="level")
    assert ax.lines[0].get_xdata().tolist() == [5, 7, 9] and {t.get_text() for t in ax.texts} == {"1", "2", "3"}
    assert legible(ax.figure, 1)
