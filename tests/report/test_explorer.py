"""The explorer offers what runs differ in, and draws a point a run."""

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from fedlib_lab.report.explorer import explore, plot_runs

FRAME = pd.DataFrame(
    {"run": ["a", "b", "c"], "method": ["x", "y", "y"], "lr": [0.1, 0.1, 0.2], "accuracy": [50.0, 60.0, 70.0],
     "exits": [[1], [2], [3]], "seed": [1, 1, 1], "dataset": ["m", "m", "n"]}
)  # fmt: skip


def test_offered_is_what_differs():
    box = explore(FRAME)
    options = {w.description: list(w.options) for w in box.children if hasattr(w, "options")}
    assert options["x"] == ["run", "method", "lr", "accuracy", "dataset"] and options["y"] == ["lr", "accuracy"]
    assert options["colour"][0] is None and "seed" not in options["panel"]
    chosen = {w.description: w.value for w in box.children if hasattr(w, "options")}
    assert chosen == {"x": "method", "y": "accuracy", "colour": None, "panel": "dataset"}
    with pytest.raises(ValueError, match="explore: 1 runs; allowed: two or more"):
        explore(FRAME[:1])


def test_a_point_is_a_run(strict):
    grid = plot_runs(FRAME, "lr", "accuracy", "method", "dataset")
    points = [len(c.get_offsets()) for ax in grid.axes.flat for c in ax.collections]
    assert points == [2, 1] and len(grid.axes.flat) == 2
    plt.close("all")
