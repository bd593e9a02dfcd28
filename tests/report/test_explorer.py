"""The explorer offers what runs differ in, and draws a point a run."""

import os

import matplotlib.pyplot as plt
import pandas as pd
import pytest

from fedlib import Experiment, run
from fedlib_lab.report.explorer import LiveCurve, explore, plot_runs

FRAME = pd.DataFrame(
    {"run": ["a", "b", "c"], "method": ["x", "y", "y"], "lr": [0.1, 0.1, 0.2], "accuracy": [50.0, 60.0, 70.0],
     "exits": [[1], [2], [3]], "seed": [1, 1, 1], "dataset": ["m", "m", "n"]}
)  # fmt: skip


def test_offered_is_what_differs():
    box = explore(FRAME)
    options = {w.description: list(w.options) for w in box.children if hasattr(w, "options")}
    assert options["x"] == ["method", "run", "lr", "accuracy", "dataset"] and options["y"] == ["accuracy", "lr"]
    assert options["colour"][0] is None and options["panel"][:2] == ["dataset", None] and "seed" not in options["panel"]
    chosen = {w.description: w.value for w in box.children if hasattr(w, "options")}
    assert chosen == {"x": "method", "y": "accuracy", "colour": None, "panel": "dataset"}
    with pytest.raises(ValueError, match="explore: 1 runs; allowed: two or more"):
        explore(FRAME[:1])


def test_a_point_is_a_run(strict):
    grid = plot_runs(FRAME, "lr", "accuracy", "method", "dataset")
    points = [len(c.get_offsets()) for ax in grid.axes.flat for c in ax.collections]
    assert points == [2, 1] and len(grid.axes.flat) == 2
    plt.close("all")


CODE = """
import sys
from fedlib import Experiment, run
from fedlib_lab.report.explorer import LiveCurve
e = Experiment(method="depthfl", backbone="vit_digits", pretrained=False, finetune="frozen", augment="none", num_train=80,
               num_test=40, num_clients=4, clients_per_round=2, rounds=3, evaluate_every=1)
done = run(e, folder={folder!r}, callbacks=[LiveCurve()], progress=False)
"""


def test_a_curve_grows_in_a_kernel_that_somebody_watches(tmp_path):
    """A display, then an update of it for every further look."""
    manager = pytest.importorskip("jupyter_client.manager")
    kernel, client = manager.start_new_kernel(kernel_name="python3", env=dict(os.environ, MPLBACKEND="agg"))
    try:
        seen = []
        reply = client.execute_interactive(CODE.format(folder=str(tmp_path)), timeout=240, output_hook=seen.append)
        assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        kernel.shutdown_kernel(now=True)
    pictures = [m["msg_type"] for m in seen if "image/png" in m["content"].get("data", {})]
    assert pictures == ["display_data", "update_display_data", "update_display_data"]


def test_nothing_is_drawn_where_nobody_watches(tmp_path, monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda *_, **__: pytest.fail("drawn"))
    e = Experiment(
        method="depthfl",
        backbone="vit_digits",
        pretrained=False,
        num_train=40,
        num_test=20,
        num_clients=2,
        clients_per_round=1,
        rounds=1,
    )
    run(e, folder=tmp_path, callbacks=[LiveCurve()], progress=False)
