"""A longer trial of a table: do its methods keep their order where training goes on?

A grid called ``horizon`` extends a table and changes its rounds; at ``smoke`` and ``paper`` both are the same runs.
Read next: ``report/table.py``, ``params/fedepth/horizon.yaml``.
"""

import re
from itertools import combinations

import pandas as pd

from .plots import curves_frame, plot_series
from .style import looks_of, panels, score_of, share_legend, styled, title_of
from .table import Table
from .tables import label_of
from .titles import figure_title, leads

LENGTHS = ["shorter", "longer"]


def order_kept(shorter: Table, longer: Table) -> pd.DataFrame:
    """Return a row per data column and pair of variants: their difference in points after each of the two trainings.

    Means over the seeds that both tables have of both variants; a pair without such a seed has no row. ``order`` says
    whether the difference keeps its sign.
    """
    keys, rows = ["finetune", "column", "variant", "seed"], []
    before = shorter.frame[[*keys, longer.value]].rename(columns={longer.value: "shorter"})
    both = longer.frame.rename(columns={longer.value: "longer"}).merge(before, on=keys).dropna(subset=LENGTHS)
    for (_, column), group in both.groupby(["finetune", "column"], sort=False):
        labels = dict(zip(group.variant, group.label.map(label_of), strict=True))
        wide = group.pivot(index="seed", columns="variant", values=LENGTHS)
        for one, other in combinations(labels, 2):
            short, long = ((wide[n][one] - wide[n][other]).mean() for n in LENGTHS)
            if pd.notna(short):
                order = "kept" if short * long > 0 else "changed"
                rows.append([column, f"{labels[one]} – {labels[other]}", round(short, 2), round(long, 2), order])
    return pd.DataFrame(rows, columns=["column", "difference", *LENGTHS, "order"])


@styled
def plot_horizons(shorter: Table, longer: Table):
    """Draw a panel per data column: the longer table's variants and modes by round, and the shorter one's, pale.

    The title says who leads after each. Return the panels' Axes; None, and say so, where no longer run is stored.
    """
    if (rows := longer.frame.dropna(subset=[longer.value])).empty:
        print("no longer run is stored yet")
        return None
    shown = rows.drop_duplicates("column")[["column", "dataset"]].values
    wide, methods = 4.2 if len(shown) > 1 else 6.4, {c.label: c.method for c in longer.cells}
    said = [f"{title_of(*names)}\n{_first(rows, longer, names[0])}" for names in shown] if len(shown) > 1 else [""]
    axes = panels(said, figure_title(_came_out(shorter, longer, rows), rows), (wide, 3.1), columns=2, sharey=False)
    for ax, (column, data) in zip(axes, shown, strict=True):
        of = (column, set(rows[rows.column == column].variant), set(rows.finetune))
        long, short = (curves_frame(table.curves(*of), "t", methods) for table in (longer, shorter))
        looks = looks_of(pd.concat([long, short]))
        plot_series(long, "t", "accuracy", "round", score_of([data]), ax.get_title(), ax, looks=looks)
        for name, part in short.groupby("series", sort=False):
            ax.plot(part.t, part.accuracy, color=looks.palette[name], alpha=0.4, linewidth=4, zorder=0)
    share_legend(axes)
    return axes


def _came_out(shorter: Table, longer: Table, done: pd.DataFrame) -> str:
    """Say who leads in the first data column after the longer training, and who of the same led after the shorter."""
    rounds = [max((c.experiment.rounds for c in table.cells), default=0) for table in (shorter, longer)]
    keys, column = ["finetune", "column", "variant"], done.column.iloc[0]
    same = shorter.frame.merge(done[keys].drop_duplicates(), on=keys)
    after, before = (_first(rows, longer, column) for rows in (done, same))
    if before.split()[0] == after.split()[0]:
        before = re.sub(r"^.*?(?=leads|trails|is (?:level|\d))", "it ", before)
    where = f"{title_of(*done[['column', 'dataset']].values[0])}: after" if done.column.nunique() > 1 else "After"
    return f"{where} {rounds[1]:,} rounds {after}; after {rounds[0]:,} (pale) {before}"


def _first(frame: pd.DataFrame, longer: Table, column: str) -> str:
    return leads(frame[frame.column == column], longer.paper, longer.value)
