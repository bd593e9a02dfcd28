"""Products are computed as an experiment says, whatever the program's switches say, and these are put back."""

import contextlib
import threading

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.engine.arithmetic import PRODUCTS, arithmetic

CPU, GPU = torch.device("cpu"), torch.device("cuda")
backends = torch.backends


def switches():
    """What PyTorch goes by, on both kinds of device; None where its former switches cannot say it."""

    def former(owner):
        try:
            return owner.allow_tf32
        except RuntimeError:
            return None

    present = (
        backends.cuda.matmul,
        backends.cudnn.conv,
        backends.cudnn.rnn,
        backends.mkldnn.matmul,
        backends.mkldnn.conv,
    )
    return [x.fp32_precision for x in present] + [former(backends.cudnn), former(backends.cuda.matmul)]


@pytest.mark.parametrize("asked", [None, "medium", "high"])
def test_float32_is_ieees_whatever_the_program_asked_for_and_its_switches_are_put_back(asked):
    before = torch.get_float32_matmul_precision()
    try:
        if asked:
            torch.set_float32_matmul_precision(asked)
        found = switches()
        with arithmetic("float32", GPU):
            assert switches()[:3] == ["ieee"] * 3 and switches()[5:] == [False, False]
            assert backends.cudnn.deterministic and not backends.cudnn.benchmark
        assert switches() == found and not backends.cudnn.deterministic
        with arithmetic("bfloat16", CPU):
            assert switches()[3:5] == ["ieee"] * 2
        assert switches() == found
        with arithmetic("tf32", GPU):
            assert switches()[:3] == ["tf32"] * 3 and switches()[5:] == [True, True]
        assert switches() == found
    finally:
        torch.set_float32_matmul_precision(before)


def test_threads_of_one_run_share_them_and_another_precision_is_refused():
    found = switches()
    with arithmetic("float32", GPU), arithmetic("float32", CPU), arithmetic("float32", GPU):
        refused = []

        def other():
            try:
                with arithmetic("tf32", GPU):
                    pass
            except RuntimeError as error:
                refused.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert "another thread" in refused[0] and switches()[:3] == ["ieee"] * 3
    assert switches() == found


def test_training_aggregation_and_evaluation_run_inside(monkeypatch):
    """A switch that a user has set is not what any product of a run goes by."""
    seen, ask = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: seen.append(PRODUCTS["cpu"]._inside) or ask(*args))
    linear = torch.nn.functional.linear
    monkeypatch.setattr(
        "torch.nn.functional.linear", lambda *args: seen.append(PRODUCTS["cpu"]._inside) or linear(*args)
    )
    small = dict(num_train=40, num_test=20, num_clients=2, clients_per_round=2, rounds=1, pretrained=False)
    e = Experiment(method="reefl", test_split="like_train", **small)
    for _ in run_rounds(build_federation(e), Execution(workers=1)):
        pass
    assert len(seen) > 50 and min(seen) > 0 and PRODUCTS["cpu"]._inside == 0


def test_tf32_is_a_gpus():
    e = Experiment(precision="tf32", num_train=40, num_test=20, num_clients=2, clients_per_round=2, pretrained=False)
    assert e.hash != e.replace(precision="float32").hash
    with pytest.raises(ValueError, match="precision = 'tf32' is of GPUs, and this one trains on cpu; allowed: float32"):
        next(run_rounds(build_federation(e)))


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, "autocast", "default type"])
def test_a_run_inside_another_switch_is_refused(around, monkeypatch):
    """Under autocast other numbers came out, without a word; under the others an error from inside PyTorch."""
    small = dict(num_train=40, num_test=20, num_clients=2, clients_per_round=2, rounds=1, pretrained=False)
    f = build_federation(Experiment(**small))
    if around == "default type":
        monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    inside = {"autocast": lambda: torch.autocast("cpu", torch.bfloat16), "default type": contextlib.nullcontext}
    with inside.get(around, around)(), pytest.raises(ValueError, match="a run inside no_grad, autocast or"):
        next(run_rounds(f, Execution(workers=1)))
