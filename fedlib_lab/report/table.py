"""One table of a paper, from its grid to its verdicts: what a table's notebook shows, cell by cell.

``Table(...)`` checks the grid, ``run`` says what it costs and runs what is missing, ``obtained`` stands beside the
printed numbers, ``verdicts`` judge the table's comparisons, ``check`` asserts what holds at every profile.
Read next: ``runs/params.py``, ``report/tables.py``, ``report/verdicts.py``.
"""

from collections.abc import Collection, Mapping
from pathlib import Path

import pandas as pd

from fedlib.data.tasks import CORRELATIONS, task_of
from fedlib.engine.executors import Execution

from ..runs.params import check_apart, load_spec
from . import tables
from .clients import VALUES, as_exits, spread_out
from .plots import plot_learning_curves, plot_modes, save_figure, score_of
from .printed import Printed, as_printed
from .titles import figure_title, leads
from .verdicts import orderings


class Table:
    """``params/<paper>/<name>.yaml`` at a profile: its cells, their stored runs, and what these say.

    ``overrides`` as for ``load_grid``, but none that makes one run of two cells. ``frame`` has a row per cell, as from
    ``tables.collect``. What is saved is called ``outputs/<paper>/{tables,figures}/<name>_<profile>…``.
    """

    def __init__(
        self, paper: str, name: str, profile: str, overrides: Mapping | None = None, folder: Path | None = None
    ):
        self.paper, self.name, self.profile, self.folder = paper, name, profile, folder
        spec = self.spec = load_spec(paper, name)
        self.value, self.thresholds = spec.get("value", "accuracy"), spec.get("thresholds")  # what the table prints
        self.reported = tables.reported_beside(paper, name)
        self.cells = tables.load_cells(paper, name, profile, overrides, folder)
        check_apart(self.cells)
        self.frame = tables.collect(self.cells, folder)
        self.complete = False

    def run(self, execution: Execution = Execution(), run_missing: bool = True) -> pd.DataFrame:
        """Print what the grid costs, run what is missing (if ``run_missing``); runs and seconds by data and status."""
        self.frame = tables.run_cells(self.cells, execution, run_missing, self.folder, self.frame.found)
        self.complete = run_missing
        return self.frame.groupby(["dataset", "status"]).agg(runs=("run", "size"), seconds=("seconds", "sum"))

    def obtained(self) -> pd.DataFrame:
        """Return mean ± SD over seeds of the last round in percent, beside what the paper prints.

        Where the table prints what clients get: mean ± SD over clients, mean over seeds.
        """
        return tables.obtained(tables.with_further(self.frame, self.spec), self.reported, self.value, self.thresholds)

    def printed(self, cost: bool = False) -> Printed:
        """Return :meth:`obtained`, or that at ``cost``, as papers print it; ``printed().to_latex()`` is for yours."""
        return as_printed(self.obtained_at_cost() if cost else self.obtained())

    def obtained_at_cost(self) -> pd.DataFrame:
        """Return :meth:`obtained`, and what a round of each row costs in MACs."""
        return self.obtained().merge(tables.compute_table(self.cells), "left", on=["mode", "column", "method"])

    def verdicts(self) -> pd.DataFrame:
        """Judge whether comparisons (``claims``, or the paper's method against all others) come out as printed."""
        frame, value = self.frame, self.value
        if value in VALUES:
            frame, value = spread_out(frame, value, self.thresholds), "clients"
        return orderings(frame, self.reported, tables.load_claims(self.paper, self.name), value)

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(c.variant for c in self.cells))

    def curves(
        self, column: str, variants: Collection[str] | None = None, finetune: Collection[str] | None = None
    ) -> dict[str, list[dict]]:
        """Return what the table prints by round in ``column``: ``tables.mean_curves`` of ``variants`` in ``finetune``.

        None is all variants, or all modes. Of tables that print every exit, or where examples leave, the mean exit.
        """
        chosen = [c for c in self.cells if variants is None or c.variant in variants]
        chosen = [c for c in chosen if finetune is None or c.finetune in finetune]
        return tables.mean_curves(chosen, column, "clients" if self.value in VALUES else self.value, self.folder)

    def plot_exits(self):
        """Draw and save the accuracy of every exit, a panel per fine-tuning mode, on the column that has most runs.

        The title judges what the table prints: the mean exit, every exit, or where examples leave.
        """
        own = self.value in VALUES
        done = self.frame.dropna(subset=["clients" if own else self.value])
        most = (done if len(done) else self.frame).groupby("column", sort=False).size().idxmax()
        frame = self.frame[self.frame.column == most]
        rows = spread_out(frame, self.value, self.thresholds) if own else frame
        if self.value == "client_exits":
            rows = rows.assign(column=rows.column.str.rpartition(", ")[2]).drop(columns="dataset")
        said = "Leaving early, " * (self.value == "left") + leads(rows, self.paper, "clients" if own else self.value)
        return self.save_figure(plot_modes(as_exits(frame) if own else frame, title=said, hero=self.paper), "exits")

    def plot_curves(self, column: str, suffix: str = "curves", variants: Collection[str] | None = None):
        """Draw and save what the table prints by round in ``column``, of ``variants`` (None: all); who leads is said.

        None where no run is stored.
        """
        rows = self.frame[(self.frame.column == column) & self.frame.variant.isin(variants or self.variants)]
        value = "clients" if self.value in VALUES else self.value
        if rows[value].notna().any():
            methods, title = {c.label: c.method for c in self.cells}, figure_title(leads(rows, self.paper, value), rows)
            curves, score = self.curves(column, variants), score_of(rows.dataset.unique())
            axes = plot_learning_curves(curves, methods, title=title, score=score, hero=self.paper)
            return self.save_figure(axes, suffix)

    def save(self, frame: pd.DataFrame, suffix: str = "") -> pd.DataFrame:
        """Write ``frame`` as the table's own, or as its part ``suffix`` (``verdicts``), and return it."""
        tables.save_table(frame, self._named(suffix))
        return frame

    def save_figure(self, axes, suffix: str):
        """Write the figure of ``axes``, if there is one, as the table's part ``suffix``; return them."""
        if axes is not None:
            save_figure(axes, self._named(suffix))
        return axes

    def _named(self, suffix: str) -> str:
        return f"{self.paper}/{self.name}_{self.profile}{'_' if suffix else ''}{suffix}"

    def check(self) -> str:
        """Assert structure and exact arithmetic; one line on what was looked at."""
        done = self.frame.dropna(subset=["accuracy"])
        assert not self.frame.duplicated(["finetune", "variant", "column", "seed"]).any(), "a cell stands twice"
        allowed = {"finished", "diverged"} | (set() if self.complete else {"missing"})
        assert set(self.frame.status) <= allowed, f"runs are {', '.join(sorted(set(self.frame.status) - allowed))}"
        for row in done.itertuples():
            assert abs(row.accuracy - sum(row.exits) / len(row.exits)) < 1e-3, f"{row.run}: not the mean of its exits"
            least = -100 if task_of(row.dataset).metric in CORRELATIONS else 0
            percent = [row.accuracy] if pd.isna(row.ensemble) else [row.accuracy, row.ensemble]  # of one model
            assert all(least <= x <= 100 for x in percent), f"{row.run}: {percent} are no percentages"
        return f"{len(done)} of {len(self.frame)} runs: every accuracy is the mean of its exits"
