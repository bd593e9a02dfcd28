"""HeteroFL: a round against a plain loop with explicit index lists, its losses by hand, what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.engine.forward import Forward
from fedlib.engine.serving import client_outputs
from fedlib.engine.stacks import Stack
from fedlib.methods import Round, build_method
from fedlib.methods.losses import Batch, cross_entropies
from fedlib.methods.sliced.heterofl import zero_absent_at_client
from fedlib.methods.sliced.splitmix import zero_absent_in_batch
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.runs.trained import all_logits
from tests.helpers.plain_convnets import PlainResNet, plain_name

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1), widths=(4, 6), size=32)
RATES = [0.25, 0.5, 1.0]


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="heterofl", options={"rates": RATES}, backbone="toy", pretrained=False, finetune="full", num_exits=1,
        augment="none", momentum=0.9, weight_decay=1e-3, clip_value=None, lr=0.02, num_train=90, num_test=60,
        num_clients=3, clients_per_round=3, rounds=1, batch_size=16, partition="pathological", classes_per_client=4,
        test_split="like_train",
    )  # fmt: skip


def kept(rate, sizes=(4, 6)):
    """By plain name, the kept indices of each dimension of each parameter: spelled out, not read from any axis."""
    a, b = (list(range(math.ceil(rate * n))) for n in sizes)
    rgb, classes, three = list(range(3)), list(range(10)), list(range(3))
    one = [0]
    return {
        "stem.conv.weight": (a, rgb, three, three), "stem.bn.weight": (a,), "stem.bn.bias": (a,),
        "blocks.0.conv1.weight": (a, a, three, three), "blocks.0.bn1.weight": (a,), "blocks.0.bn1.bias": (a,),
        "blocks.0.conv2.weight": (a, a, three, three), "blocks.0.bn2.weight": (a,), "blocks.0.bn2.bias": (a,),
        "blocks.1.conv1.weight": (b, a, three, three), "blocks.1.bn1.weight": (b,), "blocks.1.bn1.bias": (b,),
        "blocks.1.conv2.weight": (b, b, three, three), "blocks.1.bn2.weight": (b,), "blocks.1.bn2.bias": (b,),
        "blocks.1.projection.weight": (b, a, one, one),
        "blocks.1.projection_bn.weight": (b,), "blocks.1.projection_bn.bias": (b,),
        "linear.weight": (classes, b), "linear.bias": (classes,),
    }  # fmt: skip


def plain_round(f):
    """The server's state after one round, written for one client after the other."""
    e, start = f.experiment, {plain_name(n): p.double().numpy() for n, p in f.server.params.items()}
    total, holders = ({n: np.zeros(p.shape) for n, p in start.items()} for _ in range(2))
    rate_of_round = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi / e.rounds)))
    for client in f.sample_clients(1):
        rate = RATES[client.budget]
        index = kept(rate)
        net = PlainResNet(replace(TOY, widths=(math.ceil(rate * 4), math.ceil(rate * 6))), 10, tracks=False)
        net.load_state_dict({n: torch.tensor(start[n][np.ix_(*index[n])]).float() for n in start})
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.register_forward_pre_hook(lambda m, args, r=rate: (args[0] / r,))
        optimiser = torch.optim.SGD(net.parameters(), rate_of_round, momentum=e.momentum, weight_decay=e.weight_decay)
        mine = f.data.client(client.id)
        present = sorted(set(f.data.labels[mine].tolist()))
        mask = torch.zeros(10).index_fill(0, torch.tensor(present), 1.0)
        order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", 1, client.id)).numpy()
        for a in range(0, len(mine), e.batch_size):
            rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
            optimiser.zero_grad()
            logits = net(f.data.view(f.data.inputs, TOY.input_shape, rows)) * mask
            F.cross_entropy(logits, f.data.labels[rows]).backward()
            optimiser.step()
        for name, value in net.named_parameters():
            where, value = index[name], value.detach().double().numpy()
            if name.startswith("linear."):  # only the rows of its own classes are sent
                where, value = (present, *where[1:]), value[present]
            total[name][np.ix_(*where)] += value
            holders[name][np.ix_(*where)] += 1
    return {n: np.where(holders[n] > 0, total[n] / np.maximum(holders[n], 1), start[n]) for n in start}, holders


def test_a_round_equals_a_plain_loop_with_index_lists(convnet):
    f = build_federation(convnet)
    assert sorted(c.budget for c in f.sample_clients(1)) == [0, 1, 2]
    want, _ = plain_round(f)
    for size in (1, 3):
        (last,) = run_rounds(f, Execution(workers=1, cohort_size=size))
        for name, p in last.server.params.items():
            torch.testing.assert_close(p.double().numpy(), want[plain_name(name)], rtol=1e-4, atol=1e-5)


def test_entries_that_nobody_held_stand_still(convnet):
    f = build_federation(convnet.replace(num_clients=2, clients_per_round=2))  # rates 1/4 and 1/2
    want, holders = plain_round(f)
    (last,) = run_rounds(f, ONE)
    untouched = 0
    for name, p in last.server.params.items():
        idle = torch.from_numpy(holders[plain_name(name)] == 0)
        assert torch.equal(p[idle], f.server.params[name][idle])
        untouched += int(idle.sum())
    assert untouched > 100


def test_full_rates_are_fedavg(convnet):
    e = convnet.replace(rounds=2)
    options = {"rates": [1.0], "masked": False, "weighting": "examples"}
    *_, ours = run_rounds(build_federation(e.replace(options=options)), ONE)
    *_, fedavg = run_rounds(build_federation(e.replace(method="fedavg", options={})), ONE)
    for name, p in fedavg.server.params.items():
        assert torch.equal(ours.server.params[name], p)


@pytest.mark.parametrize("policy", ["tracked", "static"])
def test_the_cohort_size_changes_nothing(convnet, policy):
    e = convnet.replace(num_clients=6, clients_per_round=6, rounds=2, batch_norm=policy)
    runs = [list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 6)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-4, atol=2e-5)
    assert runs[0].metrics["accuracy"] == pytest.approx(runs[1].metrics["accuracy"], abs=2)


def test_dynamic_rates_are_drawn_anew_for_every_client_and_round(convnet):
    f = build_federation(
        convnet.replace(options={"dynamic": True}, num_clients=40, clients_per_round=40, num_train=400)
    )
    drawn = {
        t: [f.method.slice_for(c, f.server, Round(t, (), f.setting)).scale for c in f.clients(range(40))]
        for t in (1, 2)
    }
    assert set(drawn[1]) == set(f.method.rates) and drawn[1] != drawn[2]
    again = f.method.slice_for(f.clients([7])[0], f.server, Round(1, (), f.setting))
    assert again.scale == drawn[1][7]
    assert f.method.serve(f.clients([7])[0], f.server, Round(1, (), f.setting)).members[0].part == f.setting.full()


def test_a_clients_own_answer_is_its_sub_models_and_masked_where_asked(convnet):
    f = build_federation(convnet.replace(test_mask=True))
    (last,) = run_rounds(f, ONE)
    for ids, outputs, *_ in client_outputs(f, last.server, {}):
        for k, client in enumerate(ids):
            absent = f.setting.label_counts(client) == 0
            assert absent.any() and outputs[:, k][..., absent].eq(0).all() and outputs[:, k][..., ~absent].ne(0).any()
    served = f.method.serve(f.clients([0])[0], f.server, Round(1, (), f.setting)).members[0].part
    assert served.scale == 0.25 and served.index["stage2"] == range(2)


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
@pytest.mark.parametrize("rates", [RATES, [0.25, 0.5]], ids=["whole", "nobody_holds_the_whole"])
def test_local_as_published_is_the_central_model_masked_by_the_clients_classes(convnet, method, rates):
    e = convnet.replace(
        method=method, options={"answers": "whole", "rates": rates}, test_mask=True, batch_norm="tracked"
    )
    f = build_federation(e)
    (last,) = run_rounds(f, ONE)
    central, seen = all_logits(f, last.server), 0
    for ids, outputs, _, counts in client_outputs(f, last.server, {}):
        for k, (client, n) in enumerate(zip(ids, counts, strict=True)):
            has = torch.from_numpy(f.setting.label_counts(client) > 0)
            want = central[:, f.data.client_test(client)] * has
            torch.testing.assert_close(outputs[:, k, :n], want, rtol=1e-4, atol=1e-5)
            seen += n
    assert seen and len({f.method.serve(c, last.server, Round(1, (), f.setting)).members[0].part for c in f.clients(range(3))}) == 1  # fmt: skip


def test_whose_answers_needs_rates_that_stay():
    with pytest.raises(ValueError, match="answers"):
        build_method("heterofl", {"answers": "whole", "dynamic": True})


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_a_client_answers_with_the_function_that_it_trains(tiny, method):
    """In a transformer the division changes the function: what a client answers is divided as what it trains."""
    full = dict(num_exits=1, finetune="full", finetune_options={}, test_split="like_train")
    f = build_federation(tiny.replace(method=method, options={"rates": [0.5, 1.0]}, **full))
    r, rates = Round(f.server.t, (), f.setting), set()
    for (client,), outputs, *_ in (x for c in range(8) for x in client_outputs(f, f.server, {}, [c])):
        members = f.method.members(f.clients([client])[0], f.server, r)
        stack = Stack(f, members, {})
        forward = Forward(f.model, stack.slices, stack.tensors(f.server.params, merge=True), data=f.data, test=True)
        rows = torch.from_numpy(f.data.client_test(client))[None]
        with torch.no_grad():
            trained = forward.place_()(forward.inputs(rows))
        torch.testing.assert_close(outputs, trained, rtol=1e-5, atol=1e-6)
        rates.add(stack.slices[0].scale)
    assert rates == {0.5, 1.0}


def test_the_two_masked_cross_entropies_by_hand():
    """Three classes, logits (1, 2, 3), labels 0 and 1; the client has classes 0 and 1, the batch only its real rows."""
    logits = torch.tensor([1.0, 2.0, 3.0]).expand(1, 1, 2, 3)
    batch = Batch(
        logits, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.ones(1, 1),
        label_counts=lambda: torch.tensor([[5, 2, 0]]),
    )  # fmt: skip
    by_client = math.log(math.e + math.e**2 + 1) - 1  # class 2's logit is zero, not minus infinity
    by_batch = math.log(math.e + 1 + 1) - 1  # label 1 lies on padding
    assert cross_entropies(zero_absent_at_client(batch)).item() == pytest.approx(by_client, abs=1e-6)
    assert cross_entropies(zero_absent_in_batch(batch)).item() == pytest.approx(by_batch, abs=1e-6)


def test_a_scaler_is_on_in_a_transformer_and_off_at_scale_one(tiny):
    """Rate 1 with and without the scaler are bit-equal, rate 1/2 not."""
    e = tiny.replace(method="heterofl", finetune="full", finetune_options={}, rounds=1)

    def last(rate, scaler):
        options = {"rates": [rate], "scaler": scaler}
        (r,) = run_rounds(build_federation(e.replace(options=options)), ONE)
        return r.server.params["backbone.blocks.3.mlp.fc1.weight"]

    assert torch.equal(last(1.0, True), last(1.0, False))
    assert not torch.equal(last(0.5, True), last(0.5, False))


def test_what_cannot_be_is_refused(convnet, tiny):
    with pytest.raises(ValueError, match=r"heterofl: rates = \[0.5, 0.25\] must increase within"):
        build_method("heterofl", {"rates": [0.5, 0.25]})
    with pytest.raises(ValueError, match="heterofl: finetune = 'ia3' cannot be cut in width; allowed: frozen, full"):
        build_federation(tiny.replace(method="heterofl", finetune="ia3", finetune_options={}))
    with pytest.raises(ValueError, match="heterofl: backbone = 'vim_micro' cannot be cut in width: what its input"):
        build_federation(tiny.replace(method="heterofl", backbone="vim_micro", finetune="full", finetune_options={}))
    with pytest.raises(ValueError, match=r"heterofl: exit_blocks = \[5, 11\]: its network has one exit; allowed: one"):
        build_federation(
            tiny.replace(method="heterofl", exit_blocks=(5, 11), num_exits=2, finetune="full", finetune_options={})
        )
    text = dict(backbone="bert_micro", dataset="docstrings", augment="none", finetune="full", finetune_options={})
    with pytest.raises(ValueError, match="heterofl: backbone = 'bert_micro' cannot be cut in width: its exits read"):
        build_federation(tiny.replace(method="heterofl", **text))
