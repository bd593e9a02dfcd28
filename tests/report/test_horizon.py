"""A longer trial beside its table: which pairs of methods keep their order, and both trainings' curves."""

import re
from types import SimpleNamespace

import pandas as pd
from matplotlib.colors import to_rgb

from fedlib import Execution
from fedlib_lab.report.horizon import order_kept, plot_horizons
from fedlib_lab.report.plots import plot_learning_curves
from fedlib_lab.report.style import color_of, marker_of
from fedlib_lab.report.table import Table
from fedlib_lab.report.tables import mean_curves
from tests.helpers.figures import legible


def table(*rows):
    """A table that prints the last exit, of rows (variant, seed, accuracy)."""
    where = {"finetune": "full", "column": "cifar10_alpha1", "accuracy": 0.0}
    frame = pd.DataFrame([where | {"variant": v, "label": v, "seed": s, "last": x} for v, s, x in rows])
    return SimpleNamespace(value="last", frame=frame)


def test_pairs_keep_their_order_or_change_it_and_other_seeds_do_not_count():
    short = table(
        ("depthfl", 1, 30.0), ("reefl", 1, 28.0), ("reefl", 2, 99.0), ("heterofl", 1, 20.0), ("fedavg", 1, 1.0)
    )
    long = table(("depthfl", 1, 31.0), ("reefl", 1, 35.5), ("heterofl", 1, 25.0), ("fedavg", 1, None))
    found = order_kept(short, long)
    # 30 - 28 and 31 - 35.5; 30 - 20 and 31 - 25; 28 - 20 and 35.5 - 25; FedAvg's longer run is not there
    assert found.difference.tolist() == ["DepthFL – ReeFL", "DepthFL – HeteroFL", "ReeFL – HeteroFL"]
    assert found.shorter.tolist() == [2.0, 10.0, 8.0] and found.longer.tolist() == [-4.5, 6.0, 10.5]
    assert found.order.tolist() == ["changed", "kept", "kept"]
    assert order_kept(short, table(("reefl", 3, 1.0))).empty


def test_curves_stand_side_by_side(tmp_path):
    longer = {"columns": ["cifar10_alpha0.3"], "num_train": 64, "num_test": 20, "rounds": 2}
    tables = [Table("fedepth", "horizon", "smoke", longer | {"rounds": r}, tmp_path) for r in (1, 2)]
    for t in tables:
        t.run(Execution(workers=1))
    assert order_kept(*tables).difference.tolist() == ["DepthFL, fair – FeDepth, fair"]
    (ax,) = plot_horizons(*tables)
    said = ax.figure.get_suptitle().replace("\n", " ")
    assert re.match(r"After 2 rounds FeDepth, fair \w+ .+; after 1 \(pale\) it ", said) and legible(ax.figure, 1)
    assert [len(line.get_xdata()) for line in ax.lines if len(line.get_xdata())] == [2, 2, 1, 1]  # the pale ones last
    assert [to_rgb(line.get_color()) for line in ax.lines[:2]] == [to_rgb(color_of(m)) for m in ("depthfl", "fedepth")]
    (curve,) = tables[1].curves("cifar10_alpha0.3", ["fair_fedepth"]).values()
    last = tables[1].frame.set_index("variant")["last"]["fair_fedepth"]
    assert [m["t"] for m in curve] == [1, 2] and curve[-1]["accuracy"] == last


def test_a_line_has_its_methods_look_whatever_its_label():
    records = {"full-size FL": [{"t": 1, "accuracy": 5.0}, {"t": 2, "accuracy": 9.0}]}
    line = plot_learning_curves(records, {"full-size FL": "fedavg"}).lines[0]
    assert to_rgb(line.get_color()) == to_rgb(color_of("fedavg")) and line.get_marker() == marker_of("fedavg")


def test_curves_of_two_modes_are_two_lines(tmp_path, capsys):
    """Never one mean over both; a longer trial of one mode stands beside that mode's shorter one."""
    small = {"columns": ["cifar10_alpha1"], "variant": ["depthfl"], "num_train": 64, "num_test": 20, "rounds": 1}
    both, one = (
        Table("reefl", "horizon", "smoke", small | f, tmp_path) for f in ({"finetune": ["frozen", "lora"]}, {})
    )
    both.run(Execution(workers=1))
    curves = mean_curves(both.cells, "cifar10_alpha1", folder=tmp_path)
    assert list(curves) == ["depthfl, frozen", "depthfl, lora"]
    assert both.curves("cifar10_alpha1", finetune=["frozen"]) == one.curves("cifar10_alpha1")
    assert list(one.curves("cifar10_alpha1").values()) == [curves["depthfl, frozen"]]
    capsys.readouterr()
    assert plot_horizons(both, one) is None and capsys.readouterr().out == "no longer run is stored yet\n"
    one.run(run_missing=False)
    assert len(plot_horizons(both, one)[0].get_legend_handles_labels()[1]) == 1
