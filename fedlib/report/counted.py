"""Claims on which exit teaches: differences from what the notebook of Figure 7 counted, not from runs' accuracies."""

import numpy as np

from .verdicts import Difference


def counted(claim: dict, stored) -> list[tuple[dict, Difference]]:
    """Figure 7's differences per seed in points, from its notebook's table; ``running``, ``batch`` count teachers."""
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
