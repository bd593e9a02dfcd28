"""Studies of one factor at a time: a grid's columns are called ``<factor>_<level>``, two methods are compared at each.

A data set's name before the factor (``cifar100_rounds_400``) only tells columns apart: the run says which data it saw.
Accuracies of a validation split and of the test set never stand in one table or figure (``ValueError``).
Read next: ``verdicts.judged``, the rule behind every verdict; ``params/reefl/why.yaml``, a grid of this kind.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ...report.plots import ACCURACY, WIDE, lines
from ...report.style import NAMES, data_title, finish, looks_of, named, panels, share_legend, styled
from ...report.tables import collect, label_of, mean_and_sd
from ...report.titles import figure_title
from ...report.verdicts import differences, judged, measured, paired
from ...runs.params import Cell

FACTORS = NAMES["factors"]  # as an axis says them
COLUMNS = ["factor", "level", "data", "mode", "difference", "interval", "seeds", "ahead"]
ACCURACY_OF = {"test": ACCURACY, "validation": "held-out accuracy (%)"}


def factor_of(column: str) -> tuple[str, str]:
    """Return (factor, level) of a column; ``ValueError`` where its name says neither."""
    if (found := re.fullmatch(rf"(?:\w+?_)?({'|'.join(FACTORS)})_(.+)", column)) is None:
        raise ValueError(f"column {column!r} names no factor and level; factors: {', '.join(FACTORS)}")
    return found[1], found[2]


def factor_frame(cells: Sequence[Cell], folder: Path | None = None) -> pd.DataFrame:
    """Collect the runs with ``factor``, ``level`` and what accuracies are of (``split``: test or validation)."""
    factor, level = zip(*(factor_of(c.column) for c in cells), strict=True) if cells else ((), ())
    return collect(cells, folder).assign(factor=factor, level=level, split=[c.experiment.evaluate_on for c in cells])


def accuracy_differences(frame: pd.DataFrame, one: str, other: str) -> pd.DataFrame:
    """Return a row per run of ``one`` whose seed ``other`` has too: the ``difference`` of accuracies in points."""
    keys = ["factor", "level", "column", "dataset", "finetune", "split", "seed"]
    wide = frame.dropna(subset=["accuracy"]).pivot_table(index=keys, columns="variant", values="accuracy", sort=False)
    wide = wide.reindex(columns=[one, other]).dropna().reset_index()
    return wide.assign(difference=wide[one] - wide[other])


def answers(frame: pd.DataFrame, one: str, other: str) -> pd.DataFrame:
    """Return a row per factor, level and data set: both accuracies, their difference ± SD over seeds, is ``one`` ahead?

    ``interval`` and ``ahead`` are the claims' on "``one`` is more accurate" (``verdicts.py``).
    """
    _one_split(frame)
    rows, keys = [], ["factor", "column", "finetune", "dataset", "level"]
    done = frame[frame.variant.isin([one, other])].dropna(subset=["accuracy"])
    for (factor, _, mode, data, level), group in done.groupby(keys, sort=False):
        by = [measured(group[group.variant == m].to_dict("records"), "accuracy") for m in (one, other)]
        if not (pairs := paired(*by)):
            continue
        found = judged(differences([*pairs.values()])[0])
        interval = f"{found['low']:.2f} to {found['high']:.2f}" if len(pairs) > 1 else "–"
        a, b = (pd.Series([float(runs[seed].points[0]) for seed in pairs]) for runs in by)
        said = [mean_and_sd(x.mean(), x.std()) for x in (a, b, a - b)]
        rows.append([factor, level, data_title(data), label_of(mode), *said, interval, len(pairs), found["verdict"]])
    return pd.DataFrame(rows, columns=[*COLUMNS[:4], label_of(one), label_of(other), *COLUMNS[4:]])


def best_levels(frame: pd.DataFrame) -> dict[str, str]:
    """Return per variant the level of the highest mean accuracy over seeds; {} where a level of it is not stored.

    Meant for a validation split: ``ValueError`` if a run of ``frame`` was evaluated on the test set.
    """
    if (frame.split != "validation").any():
        raise ValueError("a level is chosen on validation examples, never on the test set")
    best = {}
    for variant, group in frame.groupby("variant", sort=False):
        means = group.groupby("level", sort=False).accuracy.mean()
        if means.notna().all():
            best[variant] = str(means.idxmax())
    return best


@styled
def plot_factor(frame: pd.DataFrame, factor: str, one: str, other: str):
    """Plot accuracy of both methods at every level of ``factor`` (upper row), and ``one`` minus ``other`` (lower row).

    A column per data set; mean over seeds, bars ± SD. The title says the difference at the first and the last level.
    Returns the panels' Axes, upper ones first.
    """
    rows = frame[(frame.factor == factor) & frame.accuracy.notna()]
    split, levels = _one_split(rows), list(dict.fromkeys(frame[frame.factor == factor].level))
    sets, gaps = list(dict.fromkeys(rows.dataset)) or [""], accuracy_differences(rows, one, other)
    means = gaps[gaps.dataset == sets[0]].groupby("level").difference.mean()
    ends = [x for x in levels if x in means.index]
    said = ", ".join(f"{means[x]:+.1f} at {x}".replace("-", "−", 1) for x in dict.fromkeys(ends[:1] + ends[-1:]))
    title = f"{FACTORS[factor].capitalize()}: {label_of(one)} minus {label_of(other)} is {said or 'not stored'}"
    wide = min(6.4, WIDE / len(sets))
    names = [*map(data_title, sets), *[""] * len(sets)]
    axes = panels(names, figure_title(title, rows.drop(columns="column")), (wide, 2.4), columns=len(sets), sharey=False)
    for data, upper, lower in zip(sets, axes[: len(sets)], axes[len(sets) :], strict=True):
        own = named(rows[rows.dataset == data]).assign(at=lambda part: part.level.map(levels.index))
        bars = lines(own, "at", "accuracy", upper, looks_of(own))
        _gaps(gaps[gaps.dataset == data], levels, lower)
        first = data == sets[0]
        finish(upper, "", ACCURACY_OF[split] if first else "")
        finish(lower, FACTORS[factor] + bars, f"{label_of(one)} – {label_of(other)} (points)" if first else "")
        for ax in (upper, lower):
            ax.set_xlim(-0.4, len(levels) - 0.6)
            turned = 20 if max(map(len, levels), default=0) > 8 else 0
            ax.set_xticks(range(len(levels)), levels if ax is lower else [""] * len(levels), rotation=turned)
    share_legend(axes)
    return axes


def _gaps(by_seed: pd.DataFrame, levels: Sequence[str], ax) -> None:
    """Plot every seed's difference as a dot, their mean as a line."""
    ax.axhline(0, color="black", linewidth=0.8)
    mean = by_seed.groupby("level").difference.mean().reindex(levels)
    ax.plot(range(len(levels)), mean, color="#444444", linewidth=1.2)
    at = by_seed.level.map({x: i for i, x in enumerate(levels)})
    ax.plot(at, by_seed.difference, "o", color="#444444", alpha=0.55, markersize=5)


def _one_split(frame: pd.DataFrame) -> str:
    """Return the split that the accuracies are of; ``ValueError`` if they are of both."""
    splits = sorted(set(frame.split)) or ["test"]
    if len(splits) > 1:
        raise ValueError("accuracies of the validation split and of the test set do not stand side by side")
    return splits[0]
