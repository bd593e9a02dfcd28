"""How rounds are executed: devices, cohorts, and what is refused."""

from dataclasses import replace

import pytest
import torch

from fedlib import Execution, Experiment, build_federation
from fedlib.core.clients import Client
from fedlib.core.slices import Slice
from fedlib.engine.executors import automatic_cohort_size, plan_cohorts, plan_round
from fedlib.methods import Member, Round, build_method


@pytest.mark.parametrize("device", ["cudaa", "gpu", "mps", "cuda:-1", "cuda:x", "", "cuda:99999999999"])
def test_unknown_devices_are_refused(device):
    for make in (lambda: Execution(device), lambda: build_federation(Experiment(), device)):
        with pytest.raises(
            ValueError, match=r"execution: device = .* is not possible; allowed: cpu, cuda, cuda:<number>"
        ):
            make()


def test_absent_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device = 'cuda', but PyTorch finds 0 GPUs here; allowed: cpu$"):
        Execution("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Execution("cuda:1").device == "cuda:1"
    with pytest.raises(
        ValueError, match="device = 'cuda:2', but PyTorch finds 2 GPUs here; allowed: cpu, cuda:0, cuda:1"
    ):
        replace(Execution("cuda:1"), device="cuda:2")


def test_absent_gpus_may_be_those_of_rays_workers(monkeypatch):
    pytest.importorskip("fedlib_lab")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Execution("cuda", executor="ray").home == "cpu"


def test_cuda_means_a_worker_for_each_gpu_and_a_number_means_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert Execution("cuda").devices() == ["cuda:0", "cuda:1", "cuda:2"] and Execution("cuda").side_by_side() == 3
    assert Execution("cuda", workers=2).side_by_side() == 2
    assert Execution("cuda:1").devices() == ["cuda:1"] and Execution("cuda:1").side_by_side() == 1
    assert Execution("cuda", executor="threads").side_by_side() == 1
    pytest.importorskip("fedlib_lab")
    with pytest.raises(ValueError, match="device = 'cuda:1' with executor = 'processes'; allowed: cpu, cuda"):
        Execution("cuda:1", executor="processes")


def test_an_executions_unknown_keyword_is_named():
    with pytest.raises(ValueError, match="execution: unknown key 'worker'; did you mean 'workers'?"):
        Execution(worker=3)


def test_an_executor_that_is_not_there_is_refused_with_those_that_are():
    pytest.importorskip("fedlib_lab")
    with pytest.raises(
        ValueError, match="executor = 'flower' is not possible; allowed: auto, processes, ray, stacked, threads$"
    ):
        Execution(executor="flower")
    with pytest.raises(ValueError, match="address = 'head:1' needs executor = 'ray', not 'threads'$"):
        Execution(executor="threads", address="head:1")


def test_cohorts_split_by_width_and_mix_depths(tiny):
    f = build_federation(tiny.replace(method="scalefl_vit"))
    clients = f.sample_clients(1)
    r = Round(1, tuple(clients), f.setting)
    cohorts = plan_round(f, f.server, r, workers=1, size=None)
    assert all(len({m.client.budget for m in cohort}) == 1 for cohort in cohorts)
    nested = replace(f, method=build_method("depthfl", {}))
    assert [len(plan_round(nested, f.server, r, workers, None)) for workers in (1, 2)] == [1, 2]
    planned = [m.client.id for cohort in plan_round(nested, f.server, r, 2, 2) for m in cohort]
    assert sorted(planned) == sorted(c.id for c in clients)


@pytest.mark.parametrize(
    "workers, size, sizes", [(2, 4, [3, 3, 2, 2]), (2, 5, [5, 5]), (1, 4, [4, 3, 3]), (3, None, [4, 3, 3])]
)
def test_every_worker_gets_as_many_cohorts_as_the_others(workers, size, sizes):
    """Ten clients on two workers, at most four a cohort: three cohorts would leave one worker idle for a third."""
    jobs = [[Member(Client(i, 3, 100), Slice.prefix(12, range(4)))] for i in range(10)]
    assert sorted(map(len, plan_cohorts(jobs, workers, size)), reverse=True) == sizes


def test_automatic_cohorts_batch_small_models_and_leave_large_ones_alone(tiny):
    """Widest activation of a client: 32 images x 17 tokens x 256 features x 4 bytes = 0.53 MiB."""
    size = lambda **changes: automatic_cohort_size(build_federation(tiny.replace(**{"batch_size": 32} | changes)))  # noqa: E731
    assert size(finetune="full", finetune_options={}) == 5  # 3 / 0.53
    assert size(finetune="full", finetune_options={}, batch_size=8) == 22  # 3 / 0.1328
    assert size(finetune="lora") == 30  # 16 / 0.53: frozen weights see one merged batch
    big = dict(backbone="deit_small_patch16_224", pretrained=False, batch_size=16)
    assert size(finetune="frozen", finetune_options={}, **big) == 1
    maps = dict(
        method="depthfl", num_exits=3, backbone="convnet3_slim", pretrained=False, finetune="full", finetune_options={}
    )
    # 32 channels of 30 x 30 pixels, 4 bytes, of 10 images: 1.10 MiB, of 32: 3.5
    assert size(batch_size=10, **maps) == 4 and size(batch_size=32, **maps) == 1
