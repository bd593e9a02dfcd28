"""What a stage finds as it is, is computed once: where exits alone are trained, and where it may not be."""

from dataclasses import replace

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.engine import cohort as engine
from fedlib.engine.cohort import Cohort
from fedlib.engine.forward import by_example
from fedlib.methods import Round

ONE = Execution(workers=1)
HEADS = {"fedrep": {"head_epochs": 3}, "fedrod": {"head_epochs": 3}, "fedpac": {"head_epochs": 3}}


@pytest.fixture
def convnet(tiny):
    return tiny.replace(
        backbone="convnet3_slim", finetune="full", finetune_options={}, num_exits=3, augment="none", rounds=1,
        num_train=200, num_clients=6, clients_per_round=3, batch_size=16, budgets="maximum",
    )  # fmt: skip


def trained(e, monkeypatch, ahead=True):
    """The server's tensors, the clients' own, and how many examples' worth of stems ran in local training."""
    f, seen, own = build_federation(e), [], {}
    f.model.backbone.stem.register_forward_hook(lambda m, args, out: seen.append(out.shape[0] * out.shape[1]))
    with monkeypatch.context() as m:
        if not ahead:
            m.setattr(engine, "units_ahead", lambda *args: 0)
        rounds = iter(run_rounds(f, ONE, memories=own))
        last = next(rounds)
    return last.server.params, {(k, n): x for k, memory in own.items() for n, x in memory.items()}, sum(seen)


@pytest.mark.parametrize("method", HEADS)
def test_exits_alone_are_trained_on_features_that_are_computed_once(convnet, method, monkeypatch):
    e = convnet.replace(method=method, options=HEADS[method])
    once, own, few = trained(e, monkeypatch)
    anew, own_anew, many = trained(e, monkeypatch, ahead=False)
    assert own.keys() == own_anew.keys() and own
    for name, p in (once | own).items():
        torch.testing.assert_close(p, (anew | own_anew)[name], rtol=0, atol=1e-5)
    assert few < 0.8 * many  # of four epochs or more three found their features there


@pytest.mark.parametrize("change", [
    {"augment": "crop_flip"}, {"backbone": "resnet8", "batch_norm": "tracked"}, {"options": {"head_epochs": 1}},
], ids=lambda c: next(iter(c)))  # fmt: skip
def test_they_are_computed_anew_where_they_may_differ(convnet, change, monkeypatch):
    """Augmented views, batch norm by the batch's own statistics; in a single epoch nothing comes twice."""
    e = convnet.replace(**{"method": "fedrep", "options": {"head_epochs": 3}, **change})
    once, _, few = trained(e, monkeypatch)
    anew, _, many = trained(e, monkeypatch, ahead=False)
    assert few == many and all(torch.equal(p, anew[n]) for n, p in once.items())


def test_features_follow_the_example_alone(tiny):
    def alone(**changes):
        f = build_federation(tiny.replace(finetune_options={}, **changes))
        return by_example(f.model, f.experiment.batch_norm, training=True, features=True)

    assert alone(method="fedrep", finetune="full") and not alone(method="reefl", finetune="full")
    assert alone(method="fedrep", finetune="full", backbone="convnet3_slim", num_exits=3)
    assert not alone(method="fedrep", finetune="full", backbone="efficientnet_slim", num_exits=1)  # dropout, batch norm


def test_clients_of_unequal_depth_find_the_features_they_have(convnet, monkeypatch):
    """Members of one, two and three exits in one cohort: each unit's features are of those that run it."""
    e = convnet.replace(method="fedrep", options={"head_epochs": 3}, budgets="uniform")
    once, own, _ = trained(e, monkeypatch)
    anew, own_anew, _ = trained(e, monkeypatch, ahead=False)
    for name, p in (once | own).items():
        torch.testing.assert_close(p, (anew | own_anew)[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "method, options",
    [("heterofl", {}), ("splitmix", {"bases": 4}), ("raffm", {}), ("scalefl_vit", {}), ("scalefl", {})],
)
def test_narrow_clients_find_features_of_their_own_width(tiny, method, options, monkeypatch):
    """Frozen nets of every width, exits trained for two epochs on features that are computed once."""
    e = tiny.replace(
        method=method, options=options, finetune="frozen", finetune_options={}, augment="none", rounds=1,
        local_epochs=2, num_clients=6, clients_per_round=5, num_train=200,
    )  # fmt: skip
    once, _, few = trained(e, monkeypatch)
    anew, _, many = trained(e, monkeypatch, ahead=False)
    assert few < 0.8 * many  # of two epochs the second found its features there
    for name, p in once.items():
        torch.testing.assert_close(p, anew[name], rtol=0, atol=1e-5)


def test_features_of_a_frozen_backbone_are_there_before_a_client_trains(tiny):
    """FedPAC asks for them before a client's first step, when no cache holds its examples yet."""
    e = tiny.replace(method="fedpac", finetune="frozen", finetune_options={}, augment="none", budgets="maximum",
                     num_train=150, num_clients=5, clients_per_round=3)  # fmt: skip
    f, found = build_federation(e), []
    assert f.train_cache.units > 0
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    for x in (f, replace(f, train_cache=None)):
        members = [m for c in r.clients for m in x.method.members(c, x.server, r)]
        found.append(
            [z * weights[..., None] for z, _, weights in Cohort(x, x.model, x.server, r, members, {}).answers()]
        )
    for cached, anew in zip(*found, strict=True):
        assert anew.abs().sum() > 1
        torch.testing.assert_close(cached, anew, rtol=0, atol=1e-4)
