"""Memories of many clients lie on disk, and are not kept when read."""

import resource
from pathlib import Path

import torch

from fedlib import build_federation
from fedlib.core.memories import ClientFiles, Overlay
from fedlib.methods.mixtures import cosines, mixtures
from fedlib.methods.personal.cafedistill import teacher_shares
from tests.helpers.plain_personal import LAST, experiment


def test_a_thousand_mirrors_of_a_hundred_thousand_clients_lie_on_disk(tmp_path):
    """The exits of 1,000 clients are 40 MB on disk; a round reads them one at a time."""
    import tracemalloc

    e = experiment(
        "cafedistill", num_clients=100_000, clients_per_round=4, partition="drawn", examples_per_client=5, rounds=2,
        test_split="central",
    )  # fmt: skip
    f = build_federation(e)
    initial = {n: f.server.params[n] for n in LAST}
    wide = {n: torch.zeros(160, *x.shape) for n, x in initial.items()}  # 11,200 numbers each
    mirrors = ClientFiles(tmp_path)
    for k in range(1000):
        mirrors[100 * k] = {n: x + k for n, x in wide.items()}
        if k % 50 == 49:
            mirrors.write(1)
    assert not mirrors.changed and sum(p.stat().st_size for p in tmp_path.iterdir()) > 40e6
    tracemalloc.start()
    found = cosines(Overlay(mirrors, {}), [0, 100, 7, 99_900], wide)
    shares, rest = teacher_shares(found, e.num_clients, 0.6)
    mixtures(Overlay(mirrors, {}), shares)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.shape == (4, 1000) and python < 20e6  # tables of (4, 100,000) numbers are torch's, 3 MB each
    torch.testing.assert_close(shares.sum(1) + rest, torch.ones(4).double())


def test_reading_a_clients_memory_again_and_again_keeps_nothing(tmp_path):
    """4,000 reads of 20 tensors: safetensors' own get_tensor would keep 64 bytes of each, 5 MB."""
    files = ClientFiles(tmp_path)
    files[0] = {f"own/{i}": torch.randn(4) for i in range(20)}
    files.write(1)

    def resident():
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

    def read(times):
        for _ in range(times):
            found = files[0]
        return found

    assert read(500)["own/3"].shape == (4,)
    before = resident()
    read(4000)
    assert resident() - before < 1


def test_what_is_read_back_lies_on_the_device_of_the_run(tmp_path):
    """``meta`` stands for an accelerator: what a checkpoint has written is read onto it."""
    files = ClientFiles(tmp_path)
    files.device = "meta"
    files[3] = {"w": torch.ones(2)}
    assert files[3]["w"].device.type == "cpu"  # as it was given
    files.write(1)
    assert files[3]["w"].device.type == "meta"
