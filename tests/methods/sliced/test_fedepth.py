"""FeDepth: stages of the paper and the release, one round against plain PyTorch, and what a stage leaves alone."""

import dataclasses
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.engine.cohort import Cohort
from fedlib.engine.evaluation import exit_logits
from fedlib.engine.executors import plan_round
from fedlib.engine.stages import PrecomputedUnits
from fedlib.methods import Round, build_method
from fedlib.methods.losses import Batch
from fedlib.methods.sliced.fedepth import check_skips, check_stages, pack, peer_kl
from fedlib.models import registry
from fedlib.models.exit_model import ExitModel
from fedlib.models.resnet import RESNETS, ResNetSpec
from fedlib.models.route import PartialForward
from fedlib_lab.executors.meter import count_training
from fedlib_lab.papers.fedepth.block_inference import block_logits
from fedlib_lab.runs.costs import load_shapes, training_macs
from tests.helpers.measured import unit_macs
from tests.helpers.plain_convnets import PlainResNet, plain_name, state_of

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")
ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=32, form="fedepth")
FAIR = {"fair": ((0,), (1,), (2,), (3,), (4, 5), (6, 7, 8)), "third": ((0, 1), (2, 3), (4, 5, 6, 7, 8)),
        "half": ((0, 1, 2), (3, 4, 5, 6, 7, 8)), "whole": (tuple(range(9)),)}  # fmt: skip


@pytest.fixture
def net(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="fedepth", backbone="toy", pretrained=False, finetune="full", num_exits=1, augment="none", momentum=0.9,
        weight_decay=1e-3, clip_value=None, lr=0.05, num_train=80, num_test=60, num_clients=4, clients_per_round=4,
        rounds=2, batch_size=16, partition="class_dirichlet", dirichlet_alpha=1.0, evaluate_every=1,
        options={"scenario": "own", "ratios": [0.6]},
    )  # fmt: skip


def stages_of(scenario, backbone="preresnet20", **options):
    e = Experiment(method="fedepth", backbone=backbone, pretrained=False, finetune="full", num_exits=1,
                   options={"scenario": scenario, **options}, dataset="cifar10")  # fmt: skip
    shapes = load_shapes(e, 10)
    return [tuple(map(tuple, shapes.method.blocks(r, shapes.setting))) for r in shapes.method.shares]


def test_the_released_stages_of_preresnet20():
    poor = ((3,), (4,), (5,), (6, 7), (8,))  # of 1/8: the first three blocks fit no stage
    assert stages_of("fair") == list(FAIR.values())
    assert stages_of("lack") == [poor, FAIR["fair"], FAIR["half"], FAIR["whole"]]
    assert stages_of("surplus") == [FAIR["fair"], FAIR["third"], FAIR["half"], FAIR["whole"]]
    with pytest.raises(ValueError, match=r"r = 0.167: block 1 of 9 needs 20.02 MiB, the budget is 19.34 MiB with 0%"):
        stages_of("fair", slack=0.0, partial="refused")  # why the release has a slack


def test_the_papers_toy_of_figure_3():
    layers = [3, 2, 1, 0.5, 0.5, 0.5]
    assert pack(layers, 3, 0) == (range(0, 1), range(1, 3), range(3, 6)) and len(pack(layers, 5, 0)) == 2


@pytest.mark.parametrize("backbone", ["deit_micro", "vit_digits"])
def test_a_vits_stages_are_of_2_4_6_and_12_blocks(backbone):
    sizes = [[len(stage) for stage in blocks] for blocks in stages_of("fair", backbone)]
    assert sizes == [[2] * 6, [4] * 3, [6] * 2, [12]]


class PlainStaged(PlainResNet):
    """The stage's blocks behind frozen ones; its output is sampled and padded by hand for the shared head."""

    def staged(self, x, units):
        with torch.no_grad():
            z = self.stem["bn"](self.stem["conv"](x)) if units.start else x
            for block in self.blocks[: units.start]:
                z = block(z)
        if not units.start:
            z = self.stem["bn"](self.stem["conv"](x))
        for block in self.blocks[units.start : units.stop]:
            z = block(z)
        every, more = z.shape[-1] // 8, 8 - z.shape[1]
        z = F.pad(z[:, :, ::every, ::every], (0, 0, 0, 0, more // 2, more - more // 2))
        return self.linear(F.relu(self.bn(z)).mean((-2, -1)))

    def of_stage(self, units):
        outside = [*self.bn.parameters(), *self.linear.parameters()]
        first = [] if units.start else list(self.stem.parameters())
        return [*first, *self.blocks[units.start : units.stop].parameters(), *outside]


def plain_client(f, state, client, blocks, t, mu=0.0):
    """Local training of one client: all epochs of every stage, a new optimiser each, batches drawn on."""
    e, net = f.experiment, PlainStaged(TOY, 10, False)
    net.load_state_dict({plain_name(n): p.clone() for n, p in state.items()})
    start = {n: p.clone() for n, p in net.named_parameters()}
    net = net.to(memory_format=torch.channels_last)  # as the engine's maps lie: there PyTorch's batch norm rounds more
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi * t / e.rounds)))
    mine, generator = f.data.client(client.id), torch_generator(e.seed, "local", t, client.id)
    for units in blocks:
        optimiser = torch.optim.SGD(net.of_stage(units), rate, momentum=e.momentum, weight_decay=e.weight_decay)
        for _ in range(e.local_epochs):
            order = torch.randperm(len(mine), generator=generator).numpy()
            for a in range(0, len(mine), e.batch_size):
                rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
                x = f.data.view(f.data.inputs, TOY.input_shape, rows)
                optimiser.zero_grad()
                logits = net.staged(x.contiguous(memory_format=torch.channels_last), units)
                F.cross_entropy(logits, f.data.labels[rows]).backward()
                for n, p in net.named_parameters():
                    if p.grad is not None:
                        p.grad += mu * (p.detach() - start[n])
                optimiser.step()
    return state_of(net)


def test_a_round_of_one_client_equals_plain_pytorch(net):
    options = {**net.options, "buffered": False}
    e = net.replace(num_clients=1, clients_per_round=1, local_epochs=2, rounds=2, lr=0.01, options=options)
    f = build_federation(e)
    blocks = f.method.blocks(0.6, f.setting)
    assert blocks == (range(0, 1), range(1, 3))  # the first is bridged from 4 x 32 x 32 to 8 x 8 x 8
    state = dict(f.server.params)
    for r in run_rounds(f, ONE):
        trained = plain_client(f, state, f.sample_clients(r.t)[0], blocks, r.t)
        state = r.server.params
        for name, p in state.items():
            want = trained[plain_name(name)].detach()
            torch.testing.assert_close(p, want, rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)


def test_a_round_of_several_clients_averages_by_examples(net):
    f = build_federation(net.replace(rounds=1, options={"scenario": "own", "ratios": [0.6, 1.0], "buffered": False}))
    *_, last = run_rounds(f, ONE)
    total, clients = {}, f.sample_clients(1)
    assert {c.budget for c in clients} == {0, 1}
    for client in clients:
        blocks = f.method.blocks(f.method.shares[client.budget], f.setting)
        for name, p in plain_client(f, f.server.params, client, blocks, 1).items():
            total[name] = total.get(name, 0) + client.num_examples * p.detach().double()
    for name, p in last.server.params.items():
        want = (total[plain_name(name)] / sum(c.num_examples for c in clients)).float()
        torch.testing.assert_close(p, want, rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)


def test_with_fedprox_every_stage_is_held_back_to_the_global_model(net):
    e = net.replace(num_clients=1, clients_per_round=1, local_epochs=2, rounds=1, lr=0.01)
    f = build_federation(e.replace(options={**net.options, "buffered": False, "mu": 20.0}))
    *_, last = run_rounds(f, ONE)
    held, free = (
        plain_client(f, f.server.params, f.sample_clients(1)[0], f.method.blocks(0.6, f.setting), 1, mu)
        for mu in (20.0, 0.0)
    )
    for name, p in last.server.params.items():
        torch.testing.assert_close(p, held[plain_name(name)].detach(), rtol=0, atol=1e-5, msg=lambda m, n=name: n + m)
    assert max((held[n] - free[n]).abs().max() for n in held) > 3e-4


def test_with_memory_for_the_whole_net_it_is_fedavg_bit_for_bit(net):
    whole, plain = (
        build_federation(net.replace(method=m, options=o))
        for m, o in (("fedepth", {"scenario": "own", "ratios": [1.0]}), ("fedavg", {}))
    )
    ours, theirs = (list(run_rounds(f, ONE))[-1] for f in (whole, plain))
    assert all(torch.equal(p, theirs.server.params[n]) for n, p in ours.server.params.items())
    assert ours.metrics["accuracy"] == theirs.metrics["accuracy"]


OPTIONS = {
    "skip": {"scenario": "own", "ratios": [0.6, 1.0]}, "recomputed": {"scenario": "own", "ratios": [0.6], "buffered": False},
    "auxiliary": {"scenario": "own", "ratios": [0.6, 1.0], "heads": "auxiliary"},
    "partial": {"scenario": "own", "ratios": [0.35, 1.0], "average": "trained"},
    "surplus": {"scenario": "own", "ratios": [0.6, 2.0]}, "three models": {"scenario": "own", "ratios": [3.0]},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["batch", "tracked"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
def test_the_cohort_size_changes_nothing(net, options, policy):
    e = net.replace(options=options, local_epochs=2, batch_norm=policy, lr=0.02)
    one, many = (list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 8))
    for name, p in one.server.params.items():
        torch.testing.assert_close(many.server.params[name], p, rtol=1e-4, atol=2e-5)


def trained_cohort(f, t=1):
    r = Round(t, tuple(f.sample_clients(t)), f.setting)
    cohort = Cohort(f, f.model, f.server, r, plan_round(f, f.server, r, 1, None)[0], {})
    f.method.local_update(cohort)
    return cohort


def test_a_stage_trains_its_own_blocks_and_the_head_alone(net):
    """Momentum and decay move no frozen block; of a client that trains no first block, the stem neither."""
    f = build_federation(net.replace(options={"scenario": "own", "ratios": [0.35]}))
    assert [u.start for u in f.method.blocks(0.35, f.setting)][0] == 1
    cohort = trained_cohort(f)
    moved = {n for n, p in cohort.params.items() if not torch.equal(p, cohort.start[n])}
    assert moved == {n for n in cohort.params if ".stem." not in n and ".blocks.0." not in n}


@pytest.mark.parametrize("average", ["all", "trained"])
def test_what_nobody_trained_comes_back_unchanged_and_counts_only_in_the_papers_mean(net, average):
    e = net.replace(rounds=1, options={"scenario": "own", "ratios": [0.35, 1.0], "average": average})
    f = build_federation(e)
    *_, last = run_rounds(f, ONE)
    clients = f.sample_clients(1)
    rich = [c for c in clients if c.budget == 1]
    trained = [plain_client(f, f.server.params, c, (range(0, 3),), 1) for c in rich]
    name = "backbone.blocks.0.conv1.weight"
    n, everybody = sum(c.num_examples for c in rich), sum(c.num_examples for c in clients)
    mean = sum(c.num_examples * x[plain_name(name)] for c, x in zip(rich, trained, strict=True)) / n
    share = n / everybody if average == "all" else 1.0
    want = f.server.params[name] + share * (mean - f.server.params[name])
    torch.testing.assert_close(last.server.params[name], want, rtol=0, atol=1e-5)


def test_cached_activations_are_those_of_the_examples_in_order(net):
    """One batch holds all of a client: then the order of a batch does not matter, and cached equals recomputed."""
    e = net.replace(batch_size=80, local_epochs=2)
    cached, anew = (build_federation(e.replace(options={**e.options, "buffered": b})) for b in (True, False))
    a, b = (list(run_rounds(f, ONE))[-1].server.params for f in (cached, anew))
    for name, p in a.items():
        torch.testing.assert_close(b[name], p, rtol=0, atol=2e-5)
    small = net.replace(batch_size=8)  # batch statistics of other batches: the paper's z is fixed, the release's is not
    a, b = (
        list(run_rounds(build_federation(small.replace(options={**e.options, "buffered": x})), ONE))[-1].server.params
        for x in (True, False)
    )
    assert any((a[n] - b[n]).abs().max() > 1e-4 for n in a)


def test_transformers_cache_the_same_tokens_in_any_batch(tiny):
    e = tiny.replace(method="fedepth", finetune="full", finetune_options={}, num_exits=1, augment="none", rounds=1,
                     local_epochs=2, num_train=80, num_clients=4, clients_per_round=4, batch_size=8)  # fmt: skip
    a, b = (
        list(run_rounds(build_federation(e.replace(options={"buffered": x})), ONE))[-1].server.params
        for x in (True, False)
    )
    for name, p in a.items():
        torch.testing.assert_close(b[name], p, rtol=0, atol=1e-5)


def test_auxiliary_heads_are_held_by_those_whose_stage_ends_there(net):
    f = build_federation(net.replace(rounds=1, options=OPTIONS["auxiliary"]))
    blocks, r = f.method.blocks(0.6, f.setting), Round(1, tuple(f.sample_clients(1)), f.setting)
    ends = tuple(u.stop - 1 for u in blocks)
    parts = {c.budget: f.method.slice_for(c, f.server, r) for c in r.clients}
    assert parts[0].exits == ends and parts[1].exits == (2,) and f.setting.exit_units == (0, 1, 2)
    *_, last = run_rounds(f, ONE)
    moved = {
        j for j in range(3)
        if not torch.equal(last.server.params[f"head.exits.{j}.linear.weight"], f.server.params[f"head.exits.{j}.linear.weight"])
    }  # fmt: skip
    assert moved == {*ends, 2} and len(last.metrics["exits"]) == 1  # the real head answers
    assert last.metrics["accuracy"] == last.metrics["exits"][0]
    kinds = [type(head).__name__ for head in f.model.head.exits]
    assert kinds == ["Normed"] * 3  # a norm, no ReLU: the last one too


def test_the_release_leaves_blocks_out_and_feeds_the_stem_to_the_first_trained_one(net, monkeypatch):
    spec = ResNetSpec(blocks=(2, 1, 1), widths=(4, 6, 8), size=32, form="fedepth")  # block 1 reads what block 0 reads
    monkeypatch.setitem(registry.OWN, "toy", spec)
    e = net.replace(options={"scenario": "own", "ratios": [0.3], "partial": "absent", "slack": 0.0}, rounds=1)
    f = build_federation(e)
    first = f.method.blocks(0.3, f.setting)[0].start
    assert first == 2
    seen, advance = [], f.model.backbone.advance
    monkeypatch.setattr(f.model.backbone, "advance", lambda z, unit, on: seen.append(unit) or advance(z, unit, on))
    cohort = trained_cohort(f)
    assert seen and min(seen) == first  # never run
    moved = {n for n, p in cohort.params.items() if not torch.equal(p, cohort.start[n])}
    assert any(".stem." in n for n in moved) and not any(f".blocks.{u}." in n for u in range(first) for n in moved)


def test_peers_by_hand_and_they_stay(net):
    """p = (.8, .2) and q = (.5, .5): KL(q || p) for the first, KL(p || q) for the second; a stranger has none."""
    p, q = torch.tensor([0.8, 0.2]), torch.tensor([0.5, 0.5])
    outputs = torch.stack([p, q, p]).log()[None, :, None]
    batch = Batch(outputs, torch.zeros(3, 1, dtype=torch.long), torch.ones(3, 1), torch.ones(1, 3),
                  client=torch.tensor([0, 0, 1]))  # fmt: skip
    kl = [float((q * (q / p).log()).sum()), float((p * (p / q).log()).sum()), 0.0]
    assert peer_kl(batch).tolist() == pytest.approx(kl)
    three = Batch(torch.stack([p, q, p]).log()[None, :, None], batch.labels, batch.weights, batch.held,
                  client=torch.zeros(3, dtype=torch.long))  # fmt: skip
    assert peer_kl(three).tolist() == pytest.approx([(kl[0] + 0) / 2, kl[1], (kl[0] + 0) / 2])

    f, memories = build_federation(net.replace(options={"scenario": "own", "ratios": [2.0]})), {}
    rounds = list(run_rounds(f, ONE, memories=memories))
    names = {n for n in f.server.params if not n.startswith("peer1/")}
    assert set(f.server.params) == names | {f"peer1/{n}" for n in names}
    for client in range(4):
        assert set(memories[client]) == {f"peer1/{n}" for n in names}
    weight = "peer1/backbone.blocks.0.conv1.weight"
    assert torch.equal(rounds[-1].server.params[weight], f.server.params[weight])  # it never travels
    assert not torch.equal(memories[0][weight], memories[1][weight])
    moved = [not torch.equal(rounds[-1].server.params[n], f.server.params[n]) for n in names]
    assert all(moved)


def test_mutual_distillation_by_a_plain_loop(net):
    """Two models of one client, one batch a round: each descends its cross-entropy plus KL to the other, detached."""
    e = net.replace(num_clients=1, clients_per_round=1, rounds=1, momentum=0.0, weight_decay=0.0, batch_size=80,
                    options={"scenario": "own", "ratios": [2.0]})  # fmt: skip
    f, memories = build_federation(e), {}
    *_, last = run_rounds(f, ONE, memories=memories)
    rows = torch.from_numpy(f.data.client(0))
    x, y = f.data.view(f.data.inputs, TOY.input_shape, rows), f.data.labels[rows]
    nets = [PlainResNet(TOY, 10, False) for _ in range(2)]
    for plain, start in zip(nets, ("", "peer1/"), strict=True):
        own = {n.removeprefix(start): p for n, p in f.server.params.items() if n.startswith("peer1/") == bool(start)}
        plain.load_state_dict({plain_name(n): p.clone() for n, p in own.items()})
    logp = [plain(x).log_softmax(-1) for plain in nets]
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi)))
    for plain, mine, other in zip(nets, logp, logp[::-1], strict=True):
        loss = F.nll_loss(mine, y) + F.kl_div(mine, other.detach(), reduction="batchmean", log_target=True)
        loss.backward()
        torch.optim.SGD(plain.parameters(), rate).step()
    for name, p in last.server.params.items():
        if not name.startswith("peer1/"):
            torch.testing.assert_close(p, state_of(nets[0])[plain_name(name)], rtol=0, atol=1e-6)
            kept = memories[0][f"peer1/{name}"]
            torch.testing.assert_close(kept, state_of(nets[1])[plain_name(name)], rtol=0, atol=1e-6)


def test_an_interrupted_run_ends_with_the_same_numbers(net, tmp_path):
    e = net.replace(options=OPTIONS["surplus"], rounds=3)
    whole = run(e, ONE, folder=tmp_path / "whole", progress=False)
    f, memories = build_federation(e), {}
    first = next(iter(run_rounds(f, ONE, memories=memories)))
    *_, last = run_rounds(f, ONE, first.server, memories)
    assert last.metrics["exits"] == whole.summary["exits"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"options": {"scenario": "own", "ratios": [0.05]}}, r"r = 0.05: block 3 of 3 needs .* MiB, the budget is"),
        ({"options": {"scenario": "own", "ratios": [0.35], "partial": "refused"}}, "block 1 of 3 .* no block may be"),
        ({"options": {"scenario": "own", "ratios": [0.35], "partial": "absent"}}, None),
        ({"options": {"scenario": "own"}}, "fedepth: scenario = 'own' needs ratios"),
        ({"options": {"ratios": [0.5]}}, "ratios = .* has no effect with scenario = 'fair'"),
        ({"options": {"scenario": "fare"}}, "scenario = 'fare'"),
        ({"exit_blocks": (1,)}, r"fedepth: exit_blocks = \[1\] are not the method's"),
        ({"options": {"heads": "skips"}}, "heads = 'skips'"),
    ],
)
def test_what_cannot_be_decomposed_is_refused_before_any_compute(net, changes, message):
    if message is None:
        registry.OWN["toy"] = ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=32, form="fedepth")
        assert build_federation(net.replace(**changes)).method.partial == "absent"
        return
    with pytest.raises(ValueError, match=message):
        build_federation(net.replace(**changes))


def test_checks_of_decompositions_in_words():
    with pytest.raises(ValueError, match="block 2 of 3 needs 9.00 MiB, .* only blocks before the first trained one"):
        check_stages([1, 9, 1], 2, 0.05, True)
    with pytest.raises(ValueError, match="block 3 of 3 needs 9.00 MiB"):
        check_stages([1, 1, 9], 2, 0.05, True)
    check_stages([9, 1, 1], 2, 0.05, True)
    with pytest.raises(ValueError, match="block 1 of 3 .* no block may be left out"):
        check_stages([9, 1, 1], 2, 0.05, False)
    narrowing = ResNetSpec(blocks=(1, 1), widths=(8, 6), size=32)
    with pytest.raises(
        ValueError, match="after block 1, 8 x 32 x 32, cannot skip to the head, which reads 6 x 16 x 16"
    ):
        check_skips(narrowing, [0, 1])
    check_skips(RESNETS["preresnet20"], range(9))


def test_the_price_of_stages():
    """A stage costs its own three passes and one of what is ahead of it; the whole net once is the unit."""
    e = Experiment(method="fedepth", backbone="preresnet20", pretrained=False, finetune="full", num_exits=1, rounds=1,
                   dataset="cifar10", num_clients=4, clients_per_round=4, num_train=400, augment="crop_flip")  # fmt: skip
    shapes = load_shapes(e, 10)
    stem, *units = unit_macs(shapes.setting.measure)
    total = stem + sum(units)
    assert total + 640 == shapes.setting.measure.macs(shapes.setting.full())
    firsts = (1, 2, 3, 4, 6)
    ahead = [stem + sum(units[:first]) for first in firsts]
    whole = 3 * total - stem  # no gradient to the input

    def efforts(budget, examples, e=e):
        """Without what exits take, which a stage trains each time."""
        client = Client(-1, budget, examples)
        found = count_training(e, shapes.method, shapes.setting, shapes.model, client).macs
        return (found / e.local_epochs - len(shapes.method.stages(client, shapes.setting)) * 3 * 640) / whole

    # a stage's first block of parameters needs no gradient to what is ahead of it
    assert efforts(3, 100) == pytest.approx(1, rel=0.002)
    first = efforts(0, 500)
    assert first == pytest.approx(1.62, abs=0.005) == pytest.approx(1 + sum(ahead) / whole, rel=0.01)
    once = e.replace(augment="none", local_epochs=5)
    assert efforts(0, 500, once) == pytest.approx(first)  # no z fits beside a stage
    # of 32 examples z_3 and z_6 fit: once from the inputs on, and at the other stages in every epoch
    assert efforts(0, 32, once) == pytest.approx(first - 0.8 * (ahead[2] + ahead[4]) / whole, rel=1e-3)
    surplus = e.replace(options={"scenario": "surplus"})
    assert training_macs(surplus) / training_macs(e) == pytest.approx(
        (first + efforts(1, 100) + efforts(2, 100) + 2) / (first + efforts(1, 100) + efforts(2, 100) + 1), rel=0.01
    )


def test_what_is_kept_ahead_of_a_stage_counts_as_memory():
    """r = 1/6 of 116.04 MiB with 5 % slack is 20.31. z before block 4 takes 1/16 MiB an example, before block 7 1/32.

    Stages of 20.02, 20.02, 20.02, 14.06, 20.15 and 17.78 MiB at 32 examples, 10/32 of that at ten.
    """
    e = Experiment(method="fedepth", backbone="preresnet20", pretrained=False, finetune="full", num_exits=1,
                   dataset="cifar10")  # fmt: skip
    shapes = load_shapes(e, 10)

    def kept(examples, batch=32, **options):
        setting, method = replace(shapes.setting, batch_size=batch), build_method("fedepth", options)
        stages = method.stages(Client(0, 0, examples), setting)
        assert method.program(Client(0, 0, examples), setting) == tuple(stages)  # unequal ones train apart
        return "".join("01"[s.cached] for s in stages)

    assert [kept(n) for n in (2, 10, 40, 100, 102, 500)] == ["011111", "011111", "000101", "000100", "000000", "000000"]
    assert kept(100, batch=16) == "000000" and kept(500, batch=128) == "000000" and kept(100, batch=128) != "000000"
    assert kept(2, buffered=False) == "000000"


@pytest.mark.parametrize("backbone, ratio", [("toy", 0.45), ("vit_digits", 1 / 3)])
def test_z_is_made_of_the_z_before_it(net, backbone, ratio, monkeypatch):
    """The same numbers as from the inputs at every stage, and every frozen unit runs once."""
    registry.OWN["toy"] = ResNetSpec(blocks=(2, 1, 1), widths=(4, 6, 8), size=32, form="fedepth")
    e = net.replace(options={"scenario": "own", "ratios": [ratio]}, batch_size=8, rounds=1, num_train=40,
                    backbone=backbone)  # fmt: skip
    f = build_federation(e)
    client = f.sample_clients(1)[0]
    seen, original = [], ExitModel.run_leading

    def begin(model, x, units, *args, **kwargs):
        seen.append((x.units if isinstance(x, PartialForward) else 0, units))
        return original(model, x, units, *args, **kwargs)

    monkeypatch.setattr(ExitModel, "run_leading", begin)
    *_, chained = run_rounds(f, ONE)
    stages = f.method.stages(client, f.setting)
    assert [s.cached for s in stages] == [False, True, True]
    firsts = [s.units.start for s in stages]
    assert set(seen) == {(0, firsts[1]), (firsts[1], firsts[2])}
    init = PrecomputedUnits.__init__
    monkeypatch.setattr(PrecomputedUnits, "__init__", lambda self, *args: init(self, *args[:-1]))
    seen.clear()
    *_, anew = run_rounds(build_federation(e), ONE)
    assert {first for first, _ in seen} == {0}
    for name, p in anew.server.params.items():
        torch.testing.assert_close(chained.server.params[name], p, rtol=0, atol=1e-6)  # a map lies otherwise once kept


FROZEN = {"frozen": {"finetune": "frozen"}, "upper half": {
    "finetune": "lora", "finetune_options": {"r": 4, "layers_to_transform": (6, 7, 8, 9, 10, 11)}}}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"partial": "absent", "scenario": "lack", "slack": 0.4}])
@pytest.mark.parametrize("changes", FROZEN.values(), ids=list(FROZEN))
def test_of_a_frozen_backbone_the_head_learns_from_cached_features(tiny, changes, options, monkeypatch):
    e = tiny.replace(method="fedepth", num_exits=1, augment="none", rounds=1, num_train=80, num_clients=4,
                     clients_per_round=4, batch_size=8, lr=0.05, finetune_options={}, options=options)  # fmt: skip
    e = e.replace(**changes)
    f = build_federation(e)
    assert f.train_cache.units == (12 if e.finetune == "frozen" else 6)
    *_, cached = run_rounds(f, ONE)
    *_, plain = run_rounds(dataclasses.replace(build_federation(e), train_cache=None), ONE)
    assert not torch.equal(
        cached.server.params["head.exits.0.linear.weight"], f.server.params["head.exits.0.linear.weight"]
    )
    for name, p in cached.server.params.items():
        torch.testing.assert_close(p, plain.server.params[name], rtol=0, atol=1e-5)


def test_budgets_by_quartiles_of_the_index(net):
    f = build_federation(net.replace(num_clients=10, clients_per_round=2, budgets="contiguous",
                                     options={"scenario": "own", "ratios": [0.6, 0.7, 0.8, 1.0]}))  # fmt: skip
    assert f.budgets.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 3]  # those left over are the rich ones
    few = build_federation(net.replace(num_clients=3, clients_per_round=2, budgets="contiguous",
                                       options={"scenario": "own", "ratios": [0.6, 0.7, 0.8, 1.0]}))  # fmt: skip
    assert few.budgets.tolist() == [0, 1, 2]


@pytest.mark.parametrize("backbone", ["toy", "vit_digits"])
def test_inference_unit_by_unit_gives_the_same_answers(net, backbone, tmp_path):
    e = net.replace(backbone=backbone, rounds=1, num_test=260, options={"scenario": "own", "ratios": [1.0]})
    f = build_federation(e)  # two batches, of 250 and 10 examples
    *_, last = run_rounds(f, ONE)
    seen, original = [], ExitModel.run_leading

    def begin(model, x, units, *args):
        seen.append((units, len(list(tmp_path.iterdir()))))
        others = [p.device.type for n, p in model.named_parameters() if f".blocks.{units}." in n]
        assert set(others) == {"meta"}  # the next block is not there
        return original(model, x, units, *args)

    with pytest.MonkeyPatch.context() as m:
        m.setattr(ExitModel, "run_leading", begin)
        got = block_logits(f, last.server, tmp_path)
    passes = [len(list(g)) / 2 for _, g in groupby(units for units, _ in seen)]  # of a block: one more for each norm
    assert (
        sorted({u for u, _ in seen}) == [u for u, _ in groupby(seen, lambda s: s[0])] == list(range(1, f.model.depth))
    )
    assert set(passes) == ({1} if backbone == "vit_digits" else {3, 4})  # the first has the stem's norm, too
    assert max(files for _, files in seen) == 2 and not list(tmp_path.iterdir())
    torch.testing.assert_close(got, exit_logits(f, last.server, f.setting.full())[-1], rtol=0, atol=1e-5)


def test_several_maps_are_not_kept_but_made_anew(net):
    f = build_federation(net.replace(backbone="msdnet12_slim", partition="iid", num_train=8, num_test=10, rounds=1))
    stages = f.method.stages(f.clients([0])[0], f.setting)
    assert len(stages) > 1 and not any(s.cached for s in stages)
    *_, last = run_rounds(f, ONE)
    assert all(torch.isfinite(p).all() for p in last.server.params.values())


PRERESNET20 = (20.02, 20.02, 20.02, 14.06, 10.07, 10.07, 7.22, 5.28, 5.28)  # MiB of a block, batch 32
TOTAL = 116.04  # with stem and classifier


def blocks(*stages):
    """Stages as ranges, blocks counted from 1: (1, 2) is B1 and B2."""
    return tuple(range(a - 1, b) for a, b in stages)


@pytest.mark.parametrize(
    ("ratio", "stages"),
    [
        (1 / 8, blocks((4, 4), (5, 5), (6, 6), (7, 8), (9, 9))),  # B1-B3 fit nowhere
        (1 / 6, blocks((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 9))),
        (1 / 3, blocks((1, 2), (3, 4), (5, 9))),
        (1 / 2, blocks((1, 3), (4, 9))),
        (1, blocks((1, 9))),
    ],
)
def test_fedepths_five_packings(ratio, stages):
    assert pack(PRERESNET20, ratio * TOTAL) == stages


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_the_papers_toy(slack):
    toy = (3, 2, 1, 0.5, 0.5, 0.5)
    assert pack(toy, 3, slack) == blocks((1, 1), (2, 3), (4, 6))
    assert pack(toy, 5, slack) == blocks((1, 2), (3, 6))


def test_without_slack_a_sixth_does_not_hold_the_first_blocks():
    assert pack(PRERESNET20, TOTAL / 6, slack=0.0)[0] == range(3, 4)


def test_a_block_that_fits_nowhere_parts_the_stages_beside_it():
    assert pack((1, 1, 9, 1, 0, 1), 3, 0.0) == (range(0, 2), range(3, 6))
    assert pack((0.1,) * 3, 0.3, 0.0) == (range(3),)  # 0.1 + 0.1 + 0.1 > 0.3 in floats
    with pytest.raises(ValueError, match="no block fits a budget of 2; the smallest needs 5"):
        pack((9, 5), 2)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=30), st.floats(0.1, 30))
def test_stages_are_greedy_contiguous_and_fit(memories, budget):
    if min(memories) > budget:
        return
    stages = pack(memories, budget, 0.0)
    trained = [b for s in stages for b in s]
    assert trained == [b for b, m in enumerate(memories) if m <= budget * (1 + 1e-9)]
    for stage, after in zip(stages, (*stages[1:], None), strict=True):
        held = sum(memories[b] for b in stage)
        assert stage and held <= budget * (1 + 1e-6)
        if after and after.start == stage.stop:  # no stage could have taken one block more
            assert held + memories[after.start] > budget
