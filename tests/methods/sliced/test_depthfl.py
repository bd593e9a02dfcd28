"""DepthFL's server."""

import pytest
import torch

from fedlib.methods import Server, build_method
from tests.helpers.server_rounds import infos, one_round, setting, two_clients


def test_depthfl_aggregates_with_feddyn_over_all_clients():
    info = infos(low=(1,), high=(1,))
    old = {"low": torch.tensor([1.0]), "high": torch.tensor([-1.0])}
    update = two_clients({"low": torch.tensor([[2.0], [-4.0]]), "high": torch.tensor([[3.0]])}, info)
    new = one_round(build_method("depthfl", {}), Server(0, old, {}), [update], setting(info))
    # h = 0, so theta' = mean + (n_k / N)(mean - theta). low: unweighted mean -1, n/N = 2/4: -1 + 0.5 (-2) = -2.
    # high: mean 3, n/N = 1/4 (all four clients, not those with the budget): 3 + 0.25 * 4 = 4
    assert new.params["low"].item() == pytest.approx(-2) and new.params["high"].item() == pytest.approx(4)
    assert new.memory["h/low"].item() == pytest.approx(-0.1 * 0.5 * -2)
