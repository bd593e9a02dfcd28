"""Where the numbers of claims come from: stored runs, or what the paper prints. Read next: ``claims.py``."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir, params_dir

from ..runs.params import Cell, grids, load_fallback, load_grid, load_spec
from ..runs.params_files import load_yaml
from .clients import spread_out
from .tables import collect, label_of, load_reported, stand_in
from .verdicts import BySeed, Measured, measured

# what a longer trial may change: its length, what follows from it, how often and at how many test examples it looks
LENGTH = {"rounds", "decay", "decay_every", "milestones", "warmup_rounds", "evaluate_every", "num_test", "seed"}


@dataclass
class Source:
    """What a paper's tables are made of; every file is read once."""

    paper: str

    def __post_init__(self):
        folder = params_dir() / self.paper
        self.spec = cache(lambda table: load_spec(self.paper, table))
        self.extended = cache(lambda table: load_yaml(folder / f"{table}.yaml").get("extends"))
        of_one = lambda table: {"seeds": [1], "variant": [next(iter(self.spec(table)["variants"]))]}  # noqa: E731
        self.in_print = cache(lambda table: load_grid(self.paper, table, "paper", of_one(table)))
        self.reported = cache(lambda table: load_reported(self.paper, *self.spec(table).get("reported", [table])))
        place = ["finetune", "column", "variant"]
        self.means = cache(lambda table: self.reported(table).set_index(place)["mean"].to_dict())

    def label(self, table: str, variant: str) -> str:
        return label_of(self.spec(table)["variants"][variant].get("label", variant))


@dataclass
class Stored(Source):
    """Stored runs and tables of ``paper`` at ``profile``."""

    profile: str
    outputs: Path = field(default_factory=outputs_dir)

    def __post_init__(self):
        super().__post_init__()
        self.read = cache(self._read)
        self.rows = cache(lambda t: [*zip(self.read(t)[0], self.read(t)[1].to_dict("records"), strict=True)])

    @property
    def folder(self) -> Path:
        """The paper's own part of the outputs."""
        return self.outputs / self.paper

    def _read(self, table: str) -> tuple[list[Cell], pd.DataFrame]:
        """Return the table's cells and ``tables.collect``'s frame; of the ``fallback`` if only that is stored."""
        cells, fallback = (load(self.paper, table, self.profile) for load in (load_grid, load_fallback))
        found = self._collect(cells, table)
        if fallback and found[1].accuracy.isna().all():
            other = self._collect([stand_in(c, fallback) for c in cells], table)
            found = other if other[1].accuracy.notna().any() else found
        return found

    def _collect(self, cells: list[Cell], table: str) -> tuple[list[Cell], pd.DataFrame]:
        frame, spec = collect(cells, self.outputs / "runs"), self.spec(table)
        return cells, spread_out(frame, "left", spec["thresholds"]) if spec.get("value") == "left" else frame

    def places(self, table: str, only: Mapping[str, object]) -> pd.DataFrame:
        """Return every (finetune, column, variant) of the grid whose experiment has the fields ``only``."""
        cells, _ = self.read(table)
        kept = [c for c in cells if all(getattr(c.experiment, k) == v for k, v in only.items())]
        names = ["finetune", "column", "variant"]
        return pd.DataFrame([[getattr(c, n) for n in names] for c in kept], columns=names).drop_duplicates()

    def data(self, table: str, column: str) -> str:
        """Return the data set that ``column`` of ``table`` was run on, which may differ from the one in its name."""
        return ", ".join(dict.fromkeys(c.experiment.dataset for c in self.read(table)[0] if c.column == column))

    def data_in_print(self, table: str, columns: Collection[str] = ()) -> set[str]:
        """Return the data sets of the paper's own ``table``, of its ``columns`` if it has one of these."""
        cells = self.in_print(table)
        return {c.experiment.dataset for c in [c for c in cells if c.column in columns] or cells}

    def lengths(self, table: str, variant: str, place: Mapping) -> dict[int, dict[int, dict]]:
        """Return rows by rounds, by seed: the table's own runs, and longer trials of them, of grids ``horizon…``."""
        here = (place["finetune"], place["column"], variant)
        if not (both := [(c, row) for c, row in self.rows(table) if (c.finetune, c.column, c.variant) == here]):
            return {}
        own, same = both[0][0].experiment, self._trial(table, both[0][0].experiment)
        longer = {t: rows for (trial, t), rows in self.trials.items() if trial == same and t > own.rounds}
        return longer | {own.rounds: {row["seed"]: row for _, row in both if row["accuracy"] == row["accuracy"]}}

    def values(self, table: str, variant: str, place: Mapping, value: str, variants: set, rounds: int = 0) -> BySeed:
        """Return ``value`` by seed, of runs of so many rounds; empty where nothing is stored."""
        return measured(self.lengths(table, variant, place).get(rounds, {}).values(), value)

    @cached_property
    def trials(self) -> dict[tuple[str, int], dict[int, dict]]:
        """The rows of all stored longer trials: by what it is but for length and seed, and rounds; by seed."""
        found: dict[tuple[str, int], dict[int, dict]] = {}
        for table in (name for name in grids(self.paper) if name.startswith("horizon")):
            for cell, row in (x for x in self.rows(table) if x[1]["accuracy"] == x[1]["accuracy"]):
                found.setdefault((self._trial(table, cell.experiment), cell.experiment.rounds), {})[cell.seed] = row
        return found

    def _trial(self, table: str, e: Experiment) -> str:
        """Return as text all of ``e`` but ``LENGTH``, and whether the table's examples leave early."""
        same = {k: v for k, v in e.to_dict().items() if k not in LENGTH}
        return json.dumps([same, self.spec(table).get("value") == "left"], sort_keys=True, default=str)

    def table(self, name: str) -> pd.DataFrame | None:
        """Read what a notebook stored as ``outputs/<paper>/tables/<name>.csv``; None if it stored nothing there."""
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
        """Return an empty string: a printed column is of the data that it names."""
        return ""

    def lengths(self, table: str, variant: str, place: Mapping) -> dict[int, dict]:
        """Return a single length and seed, as a printed number is of one each."""
        return {0: {0: {}}}

    def values(self, table: str, variant: str, place: Mapping, value: str, variants: set, rounds: int = 0) -> BySeed:
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
