"""Tables for notebooks: stored runs as data frames, obtained beside reported, and verdicts on the paper's claims."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from .data.datasets import is_available
from .params import Cell, load_grid, load_profile
from .project import params_dir
from .runs import find_run

LABELS = {
    "exclusivefl": "ExclusiveFL", "inclusivefl": "InclusiveFL", "scalefl": "ScaleFL", "depthfl": "DepthFL",
    "reefl": "ReeFL", "fedavg": "FedAvg",
    "full": "Full", "frozen": "Frozen", "lora": "LoRA", "pa": "PA", "sa": "SA", "ssf": "SSF",
}  # fmt: skip


def load_cells(
    paper: str, table: str, profile: str, overrides: Mapping[str, object] | None = None, folder: Path | None = None
) -> list[Cell]:
    """The table's grid, or the profile's ``fallback`` if runs are missing and its data set is not at hand."""
    cells = load_grid(paper, table, profile, overrides)
    fallback = load_profile(profile).get("fallback")
    if fallback is None or "dataset" in (overrides or {}):
        return cells
    unavailable = {n for n in {c.experiment.dataset for c in cells} if not is_available(n)}
    if any(c.experiment.dataset in unavailable and find_run(c.experiment, folder) is None for c in cells):
        return load_grid(paper, table, profile, {**fallback, **(overrides or {})})
    return cells


def collect(cells: Sequence[Cell], folder: Path | None = None) -> pd.DataFrame:
    """One row per cell: where it stands, and its stored accuracy (percent), exits, seconds; NaN where missing."""
    rows = []
    for cell in cells:
        found = find_run(cell.experiment, folder)
        row = {k: v for k, v in asdict(cell).items() if k != "experiment"}
        summary = found.summary if found else {"status": "missing"}
        rows.append(row | {"dataset": cell.experiment.dataset, "run": cell.experiment.slug, **summary})
    return pd.DataFrame(rows).reindex(
        columns=["finetune", "method", "column", "seed", "dataset", "status", "accuracy", "ensemble", "exits",
                 "seconds", "t", "run"]
    )  # fmt: skip


def mean_sd(
    frame: pd.DataFrame, value: str = "accuracy", by: Sequence[str] = ("finetune", "column", "method")
) -> pd.DataFrame:
    """Mean, SD (n - 1) and number of seeds of the last round, per group; never the best round."""
    groups = frame.dropna(subset=[value]).groupby(list(by), sort=False)[value]
    return groups.agg(mean="mean", sd="std", seeds="count").reset_index()


def load_reported(paper: str, table: str) -> pd.DataFrame:
    """The published numbers: finetune, method, column, mean, sd."""
    return pd.read_csv(params_dir() / paper / "reported" / f"{table}.csv", float_precision="round_trip")


def beside_reported(frame: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """``mean ± SD`` obtained beside reported, one row per (finetune, column, method)."""
    keys = ["finetune", "column", "method"]
    both = mean_sd(frame).merge(reported, on=keys, how="left", suffixes=("", "_reported"))
    return pd.DataFrame(
        {
            "mode": both.finetune.map(LABELS).fillna(both.finetune),
            "column": both.column,
            "method": both.method.map(LABELS).fillna(both.method),
            "obtained": [spread(m, s) for m, s in zip(both["mean"], both.sd, strict=True)],
            "seeds": both.seeds,
            "reported": [spread(m, s) for m, s in zip(both.mean_reported, both.sd_reported, strict=True)],
        }
    )


def spread(mean: float, sd: float) -> str:
    """``67.29 ± 0.06``; a dash for a missing mean."""
    if pd.isna(mean):
        return "–"
    return f"{mean:.2f}" if pd.isna(sd) else f"{mean:.2f} ± {sd:.2f}"


def orderings(frame: pd.DataFrame, reported: pd.DataFrame, of: str = "reefl") -> pd.DataFrame:
    """Does ``of`` stand to each rival as the paper reports? Paired by seed.

    ``holds``: the mean difference over seeds has the reported sign and exceeds its SD; ``does not hold``: it has the
    other sign and exceeds its SD; ``undecided``: smaller than its SD; ``not testable``: fewer than two common seeds.
    """
    rows = []
    for (finetune, column), group in frame.dropna(subset=["accuracy"]).groupby(["finetune", "column"], sort=False):
        wide = group.pivot_table(index="seed", columns="method", values="accuracy")
        paper = reported[(reported.finetune == finetune) & (reported.column == column)].set_index("method")["mean"]
        for rival in [m for m in wide.columns if m != of and of in wide and m in paper and of in paper]:
            difference, claim = (wide[of] - wide[rival]).dropna(), paper[of] - paper[rival]
            verdict = "not testable"
            if len(difference) >= 2:
                clear = abs(difference.mean()) > difference.std()
                verdict = "undecided" if not clear else "holds" if difference.mean() * claim > 0 else "does not hold"
            rows.append(
                {
                    "mode": LABELS.get(finetune, finetune),
                    "column": column,
                    "claim": f"{LABELS[of]} {'>' if claim > 0 else '<'} {LABELS[rival]}",
                    "reported": round(claim, 2),
                    "obtained": spread(difference.mean(), difference.std()),
                    "seeds": len(difference),
                    "verdict": verdict,
                }
            )
    return pd.DataFrame(rows, columns=["mode", "column", "claim", "reported", "obtained", "seeds", "verdict"])


def save_table(frame: pd.DataFrame, path: Path) -> Path:
    """Write ``frame`` as CSV and as a Markdown table beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame.to_csv(path.with_suffix(".csv"), index=False)
    cells = [list(map(str, frame.columns)), ["---"] * len(frame.columns), *frame.astype(str).values.tolist()]
    path.with_suffix(".md").write_text("".join(f"| {' | '.join(row)} |\n" for row in cells))
    return path.with_suffix(".md")
