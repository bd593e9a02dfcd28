"""SplitMix: coverage, bases against plain narrow nets, mixtures; DepthFL and FedAvg under budgets of memory."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.core.slices import NOTHING, Axis, take
from fedlib.engine.cohort import Cohort
from fedlib.engine.evaluation import exit_logits
from fedlib.methods import Round, build_method
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.runs.costs import load_shapes, training_macs
from fedlib_lab.runs.params import load_grid
from tests.helpers.plain_convnets import PlainResNet, plain_name

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1), widths=(4, 6), size=32, form="fedepth")
NARROW = ResNetSpec(blocks=(1, 1), widths=(2, 3), size=32, form="fedepth")


@pytest.fixture
def net(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="splitmix", options={"bases": 2, "ratios": [0.5, 1.0], "scaler": False}, backbone="toy",
        pretrained=False, finetune="full", num_exits=1, augment="none", momentum=0.9, weight_decay=1e-3,
        clip_value=None, lr=0.02, num_train=80, num_test=60, num_clients=4, clients_per_round=4, rounds=2,
        batch_size=16, partition="class_dirichlet", dirichlet_alpha=1.0, evaluate_every=1, test_split="like_train",
    )  # fmt: skip


def rounds(e, **execution):
    return list(run_rounds(build_federation(e), Execution(workers=1, **execution)))


def test_a_chunk_leaves_a_remainder_out_only_where_it_may():
    axis = Axis("stage1", (16,))
    assert [axis.chunk(b, 6, even=False) for b in (0, 1, 5)] == [range(0, 2), range(2, 4), range(10, 12)]
    with pytest.raises(ValueError, match=r"stage1: \[16\] cannot be cut into 6 equal parts"):
        axis.chunk(0, 6)
    with pytest.raises(ValueError, match=r"stage1: \[16\] cannot be cut into 17 equal parts"):
        axis.chunk(0, 17, even=False)


def bases_of(f, r):
    return {c.id: [int(m.name[4:]) for m in f.method.members(c, f.server, r)] for c in r.clients}


def test_the_first_bases_go_round_over_all_clients_and_rounds(net):
    e = net.replace(
        num_clients=6, clients_per_round=3, rounds=4, options={"bases": 2, "ratios": [0.5], "scaler": False}
    )
    f = build_federation(e)
    firsts = []
    for t in range(1, 5):
        r = Round(t, tuple(f.sample_clients(t)), f.setting)
        r = Round(t, r.clients, f.setting, f.method.prepare(f.server, r))
        chosen = bases_of(f, r)
        firsts += [chosen[c.id][0] for c in r.clients]
        assert all(len(x) == 1 for x in chosen.values())
    assert [sorted(firsts[i : i + 2]) for i in range(0, 12, 2)] == [[0, 1]] * 6  # every base once before any twice


def test_a_client_trains_as_many_different_bases_as_it_has_memory_for(net):
    f = build_federation(net.replace(options={"bases": 2, "ratios": [0.2, 0.5, 0.99, 1.0, 3.0]}))
    r = Round(1, tuple(Client(i, i, 10) for i in range(5)), f.setting)
    r = Round(1, r.clients, f.setting, f.method.prepare(f.server, r))
    assert [len(set(x)) for x in bases_of(f, r).values()] == [1, 1, 1, 2, 2]
    fair = build_method("splitmix", {"scenario": "fair", "bases": 6})
    assert [fair.count(Client(0, b, 1)) for b in range(4)] == [1, 2, 3, 6]
    lack = build_method("splitmix", {"scenario": "lack"})
    assert [lack.count(Client(0, b, 1)) for b in range(4)] == [1, 1, 4, 8]


def narrow_state(f, params, b):
    part = f.method.base(b, f.setting)
    return {plain_name(n): take(params[part.source(n)], i, part).clone() for n, i in f.setting.infos.items()}


def test_a_round_equals_narrow_nets_trained_by_a_plain_loop(net):
    f = build_federation(net)
    first = next(iter(run_rounds(f, ONE)))
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    r = Round(1, r.clients, f.setting, f.method.prepare(f.server, r))
    e, chosen = f.experiment, bases_of(f, r)
    assert any(len(x) == 2 for x in chosen.values()) and any(len(x) == 1 for x in chosen.values())
    rate = e.lr / 2 * (1 + np.cos(np.pi / e.rounds))
    for b in range(2):
        total, examples = {}, 0
        for client in r.clients:
            if b not in chosen[client.id]:
                continue
            plain = PlainResNet(NARROW, 10, False)
            plain.load_state_dict(narrow_state(f, f.server.params, b))
            optimiser = torch.optim.SGD(plain.parameters(), rate, momentum=e.momentum, weight_decay=e.weight_decay)
            mine = f.data.client(client.id)
            order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", 1, client.id)).numpy()
            for a in range(0, len(mine), e.batch_size):
                rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
                optimiser.zero_grad()
                x = f.data.view(f.data.inputs, TOY.input_shape, rows)
                F.cross_entropy(plain(x), f.data.labels[rows]).backward()
                optimiser.step()
            for name, p in plain.state_dict().items():
                total[name] = total.get(name, 0) + len(mine) * p.double()
            examples += len(mine)
        for name, got in narrow_state(f, first.server.params, b).items():
            torch.testing.assert_close(got, (total[name] / examples).float(), rtol=0, atol=1e-5)


def test_the_answer_is_the_mean_of_the_bases_logits(net):
    f = build_federation(net)
    parts = f.method.model_for(0, f.server, Round(0, (), f.setting))
    each = [exit_logits(f, f.server, part) for part in parts]
    torch.testing.assert_close(exit_logits(f, f.server, parts), (each[0] + each[1]) / 2)
    plain = PlainResNet(NARROW, 10, False)
    plain.load_state_dict(narrow_state(f, f.server.params, 1))
    x = f.data.view(f.data.test_inputs, TOY.input_shape, torch.arange(60))
    torch.testing.assert_close(each[1][0], plain(x), rtol=0, atol=1e-4)
    served = [len(f.method.serve(c, f.server, Round(0, (), f.setting)).members) for c in f.clients(range(4))]
    assert served == [1, 2, 1, 2]


@pytest.mark.parametrize("scaler", [True, False])
def test_the_cohort_size_changes_nothing(net, scaler):
    e = net.replace(options={**net.options, "scaler": scaler, "masked": scaler})
    one, many = (rounds(e, cohort_size=k)[-1] for k in (1, 8))
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=1e-4, atol=2e-5)
    assert one.metrics["personal"]["accuracy"] == pytest.approx(many.metrics["personal"]["accuracy"], abs=2.0)


def test_resuming_goes_on_with_the_round_robin(net):
    f = build_federation(net.replace(rounds=3))
    whole = list(run_rounds(f, ONE))
    *_, again = run_rounds(f, ONE, whole[0].server)
    assert all(torch.equal(p, again.server.params[n]) for n, p in whole[-1].server.params.items())


TABLES = [("table2", "small"), ("table2", "paper"), ("figure2", "small"), ("figure2", "paper")]
BACKBONES = {c.experiment.backbone for t, p in TABLES for c in load_grid("fedepth", t, p) if c.method == "splitmix"}


@pytest.mark.parametrize("backbone", sorted(BACKBONES | {"resnet8", "deit_micro"}))
def test_what_is_trained_is_what_is_served(net, backbone):
    """Behind norms a base at the scale that trains it is the base at scale 1, as released; a transformer is not."""
    e = net.replace(backbone=backbone, rounds=1, options={"bases": 4, "ratios": [0.25, 1.0]})
    f = build_federation(e)
    *_, last = run_rounds(f, ONE)
    r, client = Round(1, (), f.setting), Client(0, 1, 10)
    served = f.method.model_for(0, last.server, r)
    assert served == tuple(m.part for m in f.method.serve(client, last.server, r).members)
    first = Round(1, (client,), f.setting, {"first": torch.tensor([0])})
    trained = {m.name: m.part for m in f.method.members(client, last.server, first)}
    for b, part in enumerate(served):
        logits = exit_logits(f, last.server, part)
        assert torch.equal(exit_logits(f, last.server, trained[f"base{b}"]), logits)
        difference = (exit_logits(f, last.server, replace(part, scale=1.0)) - logits).abs().max()
        assert difference > 0.01 if backbone == "deit_micro" else difference < 5e-4


@pytest.mark.parametrize("rescaled, size", [(True, 1.0), (False, 2.0)])
def test_convolutions_start_uniform_by_the_wide_nets_fan_in_or_their_own(net, rescaled, size):
    """U(-b, b) with b = 1/sqrt(fan-in), SD b/sqrt(3). A base of 1/4 has a quarter of the inputs: own fan-in, 2 b."""
    options = {"bases": 4, "ratios": [1.0], "rescale_init": rescaled}
    f = build_federation(net.replace(backbone="preresnet20", options=options))
    name = "backbone.blocks.8.conv1.weight"
    part = f.method.base(3, f.setting)
    weight, bound = take(f.server.params[name], f.setting.infos[name], part), size * (64 * 9) ** -0.5
    assert weight.shape == (16, 16, 3, 3) and 0.99 * bound < weight.abs().max() <= bound
    assert weight.std() == pytest.approx(bound / 3**0.5, rel=0.05)
    stem = f.server.params["backbone.stem.conv.weight"]  # reads pixels, which no base divides
    assert 0.9 * 27**-0.5 < stem.abs().max() <= 27**-0.5
    head = take(f.server.params["head.exits.0.linear.weight"], f.setting.infos["head.exits.0.linear.weight"], part)
    assert 0.9 * size / 8 < head.abs().max() <= size / 8 and f.method.base(3, f.setting).scale == 1 / 4
    by_he = build_federation(net.replace(backbone="preresnet20", options=options | {"init": "own"})).server.params[name]
    assert by_he.std() == pytest.approx(size * (2 / (64 * 9)) ** 0.5, rel=0.05)


def test_initialisations_without_effect_are_refused(net):
    with pytest.raises(ValueError, match="rescale_init = False is of convnets; 'deit_micro' is none"):
        build_federation(net.replace(backbone="deit_micro", options={"bases": 4, "rescale_init": False}))


def test_the_scaler_divides_every_convolution(net):
    f = build_federation(net.replace(options={"bases": 2, "ratios": [1.0]}))
    assert f.model.context.scaled == ("conv", "shortcut") and f.method.base(1, f.setting).scale == 0.5
    with pytest.raises(ValueError, match="stage1: .* cannot be cut into 5 equal parts"):
        build_federation(net.replace(options={"bases": 5, "ratios": [1.0]}))


def test_fedavg_at_a_width_is_a_narrow_net_for_everybody(net):
    f = build_federation(net.replace(method="fedavg", options={"width": 0.5}))
    assert {n: len(i) for n, i in f.method.slice_for(Client(0, 0, 1), f.server, Round(1, (), f.setting)).index.items()}[
        "stage2"
    ] == 3
    *_, last = run_rounds(f, ONE)
    moved = last.server.params["backbone.blocks.1.conv2.weight"] != f.server.params["backbone.blocks.1.conv2.weight"]
    assert moved[:3, :3].all() and not moved[3:].any() and not moved[:, 3:].any()
    plain = PlainResNet(NARROW, 10, False)
    part = f.method.model_for(0, last.server, Round(0, (), f.setting))
    plain.load_state_dict({plain_name(n): take(p, f.setting.infos[n], part) for n, p in last.server.params.items()})
    x = f.data.view(f.data.test_inputs, TOY.input_shape, torch.arange(60))
    torch.testing.assert_close(exit_logits(f, last.server, part)[0], plain(x), rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="width = 1.5"):
        build_method("fedavg", {"width": 1.5})


@pytest.mark.parametrize(
    "scenario, exits, held, eligible",
    [("fair", (0, 1, 2, 8), [1, 2, 3, 4], [0, 1, 2, 3]), ("lack", (0, 2, 8), [1, 1, 2, 3], [1, 2, 3])],
)
def test_depthfl_holds_the_exits_that_memory_allows(scenario, exits, held, eligible):
    e = Experiment(
        method="depthfl", backbone="preresnet20", pretrained=False, finetune="full", num_exits=len(exits),
        exit_blocks=exits, options={"scenario": scenario}, dataset="cifar10", num_train=400, num_clients=4,
        clients_per_round=4, rounds=1,
    )  # fmt: skip
    shapes = load_shapes(e, 10)
    assert [len(shapes.slice_for(b).exits) for b in range(4)] == held
    assert shapes.method.eligible(np.arange(4), shapes.setting).tolist() == eligible
    assert [shapes.slice_for(b).depth for b in range(4)][-1] == 9
    alone = e.replace(options={}, num_exits=1, exit_blocks=None, method="fedavg")
    assert 0 < training_macs(e) < training_macs(alone)


def test_a_base_is_priced_once_for_each_that_is_trained(net):
    e = net.replace(dataset="cifar10", options={"bases": 2, "ratios": [0.5, 1.0]})
    one = e.replace(options={"bases": 2, "ratios": [0.5]})
    assert training_macs(e) == pytest.approx(
        1.5 * training_macs(one), rel=1e-4
    )  # a stacked classifier counts 30 MACs an image less


def test_heterofl_leaves_small_sub_networks_out_of_the_mean(net):
    """Figure 2: the whole nets alone are averaged, each as in a federation where nobody else takes part."""
    options = {"rates": [0.5, 1.0], "masked": False, "weighting": "examples"}
    f = build_federation(net.replace(method="heterofl", rounds=1, options={**options, "averaged_from": 1}))
    r = Round(1, tuple(f.sample_clients(1)), f.setting)
    sends = [f.method.members(c, f.server, r)[0].upload is not NOTHING for c in r.clients]
    assert sends == [c.budget == 1 for c in r.clients]
    *_, last = run_rounds(f, ONE)
    all_whole = build_federation(net.replace(method="fedavg", rounds=1, options={}))
    cohorts = [m for c in r.clients if c.budget == 1 for m in all_whole.method.members(c, f.server, r)]
    cohort = Cohort(all_whole, all_whole.model, f.server, r, cohorts, {})
    all_whole.method.local_update(cohort)
    mean = all_whole.method.summarise(all_whole.method.upload(cohort), f.setting).result(f.server.params)
    for name, p in last.server.params.items():
        torch.testing.assert_close(p, mean[name], rtol=0, atol=2e-5)
    with pytest.raises(ValueError, match="averaged_from = 2; there are 2 rates"):
        build_method("heterofl", {"rates": [0.5, 1.0], "averaged_from": 2})
