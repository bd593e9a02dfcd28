"""Tables for notebooks: stored runs as data frames, obtained beside reported, and verdicts on the paper's claims."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir, params_dir
from fedlib.core.tables import read_table
from fedlib.core.validation import check_type
from fedlib.data.datasets import is_available, load_dataset
from fedlib.engine.executors import Execution
from fedlib.methods import METHODS
from fedlib.models.registry import backbone_spec, fetch_weights, tokenizer_of

from ..runs.costs import describe_time, exit_costs, num_classes, training_macs
from ..runs.params import Cell, load_fallback, load_grid, load_spec
from ..runs.progress import say
from ..runs.store import Run, run_all, shown_run, stored_pace
from .clients import SD, VALUES, numbers_of, spread_out

NAMES = read_table(Path(__file__).with_name("names.yaml"))


def load_cells(
    paper: str, table: str, profile: str, overrides: Mapping[str, object] | None = None, folder: Path | None = None
) -> list[Cell]:
    """Return the table's grid; the ``fallback`` stands in for a data set that is not at hand and has no stored run.

    It stands in for the whole data set, in all columns; what else a column sets (how many clients) stays.
    """
    cells, fallback = load_grid(paper, table, profile, overrides), load_fallback(paper, table, profile)
    if not fallback or "dataset" in (overrides or {}):
        return cells
    sets = {(c.experiment.dataset, tokenizer_of(c.experiment.backbone)) for c in cells}
    unavailable = {name for name, tokenizer in sets if not is_available(name, tokenizer)}
    of = {name: (c.experiment for c in cells if c.experiment.dataset == name) for name in unavailable}
    lacking = {name for name in unavailable if all(shown_run(e, folder) is None for e in of[name])}
    fallback = {k: v for k, v in fallback.items() if k not in (overrides or {})}
    return [stand_in(c, fallback) if c.experiment.dataset in lacking else c for c in cells]


def stand_in(cell: Cell, fallback: Mapping[str, object]) -> Cell:
    """Return ``cell`` on the data that ``fallback`` names."""
    return replace(cell, experiment=cell.experiment.replace(**fallback))


def run_cells(
    cells: Sequence[Cell], execution: Execution = Execution(), run_missing: bool = True, folder: Path | None = None,
    looked: Sequence[Run | None] = (),
) -> pd.DataFrame:  # fmt: skip
    """Say what the grid costs, run what is missing (if ``run_missing``), and return :func:`collect`'s frame.

    Where nothing is trained, say how much is stored. ``looked``: what was found of ``cells`` a moment ago.

    Weights and data of all missing runs are fetched first: ``ConnectionError`` with one sentence before any compute.
    """
    check_type(run_missing, bool, "run_missing")
    experiments = [c.experiment for c in cells]
    known = {e: r for e, r in zip(experiments, looked, strict=False) if r is not None}
    found = {e: r for e in experiments if (r := known.get(e) or shown_run(e, folder)) is not None}
    if not (missing := [e for e in experiments if e not in found]):
        say(f"{len(experiments)} stored runs found, nothing to train; FEDLIB_OUTPUTS=<another folder> trains anew")
    elif not run_missing:
        say(f"{len(found)} of {len(experiments)} runs are stored; run_missing = True trains the others")
    else:
        fetch(missing)
        say(describe_time(len(experiments), missing, stored_pace(found.values(), execution), execution))
        found = dict(zip(experiments, run_all(experiments, execution, folder, accept="kit"), strict=True))
    return collect(cells, folder, found)


def fetch(experiments: Sequence[Experiment]) -> None:
    """Bring every backbone and data set of ``experiments`` onto this machine, or say in one sentence what is not."""
    for name in dict.fromkeys(e.backbone for e in experiments if e.pretrained):
        fetch_weights(name)
    for name, backbone in dict.fromkeys((e.dataset, e.backbone) for e in experiments):
        if not is_available(name, tokenizer := tokenizer_of(backbone)):  # of the first backbone's size, which it needs
            load_dataset(name, size=backbone_spec(backbone).input_shape[-1], tokenizer=tokenizer)


def collect(
    cells: Sequence[Cell], folder: Path | None = None, known: Mapping[Experiment, Run] | None = None
) -> pd.DataFrame:
    """Return a row per cell: where it stands, and its stored accuracy (percent), exits, seconds; NaN where missing.

    ``last`` is the last exit's accuracy, ``local`` that of each client's deepest exit on its own test set, their mean.
    ``run`` is its name and ``found`` the run itself, None where missing. ``known`` are all that are stored, where one
    has looked.
    """
    rows = []
    for cell in cells:
        found = shown_run(cell.experiment, folder) if known is None else known.get(cell.experiment)
        row = {**vars(cell), "dataset": cell.experiment.dataset, "backbone": cell.experiment.backbone}
        row |= {"run": found.path.name if found else None, "found": found}
        rows.append(row | (values_of(found.summary) if found else {"status": "missing"}))
    return pd.DataFrame(rows).reindex(columns=list(NAMES["columns"]))


def values_of(record: Mapping[str, object]) -> dict[str, object]:
    """Return a run's summary or one round's metrics, with the further numbers that tables ask for (:func:`collect`)."""
    return {**record, **({"last": record["exits"][-1]} if "exits" in record else {}), **numbers_of(record)}


def mean_curves(
    cells: Sequence[Cell], column: str, value: str = "accuracy", folder: Path | None = None
) -> dict[str, list[dict]]:
    """Return per label the mean ``value`` over stored seeds by round in ``column``, for ``plots.plot_learning_curves``.

    Of the seeds that all labels have, or of each label's own where they share none. Of cells in several fine-tuning
    modes, per label and mode. Rounds that a seed lacks, as it diverged, are left out.
    """
    modes = {c.finetune for c in cells}
    runs: dict[str, dict[int, dict[int, float]]] = {}
    for cell in cells:
        if cell.column == column and (found := shown_run(cell.experiment, folder)) is not None:
            label = f"{cell.label}, {cell.finetune}" if len(modes) > 1 else cell.label
            if rounds := {m["t"]: x for m in found.metrics if (x := values_of(m).get(value)) is not None}:
                runs.setdefault(label, {})[cell.seed] = rounds
    shared = set.intersection(*map(set, runs.values())) if runs else set()
    kept = {v: [by[s] for s in sorted(shared or by)] for v, by in runs.items()}
    mean = lambda by, t: {"t": t, "accuracy": sum(r[t] for r in by) / len(by)}  # noqa: E731
    return {v: [mean(by, t) for t in sorted(set.intersection(*map(set, by)))] for v, by in kept.items()}


def mean_sd(
    frame: pd.DataFrame, value: str = "accuracy", by: Sequence[str] = ("finetune", "column", "variant")
) -> pd.DataFrame:
    """Return mean, SD (n - 1) and number of seeds of the last round, per group; never the best round.

    Of what clients get, the SD is the one over clients, mean over seeds. ``ValueError`` if a seed stands twice.
    """
    groups = by_seed(frame, value, by).groupby(list(by), sort=False, dropna=False)
    out = groups[value].agg(mean="mean", sd="std", seeds="count").reset_index()
    return out.assign(sd=groups[SD[value]].mean().to_numpy()) if value in SD else out


def by_seed(frame: pd.DataFrame, value: str, by: Sequence[str]) -> pd.DataFrame:
    """Return the rows that have ``value``; ``ValueError`` if a seed stands twice in a group ``by`` columns."""
    done = frame.dropna(subset=[value])
    if "seed" in done and len(twice := done[done.duplicated([*by, "seed"])]):
        raise ValueError(f"seed {twice.seed.iloc[0]} stands twice where {value} is averaged; allowed: a row a seed")
    return done


def budget_accuracies(frame: pd.DataFrame) -> pd.DataFrame:
    """Return a row per run and budget b = 1..E: accuracy of the ``deepest`` exit b, and mean over all ``held``, 1..b.

    ``frame`` as from :func:`collect`; what a client of that strength can answer with on the global test set.
    ``mean_sd(..., by=(..., "budget"))`` gives mean and SD over seeds.
    """
    rows = []
    for row in frame.dropna(subset=["accuracy"]).to_dict("records"):
        exits, where = row["exits"], {k: row[k] for k in ("finetune", "column", "variant", "label", "seed")}
        rows += [where | {"budget": b, "deepest": x, "held": sum(exits[:b]) / b} for b, x in enumerate(exits, 1)]
    return pd.DataFrame(rows, columns=["finetune", "column", "variant", "label", "seed", "budget", "deepest", "held"])


def best_runs(frame: pd.DataFrame) -> pd.DataFrame:
    """Keep every cell's seed with the highest mean accuracy over exits (Tables 6 and 7 take the best of three runs)."""
    done = frame.dropna(subset=["accuracy"]).reset_index(drop=True)
    return done.loc[done.groupby(["finetune", "column", "variant"], sort=False).accuracy.idxmax()]


def load_reported(paper: str, *tables: str) -> pd.DataFrame:
    """Read the published numbers: finetune, variant, method, column, mean, sd (NaN where none is printed).

    Of several tables, later ones add the rows that earlier ones do not print.
    """
    frames = [pd.read_csv(params_dir() / paper / "reported" / f"{t}.csv") for t in tables]
    frames = [f if "variant" in f else f.assign(variant=f.method) for f in frames]
    return pd.concat(frames, ignore_index=True).drop_duplicates(["finetune", "variant", "column"])


def reported_beside(paper: str, table: str) -> pd.DataFrame:
    """Return what the paper prints in ``table`` (or in those its ``reported`` names); no rows if it prints nothing."""
    names = load_spec(paper, table).get("reported", [table])
    if not all((params_dir() / paper / "reported" / f"{name}.csv").is_file() for name in names):
        return pd.DataFrame(columns=["finetune", "column", "variant", "mean", "sd"], dtype=object)
    return load_reported(paper, *names)


def load_claims(paper: str, table: str) -> list[tuple[str, str]]:
    """Return the table's ``claims``, pairs of variants to compare; by default the paper's method with every other."""
    spec = load_spec(paper, table)
    of_all = [(paper, v) for v in spec["variants"] if v != paper] if paper in spec["variants"] else []
    return [tuple(pair) for pair in spec.get("claims", of_all)]


def beside_reported(frame: pd.DataFrame, reported: pd.DataFrame, value: str = "accuracy") -> pd.DataFrame:
    """Return ``mean ± SD`` obtained, on which ``data``, beside reported, one row per (finetune, column, variant)."""
    both = mean_sd(frame, value, ("finetune", "column", "dataset", "variant", "label"))
    place = ["finetune", "column", "variant"]
    both = both.merge(reported[[*place, "mean", "sd"]], "left", place, suffixes=("", "_reported"))
    here, printed = (zip(both[m], both[s], strict=True) for m, s in (("mean", "sd"), ("mean_reported", "sd_reported")))
    return pd.DataFrame({
        "mode": both.finetune.map(label_of), "column": both.column, "data": both.dataset,
        "method": both.label.map(label_of), "obtained": [mean_and_sd(*x) for x in here], "seeds": both.seeds,
        "reported": [mean_and_sd(*x) for x in printed],
    })  # fmt: skip


def obtained(
    frame: pd.DataFrame, reported: pd.DataFrame, value: str = "accuracy", thresholds: Mapping[str, float] | None = None
) -> pd.DataFrame:
    """Return :func:`beside_reported`; of ensembles the best run's, as printed, and the mean over seeds.

    What clients get is spread out first (``clients.spread_out``). No reported column where the paper prints nothing.
    """
    if value in VALUES:
        frame = with_controls(frame) if value == "clients" else spread_out(frame, value, thresholds)
        value = "clients"
    table = beside_reported(frame, reported, value)
    if value == "ensemble":  # Tables 6 and 7 of ReeFL take the best of three runs, which is optimistic
        mean, seeds = table.obtained, table.seeds
        table = beside_reported(best_runs(frame), reported, value).rename(columns={"obtained": f"best run's {value}"})
        table["mean over seeds"], table["mean exit"] = mean, beside_reported(frame, reported).obtained
        table["seeds"] = seeds
    return table.drop(columns="reported") if (table.reported == "–").all() else table


def with_controls(frame: pd.DataFrame) -> pd.DataFrame:
    """Add below ``frame`` two controls (``serving.evaluate_clients``) of the runs that have them, a row a seed each.

    What clients get that always answer their own most frequent label; and of each method that is not personalised,
    what it gets with the clients' own shares of labels added.
    """
    found = [row for row in frame.to_dict("records") if isinstance(row["found"], Run)]
    own = [(row, x) for row in found if "majority" in (x := row["found"].summary.get("personal", {}))]
    prior = [
        row | {"variant": f"{row['variant']}_prior", "label": f"{label_of(row['label'])} + label prior",
               "clients": x["prior"], "clients_sd": x["prior_sd"]}
        for row, x in own if ".personal." not in METHODS[row["method"]].__module__
    ]  # fmt: skip
    control = {"variant": "majority", "label": "Own majority class"}
    prior += [row | control | {"clients": x["majority"], "clients_sd": x["majority_sd"]} for row, x in own]
    more = pd.DataFrame(prior, columns=frame.columns).drop_duplicates(["finetune", "column", "variant", "seed"])
    return pd.concat([frame, more], ignore_index=True) if len(more) else frame


def with_further(frame: pd.DataFrame, spec: Mapping[str, object]) -> pd.DataFrame:
    """Add below ``frame`` (of ``tables.collect``) a row per run and metric of ``also``, and per seed of ``average``.

    A run that measured no such metric has no such row, nor a seed that lacks one of the grid's columns.
    """
    parts = [frame]
    for name, metric in spec.get("also", {}).items():
        scores = frame.others.map(lambda others, metric=metric: (others or {}).get(metric), na_action="ignore")
        own = frame[scores.notna()]
        means = scores.dropna().map(lambda exits: sum(exits) / len(exits))
        parts.append(own.assign(column=own.column + f"_{name}", accuracy=means))
    columns = [c for c in dict.fromkeys(frame.column) if c in spec.get("average", ())]
    done = frame[frame.column.isin(columns)].dropna(subset=["accuracy"])
    for _, group in done.groupby(["finetune", "variant", "seed"], sort=False):
        if len(columns) > 1 and set(group.column) == set(columns):
            data = ", ".join(NAMES["data"].get(d, d) for d in dict.fromkeys(group.dataset))
            parts.append(group[:1].assign(column="average", dataset=data, accuracy=group.accuracy.mean()))
    return pd.concat([p for p in parts if len(p)] or [frame], ignore_index=True)


def exit_table(cells: Sequence[Cell], frame: pd.DataFrame) -> pd.DataFrame:
    """Return mean ``accuracy`` over seeds and ``costs.exit_costs``'s columns per mode, column, variant and exit."""
    rows, first = [], {(c.finetune, c.column, c.variant): c for c in reversed(cells)}
    by = ["finetune", "column", "variant"]
    for key, group in by_seed(frame, "accuracy", by).groupby(by, sort=False):
        cell, accuracies = first[key], pd.DataFrame(group.exits.tolist()).mean()
        where = {k: getattr(cell, k) for k in ("finetune", "column", "variant", "method", "label")}
        where |= {"dataset": cell.experiment.dataset, "backbone": cell.experiment.backbone, "seeds": len(group)}
        costs = exit_costs(cell.experiment, num_classes(cell.experiment))
        rows += [where | {"accuracy": a} | cost for a, cost in zip(accuracies, costs, strict=True)]
    return pd.DataFrame(rows)


def compute_table(cells: Sequence[Cell]) -> pd.DataFrame:
    """Return per mode, column and variant what all clients of a round train, in 10^12 MACs, counting further epochs."""
    first = {(c.finetune, c.column, c.variant): c for c in reversed(cells)}
    a_round = lambda e: round(training_macs(e) / e.rounds / 1e12, 3)  # noqa: E731
    rows = [(label_of(c.finetune), c.column, label_of(c.label), a_round(c.experiment)) for c in first.values()]
    return pd.DataFrame(rows[::-1], columns=["mode", "column", "method", "TMACs a round"])


def label_of(name: str) -> str:
    """Spell a method, a mode, or a variant's label as tables and figures do."""
    return vars(METHODS.get(name, object)).get("label") or NAMES["modes"].get(name, name)


def mean_and_sd(mean: float, sd: float) -> str:
    """Write ``67.29 ± 0.06``, or a dash for a missing mean."""
    return "–" if pd.isna(mean) else f"{mean:.2f}" if pd.isna(sd) else f"{mean:.2f} ± {sd:.2f}"


def save_table(frame: pd.DataFrame, name: str) -> Path:
    """Write ``frame`` as ``outputs/<folder>/tables/<stem>.csv``, ``name`` being ``<folder>/<stem>``."""
    frame.to_csv(path := output_file(name, "tables", "csv"), index=False)
    return path


def output_file(name: str, kind: str, suffix: str) -> Path:
    """Return ``outputs/<folder>/<kind>/<stem>.<suffix>`` for ``name``, ``<folder>/<stem>``; its folder is there."""
    folder, _, stem = name.rpartition("/")
    path = outputs_dir() / folder / kind / f"{stem}.{suffix}"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def markdown_table(frame: pd.DataFrame) -> str:
    """Return ``frame`` without its index as a Markdown table, with – where there is no value.

    No value begins a cell or a tag.
    """
    rows = frame.astype(object).where(frame.notna(), "–").map(str).values.tolist()
    cells = [list(map(str, frame.columns)), ["---"] * len(frame.columns), *rows]
    plain = lambda text: re.sub(r"<(?=[\w/!?])", "&lt;", " ".join(text.splitlines()).replace("|", r"\|"))  # noqa: E731
    return "\n".join(f"| {' | '.join(map(plain, row))} |" for row in cells)
