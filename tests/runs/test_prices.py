"""Prices of grids: hand arithmetic, and MACs of sub-models measured or interpolated."""

import numpy as np
import pytest

from fedlib import Execution, Experiment
from fedlib_lab.runs import durations
from fedlib_lab.runs.costs import exit_costs
from fedlib_lab.runs.durations import Pace, each_seconds
from fedlib_lab.runs.latency import product_macs_per_second
from fedlib_lab.runs.prices import _macs, _shape_of, examples_per_client, num_classes, num_parameters, training_macs


def test_training_macs_by_hand():
    e = Experiment(method="depthfl", dataset="cifar100", rounds=7, clients_per_round=4, num_clients=50, local_epochs=2)
    macs = [cost["macs"] for cost in exit_costs(_shape_of(e), 100)]
    # 3 passes x 7 rounds x 4 clients x 2 epochs x 50,000 / 50 images x the mean over 50 clients, budgets 13 13 12 12
    mean = np.dot(macs, [13, 13, 12, 12]) / 50
    assert training_macs(e) == pytest.approx(3 * 7 * 4 * 2 * 1000 * mean)


@pytest.mark.parametrize(
    "method, passes", [("fedper", 3), ("ditto", 6), ("fedrep", 3 + 5 / 2), ("fedpac", 3 + 3 / 2), ("fedrod", 3 + 5 / 2)]
)
def test_two_models_and_heads_trained_alone_are_paid_for(method, passes):
    e = Experiment(method=method, dataset="cifar100", rounds=7, clients_per_round=4, num_clients=50, local_epochs=2)
    macs = exit_costs(_shape_of(e), 100)[-1]["macs"]  # everybody trains the whole net, forward and backward 3 passes
    assert training_macs(e) == pytest.approx(passes * 7 * 4 * 2 * 1000 * macs)


def test_exclusivefl_pays_for_its_few_clients_only():
    e = Experiment(method="exclusivefl", dataset="cifar100", num_exits=12, rounds=10)
    full = exit_costs(_shape_of(e), 100)[-1]["macs"]
    assert training_macs(e) == pytest.approx(3 * 10 * 8 * 500 * full)  # 8 of 100 clients hold 12 exits


@pytest.mark.parametrize("method, tolerance", [("depthfl", 1e-9), ("reefl", 2e-3), ("scalefl_vit", 1e-9)])
def test_interpolated_macs(method, tolerance):
    e = Experiment(method=method, num_exits=12)
    measured = [cost["macs"] for cost in exit_costs(e, 10)]
    assert np.allclose(_macs(_shape_of(e), 10), measured, rtol=tolerance)


def test_examples_per_client():
    assert examples_per_client(Experiment(dataset="cifar100")) == 500
    assert examples_per_client(Experiment(num_train=320, num_clients=16, clients_per_round=4)) == 20
    assert examples_per_client(Experiment(dataset="femnist", partition="natural", num_clients=381)) == 204


def test_budgets_without_exits_of_their_own_are_priced():
    """FedAvg has one exit whatever ``num_exits`` says, and clients whose budgets it ignores."""
    e = Experiment(method="fedavg", backbone="vit_digits", pretrained=False, finetune="full", num_train=4000)
    assert training_macs(e.replace(num_exits=3)) == training_macs(e.replace(num_exits=1))


def test_a_large_model_is_priced_by_its_macs_and_never_built(monkeypatch):
    e = Experiment(num_train=1000, rounds=60, finetune="frozen")
    monkeypatch.setattr(durations, "timed_macs_per_second", lambda *_: pytest.fail("built"))
    monkeypatch.setattr(durations, "product_macs_per_second", lambda *_: training_macs(e) / 100)
    with monkeypatch.context() as m:
        m.setattr(durations, "num_parameters", lambda e: durations.LARGE + 1)
        assert each_seconds([e], Pace(), Execution(workers=2)) == [pytest.approx(50)]
    assert 4e4 < num_parameters(e) < durations.LARGE  # ``vit_digits``
    assert 1e7 < product_macs_per_second(seconds=0.05) < 1e15


@pytest.mark.parametrize(
    ("data", "classes"), [({"dataset": "fsdd"}, 10), ({"dataset": "omniglot", "label_groups": True}, 8)]
)
def test_stored_runs_are_priced_where_their_data_are_absent(data, classes, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    e = Experiment(**data, partition="natural", num_clients=10, clients_per_round=2)
    assert num_classes(e) == classes and examples_per_client(e) > 0 and training_macs(e) > 0
