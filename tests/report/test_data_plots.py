"""Figures of who holds which examples."""

from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from fedlib_lab.papers.reefl.attention_plots import overlay
from fedlib_lab.report import plots
from fedlib_lab.report.data_plots import plot_clients_examples, plot_label_distribution
from tests.helpers.figures import frame, inside

pytestmark = pytest.mark.usefixtures("strict")
HOSTILE = ("$x$ and $y", "_hidden", "猫", "😀", r"\frac{", "a & <b>", "$\\alpha$")


def test_class_names_of_any_kind_are_drawn_and_listed(tmp_path, monkeypatch):
    counts = np.arange(7 * 5).reshape(5, 7)
    ax = plot_label_distribution(counts, HOSTILE)
    assert len(ax.get_legend().get_texts()) == len(HOSTILE) and inside(ax.figure)
    data = SimpleNamespace(client=lambda i: np.arange(i, 7), inputs=torch.zeros(7, 1, 4, 4), labels=torch.arange(7),
                           classes=HOSTILE)  # fmt: skip
    axes = plot_clients_examples(data, [0, 5], n=4)  # the second has two images
    assert [ax.has_data() for ax in axes[1]] == [True, True, False, False] and inside(axes[0, 0].figure)
    table = frame([(name, name, name) for name in HOSTILE])
    assert len(plots.plot_modes(table)[0].get_yticks()) == len(HOSTILE)  # a row each
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
