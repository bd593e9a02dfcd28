"""Studies of one factor: columns name it, differences are paired by seed, splits never mix; the study of ReeFL's horizon."""

import numpy as np
import pandas as pd
import pytest

from fedlib import Execution
from fedlib_lab.papers.reefl.factors import (
    FACTORS,
    accuracy_differences,
    answers,
    best_levels,
    factor_frame,
    factor_of,
    plot_factor,
)
from fedlib_lab.report.tables import mean_curves
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.store import run_all
from tests.helpers.tracked import OUTPUTS


def frame_of(*rows, split="test"):
    """Rows of (column, variant, seed, accuracy) on CIFAR-10, or on CIFAR-100 where the column says so."""
    made = []
    for column, variant, seed, accuracy in rows:
        factor, level = factor_of(column)
        data = "cifar100" if column.startswith("cifar100") else "cifar10"
        where = {"column": column, "factor": factor, "level": level, "variant": variant, "method": variant}
        made.append(where | {"label": variant, "finetune": "frozen", "dataset": data, "split": split, "seed": seed, "accuracy": accuracy})  # fmt: skip
    return pd.DataFrame(made)


SHORT = [("rounds_100", "depthfl", s, 44.0) for s in (1, 2, 3)] + [("rounds_100", "reefl", s, 44.0 - s / 2) for s in (1, 2, 3)]  # fmt: skip
LONG = [("rounds_1000", "depthfl", 1, 43.0), ("rounds_1000", "depthfl", 2, 44.0), ("rounds_1000", "reefl", 1, 46.0), ("rounds_1000", "reefl", 2, 45.0), ("rounds_1000", "reefl", 3, 50.0)]  # fmt: skip
OTHER = [("cifar100_rounds_100", "depthfl", 1, 20.0), ("cifar100_rounds_100", "reefl", 1, np.nan)]


@pytest.mark.parametrize(
    "column, expected",
    [("rounds_100", ("rounds", "100")), ("cifar100_rounds_1000", ("rounds", "1000")), ("lr_0.05", ("lr", "0.05")),
     ("backbone_deit_mini", ("backbone", "deit_mini"))],
)  # fmt: skip
def test_columns_name_factor_and_level(column, expected):
    assert factor_of(column) == expected


def test_a_column_without_a_factor_is_named():
    with pytest.raises(ValueError, match="column 'cifar100_alpha1' names no factor and level; factors: rounds, "):
        factor_of("cifar100_alpha1")


def test_differences_are_paired_by_seed_and_judged_as_claims_are():
    table = answers(frame_of(*SHORT, *LONG, *OTHER), "reefl", "depthfl")
    assert table.columns.tolist() == ["factor", "level", "data", "mode", "ReeFL", "DepthFL", "difference", "interval", "seeds", "ahead"]  # fmt: skip
    # -0.5, -1, -1.5: mean -1, SD 0.5, 4.30 SD / sqrt 3 around it; 3 and 1, 12.7 SD / sqrt 2: seed 3 has no rival
    assert table.difference.tolist() == ["-1.00 ± 0.50", "2.00 ± 1.41"]
    assert table.interval.tolist() == ["-2.24 to 0.24", "-10.71 to 14.71"]
    assert table.ahead.tolist() == ["undecided", "undecided"] and table.seeds.tolist() == [3, 2]
    assert table.ReeFL.tolist() == ["43.00 ± 0.50", "45.50 ± 0.71"]  # of the seeds that both have
    assert set(table.data) == {"CIFAR-10"} and set(table["mode"]) == {"Frozen"}
    one = answers(frame_of(*(r for r in SHORT if r[2] == 1)), "reefl", "depthfl")
    assert one[["difference", "interval", "seeds", "ahead"]].values.tolist() == [["-0.50", "–", 1, "not testable"]]


def test_nothing_stored_gives_no_rows():
    empty = frame_of(*OTHER)
    assert answers(empty, "reefl", "depthfl").empty and accuracy_differences(empty, "reefl", "depthfl").empty
    axes = plot_factor(empty[empty.variant == "reefl"], "rounds", "reefl", "depthfl")
    assert len(axes) == 2
    axes = plot_factor(empty, "backbone", "reefl", "depthfl")  # of which profile paper has no level
    assert "not stored" in axes[0].figure.get_suptitle()


def test_a_level_is_chosen_by_its_mean_on_validation_examples_only():
    rows = [("lr_0.1", "reefl", 1, 40.0), ("lr_0.1", "reefl", 2, 50.0), ("lr_0.2", "reefl", 1, 44.0), ("lr_0.2", "reefl", 2, 45.0), ("lr_0.1", "depthfl", 1, 41.0), ("lr_0.2", "depthfl", 1, np.nan)]  # fmt: skip
    assert best_levels(frame_of(*rows, split="validation")) == {"reefl": "0.1"}  # 45 > 44.5; a rate of DepthFL lacks
    with pytest.raises(ValueError, match="never on the test set"):
        best_levels(frame_of(*rows))


def test_validation_and_test_accuracies_never_stand_side_by_side():
    both = pd.concat([frame_of(*SHORT), frame_of(*LONG, split="validation")])
    for call in (lambda: answers(both, "reefl", "depthfl"), lambda: plot_factor(both, "rounds", "reefl", "depthfl")):  # fmt: skip
        with pytest.raises(ValueError, match="do not stand side by side"):
            call()


def test_a_figure_has_a_column_per_data_set_and_its_numbers():
    rows = [*SHORT, *LONG, ("cifar100_rounds_100", "depthfl", 1, 20.0), ("cifar100_rounds_100", "reefl", 1, 19.0)]
    axes = plot_factor(frame_of(*rows), "rounds", "reefl", "depthfl")
    assert axes[0].figure.get_suptitle().startswith("Rounds: ReeFL minus DepthFL is −1.0 at 100, +2.0 at 1000")
    assert [ax.get_title() for ax in axes] == ["CIFAR-10", "CIFAR-100", "", ""]
    drawn = {tuple(line.get_ydata()) for line in axes[2].lines}
    assert (-1.0, 2.0) in drawn  # the means; and every seed
    assert (-0.5, -1.0, -1.5, 3.0, 1.0) in drawn
    assert axes[2].get_xlabel().startswith(FACTORS["rounds"]) and "ReeFL – DepthFL" in axes[2].get_ylabel()
    assert axes[0].get_ylabel() == "test accuracy (%)"
    assert [t.get_text() for t in axes[3].get_xticklabels()] == ["100", "1000"]


# --- the study -------------------------------------------------------------------------------------------------------

STUDY = ("why", "why_rates", "why_tuned")


@pytest.mark.parametrize("profile", ["smoke", "small", "paper"])
@pytest.mark.parametrize("table", STUDY)
def test_every_column_of_the_study_names_a_factor(table, profile):
    cells = load_grid("reefl", table, profile)
    assert {factor_of(c.column)[0] for c in cells} <= set(FACTORS)
    assert {c.experiment.evaluate_on for c in cells} == {"validation" if table == "why_rates" else "test"}


def test_the_base_cell_is_table_ones_and_stands_in_every_factor():
    """100 rounds of the CIFAR-10 column: the runs that Table 1 stored before, not new ones."""
    base = {c.method: c.experiment for c in load_grid("reefl", "decomposition", "small", {"finetune": "frozen", "seeds": [1]}) if c.variant == "reefl"}  # fmt: skip
    own = {(c.column, c.variant): c.experiment for c in load_grid("reefl", "why", "small", {"seeds": [1]})}
    assert own["rounds_100", "reefl"] == own["epochs_1", "reefl"] == base["reefl"]
    assert own["rounds_400", "depthfl"] == own["backbone_deit_micro", "depthfl"]
    assert own["backbone_none", "reefl"] == own["width_64", "reefl"]
    assert {e.dataset for (column, _), e in own.items() if column.startswith("cifar100")} == {"cifar100"}


def test_a_level_changes_nothing_but_its_factor():
    own = {(c.column, c.variant): c.experiment for c in load_grid("reefl", "why", "small", {"seeds": [1]})}
    free = {"rounds": {"rounds", "evaluate_every"}, "epochs": {"local_epochs"}, "backbone": {"backbone", "pretrained"}, "width": {"backbone"}}  # fmt: skip
    start = {"rounds": "rounds_100", "epochs": "epochs_1", "backbone": "backbone_deit_micro", "width": "width_64"}
    for (column, variant), e in own.items():
        factor = factor_of(column)[0]
        first = own[("cifar100_" if column.startswith("cifar100") else "") + start[factor], variant].to_dict()
        assert {k for k, v in e.to_dict().items() if v != first[k]} <= free[factor], column


def test_tuned_rates_are_the_methods_best_on_validation_where_these_runs_are_stored():
    rates = load_grid("reefl", "why_rates", "small")
    stored = best_levels(factor_frame(rates, OUTPUTS / "runs"))
    assert set(stored) == {"reefl", "depthfl"}
    tuned = {c.variant: c.experiment.lr for c in load_grid("reefl", "why_tuned", "small")}
    assert all(tuned[v] == float(level) for v, level in stored.items())
    budgets = {v: {c.column for c in rates if c.variant == v} for v in tuned}
    assert budgets["reefl"] == budgets["depthfl"]  # the same budget for both


def test_curves_are_means_over_seeds_by_round(tmp_path):
    cells = load_grid("reefl", "why", "smoke", {"columns": ["rounds_100"], "variant": ["depthfl"], "num_train": 64, "num_test": 20, "evaluate_every": 1, "seeds": [1, 2]})  # fmt: skip
    runs = run_all([c.experiment for c in cells], Execution(workers=1), tmp_path, progress=False)
    curves = mean_curves(cells, "rounds_100", folder=tmp_path)
    assert list(curves) == ["depthfl"] and [m["t"] for m in curves["depthfl"]] == [1, 2]
    last = [r.metrics[-1]["accuracy"] for r in runs]
    assert curves["depthfl"][-1]["accuracy"] == pytest.approx(sum(last) / 2)
    assert mean_curves(cells, "epochs_1", folder=tmp_path) == {}
