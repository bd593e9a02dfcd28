"""What a paper says, judged on stored runs: ``params/<paper>/claims.yaml`` says what to compare, this file does it.

A comparison is a difference in points between two variants, paired by seed; ``verdicts.py`` is the rule that judges
it, and the claim over all of its comparisons. A run's flags (``flags.py``) go with what is compared. The printed
numbers are counted in the same way. What others found (``others.yaml``) stands beside the verdict. Arithmetic and
comparisons that one paper alone needs lie in ``papers/<paper>`` (:func:`of_paper`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pandas as pd

from fedlib.core.paths import params_dir
from fedlib.core.validation import check_known

from ..runs.params_files import load_yaml
from .sources import Measured, Published, Stored, differences
from .tables import label_of
from .verdicts import COLUMNS, Difference, Grade, as_rows, grade

KEYS = {"where", "says", "table", "pairs", "finetune", "columns", "need", "value", "against", "at", "costs", "over",
        "margin", "only", "exact", "counts", "compare", "by", "of", "why"}  # fmt: skip
SIDES = ("agrees", "disagrees", "related")  # of a result of others with claims
OTHERS = {"who", "source", "found", *SIDES}


@dataclass(frozen=True)
class Judged:
    """A claim with its grade, its comparisons (``verdicts.COLUMNS``), what the paper prints, and what others found."""

    name: str
    where: str
    says: str
    grade: Grade
    comparisons: pd.DataFrame
    printed: str
    others: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        return self.grade.verdict

    @property
    def numbers(self) -> str:
        return self.grade.numbers


def load_all_claims(paper: str) -> dict[str, dict]:
    """``params/<paper>/claims.yaml``, {} for an extension without claims; an unknown key is refused."""
    return _load(paper, "claims", KEYS)


def load_others(paper: str) -> dict[str, dict]:
    """``params/<paper>/others.yaml``: results of others, with the claims that they agree and disagree with."""
    others, claims = _load(paper, "others", OTHERS), load_all_claims(paper)
    for name, other in others.items():
        named = [c for side in SIDES for c in other.get(side, [])]
        check_known(named, claims, f"others.yaml: {name}: no claim is called {{}}")
    return others


def _load(paper: str, file: str, keys: set[str]) -> dict[str, dict]:
    path = params_dir() / paper / f"{file}.yaml"
    entries = load_yaml(path) if path.is_file() else {}
    for name, entry in entries.items():
        check_known(entry, keys, f"{file}.yaml: {name}: unknown key {{}}")
    return entries


def judge(stored: Stored) -> list[Judged]:
    """Every claim of the paper on what is stored."""
    printed, others = Published(stored.paper), load_others(stored.paper)
    judged = [judge_claim(name, claim, stored, printed) for name, claim in load_all_claims(stored.paper).items()]
    return [replace(j, others=beside(j, others)) for j in judged]


def beside(judged: Judged, others: Mapping[str, Mapping]) -> tuple[str, ...]:
    """What others found of the same claim; of a contradicted one also whether it stands alone."""
    found = []
    for other in others.values():
        for side in SIDES:
            if judged.name in other.get(side, []):
                found.append(f"[{other['who']}]({other['source']}) {side}: {other['found']}")
    if judged.verdict == "contradicted" and len(judged.comparisons):  # by runs, not by arithmetic
        against = any(judged.name in other.get("disagrees", []) for other in others.values())
        found.insert(0, "as others found" if against else "alone in this")
    return tuple(found)


def judge_claim(name: str, claim: dict, stored: Stored, published: Published) -> Judged:
    """One claim, by arithmetic (``exact``), or by its comparisons."""
    rows, printed = pd.DataFrame(columns=COLUMNS), "–"
    if "exact" in claim:
        holds, numbers = of_paper(stored.paper, "EXACT", claim["exact"])(stored)
        found = Grade("holds" if holds else "contradicted", numbers)
    elif "why" in claim:
        found = Grade("not testable", claim["why"])
    else:
        kind = of_paper(stored.paper, "COMPARED", claim["by"]) if "by" in claim else compared
        both = kind(claim, stored)
        rows, found = as_rows([w for w, _ in both], [d for _, d in both], claim), grade_of_its_data(both, claim)
        if "table" in claim and "by" not in claim:
            signs = [d.mean + claim.get("margin", 0.0) > 0 for _, d in compared(claim, published) if len(d.points)]
            printed = f"{sum(signs)} of {len(signs)}" if signs else "–"
    return Judged(name, claim["where"], claim["says"], found, rows, printed)


def of_paper(paper: str, kind: str, name: str) -> Callable:
    """What ``papers/<paper>`` calls ``name`` in its mapping ``kind``; ``ValueError`` where it has none of that name."""
    module = f"{__package__.rpartition('.')[0]}.papers.{paper}"
    known = getattr(import_module(module), kind, {}) if find_spec(module) else {}
    check_known([name], known, f"claims.yaml: papers/{paper} has no {{}} in {kind}")
    return known[name]


def grade_of_its_data(both: list[tuple[dict, Difference]], claim: Mapping) -> Grade:
    """The claim's grade over the comparisons on the data sets ``of`` which it speaks; other data are told of alone."""
    about = claim.get("of")
    its = [d for where, d in both if not about or where["data"] in about]
    if its or not both:
        return grade(its, claim)
    here = ", ".join(sorted({where["data"] for where, _ in both}))
    told = grade([d for _, d in both], claim).numbers
    return Grade("not testable", f"not on its data ({' and '.join(about)}); on {here}: {told}")


def compared(claim: dict, source: Stored | Published) -> list[tuple[dict, Difference]]:
    """(where, differences over common seeds) of every pair in every place that ``source`` has."""
    out, tables = [], claim["table"] if isinstance(claim["table"], list) else [claim["table"]]
    for table in tables:
        try:
            grid = source.places(table, claim.get("only", {}))
        except FileNotFoundError:  # a figure: nothing printed
            continue
        have = set(grid.itertuples(index=False, name=None))
        for column in grid.column.unique() if "columns" not in claim else claim["columns"]:
            for mode in grid.finetune.unique() if "finetune" not in claim else claim["finetune"]:
                for pair in claim["pairs"]:
                    if all("@" in side for side in pair) and mode != grid.finetune.iloc[0]:
                        continue  # both modes are spelt out: once, not once a mode
                    sides = [(v, m or mode) for v, _, m in (side.partition("@") for side in pair)]
                    if any((m, column, v) in have for v, m in sides):
                        places = [{"finetune": m, "column": column} for _, m in sides]
                        out += _differences(claim, source, table, [v for v, _ in sides], places)
    return out


def _differences(claim, source, table, pair, places) -> list[tuple[dict, Difference]]:
    found, over = _subtract(claim, source, table, pair, places), claim.get("over", {})
    columns = {places[0]["column"], over.get("column", places[0]["column"])}
    if len({source.data(table, column) for column in columns}) > 1:
        found = {}  # a difference on one data set is never taken from one on another
    elif over:
        there = _subtract(claim, source, table, pair, [{**p, **over} for p in places])
        found = {seed: found[seed] - there[seed] for seed in found if seed in there}
    names, modes = [source.label(table, v) for v in pair], [label_of(p["finetune"]) for p in places]
    if modes[0] != modes[1]:
        names = [f"{name}, {mode}" for name, mode in zip(names, modes, strict=True)]
    if "against" in claim:
        names = [f"{names[0]}, {claim['value']}", f"{names[1]}, {claim['against']}"]
    text = " – ".join(names) + (f", more than {', '.join(map(label_of, over.values()))}" if over else "")
    column = places[0]["column"]
    where = {"table": table, "mode": modes[0], "column": column, "data": source.data(table, column)}
    if not found:
        return [(where | {"comparison": text}, Difference(np.array([])))]
    parts = differences([found[seed] for seed in sorted(found)])
    of_exits = claim.get("value") in ("exits", "client_exits")
    names = [f"{text}, exit {j + 1}" if of_exits else text for j in range(len(parts))]
    return [(where | {"comparison": name}, part) for name, part in zip(names, parts, strict=True)]


def _subtract(claim, source, table, pair, places) -> dict[int, Measured]:
    value = claim.get("value", "accuracy")
    what = zip(pair, places, (value, claim.get("against", value)), strict=True)
    one, other = (source.values(table, variant, place, x, set(pair)) for variant, place, x in what)
    if "at" in claim and one and other:
        costs = source.table(f"{claim['costs']}_{source.profile}")
        if costs is None:
            return {}
        what = zip(pair, places, strict=True)
        at = [costs[(costs.variant == v) & (costs.finetune == p["finetune"])][claim["at"]] for v, p in what]
        if not all(map(len, at)):
            return {}
        one = {seed: x.at(at[0], at[1]) for seed, x in one.items()}
    return {seed: one[seed] - other[seed] for seed in one if seed in other}
