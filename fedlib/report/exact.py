"""Claims that are arithmetic, not training: what a round uploads and how large a sub-model is, from shapes alone."""

import pandas as pd

from ..methods.packing import BATCH
from ..runs.costs import Shapes, load_shapes, upload_mib, upload_parameters
from ..runs.params import load_experiment
from .tables import load_reported


def upload_table(paper: str) -> pd.DataFrame:
    """Upload per client and round in Tables 1 and 2: printed, by the paper's convention, honest.

    ``largest``: parameters a client of the largest budget sends. DeiT-S, 100 classes; MiB (2^20 bytes), float32.
    """
    rows = []
    for table, exits in (("table1", 4), ("table2", 12)):
        for r in load_reported(paper, table).query("column == 'upload_mib'").itertuples():
            row = {"finetune": r.finetune, "num_exits": exits, "dataset": "cifar100"}
            e = load_experiment(paper, r.method, "paper", {"augment": "none"}, **row)
            both = {c: round(upload_mib(e, 100, c), 4) for c in ("paper", "honest")}
            largest = upload_parameters(e, 100)[-1]
            where = {"table": table, "finetune": r.finetune, "method": r.method}
            rows.append(where | {"printed": r.mean} | both | {"largest": largest})
    return pd.DataFrame(rows)


def communication(uploads: pd.DataFrame) -> tuple[bool, str]:
    equal = uploads.paper.round(2) == uploads.printed
    return bool(equal.all()), f"{equal.sum()} of {len(equal)} cells equal to two decimals"


def extra_upload(uploads: pd.DataFrame) -> tuple[bool, str]:
    wide = uploads.pivot(index=["table", "finetune"], columns="method", values=["paper", "honest"])
    more = {c: wide[c].reefl - wide[c].depthfl for c in ("paper", "honest")}
    text = {c: f"{x.min():.2f} to {x.max():.2f} MiB more" for c, x in more.items()}
    about_one = more["paper"].between(0.5, 1.5).all()
    return bool(about_one), f"{text['paper']} in the paper's convention, {text['honest']} really sent"


def fewer_parameters(uploads: pd.DataFrame) -> tuple[bool, str]:
    at = uploads[(uploads.table == "table2") & (uploads.finetune == "frozen")].set_index("method").largest
    return bool(0 < at.depthfl - at.reefl < 0.01 * at.depthfl), f"{at.reefl:,} against {at.depthfl:,} trainable"


def memory_table(paper: str) -> tuple[bool, str]:
    """FeDepth's Table 1, counted; it cuts some decimals instead of rounding them."""
    printed = load_reported(paper, "table1").set_index("variant")["mean"]
    measure = _preresnet20(paper).setting.measure
    share = lambda name: measure.total_mib(BATCH) / float(name.partition("/")[2] or 1)  # noqa: E731
    counted = pd.Series(
        {n: share(n) if n[0] == "x" else measure.activation_mib(int(n[1:]) - 1, BATCH) for n in printed.index}
    )
    rounded = counted.round(2) == printed
    cut = (counted * 100).astype(int) / 100 == printed
    return bool((rounded | cut).all()), f"{rounded.sum()} of {len(printed)} equal to two decimals, the others cut there"


def a_sixth_trains_everything(paper: str) -> tuple[bool, str]:
    """The plan of the poorest fair client covers all blocks."""
    shapes = _preresnet20(paper)
    plan = shapes.method.plan(1 / 6, shapes.setting)
    blocks = [unit for stage in plan for unit in stage]
    return blocks == list(range(9)) and len(plan) == 6, f"{len(blocks)} of 9 blocks in {len(plan)} stages"


def _preresnet20(paper: str) -> Shapes:
    return load_shapes(load_experiment(paper, "fedepth", "paper", {"dataset": "cifar10"}), 10)


FROM_SHAPES = {"memory_table": memory_table, "a_sixth_trains_everything": a_sixth_trains_everything}
EXACT = {"communication": communication, "extra_upload": extra_upload, "fewer_parameters": fewer_parameters}
