"""What tests of kernels share."""

import pytest
import torch

from fedlib_lab.kernels import products


@pytest.fixture(params=["PyTorch", "OpenBLAS"])
def multiplying(request, monkeypatch):
    """Products by either library, in one thread."""
    by_client, by_head = [], []
    if request.param == "OpenBLAS":
        if (library := products._load()) is None:
            pytest.skip("OpenBLAS cannot run on this machine")
        by_client, by_head = ([multiply] for multiply in products._multipliers(library))
    monkeypatch.setattr(products, "_by_client", by_client)
    monkeypatch.setattr(products, "_by_head", by_head)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert (products.heads_multiplier() is products._multiply_heads) == (request.param == "PyTorch")
    yield
    torch.set_num_threads(threads)
