"""The atlas as one table: costs of a round counted by hand, and a user's own method among the others."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from fedlib import Experiment, run
from fedlib.engine.federation import build_federation
from fedlib.engine.serving import evaluate_clients
from fedlib.methods import METHODS
from fedlib_lab.atlas.fitting import SLACK, fitted_cells
from fedlib_lab.atlas.frame import BELOW, PRICES, costs, devices, entries_frame, holdings, majority_of, shares_of
from fedlib_lab.atlas.scores import BINDS, HIGH, at_best_rate, own_methods, tasks_of
from fedlib_lab.report.flags import OVER
from fedlib_lab.report.tables import collect
from fedlib_lab.runs.costs import load_shapes
from fedlib_lab.runs.packed import seen
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.store import find_run
from tests.helpers.tracked import OUTPUTS

CAPS = {"of": "macs", "shares": [0.125, 0.25, 0.5, 1.0]}
MINE = '''
from dataclasses import dataclass

from fedlib.methods import Method, register


@register("mine")
@dataclass(frozen=True)
class Mine(Method):
    """Early exits, each trained by its own loss."""
'''


@pytest.fixture(scope="module")
def cells():
    return load_grid("atlas", "cifar10_macs", "smoke", {"seeds": [1], "num_train": 80, "num_test": 40, "rounds": 1})


def test_every_task_is_a_table_of_its_caps():
    for caps in BINDS:
        for task, table in tasks_of(caps).items():
            assert table == f"{task}_{caps}"
            assert load_spec("atlas", table)["caps"]["of"] == caps
            shares = load_spec("atlas", table)["caps"]["shares"]
            assert shares == sorted(shares) and shares[-1] == 1 and len(shares) == len(devices())


def test_costs_of_a_round_by_hand():
    """What runs: the last block is computed for the class token alone, and no gradient reaches the images."""
    of = {"seeds": [1], "num_train": 80, "num_test": 40, "rounds": 1, "finetune": "full", "finetune_options": {}}
    grid = load_grid("atlas", "cifar10_macs", "smoke", of)
    depth = next(c.experiment for c in grid if c.variant == "depthfl")
    found, boards, shapes = costs(depth), devices(), load_shapes(depth, 10)
    tokens, width, examples = 16 + 1, 64, 80 / depth.num_clients
    stem, head = 16 * width * 8 * 8 * 3, width * 10
    block = 12 * tokens * width**2 + 2 * tokens**2 * width
    last = 2 * tokens * width**2 + 10 * width**2 + 2 * tokens * width  # keys and values of all tokens
    for k, board in enumerate(boards.index):
        forward = stem + (found.blocks[board] - 1) * block + last + found.exits[board] * head
        assert found.macs[board] == pytest.approx((3 * forward - stem) * examples * depth.local_epochs)
        travel = (found.up[board] + found.down[board]) * 8 * 2**20 / (boards.megabits[board] * 1e6)
        training = found.macs[board] / (boards.tera_macs[board] * 1e12 * boards.utilisation[board])
        assert found.seconds[board] == pytest.approx(training + travel)
        assert found.up[board] == pytest.approx(shapes.upload_mib(shapes.slice_for(k), k))
    assert found.peak.is_monotonic_increasing and found.macs.is_monotonic_increasing


def test_what_classes_hold_by_hand():
    """Blocks of a ViT cost alike, a single one, for the class token alone, far less; ranks cut what travels alone."""
    of = {"variant": ["whole", "depthfl", "heterofl", "hetlora"], "seeds": [1]}
    grids = {"upload": {"cifar10": load_grid("atlas", "cifar10_upload", "small", of)}, "memory": {}}
    whole, *rows = grids["upload"]["cifar10"]
    held = {c.variant: shares_of(c.experiment, whole.experiment).set_index("blocks") for c in rows}
    prefix = held["depthfl"]
    assert list(prefix.index) == [1, 2, 6, 12] and list(prefix.exits) == [1, 2, 3, 4] and (prefix.width == 1).all()
    blocks = np.diff(prefix.macs) / np.diff(prefix.index)
    assert np.allclose(blocks, blocks.mean(), rtol=0.05) and prefix.macs.iloc[0] < 0.3 * blocks.mean()
    wide, ranks = held["heterofl"], held["hetlora"]
    assert list(wide.width) == [0.125, 0.25, 0.5, 1] == pytest.approx(list(wide.upload), rel=0.01)
    assert list(ranks.width) == [3 / 32, 8 / 32, 16 / 32, 1] and ranks.macs.min() > 0.8
    (told,) = holdings(grids, "depthfl").to_dict("records")
    assert (told["what binds"], told["task"], told["blocks"]) == ("traffic", "CIFAR-10", "1, 2, 6, 12")
    assert told["upload"] == "0.09, 0.18, 0.52, 1.02" and holdings(grids, "fedepth").empty


@pytest.mark.slow
@pytest.mark.parametrize("table", [t for caps in BINDS for t in tasks_of(caps).values()])
def test_no_row_of_the_atlas_is_over_its_caps(table):
    caps = load_spec("atlas", table)["caps"]
    rows = {c.variant: c.experiment for c in load_grid("atlas", table, "small", {"seeds": [1]})}
    for row, e in rows.items():
        if row not in (HIGH, "local_whole"):  # the caps forbid the one, and of what is sent the other sends nothing
            takes = shares_of(e, rows[HIGH])[caps["of"]]
            assert (takes <= np.multiply(caps["shares"], 1 + SLACK)).all(), (row, list(takes))


@pytest.mark.parametrize("seed", [1, 2])
def test_the_majority_class_is_known_of_the_split_alone(cells, seed, monkeypatch):
    """As a run measures it (``serving.evaluate_clients``); the method and its rate do not matter."""
    e = next(c.experiment for c in cells if c.variant == "whole").replace(seed=seed, num_test=60)
    f = build_federation(e)
    measured = evaluate_clients(f, f.server, {})["majority"]
    other = next(c.experiment for c in cells if c.variant == "depthfl").replace(seed=seed, num_test=60, lr=0.3)
    assert majority_of(e) == majority_of(other) == pytest.approx(measured, abs=0.006) and measured > 12
    monkeypatch.setattr("fedlib_lab.atlas.frame.is_available", lambda *_: False)
    assert np.isnan(majority_of(e.replace(seed=seed + 10)))


STORED = OUTPUTS / "atlas/tables/atlas_small.parquet"


def told_again(picked):
    """Prices of stored runs, counted anew beside those of the stored table."""
    for name, row in picked.iterrows():
        e = Experiment.from_dict(
            json.loads((seen(OUTPUTS / "runs" / name) / "experiment.json").read_text())["experiment"]
        )
        took = costs(e.replace(seed=1, lr=1.0))
        found = took.macs.mean(), took.peak.max(), took.up.mean(), took.down.mean(), took.seconds.max()
        yield name, list(row[PRICES]), found


@pytest.mark.parametrize("method", ["smallest", "fedper", "depthfl"])
def test_prices_of_the_stored_table_are_those_that_are_counted(method):
    frame = pd.read_parquet(STORED).set_index("run")
    for name, stored, found in told_again(frame[(frame.method == method) & (frame.task == "speakers")].iloc[:1]):
        assert stored == pytest.approx(found), name


@pytest.mark.slow
def test_all_prices_of_the_stored_table_are_those_that_are_counted():
    frame = pd.read_parquet(STORED)
    for name, stored, found in told_again(
        frame.drop_duplicates(["task", "caps", "method"]).drop_duplicates("run").set_index("run")
    ):
        assert stored == pytest.approx(found), name


def test_a_row_a_run_and_a_method_of_ones_own(cells, tmp_path, monkeypatch):
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    try:
        assert own_methods(path) == own_methods(path) == ["mine"]  # the file may be read again
        mine = fitted_cells(cells, CAPS, "mine")
        assert [c.variant for c in mine] == ["mine"] and mine[0].experiment.budgets == (0, 1, 2, 3)
        whole = next(c for c in cells if c.variant == "whole")
        for cell in (*mine, whole):
            run(cell.experiment, folder=tmp_path / "runs", progress=False)
        rows = collect([*cells, *mine], tmp_path / "runs")
        frame = entries_frame({"macs": {"cifar10": rows}})
        told = tmp_path / "told.parquet"
        frame.iloc[:1].assign(
            macs=1.0, majority=12.0, flags="over budget: levels of A cost 1 where 0.5 of the whole are said, rising"
        ).to_parquet(told)
        OVER.clear()
        again = entries_frame({"macs": {"cifar10": rows}}, told)
        for found in rows.found.dropna():  # as older runs, which did not look
            del found.summary["personal"]["majority"]
        with monkeypatch.context() as away:  # what a stored table knows of data that are not at hand is not lost
            away.setattr("fedlib_lab.atlas.frame.majority_of", lambda _: np.nan)
            older = entries_frame({"macs": {"cifar10": rows}}, told)
        assert older.majority[0] == 12 and np.isnan(older.majority[1])
        small = {"num_train": 80, "num_test": 40, "rounds": 1}
        tried = fitted_cells(load_grid("atlas", "cifar10_rates", "smoke", small), CAPS, "mine")
        for cell in tried:
            run(cell.experiment, folder=tmp_path / "runs", progress=False)
        (best,) = at_best_rate(mine, tried, tmp_path / "runs")
        third = replace(tried[0], column="lr_1.6", experiment=tried[0].experiment.replace(lr=1.6))  # it has no score
        assert at_best_rate(mine, [*tried, third], tmp_path / "runs") == [best]
        with pytest.raises(ValueError, match="no rate of 'mine' has a score"):
            at_best_rate(mine, [third], tmp_path / "runs")
    finally:
        METHODS.pop("mine", None)
    scores = {c.experiment.lr: find_run(c.experiment, tmp_path / "runs").summary["personal"] for c in tried}
    assert set(scores) == {0.05, 0.1} and {c.experiment.evaluate_on for c in tried} == {"validation"}
    highest = max(sorted(scores), key=lambda lr: round(np.mean(list(scores[lr]["by_client"].values())), 2))
    assert best.experiment == mine[0].experiment.replace(lr=highest)
    assert list(frame.method) == ["whole", "mine"]
    assert list(again.macs) == [1, frame.macs[1]] and again[PRICES[1:]].equals(
        frame[PRICES[1:]]
    )  # one is as it was told
    assert again["flags"][0].startswith("over budget: levels of A cost 1 where 0.5 of the whole are said")
    OVER.clear()
    for row in frame.to_dict("records"):
        summary = find_run(
            next(c.experiment for c in (*cells, *mine) if c.variant == row["method"]), tmp_path / "runs"
        ).summary
        own = summary["personal"]
        assert row["majority"] == own["majority"] and row["central"] == summary["exits"][-1]
        assert (BELOW in row["flags"]) == (row["score"] < own["majority"])
        assert row["prior"] == own["last_prior"] and (own["last_prior"] == own["prior"]) == (len(own["exits"]) == 1)
    assert np.allclose(frame.score, frame[[f"class {k}" for k in range(1, 5)]].mean(axis=1))  # classes of equal size
    assert (frame.worst <= frame.score).all()
    nothing = tmp_path / "nothing.py"
    nothing.write_text("x = 1\n")
    with pytest.raises(ValueError, match="registers no method"):
        own_methods(nothing)


@pytest.mark.parametrize(
    ("caps", "method"), [("macs", "depthfl"), ("macs", "fedper"), ("upload", "depthfl"), ("upload", "hetlora")]
)
def test_rows_of_the_atlas_are_what_fits(caps, method):
    """Some; the others are given by the same function, by what is counted when they run."""
    by = {c.variant: c for c in load_grid("atlas", f"cifar10_{caps}", "small", {"seeds": [1]})}
    (here,) = fitted_cells([by["whole"]], load_spec("atlas", f"cifar10_{caps}")["caps"], method)
    for key in ("num_exits", "exit_blocks", "budgets", "options"):
        assert getattr(here.experiment, key) == getattr(by[method].experiment, key)
