"""What clients of unequal devices get, in percent, and which rows may be ranked by it.

A client's score is that of the best sub-model that its class of devices affords, on its own test examples, which have
its own shares of labels. Tasks share no scale. A row of fewer than ``verdicts.RANKED`` seeds is shown and not ranked;
ranks are what paired differences over seeds leave open. Methods that ``params/atlas/headline.yaml`` sets apart stand in
tables alone. Read next: ``atlas/frame.py`` (the two controls), ``report/verdicts.py``, ``params/atlas``.
"""

import runpy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.core.paths import params_dir
from fedlib.methods import METHODS

from ..report.style import title_of
from ..report.tables import collect, label_of
from ..report.titles import leads
from ..report.verdicts import ENOUGH, not_ranked, paired_differences
from ..runs.params import Cell
from ..runs.params_files import grids, load_yaml

BINDS = {"macs": "compute", "memory": "memory", "upload": "traffic"}  # what tables cap, in words
LOW, HIGH = "smallest", "whole"  # rows of every task: the smallest level for all, and the whole model, over the caps
WORST = 0.1  # of the clients
NOISE = 3.0  # points of held-out accuracy: another value of a method's own parameter must gain more to be taken
VERDICTS = {"first is higher": "holds", "second is higher": "contradicted"}  # of a prediction


def worst(scores: np.ndarray) -> float:
    """Return the mean of the worst tenth of the clients, at least one."""
    return float(np.sort(scores)[: max(1, round(WORST * len(scores)))].mean())


def apart() -> list[str]:
    """Return the methods that stand in tables and in no figure, ranking or title."""
    return load_yaml(params_dir() / "atlas" / "headline.yaml")["apart"]


def drawn(frame: pd.DataFrame, methods: Mapping[str, str]) -> pd.DataFrame:
    """Return those rows of ``frame``, whose ``method`` is a row's name, that figures show; ``methods`` of the rows."""
    return frame[~frame.method.map(methods).isin(apart())]


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Return those of a task's rows (``Table.frame``) that have runs, keep to the caps and are not set ``apart``."""
    return frame[frame.local.notna() & (frame.variant != HIGH) & ~frame.method.isin(apart())]


def against(frame: pd.DataFrame, pairs: Sequence[tuple[str, str]]) -> pd.DataFrame:
    """Judge pairs of a task's rows by ``verdicts.paired_differences``; of too few shared seeds it is said, not judged.

    ``obtained``: points that clients get more of the first, mean over the seeds that both have.
    """
    rows = paired_differences(frame, pairs, "local")
    few = rows.seeds.map(lambda n: not_ranked([n]))
    return rows.assign(verdict=rows.verdict.where(few == "", few), interval=rows.interval.where(few == "", "–"))


def ranks(frame: pd.DataFrame) -> dict[str, str]:
    """Return of a task's :func:`compared` rows the ranks left open, ``1–3 of 9 ranked``, or why a row has none.

    The 9 are those of enough seeds, of which one alone has no rank; a rank is lost to each row that is surely higher.
    """
    rows = compared(frame)
    seeds = rows.groupby("variant", sort=False).seed.nunique()
    ranked = [v for v in seeds.index if not not_ranked([seeds[v]])]
    pairs = list(combinations(ranked, 2))
    found = zip(pairs, against(rows[rows.variant.isin(ranked)], pairs).verdict, strict=True)
    sure = [pair if said == "first is higher" else pair[::-1] for pair, said in found if said in VERDICTS]
    above, below = ([one for one, _ in sure], [other for _, other in sure])
    spans = {v: (1 + below.count(v), len(ranked) - above.count(v)) for v in ranked}
    told = {v: "–".join(map(str, dict.fromkeys(span))) + f" of {len(ranked)} ranked" for v, span in spans.items()}
    return {v: not_ranked([n]) or (told[v] if pairs else "–") for v, n in seeds.items()}


def headline(frames: Mapping[str, pd.DataFrame]) -> str:
    """Say who leads of the :func:`compared` rows of each place, and of the other places that they are not ranked.

    A place is ranked if all of its rows have enough seeds. Of more than two, those are named where a lead is sure.
    """
    rows = {place: found for place, frame in frames.items() if len(found := compared(frame))}
    seeds = {place: found.groupby("variant").seed.nunique() for place, found in rows.items()}
    said = [f"{title_of(p)}: {leads(rows[p], value='local')}" for p in rows if not not_ranked(seeds[p])]
    sure = [x for x in said if " leads " in x or len(said) < 3]
    open_ = f"no lead is sure in {len(said) - len(sure)} places" if len(sure) < len(said) else ""
    others = not_ranked([n for found in seeds.values() if not_ranked(found) for n in found])
    return "; ".join(filter(None, [*sure, open_, others]))


def standings(frame: pd.DataFrame, frames: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return a row per task and row of ``frame`` (``entries_frame``'s, of one kind of caps), means over its seeds.

    In percent: ``own labels``, what clients get on their own shares of labels, with its ``sd`` over seeds; ``worst
    tenth`` of them; ``all alike``, what the whole net gets on all test examples, where all classes are alike;
    ``prior``, what they would get with their own shares of labels added to the answers, where runs say it;
    ``majority``, what always answering one's own most frequent label gives, and the points that the row is ``above``
    it. ``rank``: :func:`ranks` of the task's ``frames``.
    """
    rank = {(task, v): said for task, found in frames.items() for v, said in ranks(found).items()}
    table = frame.groupby(["task", "method", "label"], sort=False).agg(**{
        "own labels": ("score", "mean"), "sd": ("score", "std"), "worst tenth": ("worst", "mean"),
        "all alike": ("central", "mean"), "prior": ("prior", lambda x: x.mean(skipna=False)),  # of all seeds or none
        "majority": ("majority", "mean"), "seeds": ("seed", "nunique"),
        "flags": ("flags", lambda x: ", ".join(dict.fromkeys(f for each in x for f in each.split(", ") if f))),
    }).reset_index()  # fmt: skip
    places = zip(table.task, table.method, strict=True)
    table.insert(table.columns.get_loc("seeds"), "above", table["own labels"] - table.majority)
    table.insert(table.columns.get_loc("flags"), "rank", [rank.get(place, "–") for place in places])
    return table.assign(label=table.label.map(label_of)).round(2)


def tasks_of(caps: str) -> dict[str, str]:
    """Return the tables of ``params/atlas`` in which ``caps`` (of ``BINDS``; macs_tuned) binds, by task.

    Such a table is called ``<task>_<caps>``.
    """
    return {t.removesuffix(f"_{caps}"): t for t in grids("atlas") if t.endswith(f"_{caps}")}


def own_methods(path: Path) -> list[str]:
    """List the methods, by name, that the file ``path`` registers; ``ValueError`` if it registers none."""
    known = set(METHODS)
    runpy.run_path(str(path), run_name=path.stem)
    if not (own := [name for name in METHODS if name not in known or METHODS[name].__module__ == path.stem]):
        raise ValueError(f"atlas: {path} registers no method; a class under @fedlib.methods.register is one")
    return own


def best_rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per method of a table of rates (``Table.frame``): its held-out scores, the best.

    Scores are in percent, columns named ``lr_<rate>`` by rate. ``best``: the column of the highest, the smaller rate
    where two are equal; None where one that the row tries is missing. ``minutes``: what its search took.
    """
    cells = frame.groupby(["label", "column"], sort=False)
    rows, tries = cells[["local", "seconds"]].mean().unstack(), cells.size().unstack()
    scores = rows["local"][sorted(set(frame.column), key=lambda name: float(name.rpartition("_")[2]))]
    best = scores.fillna(-1).idxmax(axis=1).where((scores.notna() | tries[scores.columns].isna()).all(axis=1))
    return scores.assign(best=best, minutes=rows["seconds"].sum(1) / 60).rename(index=label_of).round(2).reset_index()


def own_parameters(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per value of a table of methods' own parameters (``Table.frame``): its held-out score in percent.

    ``gain``: points above the method's first row, its default. ``taken``: of a method the value that gains most, if
    that is over ``NOISE``; the task's tuned tables have it.
    """
    scores = frame.groupby(["method", "variant", "label"], sort=False).local.mean().reset_index()
    gain = scores.local - scores.groupby("method").local.transform(lambda values: values.iloc[0])  # NaN: not run yet
    taken = (gain > NOISE) & (gain == gain.groupby(scores.method).transform("max"))
    return scores.assign(label=scores.label.map(label_of), gain=gain, taken=taken).round(2)


def at_best_rate(cells: Sequence[Cell], tried: Sequence[Cell], folder: Path | None = None) -> list[Cell]:
    """Return one method's ``cells`` at the rate that the stored runs of ``tried``, a column a rate, found best.

    A rate whose run has no score, as one that diverged at once, is none of them; ``ValueError`` where no run has.
    """
    if (scored := collect(tried, folder).dropna(subset=["local"])).empty:
        raise ValueError(f"atlas: no rate of {tried[0].variant!r} has a score; looked at {[c.column for c in tried]}")
    column = best_rates(scored).best[0]
    lr = next(c.experiment.lr for c in tried if c.column == column)
    return [replace(c, experiment=c.experiment.replace(lr=lr)) for c in cells]


def judge(predictions: Mapping[str, Mapping], frames: Mapping[str, pd.DataFrame], caps: str) -> pd.DataFrame:
    """Judge the predictions that speak of ``caps`` on each task that they name: is the pair's first above its second?

    A row per prediction and task, all of a task judged at once; one without runs of both has one row. With fewer than
    five seeds a verdict is indicative. ``note``: of a difference below zero, what the prediction says explains it.
    """
    told, rows = {n: p for n, p in predictions.items() if caps in p.get("caps", [caps])}, []
    for task, frame in frames.items():
        ran = set(frame.variant[frame.local.notna()])
        here = [n for n, p in told.items() if task in p.get("tasks", [task]) and set(p["pair"]) <= ran]
        for name, row in zip(here, against(frame, [told[n]["pair"] for n in here]).itertuples(), strict=True):
            verdict = VERDICTS.get(row.verdict, row.verdict)
            verdict += ", indicative" * (row.verdict in VERDICTS and row.seeds < ENOUGH)
            rows.append({"prediction": name, "task": title_of(task), "difference": row.obtained,
                         "interval": row.interval, "seeds": row.seeds, "verdict": verdict,
                         "note": told[name].get("note", "") if row.obtained < 0 else ""})  # fmt: skip
    absent = [{"prediction": n, "verdict": "not testable"} for n in told if n not in {r["prediction"] for r in rows}]
    columns = ["prediction", "says", "source", "task", "difference", "interval", "seeds", "verdict", "note"]
    table = pd.DataFrame([*rows, *absent], columns=columns)
    return table.assign(**{k: table.prediction.map(lambda n, k=k: told[n][k]) for k in ("says", "source")})
