"""Figures: a method's look is one everywhere and can be told apart, words are safe, nothing is cut off or misplaced."""

import itertools

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgb

from fedlib.core.paths import params_dir
from fedlib_lab.report import plots
from fedlib_lab.report.style import color_of, marker_of, styled
from tests.helpers.figures import boxed, frame, inside

pytestmark = pytest.mark.usefixtures("strict")


def test_a_figure_leaves_the_backend_as_interactive_as_it_became():
    """A notebook's backend becomes interactive with its first figure; were that undone, no later one would be shown."""

    @styled
    def first_figure():
        matplotlib.interactive(True)

    before, grid = matplotlib.is_interactive(), matplotlib.rcParams["axes.grid"]
    try:
        matplotlib.interactive(False)
        first_figure()
        assert matplotlib.is_interactive() and matplotlib.rcParams["axes.grid"] == grid
    finally:
        matplotlib.interactive(before)


def test_no_rows_are_no_figure():
    """It ended in a division by zero."""
    with pytest.raises(ValueError, match="plot_modes: 0 rows; allowed: one or more"):
        plots.plot_modes(frame([("a", "reefl", "a")])[:0])


def test_a_line_looks_the_same_in_every_panel_and_in_the_legend():
    """Variants that only one mode has must not take another's dash; handles are long enough to show it."""
    of = [("a", "inclusivefl", "a"), ("b", "inclusivefl", "b"), ("c", "inclusivefl", "c"), ("d", "inclusivefl", "d")]
    table = pd.concat([frame(of[:2], modes=("frozen",)), frame(of[1:], modes=("lora",))])
    axes = plots.plot_modes(table)
    legend = axes[0].figure.legends[0]
    handles = dict(zip((t.get_text() for t in legend.get_texts()), legend.legend_handles, strict=True))
    assert list(handles) == ["a", "b", "c", "d"] and legend.handlelength >= 4
    patterns = {name: h._unscaled_dash_pattern[1] for name, h in handles.items()}
    assert len(set(map(str, patterns.values()))) == 4
    for ax in axes:
        drawn = [line for line in ax.lines if len(line.get_xdata()) == 4]
        assert all(line._unscaled_dash_pattern[1] in patterns.values() for line in drawn)
    assert inside(axes[0].figure)


@pytest.mark.parametrize(("variants", "modes"), [(12, 2), (2, 5), (1, 1), (5, 6)])
def test_modes_make_no_strip_and_cut_nothing_off(variants, modes):
    names = ["full", "frozen", "lora", "pa", "sa", "ssf"][:modes]
    many = [(f"reefl_{i}", "reefl", f"ReeFL, without some part {i}") for i in range(variants)]
    axes = plots.plot_modes(frame(many, modes=names))
    width, height = axes[0].figure.get_size_inches()
    assert len(axes) == modes and width / height < 2.6 and inside(axes[0].figure)
    said = axes[0].figure.get_suptitle().replace("\n", " ")
    assert said.endswith("seeds") and "CIFAR-10 standing in for CIFAR-100, Dirichlet 1, " in said
    assert all(ax.get_window_extent().height > 100 for ax in axes)


def test_several_data_sets_are_never_drawn_onto_one_another():
    both = frame([("reefl", "reefl", "reefl")], columns=("cifar100_alpha1", "cifar100_alpha0.1"), modes=("lora",))
    axes = plots.plot_modes(both)
    ends = [a.get_title().replace("\n", " ").removeprefix("CIFAR-10 standing in for CIFAR-100, ") for a in axes]
    assert ends == ["Dirichlet 1 LoRA", "Dirichlet 0.1 LoRA"]


def test_one_seed_has_no_error_bars():
    one, two = (plots.plot_exit_accuracies(frame([("reefl",) * 3], seeds=s, modes=("lora",))) for s in ((1,), (1, 2)))
    assert not one.collections and not one.containers and two.containers


def test_exits_stand_at_their_numbers():
    table = frame([("reefl",) * 3, ("depthfl",) * 3], modes=("lora",))
    ax = plots.plot_exit_accuracies(table)
    assert ax.get_xticks().tolist() == [1, 2, 3, 4] and ax.get_legend_handles_labels()[1] == ["ReeFL", "DepthFL"]
    line = next(x for x in ax.lines if len(x.get_xdata()) == 4)
    assert np.abs(line.get_xdata() - [1, 2, 3, 4]).max() < 0.1
    assert line.get_ydata().tolist() == [41.5, 42.5, 43.5, 44.5]  # means over seeds 1 and 2
    assert plots.plot_exit_accuracies(table.assign(accuracy=np.nan)).lines[:] == []


def test_what_are_no_curves_is_said():
    for given, more, said in (
        ({"a": object()}, (), "curves: 'a', as run.metrics = .*: expected Sequence"),
        ([], (), "curves = .*: expected Mapping"),
        ({"a": []}, ("accuracy",), "methods = 'accuracy': expected Mapping"),
    ):
        with pytest.raises(ValueError, match=said):
            plots.plot_learning_curves(given, *more)


@pytest.mark.parametrize(("rounds", "ticks"), [(range(5, 31, 5), [5, 10, 15, 20, 25, 30]), (range(1, 101), None)])
def test_ticks_of_curves_meet_points(rounds, ticks):
    ax = plots.plot_learning_curves({"reefl, lora": [{"t": t, "accuracy": t} for t in rounds], "mine": []})
    found = ax.get_xticks().tolist()
    assert (
        set(found) <= set(rounds) and found[-1] == rounds[-1] and len(found) <= 8 and (ticks is None or found == ticks)
    )
    assert ax.get_legend_handles_labels()[1] == ["ReeFL, LoRA"]


def test_curves_are_named_by_numbers_too():
    """By a seed, or a rate."""
    ax = plots.plot_learning_curves({seed: [{"t": 1, "accuracy": 5}, {"t": 2, "accuracy": 9}] for seed in (1, 0.5)})
    assert ax.get_legend_handles_labels()[1] == ["1", "0.5"]


def test_costs_and_curves_have_the_methods_looks():
    costs = pd.DataFrame({"method": ["reefl"] * 2 + ["depthfl"] * 2, "macs": [1e6, 2e6] * 2, "upload_mib": [1, 2, 3, 4],
                          "accuracy": [10, 20, 30, 40], "finetune": "lora", "column": "femnist"})  # fmt: skip
    adaptive = {"ReeFL": [{"macs": 1e6, "accuracy": 5}, {"macs": 2e6, "accuracy": 9}]}
    for ax in (plots.plot_costs(costs), plots.plot_costs(costs, y="accuracy"), plots.plot_adaptive(adaptive)):
        line = ax.lines[0]
        assert to_rgb(line.get_color()) == to_rgb(color_of("reefl")) and line.get_marker() == marker_of("reefl")
        assert line.get_xdata().tolist() == [1, 2] and inside(ax.figure)
    (panel,) = plots.plot_modes(costs, plots.plot_costs, title="Against compute", x="macs", y="accuracy")
    assert panel.figure.get_suptitle() == "Against compute\nFEMNIST, LoRA"


def test_a_label_of_ones_own_has_its_methods_look():
    """The multi-exit form of a method is no method of its own."""
    records = [{"macs": 1e6, "accuracy": 5}, {"macs": 2e6, "accuracy": 9}]
    for name, told in (("FedPer-EE", {"FedPer-EE": "fedper"}), ("FedPAC-EE", {"FedPAC-EE": "fedpac"})):
        line = plots.plot_adaptive({name: records}, methods=told).lines[0]
        assert to_rgb(line.get_color()) == to_rgb(color_of(told[name])) and line.get_marker() == marker_of(told[name])


def test_a_single_exit_stands_at_the_depth_of_the_deepest():
    where = {"finetune": "full", "column": "cifar10", "seed": 1, "dataset": "cifar10", "backbone": "convnet3"}
    rows = [("cafedistill", [50.0, 55.0, 60.0]), ("fedper", [58.0])]
    table = pd.DataFrame([where | {"method": m, "label": m, "exits": x, "accuracy": x[-1]} for m, x in rows])
    three, one = plots.plot_exit_accuracies(table).lines[:2]
    assert three.get_xdata().round().tolist() == [1, 2, 3] and one.get_xdata().round().tolist() == [3]


def test_every_exit_stands_beside_the_curve_of_leaving_early():
    records = [{"macs": 1e6, "accuracy": 5}, {"macs": 2e6, "accuracy": 9}]
    exits = [{"exit": 1, "macs": 1e6, "accuracy": 5}, {"exit": 2, "macs": 3e6, "accuracy": 8}]
    ax = plots.plot_adaptive({"DepthFL": records, "ReeFL": records + exits})
    (rings,) = (c for c in ax.collections if len(c.get_offsets()) == 2)
    assert rings.get_offsets().tolist() == [[1, 5], [3, 8]] and not len(rings.get_facecolors())
    assert to_rgb(rings.get_edgecolors()[0][:3]) == to_rgb(color_of("reefl"))
    assert [len(line.get_xdata()) for line in ax.lines[:2]] == [2, 2]


def test_tradeoff_names_do_not_overlap_and_ticks_stand_at_points():
    rows = [("reefl", f"compression {i}", 40 + i % 2 * 0.1, 0.01 * (1 + i / 20)) for i in range(6)]
    table = pd.DataFrame([*rows, ("reefl", "clipped", 41, None)], columns=["method", "column", "accuracy", "mib"])
    ax = plots.plot_tradeoff(table, "mib", "upload", "Uploads shrink", dashed="clipped", line="")
    boxes = [boxed(t) for t in ax.texts]  # without their arrows
    assert len(boxes) == 6 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2)) and inside(ax.figure)
    assert ax.get_legend_handles_labels()[1][-1] == "ReeFL, clipped"
    ax = plots.plot_tradeoff(table[table.column.isin(["compression 0", "compression 4"])], "mib", "upload", "")
    assert ax.get_xticks().tolist() == [0.01, 0.012] and len(ax.get_xticks(minor=True)) == 0
    ax.figure.draw_without_rendering()
    assert [t.get_text() for t in ax.get_xticklabels()] == ["0.01", "0.012"]


def test_names_at_the_right_edge_stay_inside():
    """Six points close to the edge: a name that would leave the figure goes elsewhere, on top of nothing if it can."""
    places = {"fair": (0.15, 34.5), "lack": (0.164, 34.4), "surplus": (0.183, 33.4)}
    rows = [("fedepth", name, y, x) for name, (x, y) in places.items()]
    rows += [("fedepth", f"auxiliary heads, {name}", y + 3, x) for name, (x, y) in places.items()]
    rows += [("fedavg", "whole", 33.0, 0.12), ("fedavg", "sixth", 20.0, 0.002)]
    ax = plots.plot_tradeoff(
        pd.DataFrame(rows, columns=["method", "column", "accuracy", "macs"]), "macs", "MACs", "", line=""
    )
    named = {t.get_text(): to_rgb(t.get_color()) for t in ax.texts}  # as their points: a crowd can be told apart
    assert named["sixth"] == to_rgb(color_of("fedavg")) and named["fair"] == to_rgb(color_of("fedepth"))
    boxes = [boxed(t) for t in ax.texts]
    assert all(ax.figure.bbox.x0 <= b.x0 and b.x1 <= ax.figure.bbox.x1 for b in boxes)
    assert all(b.y1 <= ax.bbox.y1 for b in boxes)  # above stands the title
    assert len(boxes) == 8 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_ratios_of_the_engine_are_a_row_a_workload():
    from benchmarks.plots import plot_phases, plot_population, plot_ratios

    systems = {"W1": ["fedlib", "bare loop, 2 threads", "Flower", "pfl"], "W5, FedPer": ["fedlib", "Flower", "PFLlib"]}
    index = pd.MultiIndex.from_tuples([(w, s) for w, of in systems.items() for s in of], names=["workload", "system"])
    ax = plot_ratios(pd.DataFrame({"ratio": 2.0, "ratio_min": 1.5, "ratio_max": 2.5}, index=index))
    assert [t.get_text() for t in ax.get_yticklabels()] == ["W1: FedAvg, ViT", "W5: convnet, FedPer"] and inside(
        ax.figure
    )
    assert [t.get_text() for t in ax.figure.legends[0].texts] == [
        "bare loop, 2 threads",
        "Flower",
        "pfl",
        "PFLlib",
    ]  # not us
    spans = [segment[:, 0].tolist() for segment in ax.collections[0].get_segments()]
    assert spans == [[1.5, 2.5]] * 5  # the range over turns

    rows = [{"num_clients": 10**n, "seconds": 0.3, "peak_mib": 800 + n} for n in (2, 3, 5)]
    axes = plot_population(rows)
    axes[0].figure.draw_without_rendering()
    assert [t.get_text() for t in axes[0].get_xticklabels()] == ["100", "1,000", "100,000"]
    assert axes[1].get_ylim()[0] == 0 and axes[1].get_ylim()[1] > 805 and inside(axes[0].figure)
    assert inside(plot_population([])[0].figure)
    assert inside(plot_phases(pd.Series({"forward": 60.0, "backward": 40.0})).figure)


def test_the_overview_is_a_picture_on_a_ground_of_its_own():
    """It stands in README on light and dark pages: well-formed, nothing fetched, all of it on a white card."""
    from xml.etree import ElementTree

    picture = ElementTree.parse(params_dir().parent / "docs" / "overview.svg").getroot()
    _, _, width, height = map(float, picture.get("viewBox").split())
    card = next(e for e in picture if e.tag.endswith("rect"))
    assert card.get("fill") == "#ffffff" and float(card.get("width")) >= width - 2
    for e in picture.iter():
        assert not any("http" in value for value in e.attrib.values())
        if e.tag.endswith("text"):
            assert 0 < float(e.get("x")) < width and 0 < float(e.get("y")) < height
            assert float(e.get("font-size", 15)) * 800 / width >= 11  # pixels, on 800


def test_axes_are_named_by_the_metric_of_the_task():
    """STS-B's correlation was drawn as an accuracy, CoLA's as a score."""
    accuracy, score_of = plots.ACCURACY, plots.score_of
    assert score_of(["stsb"]) == "test Pearson correlation (× 100)" and score_of(["squad", "squad_v2"]) == "test F1 (%)"
    assert score_of(["cola"]) == "test Matthews correlation (× 100)" and score_of(["mrpc", "sst2"]) == accuracy
    assert score_of(["sst2", "cola"]) == "test score (%)" and score_of([]) == accuracy
    assert score_of(["svamp"]) == "test exact match (%)"
    rows = pd.DataFrame({
        "method": ["fedavg"], "label": ["fedavg"], "variant": ["fl"], "finetune": ["full"], "accuracy": [70.0],
        "exits": [[70.0]], "dataset": ["stsb"], "column": ["stsb"],
    })  # fmt: skip
    assert plots.plot_exit_accuracies(rows).get_ylabel() == "test Pearson correlation (× 100)"
    assert plots.plot_exit_accuracies(rows.assign(dataset="cifar10")).get_ylabel() == accuracy
    records = {"fedavg": [{"t": 1, "accuracy": 3.0}, {"t": 2, "accuracy": 4.0}]}
    assert (
        plots.plot_learning_curves(records, score=score_of(["cola"])).get_ylabel()
        == "test Matthews correlation (× 100)"
    )
