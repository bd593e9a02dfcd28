"""What a paper says, judged on stored runs: ``params/<paper>/claims.yaml`` says what to compare, this file does it.

A comparison is a difference in points between two variants, paired by seed, with its bootstrap interval over seeds.
It ``holds`` if the interval lies on the claimed side of zero, is ``contradicted`` on the other, else ``undecided``.
A claim holds if all its comparisons do (``need: most``: over half of them), does not hold if one is contradicted
(``most``: at least half), and is not testable without two seeds. The printed numbers are counted in the same way.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from ..core.paths import outputs_dir, params_dir
from ..core.validation import did_you_mean
from ..runs.params import Cell, load_fallback, load_grid, load_spec
from ..runs.params_files import load_yaml
from .clients import spread_out
from .counted import counted
from .exact import EXACT, upload_table
from .statistics import bootstrap_interval, verdict
from .tables import collect, label_of, load_reported, stand_in

KEYS = {"where", "says", "table", "pairs", "finetune", "columns", "need", "value", "against", "at", "costs", "over",
        "margin", "only", "exact", "counts", "compare", "why"}  # fmt: skip
VERDICTS = {"better": "holds", "worse": "contradicted", "undecided": "undecided"}
COLUMNS = ["table", "mode", "column", "data", "comparison", "mean", "low", "high", "seeds", "verdict"]


@dataclass
class Source:
    """What a paper's tables are made of; every file is read once."""

    paper: str

    def __post_init__(self):
        folder = params_dir() / self.paper
        self.spec = cache(lambda table: load_spec(self.paper, table))
        self.extended = cache(lambda table: load_yaml(folder / f"{table}.yaml").get("extends"))
        self.reported = cache(lambda table: load_reported(self.paper, *self.spec(table).get("reported", [table])))

    def label(self, table: str, variant: str) -> str:
        return label_of(self.spec(table)["variants"][variant].get("label", variant))


@dataclass
class Stored(Source):
    """Stored runs and tables of ``paper`` at ``profile``."""

    profile: str
    outputs: Path = field(default_factory=outputs_dir)
    tables: dict = field(default_factory=dict, repr=False)
    rows: dict = field(default_factory=dict, repr=False)

    @property
    def folder(self) -> Path:
        """The paper's own part of the outputs."""
        return self.outputs / self.paper

    def read(self, table: str) -> tuple[list[Cell], pd.DataFrame]:
        """The table's cells and ``tables.collect``'s frame; of the ``fallback`` if only that is stored."""
        if table not in self.tables:
            cells, fallback = (load(self.paper, table, self.profile) for load in (load_grid, load_fallback))
            self.tables[table] = self._collect(cells, table)
            if fallback and self.tables[table][1].accuracy.isna().all():
                other = self._collect([stand_in(c, fallback) for c in cells], table)
                self.tables[table] = other if other[1].accuracy.notna().any() else self.tables[table]
        return self.tables[table]

    def _collect(self, cells: list[Cell], table: str) -> tuple[list[Cell], pd.DataFrame]:
        frame, spec = collect(cells, self.outputs / "runs"), self.spec(table)
        return cells, spread_out(frame, "left", spec["thresholds"]) if spec.get("value") == "left" else frame

    def places(self, table: str, only: Mapping[str, object]) -> pd.DataFrame:
        """Every (finetune, column, variant) of the grid whose experiment has the fields ``only``."""
        cells, _ = self.read(table)
        kept = [c for c in cells if all(getattr(c.experiment, k) == v for k, v in only.items())]
        names = ["finetune", "column", "variant"]
        return pd.DataFrame([[getattr(c, n) for n in names] for c in kept], columns=names).drop_duplicates()

    def data(self, table: str, column: str) -> str:
        """The data set that ``column`` of ``table`` was run on, which need not be the one it is named after."""
        return ", ".join(dict.fromkeys(c.experiment.dataset for c in self.read(table)[0] if c.column == column))

    def values(self, table: str, variant: str, place: dict, value: str, variants: set) -> dict[int, np.ndarray]:
        """By seed (1,), or (exits,) for ``exits``; empty where nothing is stored."""
        if table not in self.rows:
            done = self.read(table)[1].dropna(subset=["accuracy"])
            self.rows[table] = {(r.finetune, r.column, r.variant, r.seed): r for r in done.itertuples()}
        here = (place["finetune"], place["column"], variant)
        found = {key[3]: getattr(r, value) for key, r in self.rows[table].items() if key[:3] == here}
        return {seed: np.atleast_1d(x) for seed, x in found.items()}

    def table(self, name: str) -> pd.DataFrame | None:
        """What a notebook stored as ``outputs/<paper>/tables/<name>.csv``, if it did."""
        path = self.folder / "tables" / f"{name}.csv"
        return pd.read_csv(path) if path.exists() else None

    @cached_property
    def uploads(self) -> pd.DataFrame:
        """:func:`exact.upload_table`, computed where ``outputs/<paper>/tables/uploads.csv`` does not hold it yet."""
        path = self.folder / "tables" / "uploads.csv"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            upload_table(self.paper).to_csv(path, index=False)
        return pd.read_csv(path)


@dataclass
class Published(Source):
    """The printed numbers behind the same questions: one row, as of one seed."""

    def places(self, table: str, only: Mapping[str, object]) -> pd.DataFrame:
        frame = self.reported(table)
        frame = frame.assign(column=frame.column.str.replace(r", exit \d+$", "", regex=True))  # printed exit by exit
        return frame[frame.column != "upload_mib"][["finetune", "column", "variant"]].drop_duplicates()

    def data(self, table: str, column: str) -> str:
        """A printed column is of the data that it names."""
        return ""

    def values(self, table: str, variant: str, place: dict, value: str, variants: set) -> dict[int, np.ndarray]:
        printed = self.spec(table).get("value", "accuracy")
        if value != printed and (value, printed) not in (("accuracy", "ensemble"), ("clients", "left")):
            return {}  # figures print no numbers
        if (value, printed) == ("accuracy", "ensemble"):  # Table 6's mean exit is Table 1's
            table = self.extended(table)
        own = self.means(table)
        missing = not variants <= {v for _, _, v in own}  # Table 5 prints differences to Table 4's row
        means = self.means(self.extended(table)) | own if missing and self.extended(table) else own
        columns = [place["column"]]
        if value == "client_exits":
            columns = [c for _, c, v in means if v == variant and c.startswith(f"{place['column']}, exit ")]
        found = [means[k] for c in columns if (k := (place["finetune"], c, variant)) in means]
        return {0: np.array(found)} if found else {}

    @cached_property
    def means(self):
        """table -> {(finetune, column, variant): mean}"""
        keys = ["finetune", "column", "variant"]
        return cache(lambda table: self.reported(table).set_index(keys)["mean"].to_dict())


@dataclass(frozen=True)
class Judged:
    """A claim with its verdict, the numbers in words, its comparisons (``COLUMNS``) and what the paper prints."""

    name: str
    where: str
    says: str
    verdict: str
    numbers: str
    comparisons: pd.DataFrame
    printed: str


def load_all_claims(paper: str) -> dict[str, dict]:
    """``params/<paper>/claims.yaml``, {} for an extension without claims; an unknown key is refused."""
    path = params_dir() / paper / "claims.yaml"
    claims = load_yaml(path) if path.is_file() else {}
    for name, claim in claims.items():
        for key in claim:
            if key not in KEYS:
                raise ValueError(f"claims.yaml: {name}: unknown key {key!r}{did_you_mean(key, KEYS)}")
    return claims


def judge(stored: Stored) -> list[Judged]:
    """Every claim of the paper on what is stored."""
    printed = Published(stored.paper)
    return [judge_claim(name, claim, stored, printed) for name, claim in load_all_claims(stored.paper).items()]


def judge_claim(name: str, claim: dict, stored: Stored, published: Published) -> Judged:
    """One claim; see the module's first lines for the rule."""
    rows, printed = pd.DataFrame(columns=COLUMNS), "–"
    if "exact" in claim:
        holds, numbers = EXACT[claim["exact"]](stored)
        found = "holds" if holds else "does not hold", numbers
    elif "why" in claim:
        found = "not testable", claim["why"]
    else:
        differences = counted(claim, stored) if "counts" in claim else compared(claim, stored)
        margin = claim.get("margin", 0.0)
        rows = pd.DataFrame([where | judged(d, margin) for where, d in differences], columns=COLUMNS)
        found = decide(rows, claim)
        if "table" in claim:
            signs = [float(d[0]) + margin > 0 for _, d in compared(claim, published) if len(d)]
            printed = f"{sum(signs)} of {len(signs)}" if signs else "–"
    return Judged(name, claim["where"], claim["says"], *found, rows, printed)


def judged(differences: np.ndarray, margin: float = 0.0) -> dict:
    """Mean, interval, number of seeds and verdict of paired differences (seeds,) in points; rounded after judging."""
    if len(differences) < 2:
        mean = round(differences.mean(), 2) if len(differences) else np.nan
        return {"mean": mean, "low": np.nan, "high": np.nan, "seeds": len(differences), "verdict": "not testable"}
    low, high = bootstrap_interval(differences)
    found = VERDICTS[verdict(low + margin, high + margin)]
    numbers = {"mean": round(differences.mean(), 2), "low": round(low, 2), "high": round(high, 2)}
    return numbers | {"seeds": len(differences), "verdict": found}


def decide(rows: pd.DataFrame, claim: dict) -> tuple[str, str]:
    """The claim's verdict over its comparisons, and how many went which way."""
    tested = rows[rows.verdict != "not testable"]
    if tested.empty:
        seeds = int(rows.seeds.max()) if len(rows) else 0
        return "not testable", "one seed only" if seeds else missing(claim)
    count = {v: int((tested.verdict == v).sum()) for v in ("holds", "undecided", "contradicted")}
    n, most = len(tested), claim.get("need", "all") == "most"
    holds = 2 * count["holds"] > n if most else count["holds"] == n
    fails = 2 * count["contradicted"] >= n if most else count["contradicted"] > 0
    words = ", ".join(f"{k} {'hold' if v == 'holds' else v}" for v, k in count.items() if k)
    numbers = f"{n} comparison{'s' if n > 1 else ''}: {words}"
    numbers += f"; {len(rows) - n} not testable" if len(rows) > n else ""
    return "holds" if holds else "does not hold" if fails else "undecided", numbers


def missing(claim: dict) -> str:
    """What a claim without stored evidence would need."""
    needs = [*claim.get("only", {}).values(), *claim.get("finetune", []), *claim.get("columns", [])]
    source = claim.get("counts", claim.get("table"))
    source = ", ".join(source) if isinstance(source, list) else source
    return f"no runs at this scale ({source}{': ' if needs else ''}{', '.join(needs)})"


def compared(claim: dict, source: Stored | Published) -> list[tuple[dict, np.ndarray]]:
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


def _differences(claim, source, table, pair, places) -> list[tuple[dict, np.ndarray]]:
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
        return [(where | {"comparison": text}, np.array([]))]
    parts = np.array([found[seed] for seed in sorted(found)]).T  # (1 or exits, seeds)
    of_exits = claim.get("value") in ("exits", "client_exits")
    names = [f"{text}, exit {j + 1}" if of_exits else text for j in range(len(parts))]
    return [(where | {"comparison": name}, part) for name, part in zip(names, parts, strict=True)]


def _subtract(claim, source, table, pair, places) -> dict[int, np.ndarray]:
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
        one = {seed: np.interp(at[1], at[0], x) for seed, x in one.items()}
    return {seed: one[seed] - other[seed] for seed in one if seed in other}
