"""What a paper says, judged on stored runs: ``params/<paper>/claims.yaml`` says what to compare, this file does it.

A comparison is a difference in points between two variants, paired by seed, of the longest training of which two seeds
are stored; ``verdicts.py`` is the rule that judges it, and the claim over all of its comparisons. A run's flags
(``flags.py``) go with what is compared. A claim is judged on the data that were run, and its verdict says so where the
paper's are others; one that is about data (``of``), a net or its pre-training (``only``) is judged on these alone. The
printed numbers are counted in the same way. What others found (``others.yaml``) stands beside the verdict. Arithmetic
and comparisons that one paper alone needs lie in ``papers/<paper>`` (:func:`of_paper`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec

import pandas as pd

from fedlib.core.paths import params_dir
from fedlib.core.validation import check_known

from ..runs.params_files import load_yaml
from .sources import Published, Stored
from .style import data_title
from .tables import label_of
from .verdicts import COLUMNS, BySeed, Difference, Grade, as_rows, differences, grade, paired

KEYS = {"where", "says", "table", "pairs", "finetune", "columns", "need", "value", "against", "at", "costs", "over",
        "margin", "only", "exact", "counts", "compare", "by", "of", "why"}  # fmt: skip
KINDS = ("arithmetic", "runs at paper scale", "runs at small scale")
SIDES = ("agrees", "disagrees", "related")  # of a result of others with claims
OTHERS = {"who", "source", "found", *SIDES}


@dataclass(frozen=True, kw_only=True)
class Judged(Grade):
    """A claim, graded, with its comparisons (``verdicts.COLUMNS``), what the paper prints, and what others found."""

    name: str
    where: str
    says: str
    comparisons: pd.DataFrame
    printed: str
    kind: str = KINDS[-1]  # of evidence
    on: str = ""  # which data, where they are not all of the paper's and no others
    others: tuple[str, ...] = ()


def load_all_claims(paper: str) -> dict[str, dict]:
    """Read ``params/<paper>/claims.yaml``, {} for an extension without claims; an unknown key is refused."""
    return _load(paper, "claims", KEYS)


def load_others(paper: str) -> dict[str, dict]:
    """Read ``params/<paper>/others.yaml``: results of others, with the claims that they agree and disagree with."""
    others, claims = _load(paper, "others", OTHERS), load_all_claims(paper)
    for name, other in others.items():
        check_known(sum((other.get(s, []) for s in SIDES), []), claims, f"others.yaml: {name}: no claim is called {{}}")
    return others


def _load(paper: str, file: str, keys: set[str]) -> dict[str, dict]:
    path = params_dir() / paper / f"{file}.yaml"
    entries = load_yaml(path) if path.is_file() else {}
    for name, entry in entries.items():
        check_known(entry, keys, f"{file}.yaml: {name}: unknown key {{}}")
    return entries


def judge(stored: Stored) -> list[Judged]:
    """Judge every claim of the paper on what is stored."""
    printed, others = Published(stored.paper), load_others(stored.paper)
    judged = [judge_claim(name, claim, stored, printed) for name, claim in load_all_claims(stored.paper).items()]
    return [replace(j, others=beside(j, others)) for j in judged]


def beside(judged: Judged, others: Mapping[str, Mapping]) -> tuple[str, ...]:
    """Return what others found on the same claim; for a contradicted one, also whether it stands alone."""
    told = [(o, side) for o in others.values() for side in SIDES if judged.name in o.get(side, [])]
    found = [f"[{o['who']}]({o['source']}) {side}: {o['found']}" for o, side in told]
    if judged.verdict == "contradicted" and len(judged.comparisons):  # by runs, not by arithmetic
        against = any(judged.name in other.get("disagrees", []) for other in others.values())
        found.insert(0, "as others found" if against else "alone in this")
    return tuple(found)


def judge_claim(name: str, claim: dict, stored: Stored, published: Published) -> Judged:
    """Judge one claim, by arithmetic (``exact``) or by its comparisons."""
    rows, printed, on, kind = pd.DataFrame(columns=[*COLUMNS, "bound"]), "–", "", KINDS[1 + (stored.profile != "paper")]
    if "exact" in claim:
        holds, numbers = of_paper(stored.paper, "EXACT", claim["exact"])(stored)
        found, kind = Grade("holds" if holds else "contradicted", numbers), KINDS[0]
    elif "why" in claim:
        found = Grade("not testable", claim["why"])
    else:
        both = (of_paper(stored.paper, "COMPARED", claim["by"]) if "by" in claim else compared)(claim, stored)
        about = [(w, d) for w, d in both if w.get("data") in claim.get("of", [w.get("data")])]
        where, found = [w for w, _ in both], grade([d for _, d in about], claim, [w for w, _ in about])
        rows = as_rows(where, [d for _, d in both], claim)
        if any(len(d.points) for _, d in both) and not any(len(d.points) for _, d in about):
            here, told = ", ".join(sorted({w["data"] for w in where})), grade([d for _, d in both], claim, where)
            found = Grade("not testable", f"not on its data ({' and '.join(claim['of'])}); on {here}: {told.numbers}")
        if "table" in claim:
            on = on_data({w["data"] for w, d in about if len(d.points) > 1}, claim, stored)
            in_print = [] if "by" in claim else compared(claim, published)
            signs = [d.mean + claim.get("margin", 0.0) > 0 for _, d in in_print if len(d.points)]
            printed = f"{sum(signs)} of {len(signs)}" if signs else "–"
    asked = {"name": name, "where": claim["where"], "says": claim["says"]}
    return Judged(**vars(found), **asked, comparisons=rows, printed=printed, kind=kind, on=on)


def tables_of(claim: Mapping) -> list[str]:
    return claim["table"] if isinstance(claim["table"], list) else [claim["table"]]


def on_data(ran: set[str], claim: Mapping, stored: Stored) -> str:
    """Return words such as ``on CIFAR-10 in place of CIFAR-100``; empty where the paper's own data were run."""
    own = set().union(*(stored.data_in_print(table, claim.get("columns", ())) for table in tables_of(claim)))
    titles = (sorted(map(data_title, sets)) for sets in (ran - own, own - ran))
    other, lacking = (" and ".join(t if len(t) < 3 else [t[0], f"{len(t) - 1} more"]) for t in titles)
    if other and lacking:
        return f"on {other} in place of {lacking}"
    return f"also on {other}" if other else f"not on {lacking}" if ran and lacking else ""


def of_paper(paper: str, kind: str, name: str) -> Callable:
    """Return what ``papers/<paper>`` calls ``name`` in its mapping ``kind``; raise ``ValueError`` if it has none."""
    module = f"{__package__.rpartition('.')[0]}.papers.{paper}"
    known = getattr(import_module(module), kind, {}) if find_spec(module) else {}
    check_known([name], known, f"claims.yaml: papers/{paper} has no {{}} in {kind}")
    return known[name]


def compared(claim: dict, source: Stored | Published) -> list[tuple[dict, Difference]]:
    """Return (where, differences over common seeds) for every pair in every place that ``source`` has."""
    out = []
    for table in tables_of(claim):
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
    over, column = claim.get("over", {}), places[0]["column"]
    there = [{**p, **over} for p in places]
    sides = [source.lengths(table, v, p) for ps in (places, there) for v, p in zip(pair, ps, strict=True)]
    rounds, longer = longest(sides)
    found = _subtract(claim, source, table, pair, places, rounds)
    if len({source.data(table, c) for c in (column, there[0]["column"])}) > 1:
        found = {}  # a difference on one data set is never taken from one on another
    elif over:
        found = paired(found, _subtract(claim, source, table, pair, there, rounds))
    names, modes = [source.label(table, v) for v in pair], [label_of(p["finetune"]) for p in places]
    if modes[0] != modes[1]:
        names = [f"{name}, {mode}" for name, mode in zip(names, modes, strict=True)]
    if "against" in claim:
        names = [f"{names[0]}, {claim['value']}", f"{names[1]}, {claim['against']}"]
    text = " – ".join(names) + (f", more than {', '.join(map(label_of, over.values()))}" if over else "")
    text += f", after {rounds:,} rounds" if longer else ""
    where = {"table": table, "mode": modes[0], "column": column, "data": source.data(table, column)}
    parts = differences([*found.values()])
    of_exits = found and claim.get("value") in ("exits", "client_exits")
    names = [f"{text}, exit {j + 1}" if of_exits else text for j in range(len(parts))]
    return [(where | {"comparison": name}, part) for name, part in zip(names, parts, strict=True)]


def longest(sides: Sequence[Mapping[int, Mapping]]) -> tuple[int, bool]:
    """Return the most rounds at which all ``sides`` have two seeds in common, else the fewest rounds.

    The second value says whether it is more than the fewest.
    """
    common = {t: set.intersection(*(set(s.get(t, ())) for s in sides)) for t in set().union(*sides)}
    own = min(common, default=0)
    rounds = max((t for t, seeds in common.items() if len(seeds) > 1), default=own)
    return rounds, rounds > own


def _subtract(claim, source, table, pair, places, rounds) -> BySeed:
    value = claim.get("value", "accuracy")
    what = zip(pair, places, (value, claim.get("against", value)), strict=True)
    one, other = (source.values(table, variant, place, x, set(pair), rounds) for variant, place, x in what)
    if "at" in claim and one and other:
        if (costs := source.table(f"{claim['costs']}_{source.profile}")) is None:
            return {}
        what = zip(pair, places, strict=True)
        at = [costs[(costs.variant == v) & (costs.finetune == p["finetune"])][claim["at"]] for v, p in what]
        if not all(map(len, at)):
            return {}
        one = {seed: x.at(at[0], at[1]) for seed, x in one.items()}
    return paired(one, other)
