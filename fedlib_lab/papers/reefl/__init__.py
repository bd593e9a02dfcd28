"""ReeFL: what a round uploads (Tables 1 and 2), which exit teaches (Figure 7).

Read next: ``reefl/attention_maps.py`` (Figure 1), ``reefl/teachers.py`` (Figure 7), ``reefl/factors.py`` (why).
"""

import numpy as np
import pandas as pd

from ...report.sources import Stored
from ...report.tables import load_reported
from ...report.verdicts import Difference
from ...runs.costs import upload_mib, upload_parameters
from ...runs.params import load_experiment


def upload_table(paper: str) -> pd.DataFrame:
    """Return the upload per client and round in Tables 1 and 2: printed, by the paper's convention, honest.

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


def uploads_of(stored: Stored) -> pd.DataFrame:
    """Return :func:`upload_table`, computed where ``outputs/<paper>/tables/uploads.csv`` does not hold it yet."""
    if (table := stored.table("uploads")) is None:
        path = stored.folder / "tables" / "uploads.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        upload_table(stored.paper).to_csv(path, index=False)
        table = stored.table("uploads")
    return table


def communication(stored: Stored) -> tuple[bool, str]:
    uploads = uploads_of(stored)
    equal = uploads.paper.round(2) == uploads.printed
    return bool(equal.all()), f"{equal.sum()} of {len(equal)} cells equal to two decimals"


def extra_upload(stored: Stored) -> tuple[bool, str]:
    wide = uploads_of(stored).pivot(index=["table", "finetune"], columns="method", values=["paper", "honest"])
    more = {c: wide[c].reefl - wide[c].depthfl for c in ("paper", "honest")}
    text = {c: f"{x.min():.2f} to {x.max():.2f} MiB more" for c, x in more.items()}
    about_one = more["paper"].between(0.5, 1.5).all()
    return bool(about_one), f"{text['paper']} in the paper's convention, {text['honest']} really sent"


def fewer_parameters(stored: Stored) -> tuple[bool, str]:
    uploads = uploads_of(stored)
    at = uploads[(uploads.table == "table2") & (uploads.finetune == "frozen")].set_index("method").largest
    return bool(0 < at.depthfl - at.reefl < 0.01 * at.depthfl), f"{at.reefl:,} against {at.depthfl:,} trainable"


def teacher_differences(claim: dict, stored: Stored) -> list[tuple[dict, Difference]]:
    """Return Figure 7's differences per seed in points from its notebook's table, teachers counted per estimate."""
    out = []
    for exits in (4, 12):
        table = stored.table(f"{claim['counts']}_{stored.profile}_{exits}exits")
        where = {"table": claim["counts"], "mode": "LoRA", "column": f"{exits} exits"}
        seeds = [] if table is None else [group for _, group in table.groupby("seed")]
        if claim["compare"] == "teacher_accuracy":
            mean = lambda g, w: np.average(g.accuracy, weights=g[w])  # noqa: E731
            values = [mean(g, "running") - mean(g, "batch") for g in seeds]
            text = "test accuracy of the teacher: running estimate – mini-batch"
        else:
            share = [100 * (g.running / g.running.sum()).set_axis(range(len(g))) for g in seeds]
            best = [int(g.accuracy.to_numpy().argmax()) for g in seeds]
            values = [s[b] - s.drop(b).max() for s, b in zip(share, best, strict=True)]
            text = "share of mini-batches: best exit – most frequent other"
        out.append((where | {"comparison": text}, Difference(np.array(values))))
    return out


EXACT = {"communication": communication, "extra_upload": extra_upload, "fewer_parameters": fewer_parameters}
COMPARED = {"counted": teacher_differences}
