"""What comes home is what was there, in one transfer; what is sent to a GPU is sent from pinned memory; what is free."""

from types import SimpleNamespace

import torch

from fedlib.core import devices
from fedlib.core.devices import memory_to_plan_with, to_device, to_host
from tests.helpers.virtual_accelerator import accelerator

THERE = [torch.tensor([True, False, True]), torch.arange(4).view(2, 2), torch.tensor(0.5), torch.zeros(0, 3)]


def test_whatever_their_types_and_shapes():
    class Elsewhere(torch.Tensor):
        """A tensor that says that it lies on another device."""

        device = torch.device("meta")

    for found, there in zip(to_host([t.as_subclass(Elsewhere) for t in THERE]), THERE, strict=True):
        assert (
            found.dtype == there.dtype
            and found.shape == there.shape
            and torch.equal(found.as_subclass(torch.Tensor), there)
        )


def test_they_come_together_and_what_is_here_stays():
    assert all(a is b for a, b in zip(to_host(THERE), THERE, strict=True))
    with accelerator() as fetched, fetched.during("server"):
        found = to_host([t.to("meta") for t in THERE])
    assert [t.shape for t in found] == [t.shape for t in THERE] and fetched.most("server") == 1


def test_to_a_gpu_it_is_copied_from_pinned_memory_while_the_host_goes_on(monkeypatch):
    asked, x, gpu = [], torch.ones(2), torch.device("cuda", 1)
    assert to_device(x, torch.device("cpu")) is x
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: asked.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *where, **how: asked.append((where, how)) or x)
    to_device(x, gpu)
    assert asked == ["pinned", ((gpu,), {"non_blocking": True})]


def test_free_memory_counts_the_containers_limit(tmp_path, monkeypatch):
    cpu = torch.device("cpu")
    assert devices.free_memory(cpu) > 2**28  # of the machine
    monkeypatch.setattr(devices.psutil, "virtual_memory", lambda: SimpleNamespace(available=500 * 1024))
    monkeypatch.setattr(devices, "CGROUP", tmp_path)
    assert devices.free_memory(cpu) == 500 * 1024
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "memory.current").write_text("200000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert devices.free_memory(cpu) == 150_000
    (tmp_path / "memory.max").write_text("max\n")
    assert devices.free_memory(cpu) == 500 * 1024


def test_memory_that_pytorch_keeps_is_free_and_a_plan_does_not_depend_on_what_ran_before(monkeypatch):
    gpu, taken = torch.device("cuda:0"), {"others": 0, "cached": 0, "used": 0}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda d: (1000 - sum(taken.values()), 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda d: taken["cached"] + taken["used"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda d: taken["used"])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(total_memory=1000))
    for cached, used, free in ((0, 0, 1000), (900, 0, 1000), (500, 300, 700)):
        taken |= {"cached": cached, "used": used}
        assert devices.free_memory(gpu) == free and memory_to_plan_with(gpu) == 1000
    taken |= {"cached": 0, "used": 0, "others": 700}
    assert devices.free_memory(gpu) == 300 and memory_to_plan_with(gpu) == 600
