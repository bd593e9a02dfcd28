"""A table as its paper prints it: a row a method, a column a data set, the best bold, the paper's own in brackets."""

import re

import pandas as pd

from .style import NAMES, data_title, title_of

PLACE, NUMBERS = ["mode", "column", "data"], ["obtained", "seeds", "reported"]
BOLD = r"\*\*(.+?)\*\*"
RANKED = 3  # seeds of a row that is ranked: where seeds differ much, intervals of two miss in a third of cases


class Printed(pd.DataFrame):
    """Cells in a reader's words; what stands in ``**`` is bold in a notebook, in Markdown and in LaTeX. Never cut."""

    def _repr_html_(self) -> str:
        with pd.option_context("display.max_colwidth", None):
            return re.sub(BOLD, r"<b>\1</b>", self.to_html(index=False))

    def to_latex(self, *args: object, **options: object) -> str:
        """Return the LaTeX that a paper pastes (booktabs)."""
        return re.sub(BOLD, r"\\textbf{\1}", super().to_latex(*args, **{"index": False, "escape": True} | options))


def as_printed(table: pd.DataFrame, of: str = "column") -> Printed:
    """Return ``tables.obtained``'s ``table`` as papers print it, the best of every column or method (``of``) bold.

    Of fewer than ``RANKED`` seeds none is, but in a search, whose rows choose (``method``). Columns say which data
    stood in. ``seeds`` is how many the numbers of a row are of, from the fewest to the most. A table with columns of
    its own, or with two rows of one name, keeps a row a number.
    """
    if table.empty:
        return Printed(table)
    titles = [heading(*names, table.data.nunique() > 1) for names in zip(table.column, table.data, strict=True)]
    table = table.assign(column=titles, data=titles)
    mode, enough = ["mode"] if table["mode"].nunique() > 1 else [], (table.seeds >= RANKED) | (of == "method")
    if set(table) - {*PLACE, *NUMBERS, "method"} or table.duplicated([*PLACE, "method"]).any():
        name = next(c for c in table if c == "obtained" or c.startswith("best run's"))
        best = table.groupby(["mode", "column"], sort=False)[name].transform(bold).where(enough, table[name])
        return Printed(table.assign(**{name: best}).drop(columns=["data"] + ["mode"] * (not mode)))
    reported = table.get("reported", pd.Series("–", table.index)).str.split(" ±").str[0]
    numbers = table.obtained.where(reported == "–", table.obtained + " (" + reported + ")")
    numbers = numbers.groupby([table["mode"], table[of]], sort=False).transform(bold).where(enough, numbers)
    rows = [*mode, "method"]
    wide = table.assign(numbers=numbers).pivot(index=rows, columns="column", values="numbers")
    seeds = table.groupby(rows).seeds.agg(lambda n: "–".join(map(str, sorted({n.min(), n.max()}))))
    order = pd.MultiIndex.from_frame(table[rows].drop_duplicates()) if mode else table.method.unique()
    wide = wide[list(dict.fromkeys(titles))].fillna("–").assign(seeds=seeds).loc[order].reset_index()
    return Printed(wide.rename_axis(columns=None))


def bold(numbers: pd.Series) -> pd.Series:
    """Mark the highest cell of one comparison, without what is in brackets; one alone is not marked."""
    values = numbers.str.extract(r"^(-?\d+(?:\.\d+)?)")[0].astype(float)
    best = (values == values.max()) & (values.notna().sum() > 1)
    return numbers.where(~best, numbers.str.replace(r"^([^(]+?)(?= \(|$)", r"**\1**", regex=True))


def heading(column: str, data: str, several: bool = False) -> str:
    """Return a column's title and what stood in for its data, or which data it is of where there are ``several``."""
    (first, *rest), name = column.split(", "), data_title(data)
    own = name == (title := title_of(first)).partition(", ")[0]
    known = re.sub(r"_(alpha|alpha_u|beta)[\d.]+$", "", first) in NAMES["data"]
    said = f" (here {name})" * (not own) if known else f" ({name})" * (several and name != title)
    return ", ".join([title, *rest]) + said
