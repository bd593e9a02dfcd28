"""Runs that differ in their seed, rate or split train together: with the numbers of each alone, and each stays a run of its own."""

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedlib import Execution, build_federation, run, run_all, run_rounds
from fedlib.methods import METHODS
from fedlib_lab.executors.stacked import Joint, Meeting, are_alike
from fedlib_lab.runs import side_by_side
from fedlib_lab.runs.checkpoints import Checkpoints
from fedlib_lab.runs.side_by_side import stacks
from fedlib_lab.runs.store import find_run, run_path
from fedlib_lab.runs.verify import verify
from tests.helpers.granted import few_blocks
from tests.helpers.stored import ONE, small, state
from tests.system.test_gpu import apart, products, tiny

SEEDS = (3, 4, 5)
# the frozen net follows from the seed where it is not pre-trained; FjORD draws widths from it
ALONE = ("hetlora", "flexlora", "flora", "fjord")
QUICK = "fedavg scalefl splitmix heterofl inclusivefl cafedistill ditto fedpac fjord fiarse".split()
STACK = Execution(workers=1, stack=3)


def chosen(missing, execution):
    return list(stacks(missing, execution))


full = partial(small, finetune="full", finetune_options={})  # frozen nets that are not pre-trained follow from the seed


def rounds(e, **how):
    """All rounds of ``e``, and what they began with."""
    f = build_federation(e)
    return list(run_rounds(f, Execution(**{"workers": 1, "executor": "threads"} | how))), f.server.params


def together(grid, **how):
    """The rounds of every experiment of ``grid``, which meet, and their meeting."""
    meeting = Meeting(len(grid))
    with ThreadPoolExecutor(len(grid)) as pool:
        each = [pool.submit(meeting.attend, partial(rounds, e, executor="stacked", **how)) for e in grid]
        done = [r.result() for r in each]
    meeting.close()
    return done, meeting


def assert_as_alone(grid, whole=dict, limit=1e-4, **how):
    """Two ways to the same numbers, up to rounding; return how many runs trained together."""
    done, meeting = together(grid, **how)
    for e, (there, _) in zip(grid, done, strict=True):
        here, start = rounds(e)
        assert apart(there[-1].server, here[-1].server, start, whole) < limit
        for a, b in zip(there, here, strict=True):
            assert a.losses == pytest.approx(b.losses, rel=1e-4, abs=1e-5) and a.memories.keys() == b.memories.keys()
            for c, kept in b.memories.items():
                assert all(torch.allclose(a.memories[c][n], x, atol=1e-4) for n, x in kept.items())
    return max(len(j.runs) for j in meeting.joints.values())


@pytest.mark.parametrize("method", [m if m in QUICK else pytest.param(m, marks=pytest.mark.slow) for m in METHODS])
@pytest.mark.filterwarnings("ignore")
def test_every_method_has_the_numbers_of_each_run_alone(method, monkeypatch):
    net = few_blocks(monkeypatch, method)
    grid = [tiny(method, backbone=net, seed=s) for s in SEEDS]
    # darkdistill and feddf distil at the server by Adam, which amplifies rounding
    limit = 1e-3 if method in ("feddf", "darkdistill") else 1e-4
    assert assert_as_alone(grid, products if method == "flexlora" else dict, limit) == (1 if method in ALONE else 3)


@pytest.mark.parametrize(
    "changes",
    [
        dict(method="fedper", options={"compress": "quantise", "bits": 4, "update_norm": 0.5}),
        dict(method="fedavg", options={"compress": "topk", "error_feedback": True}, nonfinite="drop"),
        dict(method="depthfl", backbone="resnet8", num_exits=3, batch_norm="local", augment="crop_flip"),
        dict(method="cafedistill", backbone="resnet8", num_exits=3, batch_norm="tracked", optimiser="adamw"),
        dict(method="reefl", backbone="deit_micro", pretrained=True, finetune="lora",
             finetune_options={"r": 2, "lora_dropout": 0.3}, num_exits=4),
    ],
    ids=lambda c: c["method"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:.*left out")
def test_so_has_whatever_clients_draw_keep_and_send(changes):
    grid = [tiny(**{**changes, "seed": s}) for s in SEEDS]
    assert assert_as_alone(grid) == 3


@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_rates_and_splits_may_differ_too(optimiser):
    sgd = optimiser == "sgd"
    lr = 0.1 if sgd else 0.001
    unlike = (dict(lr=lr), dict(lr=lr / 5, schedule="constant"), dict(lr=lr, seed=4, dirichlet_alpha=0.3))
    how = dict(optimiser=optimiser, local_schedule="linear" if sgd else "constant", local_epochs=2, min_lr=0.0)
    grid = [tiny("reefl", finetune="full", **how | own) for own in unlike]
    assert chosen([*grid, grid[0].replace(weight_decay=0.1)], STACK) == [grid]
    assert assert_as_alone(grid, limit=1e-4 if sgd else 1e-3) == 3  # Adam amplifies rounding


def test_cohorts_are_planned_anew_from_the_clients_of_all(monkeypatch):
    sizes = []
    train = Joint.train
    monkeypatch.setattr(Joint, "train", lambda self, asked: sizes.append(len(asked)) or train(self, asked))
    grid = [tiny("fedavg", seed=s) for s in SEEDS]
    assert assert_as_alone(grid, cohort_size=2) == 3
    assert sizes == [3, 3]  # a round is one training of all


def test_who_reads_the_seed_while_clients_train_trains_alone(monkeypatch):
    grid = [tiny("fjord", backbone=few_blocks(monkeypatch, "fjord"), seed=s) for s in SEEDS]
    with pytest.warns(
        UserWarning, match="train one after another: the training of clients reads seed, in which they differ"
    ):
        _, meeting = together(grid)
    assert [len(j.runs) for j in meeting.joints.values()] == [1, 1, 1]


def test_runs_of_other_examples_or_frozen_tensors_do_not_meet():
    a, b = (build_federation(tiny("fedavg", seed=s)) for s in (1, 2))
    assert are_alike(a, b)
    assert not are_alike(a, replace(b, data=replace(b.data, mean=b.data.mean + 1)))
    assert not are_alike(a, replace(b, data=replace(b.data, inputs=b.data.inputs.clone())))
    frozen = [build_federation(tiny("fedavg", finetune="frozen", finetune_options={}, seed=s)) for s in (1, 2)]
    assert not are_alike(*frozen)


def test_what_trains_together_differs_in_its_seed_alone(monkeypatch):
    a = [full("fedavg", seed=s) for s in range(5)]
    b = [full("fedavg", seed=s, rounds=3) for s in range(2)]
    grid = [a[0], b[0], *a[1:], b[1], full("fedavg", rounds=2)]
    assert chosen(grid, Execution(stack=3)) == [a[:3], a[3:], b]
    assert chosen(grid, Execution(stack=4)) == [a[:4], b]  # one is left for itself
    assert chosen(grid, Execution()) == chosen(grid, Execution(stack=1)) == []
    assert chosen(grid, Execution(stack=3, executor="processes", workers=2)) == []
    with pytest.raises(ValueError, match="stack = 0"):
        Execution(stack=0)


def test_on_a_gpu_as_many_as_memory_suffices_for(monkeypatch, own):
    grid = [full("fedavg", seed=s) for s in range(5)]
    execution = Execution()
    object.__setattr__(execution, "device", "cuda:0")
    monkeypatch.setattr(side_by_side, "memory_to_plan_with", lambda device: 8 * 100.0)
    monkeypatch.setattr(side_by_side, "_bytes_of", lambda e: 100.0)
    assert [len(stack) for stack in chosen(grid, execution)] == [4]
    mine = [e.replace(method="own") for e in grid]
    assert (
        chosen(mine, execution) == [] and len(chosen(mine, Execution(stack=5))) == 1
    )  # nobody knows what it does by id
    monkeypatch.setattr(side_by_side, "_bytes_of", lambda e: 1000.0)
    assert chosen(grid, execution) == []


def test_every_run_keeps_its_name_its_checkpoint_and_its_record(tmp_path):
    grid = [full("reefl", seed=s) for s in SEEDS]
    apart = run_all(grid, ONE, tmp_path / "a", progress=False)
    run(grid[0], ONE, tmp_path / "b", progress=False)  # is there already
    stacked = run_all(grid, STACK, tmp_path / "b", progress=False)
    for e, a, b in zip(grid, apart, stacked, strict=True):
        assert a.path.name == b.path.name and a.summary.keys() == b.summary.keys()
        one, other = state(e, tmp_path / "a"), state(e, tmp_path / "b")
        assert all(torch.allclose(one[0][n], x, atol=1e-5) for n, x in other[0].items())
    said = [b.record["provenance"].get("stack") for b in stacked]
    assert said == [None, 2, 2]
    assert (found := verify(stacked[1])).passed and found.differing["stack"] == [[2], None]  # to rounding, not in bytes
    assert [r.path for r in run_all(grid, STACK, tmp_path / "b", progress=False)] == [r.path for r in stacked]


def test_runs_of_unlike_rounds_wait_for_who_is_behind(tmp_path):
    grid = [full("depthfl", seed=s, rounds=4) for s in SEEDS]
    whole = run_all(grid, ONE, tmp_path / "a", progress=False)
    run(grid[0], ONE, tmp_path / "b", progress=False, on_round=lambda r: r.t == 2)
    with pytest.MonkeyPatch.context() as patch:
        meant = []
        patch.setattr(
            Joint, "train", lambda self, asked, train=Joint.train: meant.append(len(asked)) or train(self, asked)
        )
        found = run_all(grid, STACK, tmp_path / "b", progress=False)
    assert meant == [2, 2, 3, 3]
    for a, b in zip(whole, found, strict=True):
        assert [m["t"] for m in b.metrics] == [m["t"] for m in a.metrics]
        assert [m["accuracy"] for m in b.metrics] == pytest.approx([m["accuracy"] for m in a.metrics], abs=10.1)
    assert found[0].record["resumed"][0]["after_round"] == 2
    a, b = (Checkpoints(r.path, r.experiment).restore(build_federation(r.experiment)) for r in (whole[0], found[0]))
    assert all(torch.allclose(p, b.params[n], atol=1e-5) for n, p in a.params.items())


def test_an_error_is_that_of_its_run_and_the_others_go_on(own, tmp_path):
    def spoil(cohort):
        if len({c.id // 6 for c in cohort.clients}) > 1:
            raise ValueError("there are several runs")

    own.does = staticmethod(spoil)
    grid = [full("own", seed=s) for s in SEEDS]
    with pytest.warns(UserWarning, match="train one after another: there are several runs"):
        found = run_all(grid, STACK, tmp_path, progress=False)
    assert [r.summary["status"] for r in found] == ["finished"] * 3

    def infinite(cohort):
        if cohort.t == 2:
            for i, c in enumerate(cohort.clients):
                if c.id % 6 == 3:
                    next(iter(cohort.params.values()))[i] = float("inf")

    own.does = staticmethod(infinite)
    grid = [full("own", seed=s, clients_per_round=5, nonfinite="fail") for s in SEEDS]
    holds = [any(c.id == 3 for c in build_federation(e).sample_clients(2)) for e in grid]
    assert any(holds)
    with warnings.catch_warnings(), pytest.raises(FloatingPointError, match=r"round 2: client 3: "):
        warnings.simplefilter("ignore")
        run_all(grid, STACK, tmp_path, progress=False)
    assert [find_run(e, tmp_path) is None for e in grid] == holds


SCRIPT = """
import signal, sys, json
from fedlib import Execution, Experiment, run_all
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job ignores
run_all([Experiment.from_dict(e) for e in json.loads(sys.argv[1])], Execution(stack=2, workers=int(sys.argv[3])), sys.argv[2])
"""


@pytest.mark.system
@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_stores_all_up_to_their_last_rounds(workers, tmp_path):
    grid = [full("depthfl", rounds=5000, evaluate_every=0, seed=s) for s in (1, 2)]
    command = [sys.executable, "-c", SCRIPT, json.dumps([e.to_dict() for e in grid]), tmp_path, str(workers)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    paths = [run_path(e, tmp_path) for e in grid]
    while not all((p / "experiment.json").exists() for p in paths):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.02)
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT
    assert said.splitlines()[-1] == (
        "interrupted: 0 of 2 runs are done, 2 are stored up to their last rounds; "
        "run the same again, and they go on from there"
    )
    for e, path in zip(grid, paths, strict=True):
        assert not (path / "summary.json").exists()
        assert Checkpoints(path, e).restore(build_federation(e)).t >= 1
