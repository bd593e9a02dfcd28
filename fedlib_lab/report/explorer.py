"""Stored runs to look through: choose what stands on the axes, in colour and side by side (ipywidgets)."""

import sys
from typing import Any

import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.engine.rounds import Finished

from ..runs.callbacks import Callback
from ..runs.progress import Terminal
from .frames import runs_frame
from .plots import plot_learning_curves

MOST = 12  # values of a colour, or panels


def explore(frame: pd.DataFrame | None = None) -> Any:
    """Return a widget over ``frame`` (None: ``runs_frame()`` of all stored runs) that draws a point per run.

    Offered are columns in which runs differ; for colour and panels, those of at most ``MOST`` values. ``ValueError``
    where there are fewer than two runs.
    """
    from ipywidgets import interactive

    frame = runs_frame() if frame is None else frame
    frame = frame.loc[:, [not frame[c].map(lambda v: isinstance(v, (list, dict))).any() for c in frame]]
    axes = [c for c in frame if frame[c].nunique() > 1]
    if len(frame) < 2 or not axes:
        raise ValueError(f"explore: {len(frame)} runs; allowed: two or more that differ")
    numbers = [c for c in axes if pd.api.types.is_numeric_dtype(frame[c])]
    groups = [None, *(c for c in axes if frame[c].nunique() <= MOST)]
    draw = lambda x, y, colour, panel: plot_runs(frame, x, y, colour, panel)  # noqa: E731
    first = lambda name, of: sorted(of, key=lambda c: c != name)  # noqa: E731  what is chosen at the start
    colour, panel = first("finetune", groups), first("dataset", groups)
    return interactive(draw, x=first("method", axes), y=first("accuracy", numbers), colour=colour, panel=panel)


class LiveCurve(Callback):
    """The accuracy, a curve that grows in a notebook while a run trains: ``run(e, callbacks=[LiveCurve()])``.

    Where nobody watches, under papermill or in a shell, nothing is drawn.
    """

    def begin(self, e: Experiment, t: int, metrics: Any) -> None:
        self.name, self.lines, self.shown = e.slug, list(metrics), None
        self.watched = type(sys.stderr).__module__.startswith("ipykernel") and Terminal.of_this_kernel() is None

    def round(self, r: Finished) -> None:
        from IPython.display import display
        from matplotlib.pyplot import close

        if r.metrics is None or not self.watched:
            return
        self.lines.append({"t": r.t, **r.metrics})
        figure = plot_learning_curves({self.name: self.lines}, title=f"{self.name}: round {r.t}").figure
        self.shown = display(figure, display_id=True) if self.shown is None else self.shown.update(figure) or self.shown
        close(figure)


def plot_runs(frame: pd.DataFrame, x: str, y: str, colour: str | None = None, panel: str | None = None) -> Any:
    """Draw a point per run, ``y`` over ``x``, a colour and a panel per value of two others; return seaborn's grid."""
    import seaborn

    shown = frame.dropna(subset=[x, y])
    colours = shown[colour].astype(str) if colour is not None else None
    wrap = {"col": panel, "col_wrap": 3 if panel else None, "palette": "tab20" if colour else None}
    grid = seaborn.relplot(shown, x=x, y=y, hue=colours, height=3, aspect=1.4, **wrap)
    return grid.tick_params(axis="x", rotation=0 if pd.api.types.is_numeric_dtype(shown[x]) else 90, labelsize=8)
