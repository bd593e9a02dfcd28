"""Claims that are arithmetic, not training: what a round uploads, how large a model is, what printed numbers say.

Each looks at a paper's ``claims.Stored`` and returns (does it hold?, the numbers).
"""

import pandas as pd

from ..core.paths import params_dir
from ..methods.packing import BATCH
from ..runs.costs import Shapes, load_shapes, upload_mib, upload_parameters
from ..runs.params import load_experiment, load_grid
from ..runs.prices import num_classes
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


def communication(stored) -> tuple[bool, str]:
    uploads = stored.uploads
    equal = uploads.paper.round(2) == uploads.printed
    return bool(equal.all()), f"{equal.sum()} of {len(equal)} cells equal to two decimals"


def extra_upload(stored) -> tuple[bool, str]:
    uploads = stored.uploads
    wide = uploads.pivot(index=["table", "finetune"], columns="method", values=["paper", "honest"])
    more = {c: wide[c].reefl - wide[c].depthfl for c in ("paper", "honest")}
    text = {c: f"{x.min():.2f} to {x.max():.2f} MiB more" for c, x in more.items()}
    about_one = more["paper"].between(0.5, 1.5).all()
    return bool(about_one), f"{text['paper']} in the paper's convention, {text['honest']} really sent"


def fewer_parameters(stored) -> tuple[bool, str]:
    uploads = stored.uploads
    at = uploads[(uploads.table == "table2") & (uploads.finetune == "frozen")].set_index("method").largest
    return bool(0 < at.depthfl - at.reefl < 0.01 * at.depthfl), f"{at.reefl:,} against {at.depthfl:,} trainable"


def memory_table(stored) -> tuple[bool, str]:
    """FeDepth's Table 1, counted; it cuts some decimals instead of rounding them."""
    printed = load_reported(stored.paper, "table1").set_index("variant")["mean"]
    measure = _preresnet20(stored.paper).setting.measure
    share = lambda name: measure.total_mib(BATCH) / float(name.partition("/")[2] or 1)  # noqa: E731
    counted = pd.Series(
        {n: share(n) if n[0] == "x" else measure.activation_mib(int(n[1:]) - 1, BATCH) for n in printed.index}
    )
    rounded = counted.round(2) == printed
    cut = (counted * 100).astype(int) / 100 == printed
    return bool((rounded | cut).all()), f"{rounded.sum()} of {len(printed)} equal to two decimals, the others cut there"


def a_sixth_trains_everything(stored) -> tuple[bool, str]:
    """The plan of the poorest fair client covers all blocks."""
    shapes = _preresnet20(stored.paper)
    plan = shapes.method.plan(1 / 6, shapes.setting)
    blocks = [unit for stage in plan for unit in stage]
    return blocks == list(range(9)) and len(plan) == 6, f"{len(blocks)} of 9 blocks in {len(plan)} stages"


def _preresnet20(paper: str) -> Shapes:
    return load_shapes(load_experiment(paper, "fedepth", "paper", {"dataset": "cifar10"}), 10)


def printed_savings(stored) -> tuple[bool, str]:
    """CAFEDistill's savings in the text against those of its printed MACs."""
    macs = load_costs(stored.paper)
    saved = 100 * (1 - macs.cafedistill_millions / macs.single_exit_millions)
    agree = (saved - macs.saved_percent_in_text).abs() < 0.02
    return bool(agree.all()), "the printed MACs give " + ", ".join(f"{x:.2f}" for x in saved) + " %"


def last_exit_share(stored) -> tuple[bool, str]:
    """The last exit of ResNet-18 with 100 classes, as a share of the backbone, in parameters."""
    setting = model_setting(stored.paper, "cifar100_alpha0.3")
    backbone = setting.measure.parameters(setting.full().only(exits=()))
    last = setting.measure.parameters(setting.full().only(exits=(setting.num_exits - 1,))) - backbone
    share = 100 * last / backbone
    return abs(share - 0.45) < 0.015, f"{last:,} of {backbone:,} parameters: {share:.2f} %"


def single_exit_macs(stored) -> tuple[bool, str]:
    """MACs of the whole model with its last exit alone; norms are not counted, which the paper's tool does (0.4 %)."""
    found, agree = [], []
    for row in load_costs(stored.paper).itertuples():
        setting = model_setting(stored.paper, row.column)
        macs = setting.measure.macs(setting.full().only(exits=(setting.num_exits - 1,))) / 1e6
        found.append(f"{macs:.2f}")
        agree.append(abs(macs / row.single_exit_millions - 1) < 0.006)
    return all(agree), f"{', '.join(found)} million; {sum(agree)} of {len(agree)} agree"


def load_costs(paper: str) -> pd.DataFrame:
    """The MACs that a paper prints, by data column."""
    return pd.read_csv(params_dir() / paper / "reported" / "macs.csv")


def model_setting(paper: str, column: str):
    """The setting of the paper's own method at paper size on a data column, from shapes alone."""
    (cell, *_) = load_grid(paper, "table1", "paper", {"method": paper, "columns": [column]})
    return load_shapes(cell.experiment, num_classes(cell.experiment)).setting


EXACT = {
    "communication": communication, "extra_upload": extra_upload, "fewer_parameters": fewer_parameters,
    "memory_table": memory_table, "a_sixth_trains_everything": a_sixth_trains_everything,
    "printed_savings": printed_savings, "last_exit_share": last_exit_share, "single_exit_macs": single_exit_macs,
}  # fmt: skip
