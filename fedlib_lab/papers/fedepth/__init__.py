"""FeDepth: the memory of Table 1, and what the poorest client trains.

Read next: ``fedepth/training_memory.py`` (what stages take), ``fedepth/local_networks.py`` (Figure 5).
"""

import pandas as pd

from fedlib.methods.memory_budgets import BATCH, SLACK

from ...report.sources import Stored
from ...report.tables import load_reported
from ...runs.costs import Shapes, load_shapes
from ...runs.params import load_experiment


def memory_table(stored: Stored) -> tuple[bool, str]:
    """Compare FeDepth's Table 1 with our counts; it cuts some decimals instead of rounding them."""
    printed = load_reported(stored.paper, "table1").set_index("variant")["mean"]
    measure = _preresnet20(stored.paper).setting.measure
    share = lambda name: measure.total_mib(BATCH) / float(name.partition("/")[2] or 1)  # noqa: E731
    block = lambda name: measure.activation_mib(int(name[1:]) - 1, BATCH)  # noqa: E731
    counted = pd.Series({n: share(n) if n[0] == "x" else block(n) for n in printed.index})
    rounded = counted.round(2) == printed
    cut = (counted * 100).astype(int) / 100 == printed
    return bool((rounded | cut).all()), f"{rounded.sum()} of {len(printed)} equal to two decimals, the others cut there"


def a_sixth_trains_everything(stored: Stored) -> tuple[bool, str]:
    """Check that the stages of the poorest fair client cover all blocks, and that training takes no more."""
    shapes = _preresnet20(stored.paper)
    stages = shapes.method.blocks(1 / 6, shapes.setting)
    blocks = [unit for stage in stages for unit in stage]
    counted, told = blocks == list(range(9)) and len(stages) == 6, f"{len(blocks)} of 9 blocks in {len(stages)} stages"
    if (table := stored.table(f"table1_{stored.profile}_measured")) is None:
        return counted, f"{told} by the paper's count; not measured"
    taken = (table.measured_mib / table.budget_mib)[table.stage.groupby(table.r).transform("size") == len(stages)]
    ends = f"{taken.min():.1f} to {taken.max():.1f} times a sixth of what training the whole net takes"
    return counted and taken.max() <= 1 + SLACK, f"{told} by the paper's count; measured, a stage takes {ends}"


def _preresnet20(paper: str) -> Shapes:
    return load_shapes(load_experiment(paper, "fedepth", "paper", {"dataset": "cifar10"}), 10)


EXACT = {"memory_table": memory_table, "a_sixth_trains_everything": a_sixth_trains_everything}
