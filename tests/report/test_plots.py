"""Figures: a method's look is one everywhere and can be told apart, words are safe, nothing is cut off or misplaced."""

import itertools
import re
import warnings
from types import SimpleNamespace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb

from fedlib.core.paths import params_dir
from fedlib.core.words import fonts, plain
from fedlib.methods import METHODS
from fedlib.papers.reefl.attention_plots import overlay
from fedlib.papers.reefl.teachers import plot_teachers
from fedlib.report import plots
from fedlib.report.data_plots import plot_clients_examples, plot_label_distribution
from fedlib.report.style import color_of, looks_of, marker_of, model_of, named, styled, title_of
from fedlib.report.tables import label_of

HOSTILE = ("$x$ and $y", "_hidden", "猫", "😀", r"\frac{", "a & <b>", "$\\alpha$")
GROUPS = (  # methods that stand in one figure
    "exclusivefl inclusivefl scalefl_vit depthfl reefl fedavg",
    "fedavg heterofl splitmix depthfl fedepth",
    "heterofl fedavg decoupled scalefl_vit splitmix feddf raffm",
    "local fedavg fedprox scalefl depthfl fedper fedrep fedbabu fedamp pfedgraph fedrod ditto fedpac cafedistill",
)


@pytest.fixture(autouse=True)
def strict():
    """Any warning of matplotlib (a glyph or font that is missing, a layout that does not fit) fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    plt.close("all")


def frame(variants, columns=("cifar100_alpha1",), seeds=(1, 2), exits=4, dataset="cifar10", modes=("frozen", "lora")):
    """As ``tables.collect`` gives: ``variants`` are (variant, method, label)."""
    rows = [
        {"finetune": mode, "variant": v, "method": m, "label": label, "column": c, "seed": s, "dataset": dataset,
         "accuracy": 40.0 + s + i, "ensemble": 42.0 + 2 * s + i, "exits": [40.0 + s + i + e for e in range(exits)]}
        for mode in modes for c in columns for i, (v, m, label) in enumerate(variants) for s in seeds
    ]  # fmt: skip
    return pd.DataFrame(rows)


def inside(figure):
    """Every legend, title and text that is drawn lies on the canvas."""
    figure.draw_without_rendering()
    canvas = figure.bbox
    shown = [*figure.legends, *(ax.get_legend() for ax in figure.axes), *figure.texts]
    shown += [t for ax in figure.axes for t in (ax.title, ax.xaxis.label, ax.yaxis.label, *ax.texts)]
    for part in (p for p in shown if p is not None):
        box = part.get_window_extent()
        if not box.width:
            continue
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= canvas.x1 + 1 and box.y1 <= canvas.y1 + 1, part
    return True


# Machado et al. 2009, severity 1: how linear RGB looks without red, without green, and to most.
SEEN = np.array([
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    np.eye(3),
])  # fmt: skip


def lab(rgb):
    """Linear RGB -> CIE L*a*b*."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    f = np.where((t := xyz / [0.9505, 1, 1.089]) > 0.008856, np.cbrt(t), 7.787 * t + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a, b):
    """The smallest distance of two colours to any eye."""
    linear = [np.where((c := np.array(to_rgb(x))) <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) for x in (a, b)]
    return min(np.linalg.norm(lab(m @ linear[0]) - lab(m @ linear[1])) for m in SEEN)


def test_methods_of_a_figure_can_be_told_apart_by_every_eye():
    assert distance("#ff0000", "#ff0000") == 0 and distance("#000000", "#ffffff") > 90
    for group in map(str.split, GROUPS):
        assert len({marker_of(m) for m in group}) == len(group)
        for a, b in itertools.combinations(group, 2):
            assert distance(color_of(a), color_of(b)) > 17, (a, b)
    twins = {"scalefl": "scalefl_vit", "fedavg_level1": "fedavg"}  # one method, in papers of their own
    looks = {n: (m.color, m.marker) for n, m in METHODS.items() if m.__module__.startswith("fedlib.")}
    assert len(looks) == 25 and all(looks[a] == looks[b] for a, b in twins.items())
    assert len(set(looks.values())) == len(looks) - len(twins)
    for a, b in itertools.combinations(set(looks) - set(twins), 2):
        assert distance(color_of(a), color_of(b)) > 8, (a, b)


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


def test_an_unknown_method_has_a_look_of_its_own_that_stays(monkeypatch):
    assert color_of("mine") == color_of("mine") and color_of("mine") != color_of("yours")
    monkeypatch.setitem(METHODS, "mine", type("Mine", (), {"color": "#123456", "marker": "H"}))
    assert (color_of("mine"), marker_of("mine"), label_of("mine")) == ("#123456", "H", "mine")
    monkeypatch.setitem(METHODS, "better", type("Better", (METHODS["reefl"],), {"label": "Better"}))
    assert label_of("better") == "Better" and color_of("better") != color_of("reefl")  # a look is not inherited


def test_variants_share_the_methods_colour_and_differ_in_dash():
    six = [(f"depthfl_{i}", "depthfl", f"DepthFL, {i}") for i in range(5)] + [("depthfl", "depthfl", "depthfl")]
    looks = looks_of(named(frame([*six, ("reefl", "reefl", "reefl")])))
    dashes = [looks.dashes[n] for n in looks.dashes if n.startswith("DepthFL")]
    assert len(set(dashes)) == 6 and looks.dashes["DepthFL"] == "" == looks.dashes["ReeFL"]
    assert {looks.markers[n] for n in looks.markers if n.startswith("DepthFL")} == {marker_of("depthfl")}
    assert looks.palette["DepthFL"] == to_rgb(color_of("depthfl"))


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
    assert said == "Accuracy of every exit: CIFAR-10 standing in for CIFAR-100, Dirichlet 1"
    assert all(ax.get_window_extent().height > 100 for ax in axes)


def test_several_data_sets_are_never_drawn_onto_one_another():
    both = frame([("reefl", "reefl", "reefl")], columns=("cifar100_alpha1", "cifar100_alpha0.1"), modes=("lora",))
    axes = plots.plot_modes(both)
    ends = [a.get_title().replace("\n", " ").removeprefix("CIFAR-10 standing in for CIFAR-100, ") for a in axes]
    assert ends == ["Dirichlet 1 LoRA", "Dirichlet 0.1 LoRA"]


def test_gains_are_a_panel_per_data_set_and_a_bar_is_its_own_mean():
    methods = [("depthfl", "depthfl", "depthfl"), ("reefl", "reefl", "reefl")]
    table = pd.concat([
        frame(methods, columns=("cifar100_alpha1",)).assign(gain=[1, 3, 2, 4, 5, 7, 6, 8]),
        frame(methods, columns=("femnist",), dataset="omniglot").assign(gain=[11, 13, 12, 14, 15, 17, 16, 18]),
    ])  # fmt: skip
    axes = plots.gain_bars(table)
    heights = [[[p.get_height() for p in bars] for bars in ax.containers] for ax in axes]
    assert heights == [[[2, 6], [3, 7]], [[12, 16], [13, 17]]]  # per panel, method, mode: means over two seeds
    assert [a.get_title().replace("\n", " ") for a in axes] == [
        "CIFAR-10 standing in for CIFAR-100, Dirichlet 1", "Omniglot standing in for FEMNIST"
    ]  # fmt: skip
    assert [len(ax.containers) for ax in axes] == [2, 2] and inside(axes[0].figure)
    bar = axes[0].lines[0].get_ydata()  # one standard deviation of (1, 3) to either side; NaN between bar and caps
    assert np.nanmax(bar) - np.nanmin(bar) == pytest.approx(2 * 2**0.5)


def test_one_seed_has_no_error_bars():
    one, two = (plots.plot_exit_accuracies(frame([("reefl",) * 3], seeds=s, modes=("lora",))) for s in ((1,), (1, 2)))
    assert not one.collections and not one.containers and two.containers
    bars = plots.gain_bars(frame([("reefl",) * 3], seeds=(1,)).assign(gain=1.0))[0]
    assert len(bars.lines) == 1  # the line at zero


def test_exits_stand_at_their_numbers():
    table = frame([("reefl",) * 3, ("depthfl",) * 3], modes=("lora",))
    ax = plots.plot_exit_accuracies(table)
    assert ax.get_xticks().tolist() == [1, 2, 3, 4] and ax.get_legend_handles_labels()[1] == ["ReeFL", "DepthFL"]
    line = next(x for x in ax.lines if len(x.get_xdata()) == 4)
    assert np.abs(line.get_xdata() - [1, 2, 3, 4]).max() < 0.1
    assert line.get_ydata().tolist() == [41.5, 42.5, 43.5, 44.5]  # means over seeds 1 and 2
    assert plots.plot_exit_accuracies(table.assign(accuracy=np.nan)).lines[:] == []


@pytest.mark.parametrize(("rounds", "ticks"), [(range(5, 31, 5), [5, 10, 15, 20, 25, 30]), (range(1, 101), None)])
def test_ticks_of_curves_meet_points(rounds, ticks):
    ax = plots.plot_learning_curves({"reefl, lora": [{"t": t, "accuracy": t} for t in rounds], "mine": []})
    found = ax.get_xticks().tolist()
    assert (
        set(found) <= set(rounds) and found[-1] == rounds[-1] and len(found) <= 8 and (ticks is None or found == ticks)
    )
    assert ax.get_legend_handles_labels()[1] == ["ReeFL, LoRA"]


def test_costs_and_curves_have_the_methods_looks():
    costs = pd.DataFrame({"method": ["reefl"] * 2 + ["depthfl"] * 2, "macs": [1e6, 2e6] * 2, "upload_mib": [1, 2, 3, 4],
                          "accuracy": [10, 20, 30, 40], "finetune": "lora", "column": "femnist"})  # fmt: skip
    adaptive = {"ReeFL": [{"macs": 1e6, "accuracy": 5}, {"macs": 2e6, "accuracy": 9}]}
    for ax in (plots.plot_costs(costs), plots.plot_accuracy_costs(costs), plots.plot_adaptive(adaptive)):
        line = ax.lines[0]
        assert to_rgb(line.get_color()) == to_rgb(color_of("reefl")) and line.get_marker() == marker_of("reefl")
        assert line.get_xdata().tolist() == [1, 2] and inside(ax.figure)
    (panel,) = plots.plot_modes(costs, plots.plot_accuracy_costs, title="Against compute", x="macs")
    assert panel.figure.get_suptitle() == "Against compute: FEMNIST"
    assert plots.plot_adaptive(adaptive, {"ReeFL": "#010203"}).lines[0].get_color() == "#010203"


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
    ax = plots.plot_tradeoff(table, "mib", "upload", "Uploads shrink", levels="clipped", line="")
    boxes = [t.get_window_extent() for t in ax.texts]
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
    boxes = [t.get_window_extent() for t in ax.texts]
    assert all(ax.figure.bbox.x0 <= b.x0 and b.x1 <= ax.figure.bbox.x1 for b in boxes)
    assert len(boxes) == 8 and not any(a.overlaps(b) for a, b in itertools.combinations(boxes, 2))


def test_titles_are_a_readers_words():
    assert title_of("cifar100_alpha1", "cifar10") == "CIFAR-10 standing in for CIFAR-100, Dirichlet 1"
    assert title_of("cifar100_alpha0.1", "cifar100") == title_of("cifar100_alpha0.1") == "CIFAR-100, Dirichlet 0.1"
    assert title_of("cifar100_beta10") == "CIFAR-100, 10 classes a client"
    assert title_of("cifar10_alpha_u0.3", "cifar10") == "CIFAR-10, unbalanced Dirichlet 0.3"
    assert title_of("speech_commands", "fsdd") == "Free Spoken Digits standing in for Speech Commands"
    assert title_of("my_column", "/data/my_birds") == "my birds standing in for my column"
    assert (model_of("bert_base.384"), model_of("my_net")) == ("BERT-base", "my_net")


def test_words_are_drawn_literally():
    assert plain("a$b$") == r"a\$b\$" and plain("_x").lstrip("\u200b") == "_x" and not plain("_x").startswith("_")
    assert "DejaVu Sans" in fonts()
    for other in ("\U000f0000\u4e00", "\ue000"):  # private use: no font has it
        assert re.search(r"U\+[0-9A-F]{4,}", plain(other))
    figure = plt.figure()
    text = figure.text(0, 0.5, plain("$x$ costs $y"))
    figure.draw_without_rendering()
    assert text._preprocess_math(text.get_text()) == ("$x$ costs $y", False)


def test_class_names_of_any_kind_are_drawn_and_listed(tmp_path, monkeypatch):
    counts = np.arange(7 * 5).reshape(5, 7)
    ax = plot_label_distribution(counts, HOSTILE)
    assert len(ax.get_legend().get_texts()) == len(HOSTILE) and inside(ax.figure)
    data = SimpleNamespace(client=lambda i: np.arange(i, 7), images=torch.zeros(7, 1, 4, 4), labels=torch.arange(7),
                           classes=HOSTILE)  # fmt: skip
    axes = plot_clients_examples(data, [0, 5], n=4)  # the second has two images
    assert [ax.has_data() for ax in axes[1]] == [True, True, False, False] and inside(axes[0, 0].figure)
    table = frame([(name, name, name) for name in HOSTILE])
    assert len(plots.plot_modes(table)[0].figure.legends[0].get_texts()) == len(HOSTILE)
    plots.plot_tradeoff(table.assign(mib=1.0), "mib", "MiB", "Costs", line="")
    for name in HOSTILE:
        overlay(np.zeros((4, 4, 3), np.uint8), None, one := plt.subplots()[1], f"{name}: exit 2, block 6")
        one.figure.draw_without_rendering()
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    assert plots.save_figure(ax, "x").stat().st_size > 1000  # it renders, too


def test_label_counts_have_headroom_and_clients_are_spread():
    counts = np.zeros((160, 8), int)
    counts[np.arange(160), np.arange(160) // 20] = 20
    ax = plot_label_distribution(counts, [f"alphabet {i}" for i in range(8)])
    drawn = {tuple(np.round(p.get_facecolor(), 3)) for p in ax.patches if p.get_height() > 0}
    assert len(drawn) == 8 and ax.get_ylim()[1] > 20  # the first 40 clients would show two alphabets
    assert sum(p.get_height() for p in ax.patches) == 40 * 20
    many = plot_label_distribution(counts.repeat(10, 1), [f"class {i}" for i in range(80)])
    assert many.collections[0].get_array().sum() == counts[np.linspace(0, 159, 40).astype(int)].sum() * 10


def test_bars_of_the_engine_are_of_one_thickness_and_their_names_are_read():
    from benchmarks.plots import plot_phases, plot_population, plot_times

    systems = {"W1": ["fedlib", "bare loop, 2 threads", "Flower", "pfl", "BlazeFL"], "W3, LoRA": ["fedlib", "Flower"]}
    index = pd.MultiIndex.from_tuples([(w, s) for w, of in systems.items() for s in of], names=["workload", "system"])
    times = pd.DataFrame({"seconds": 2.0, "seconds_q25": 1.5, "seconds_q75": 2.5}, index=index)
    axes = plot_times(times)
    assert [ax.get_title() for ax in axes] == ["FedAvg (W1)", "ReeFL, LoRA (W3)"] and inside(axes[0].figure)
    thickness = {round(bar.get_window_extent().height) for ax in axes for bar in ax.patches}
    assert len(thickness) == 1 and thickness.pop() > 10
    assert [t.get_text() for t in axes[1].get_yticklabels()] == systems["W3, LoRA"]
    spans = [segment[:, 0].tolist() for segment in axes[1].collections[0].get_segments()]
    assert spans == [[1.5, 2.5]] * 2  # the quartiles

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


def test_the_callers_settings_stay_as_they_were():
    before = dict(matplotlib.rcParams)
    plot_teachers({"running": np.array([1, 2]), "batch": np.array([2, 1])})
    assert dict(matplotlib.rcParams) == before


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
