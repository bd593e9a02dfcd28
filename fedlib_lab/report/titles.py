"""What a figure's title says: the message with its numbers, and below it data, mode, net and seeds; all of the runs.

Nothing in a title is typed: a run more, and it says so. Read next: ``report/plots.py``.
"""

import re
from collections.abc import Iterable

import numpy as np
import pandas as pd

from .style import NAMES, data_title, model_of, named, title_of
from .tables import label_of
from .verdicts import BySeed, Measured, differences, judged, measured, not_ranked, paired, reason

LEVEL = 0.05  # points: what rounds to 0.0 is level


def figure_title(message: str, frame: pd.DataFrame) -> str:
    """Return the title of a figure that draws the runs of ``frame`` (rows as from ``tables.collect``)."""
    return f"{message}\n{about(frame)}"


def about(frame: pd.DataFrame) -> str:
    """Say ``CIFAR-10, Dirichlet 1, frozen, deit_micro, 3 seeds``: what of it the rows with an accuracy have."""
    done = frame[frame.accuracy.notna()] if "accuracy" in frame and frame.accuracy.notna().any() else frame
    sets = list(done.get("dataset", [None] * len(done)))
    data = listed(map(_data, map(str, done.get("column", sets if "dataset" in done else [])), sets), "data sets")
    modes = listed((label_of(m) for m in done.get("finetune", []) if m != "full"), "modes")
    nets = listed(map(model_of, done.get("backbone", [])), "nets")
    return ", ".join(p for p in (data, modes.replace("Frozen", "frozen"), nets, seeds_of(done)) if p)


def _data(column: str, ran: str | None) -> str:
    """Name the data in words; a column called by something else (rounds, a budget) leaves the data set's name."""
    known = re.sub(r"_(alpha|alpha_u|beta)[\d.]+$", "", column) in NAMES["data"] or not isinstance(ran, str)
    return title_of(column, ran) if known else data_title(ran)


def seeds_of(frame: pd.DataFrame) -> str:
    """Say ``3 seeds``, or ``1–3 seeds`` and what is compared; a row is of a run, or says how many (``seeds``)."""
    if not {"seed", "seeds"} & set(frame) or frame.empty:
        return ""
    by = [c for c in ("finetune", "column", "variant") if c in frame]
    counts = frame.seeds if "seeds" in frame else frame.groupby(by).seed.nunique() if by else frame[["seed"]].nunique()
    low, high = int(counts.min()), int(counts.max())
    return f"{low}–{high} seeds (compared: common ones)" if low < high else f"{high} seed{'s' * (high > 1)}"


def listed(names: Iterable[str], many: str, most: int = 2) -> str:
    """Join names as ``a and b``; for more than ``most``, say how many they are."""
    names = list(dict.fromkeys(names))
    return " and ".join(names) if len(names) <= most else f"{len(names)} {many}"


def leads(frame: pd.DataFrame, hero: str = "", value: str = "accuracy") -> str:
    """Say ``ReeFL leads DepthFL by 2.4 points``: method ``hero`` (none: the best) and its best rival, means of rows.

    ``leads`` stands only where it holds against every rival (``verdicts.py``), ``trails`` where that is as sure; else
    the verdict is said, why a run does not count, or that seeds are too few. Of several data columns or modes each is
    told, up to three; a rival is another method, if there is one.
    """
    by = [c for c in ("column", "finetune") if c in frame and frame[c].nunique() > 1]
    if (done := frame.dropna(subset=[value])).empty:
        return "No run is stored yet"
    groups = [*done.groupby(by, sort=False)][:3] if by else [("", done)]
    found = {_place(g, by): _compared(g, hero, value) for _, g in groups}
    pairs = {(one, other) for one, other, _, _ in found.values()}
    if len(found) == 1 or len(pairs) > 1 or not max(pairs)[1]:
        return "; ".join(f"{place}: " * bool(place) + apart(*said) for place, said in found.items())
    words = {"holds": "leads", "contradicted": "trails", "not testable": "one seed"}
    said = [f" ({words.get(v, v)})" for *_, v in found.values()]
    said = said if len({*said}) > 1 else [""] * (len(said) - 1) + said[:1]  # once, where it is the same of all
    ends = [f"{place} {found[place][2]:+.1f}".replace("-", "−") + v for place, v in zip(found, said, strict=True)]
    return f"{' against '.join(max(pairs))}, in points: {', '.join(ends)}"


def _compared(done: pd.DataFrame, hero: str, value: str) -> tuple[str, str, float, str]:
    """Return who is spoken of, its best rival ("" if alone), by how many points it is ahead, and the verdict."""
    rows = (named(done) if "series" not in done else done).assign(seed=done.get("seed", 1))
    series = {name: group for name, group in rows.groupby(["series", "method"], sort=False)}
    best = sorted(series, key=lambda name: -series[name][value].mean())
    first = ([name for name in best if name == (label_of(hero), hero)] or [n for n in best if n[1] == hero] or best)[0]
    rivals = [name for name in best if name[1] != first[1]] or [name for name in best if name != first]
    if not rivals:
        return first[0], "", series[first][value].mean(), ""
    runs = {name: _by_seed(series[name], value) for name in (first, *rivals)}
    found = [differences([*paired(runs[first], runs[name]).values()])[0] for name in rivals]
    verdicts = [reason(d) or not_ranked([len(d.points)]) or judged(d)["verdict"] for d in found]
    verdict = verdicts[0] if verdicts[0] != "holds" else next((v for v in verdicts if v != "holds"), "holds")
    apart_by = found[0].mean if len(found[0].points) else series[first][value].mean() - series[rivals[0]][value].mean()
    return first[0], rivals[0][0], apart_by, verdict


def _by_seed(rows: pd.DataFrame, value: str) -> BySeed:
    """Return by seed the mean of its ``rows``, of which there is one where no exits are told apart."""
    out = {}
    for seed, own in rows.filter(items=["seed", "found", value]).groupby("seed"):
        first, *more = measured(own.assign(seed=range(len(own))).to_dict("records"), value).values()
        points, variances = (np.mean([getattr(m, of) for m in (first, *more)], 0) for of in ("points", "variances"))
        out[seed] = Measured(points, variances, None, first.flags) if more else first
    return out


def apart(one: str, other: str, difference: float, verdict: str) -> str:
    """Put a difference in points into a sentence that says no more than its ``verdict``; without ``other``, a level."""
    if not other:
        return f"{one} reaches {difference:.1f}"
    if verdict in ("holds", "contradicted"):
        return f"{one} {'leads' if verdict == 'holds' else 'trails'} {other} by {abs(difference):.1f} points"
    if abs(difference) < LEVEL:
        return f"{one} is level with {other}"
    side, verdict = "above" if difference > 0 else "below", "one seed" if verdict == "not testable" else verdict
    return f"{one} is {abs(difference):.1f} points {side} {other} ({verdict})"


def _place(group: pd.DataFrame, by: Iterable[str]) -> str:
    data = group.dataset.iloc[0] if "dataset" in group else None
    words = {"column": title_of(str(group.column.iloc[0]), data) if "column" in group else ""}
    return ", ".join(words.get(c) or label_of(group[c].iloc[0]) for c in by)
