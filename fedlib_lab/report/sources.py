"""Where the numbers of claims come from: stored runs, or what the paper prints. Read next: ``claims.py``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.core.paths import outputs_dir, params_dir

from ..runs.params import Cell, load_fallback, load_grid, load_spec
from ..runs.params_files import load_yaml
from ..runs.store import Run, shown_run
from .clients import spread_out
from .flags import bound_on_variance, flags_of, right_of
from .tables import collect, label_of, load_reported, stand_in
from .verdicts import Difference


@dataclass(frozen=True)
class Measured:
    """One run's numbers in points, (1,) or (exits,), with its flags, or a difference of such.

    ``variances`` bounds what the test examples leave of each; ``right`` is what each example gives, (1 or exits, N).
    """

    points: np.ndarray
    variances: np.ndarray
    right: np.ndarray | None = None
    flags: tuple[str, ...] = ()

    @classmethod
    def of(cls, run: Run, value: str, points: np.ndarray) -> "Measured":
        return cls(points, bound_on_variance(run, points), right_of(run, value), flags_of(run, value))

    def __sub__(self, other: "Measured") -> "Measured":
        both = self.right is not None and other.right is not None and self.right.shape == other.right.shape
        right = self.right - other.right if both else None
        flags = tuple(dict.fromkeys([*self.flags, *other.flags]))
        return Measured(self.points - other.points, self.variances + other.variances, right, flags)

    def at(self, have: np.ndarray, want: np.ndarray) -> "Measured":
        """Between exits that cost ``have``, where ``want`` is spent."""
        mix = np.array([np.interp(want, have, row) for row in np.eye(len(have))]).T  # (wanted, exits)
        right = None if self.right is None else mix @ self.right
        return Measured(mix @ self.points, mix @ self.variances, right, self.flags)


def differences(by_seed: list[Measured]) -> list[Difference]:
    """Of the numbers of all seeds one :class:`Difference` each; with flags of most seeds, or of an older rule."""
    flags = [f for m in by_seed for f in m.flags]
    kept = tuple(f for f in dict.fromkeys(flags) if f == "older rule" or 2 * flags.count(f) > len(by_seed))
    points, variances = np.array([m.points for m in by_seed]).T, np.mean([m.variances for m in by_seed], 0)
    if all(m.right is not None for m in by_seed):
        mean = np.mean([m.right for m in by_seed], 0)  # (1 or exits, N): examples are the same for every seed
        variances = mean.var(1, ddof=1) / mean.shape[1]
    return [Difference(x, float(v), kept) for x, v in zip(points, variances, strict=True)]


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

    def values(self, table: str, variant: str, place: dict, value: str, variants: set) -> dict[int, Measured]:
        """By seed; empty where nothing is stored."""
        if table not in self.rows:
            cells, frame = self.read(table)
            both = zip(cells, frame.itertuples(), strict=True)
            self.rows[table] = {
                (r.finetune, r.column, r.variant, r.seed): (c, r) for c, r in both if r.accuracy == r.accuracy
            }
        here, found = (place["finetune"], place["column"], variant), {}
        for (*where, seed), (cell, row) in self.rows[table].items():
            if tuple(where) == here:
                run = shown_run(cell.experiment, self.outputs / "runs")
                found[seed] = Measured.of(run, value, np.atleast_1d(getattr(row, value)))
        return found

    def table(self, name: str) -> pd.DataFrame | None:
        """What a notebook stored as ``outputs/<paper>/tables/<name>.csv``, if it did."""
        path = self.folder / "tables" / f"{name}.csv"
        return pd.read_csv(path) if path.exists() else None


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

    def values(self, table: str, variant: str, place: dict, value: str, variants: set) -> dict[int, Measured]:
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
        return {0: Measured(np.array(found), np.zeros(len(found)))} if found else {}

    @cached_property
    def means(self):
        """table -> {(finetune, column, variant): mean}"""
        keys = ["finetune", "column", "variant"]
        return cache(lambda table: self.reported(table).set_index(keys)["mean"].to_dict())
