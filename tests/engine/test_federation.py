"""A federation of convnets against a plain PyTorch loop, and clients on their own test sets against one at a time."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.engine.serving import client_outputs, evaluate_clients
from fedlib.methods import METHODS, Method
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from tests.helpers.plain_convnets import PlainResNet, plain_name, state_of

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1), widths=(4, 6), size=32)


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="fedavg", backbone="toy", pretrained=False, finetune="full", num_exits=1, augment="none", momentum=0.9,
        weight_decay=1e-3, clip_value=None, lr=0.02, num_train=90, num_test=60, num_clients=3, clients_per_round=3,
        rounds=2, batch_size=16, partition="class_dirichlet", dirichlet_alpha=1.0, evaluate_every=1,
        test_split="like_train",
    )  # fmt: skip


def plain_round(f, state, t, tracks):
    """FedAvg as one writes it for one client after the other; the mean over clients by examples, statistics too."""
    e, total = f.experiment, {}
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi * t / e.rounds)))
    for client in f.sample_clients(t):
        net = PlainResNet(TOY, 10, tracks)
        net.load_state_dict({plain_name(n): p.clone() for n, p in state.items()}, strict=False)
        optimiser = torch.optim.SGD(net.parameters(), rate, momentum=e.momentum, weight_decay=e.weight_decay)
        mine = f.data.client(client.id)
        order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
        for a in range(0, len(mine), e.batch_size):
            rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
            x = f.data.view(f.data.inputs, TOY.input_shape, rows)
            optimiser.zero_grad()
            F.cross_entropy(net(x), f.data.labels[rows]).backward()
            optimiser.step()
        trained = state_of(net)
        for name in state:
            total[name] = total.get(name, 0) + len(mine) * trained[plain_name(name)].detach().double()
    examples = sum(c.num_examples for c in f.sample_clients(t))
    return {n: (x / examples).float() for n, x in total.items()}


@pytest.mark.parametrize("policy", ["batch", "tracked"])
def test_two_rounds_equal_a_plain_loop(convnet, policy):
    f = build_federation(convnet.replace(batch_norm=policy))
    kinds = {i.kind for i in f.setting.infos.values()}
    assert ("statistic" in kinds) == (policy == "tracked")
    state = dict(f.server.params)
    for r in run_rounds(f, Execution(workers=1, cohort_size=3)):
        state = plain_round(f, state, r.t, policy == "tracked")
        for name, want in state.items():
            torch.testing.assert_close(r.server.params[name], want, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
    if policy == "tracked":
        net = PlainResNet(TOY, 10, True).eval()
        net.load_state_dict({plain_name(n): p for n, p in state.items()}, strict=False)
        x = f.data.view(f.data.test_inputs, TOY.input_shape, torch.arange(60))
        right = (net(x).argmax(1) == f.data.test_labels).double().mean().item()
        assert r.metrics["accuracy"] == pytest.approx(100 * right, abs=1e-3)


@pytest.mark.parametrize("method, policy", [("depthfl", "tracked"), ("exclusivefl", "static"), ("depthfl", "local")])
def test_the_cohort_size_changes_nothing(convnet, method, policy):
    e = convnet.replace(method=method, num_exits=2, batch_norm=policy, budgets="maximum")
    runs = [list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 3)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-4, atol=2e-5)
    assert runs[0].metrics["personal"]["accuracy"] == pytest.approx(runs[1].metrics["personal"]["accuracy"], abs=1.0)


def test_clients_are_served_together_as_they_are_one_by_one(convnet, monkeypatch):
    class Heads(Method):
        def personal(self, info):
            return info.exit is not None

    monkeypatch.setitem(METHODS, "heads", Heads)
    e = convnet.replace(method="heads", num_exits=2, batch_norm="tracked", budgets="maximum")
    f, memories = build_federation(e), {}
    *_, last = run_rounds(f, ONE, memories=memories)
    scores = []
    for client in range(3):
        ((ids, outputs, labels, counts),) = client_outputs(f, last.server, memories, [client])
        rows = torch.from_numpy(f.data.client_test(client))
        assert ids == [client] and counts == [len(rows)] and torch.equal(labels[0], f.data.test_labels[rows])
        scores.append([(o[0].argmax(-1) == labels[0]).double().mean().item() * 100 for o in outputs])
    found = evaluate_clients(f, last.server, memories)
    assert found["exits"] == pytest.approx(np.mean(scores, 0).tolist(), abs=1e-3)
    assert found["accuracy"] == pytest.approx(np.mean(scores), abs=1e-3)
    assert found["sd"] == pytest.approx(np.mean(scores, 1).std(), abs=1e-3) and found == last.metrics["personal"]


def test_exits_that_a_client_does_not_hold_do_not_count_for_it(convnet):
    """Clients 0 and 2 hold one exit, client 1 both; by hand from each one's outputs."""
    f = build_federation(convnet.replace(method="depthfl", num_exits=2, rounds=1))
    *_, last = run_rounds(f, ONE)
    right = {}
    for (client,), outputs, labels, _ in (o for c in range(3) for o in client_outputs(f, last.server, {}, [c])):
        right[client] = [100 * (x[0].argmax(-1) == labels[0]).double().mean().item() for x in outputs]
    found = last.metrics["personal"]
    first = np.mean([right[c][0] for c in range(3)])
    assert found["exits"] == pytest.approx([first, right[1][1]], abs=1e-3)
    assert found["accuracy"] == pytest.approx(np.mean([right[0][0], np.mean(right[1]), right[2][0]]), abs=1e-3)
    assert found["last"] == pytest.approx(np.mean([right[0][0], right[1][1], right[2][0]]), abs=1e-3)
    assert found["by_budget"]["1"] == {
        "accuracy": pytest.approx(np.mean(right[1]), abs=1e-3), "last": pytest.approx(right[1][1], abs=1e-3), "clients": 1,
    }  # fmt: skip
    assert found["by_budget"]["0"]["clients"] == 2


def test_what_cannot_run_on_a_convnet_is_refused_in_words(convnet):
    with pytest.raises(ValueError, match="reefl: backbone: Ree needs a class token, a ResNet's exits read maps"):
        build_federation(convnet.replace(method="reefl", num_exits=2))
    for exits in (2, 3, 4):  # also where these many would not divide the toy's two blocks
        with pytest.raises(ValueError, match="reefl: backbone: Ree needs a class token, a ResNet's exits read maps"):
            build_federation(convnet.replace(method="reefl", num_exits=exits))
        with pytest.raises(ValueError, match="scalefl_vit: backbone: a ResNet .* a ViT; use 'scalefl'"):
            build_federation(convnet.replace(method="scalefl_vit", num_exits=exits))
    with pytest.raises(ValueError, match="finetune = 'lora'"):
        build_federation(convnet.replace(finetune="lora"))


def test_sampling_is_a_function_of_seed_and_round_and_the_same_for_every_method(tiny):
    ids = {}
    for method in ("reefl", "depthfl", "scalefl_vit"):
        f = build_federation(tiny.replace(method=method))
        ids[method] = [[c.id for c in f.sample_clients(t)] for t in (1, 2, 3)]
    assert ids["reefl"] == ids["depthfl"] == ids["scalefl_vit"]
    assert len({tuple(x) for x in ids["reefl"]}) > 1 and all(len(set(x)) == 6 for x in ids["reefl"])
    exclusive = build_federation(tiny.replace(method="exclusivefl"))
    assert {c.id % 4 for c in exclusive.sample_clients(1)} == {3}


@pytest.mark.parametrize("hook, gives, told", [
    ("eligible", lambda self, budgets, setting: np.array([0, 0, 1]), r"eligible\(\) gave \[.*0.*0.*1.*\]; allowed: distinct ids, < 3"),
    ("eligible", lambda self, budgets, setting: budgets >= 0, r"eligible\(\) gave \[.*True"),
    ("eligible", lambda self, budgets, setting: np.array([0, 9]), r"eligible\(\) gave \[.*9.*\]; allowed: distinct ids, < 3"),
    ("client_budgets", lambda self, clients, exits: np.zeros(2, int), r"client_budgets\(\) gave \[0, 0\]; allowed: 3 numbers, one a client"),
])  # fmt: skip
def test_who_a_method_of_ones_own_samples_is_checked(convnet, monkeypatch, hook, gives, told):
    """A mask sampled client 1 again and again, an id twice a client twice; of two budgets the third client was left out."""
    cls = dataclass(frozen=True)(type("Own", (Method,), {hook: gives}))
    monkeypatch.setitem(METHODS, "own", cls)
    with pytest.raises(ValueError, match=f"^own: {told}"):
        build_federation(convnet.replace(method="own"))


def test_a_method_that_gives_nobody_a_model_is_refused(convnet, monkeypatch):
    """It trained nothing and was finished."""
    cls = dataclass(frozen=True)(type("Own", (Method,), {"members": lambda self, client, server, r: []}))
    monkeypatch.setitem(METHODS, "own", cls)
    with pytest.raises(ValueError, match=r"^own: members\(\) gave nothing that trains to any client of round 1"):
        next(run_rounds(build_federation(convnet.replace(method="own")), Execution(workers=1)))
