"""How rounds are executed: devices, cohorts, and what is refused."""

from dataclasses import replace

import pytest
import torch

from fedlib import Execution, Experiment, build_federation


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
    assert Execution("cuda", executor="ray").home == "cpu"  # its workers' machines may have some
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert Execution("cuda:1").device == "cuda:1"
    with pytest.raises(
        ValueError, match="device = 'cuda:2', but PyTorch finds 2 GPUs here; allowed: cpu, cuda:0, cuda:1"
    ):
        replace(Execution("cuda:1"), device="cuda:2")


def test_an_executions_unknown_keyword_is_named():
    with pytest.raises(ValueError, match="execution: unknown key 'worker'; did you mean 'workers'?"):
        Execution(worker=3)
