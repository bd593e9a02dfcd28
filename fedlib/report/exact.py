"""Claims that are arithmetic, not training: what a round uploads and how large a sub-model is, from shapes alone."""

import pandas as pd

from ..runs.costs import upload_mib, upload_parameters
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


EXACT = {"communication": communication, "extra_upload": extra_upload, "fewer_parameters": fewer_parameters}
