"""A longer trial of a table: do its methods keep their order where training goes on?

A grid called ``horizon`` extends a table and changes its rounds; at ``smoke`` and ``paper`` both are the same runs.
Read next: ``report/table.py``, ``params/fedepth/horizon.yaml``.
"""

from itertools import combinations

import pandas as pd

from .plots import plot_learning_curves
from .style import panels, score_of, share_legend, styled, title_of
from .table import Table
from .tables import label_of

LENGTHS = ["shorter", "longer"]
COLUMNS = ["column", "difference", *LENGTHS, "order"]


def order_kept(shorter: Table, longer: Table) -> pd.DataFrame:
    """One row per data column and pair of variants: their difference in points after each of the two trainings.

    Means over the seeds that both tables have of both variants; a pair without such a seed has no row. ``order`` says
    whether the difference keeps its sign.
    """
    keys = ["finetune", "column", "variant", "seed"]
    before = shorter.frame[[*keys, longer.value]].rename(columns={longer.value: "shorter"})
    both = longer.frame.rename(columns={longer.value: "longer"}).merge(before, on=keys).dropna(subset=LENGTHS)
    rows = []
    for (_, column), group in both.groupby(["finetune", "column"], sort=False):
        labels = dict(zip(group.variant, group.label.map(label_of), strict=True))
        wide = group.pivot(index="seed", columns="variant", values=LENGTHS)
        for one, other in combinations(labels, 2):
            short, long = ((wide[n][one] - wide[n][other]).mean() for n in LENGTHS)
            if pd.notna(short):
                order = "kept" if short * long > 0 else "changed"
                rows.append([column, f"{labels[one]} – {labels[other]}", round(short, 2), round(long, 2), order])
    return pd.DataFrame(rows, columns=COLUMNS)


@styled
def plot_horizons(shorter: Table, longer: Table):
    """Learning curves of the longer table's variants and modes: a row per column, on the left the shorter training's.

    Returns the panels' Axes.
    """
    drawn, methods = [], {c.label: c.method for c in longer.cells}
    for column, data in dict(zip(longer.frame.column, longer.frame.dataset, strict=True)).items():
        for table in (shorter, longer):
            rounds = max((c.experiment.rounds for c in table.cells if c.column == column), default=0)
            curves = table.curves(column, longer.variants, {c.finetune for c in longer.cells})
            drawn.append((f"{title_of(column, data)}, {rounds} rounds", curves, score_of([data])))
    axes = panels([title for title, _, _ in drawn], "A longer trial", (4.2, 2.9), columns=2)
    for ax, (_, curves, score) in zip(axes, drawn, strict=True):
        plot_learning_curves(curves, methods, ax, ax.get_title(), score)
    share_legend(axes)
    return axes
