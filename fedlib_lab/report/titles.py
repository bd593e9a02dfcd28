"""What a figure's title says: the message with its numbers, and below it data, mode, net and seeds; all of the runs.

Nothing in a title is typed: a run more, and it says so. Read next: ``report/plots.py``.
"""

import re
from collections.abc import Iterable

import pandas as pd

from .style import NAMES, data_title, model_of, named, title_of
from .tables import label_of

LEVEL = 0.05  # points: what rounds to 0.0 is level


def told(message: str, frame: pd.DataFrame) -> str:
    """The title of a figure that draws the runs of ``frame`` (rows as from ``tables.collect``)."""
    return f"{message}\n{about(frame)}"


def about(frame: pd.DataFrame) -> str:
    """``CIFAR-10, Dirichlet 1, frozen, deit_micro, 3 seeds``: what of it the rows have, of those with an accuracy."""
    done = frame[frame.accuracy.notna()] if "accuracy" in frame and frame.accuracy.notna().any() else frame
    sets = list(done.get("dataset", [None] * len(done)))
    columns = done.get("column", sets)
    data = listed(map(_data, map(str, columns), sets), "data sets")
    modes = listed((label_of(m) for m in done.get("finetune", []) if m != "full"), "modes")
    nets = listed(map(model_of, done.get("backbone", [])), "nets")
    return ", ".join(p for p in (data, modes.replace("Frozen", "frozen"), nets, seeds_of(done)) if p)


def _data(column: str, ran: str | None) -> str:
    """The data in words; a column that is called by something else (rounds, a budget) leaves the data set's name."""
    known = re.sub(r"_(alpha|alpha_u|beta)[\d.]+$", "", column) in NAMES["data"] or not isinstance(ran, str)
    return title_of(column, ran) if known else data_title(ran)


def seeds_of(frame: pd.DataFrame) -> str:
    """``3 seeds``; where methods have fewer, ``1–3 seeds``; of rows of runs, or with how many (``seeds``)."""
    if not {"seed", "seeds"} & set(frame) or frame.empty:
        return ""
    by = [c for c in ("finetune", "column", "variant") if c in frame]
    counts = frame.seeds if "seeds" in frame else frame.groupby(by).seed.nunique() if by else frame[["seed"]].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"{low}–{high} seeds" if low < high else f"{high} seed{'s' * (high > 1)}"


def listed(names: Iterable[str], many: str, most: int = 2) -> str:
    """``a and b``; of more than ``most`` names how many they are."""
    names = list(dict.fromkeys(names))
    return " and ".join(names) if len(names) <= most else f"{len(names)} {many}"


def leads(frame: pd.DataFrame, hero: str = "", value: str = "accuracy") -> str:
    """``ReeFL leads DepthFL by 2.4 points``: the method ``hero`` (none: the best) and its best rival, means of rows.

    Of several data columns or modes each is told, up to three; a rival is another method, if there is one.
    """
    by = [c for c in ("column", "finetune") if c in frame and frame[c].nunique() > 1]
    done = frame.dropna(subset=[value])
    if by and len(done):
        parts = [(_place(g, by), leads(g, hero, value)) for _, g in done.groupby(by, sort=False)][:3]
        return "; ".join(f"{place}: {said}" for place, said in parts)
    rows = named(done) if "series" not in done else done
    means = rows.groupby(["series", "method"], sort=False)[value].mean().sort_values(ascending=False).reset_index()
    if means.empty:
        return "No run is stored yet"
    own = means[means.method == hero]
    first = next(means.loc[i] for part in (own[own.series == label_of(hero)], own, means) for i in part.index[:1])
    rivals = means[means.method != first.method]
    rivals = rivals if len(rivals) else means[means.series != first.series]
    if rivals.empty:
        return f"{first.series} reaches {first[value]:.1f}"
    return apart(first.series, rivals.iloc[0].series, first[value] - rivals.iloc[0][value])


def apart(one: str, other: str, difference: float) -> str:
    """A difference in points as a sentence."""
    if abs(difference) < LEVEL:
        return f"{one} is level with {other}"
    return f"{one} {'leads' if difference > 0 else 'trails'} {other} by {abs(difference):.1f} points"


def _place(group: pd.DataFrame, by: Iterable[str]) -> str:
    data = group.dataset.iloc[0] if "dataset" in group else None
    words = {"column": title_of(str(group.column.iloc[0]), data) if "column" in group else ""}
    return ", ".join(words.get(c) or label_of(group[c].iloc[0]) for c in by)
