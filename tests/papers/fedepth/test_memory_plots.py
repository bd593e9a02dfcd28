"""Figures of memory and of stages."""

import numpy as np
import pandas as pd
import pytest

from fedlib_lab.papers.fedepth.memory_plots import plot_memory, plot_parts, plot_similarities, plot_stages


def test_figures(measured):
    axes = plot_stages([3, 2, 1, 0.5, 0.5, 0.5], {"k": 3, "l": 5, "m": 2}, 0.0, "stages", "GB")
    tops = [[round(p.get_y() + p.get_height(), 2) for p in ax.patches] for ax in axes]
    assert tops == [[3, 2, 3, 0.5, 1, 1.5], [3, 5, 1, 1.5, 2, 2.5], [3, 2, 1, 1.5, 2, 0.5]]
    colors = [len({p.get_facecolor() for p in ax.patches}) for ax in axes]
    assert colors == [3, 2, 4]  # stages; of 2 GB the first layer is left out, in grey
    assert max(max(t) for t, ax in zip(tops[:2], axes, strict=False)) <= 5
    drawn = plot_memory(measured, "a net")
    (lines,) = drawn.collections
    assert [segment[0][0] for segment in lines.get_segments()] == pytest.approx(measured.budget_mib.tolist())
    bars = drawn.patches
    assert {round(p.get_width(), 3) for p in bars} >= set(measured.measured_mib.round(3))
    drawn = plot_similarities({"CKA": np.eye(3), "CCA": np.ones((3, 3))}, "alike")
    assert [ax.images[0].get_array().sum() for ax in drawn] == [3, 9]
    parts = pd.DataFrame({"net": ["a", "b"], "parameters": [1.0, 2.0], "activations": [3.0, 2.0]})
    assert [round(p.get_width()) for p in plot_parts(parts, "parts").patches] == [25, 50, 75, 50]
