"""FedRolex: windows by hand, three rounds against a plain loop with explicit index lists, what it refuses."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.core.slices import Axis
from fedlib.engine.schedules import round_rate
from fedlib.methods import Round, build_method
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.runs.costs import exit_costs
from tests.helpers.plain_convnets import PlainResNet, plain_name

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1), widths=(5, 6), size=32)
RATES = [0.3, 0.5, 1.0]  # 1, 2, 5 of five channels and 1, 3, 6 of six


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="fedrolex", options={"rates": RATES}, backbone="toy", pretrained=False, finetune="full", num_exits=1,
        augment="none", momentum=0.9, weight_decay=1e-3, clip_value=None, lr=0.02, num_train=90, num_test=60,
        num_clients=3, clients_per_round=3, rounds=3, batch_size=16, partition="pathological", classes_per_client=4,
        test_split="like_train",
    )  # fmt: skip


def kept(rate, t):
    """By plain name, the kept indices of each dimension of each parameter in round t."""
    a, b = ([(t - 1 + i) % n for i in range(math.floor(rate * n))] for n in (5, 6))
    rgb, classes, three, one = list(range(3)), list(range(10)), list(range(3)), [0]
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


def plain_round(f, start, t):
    """The server's state after round t from ``start``, one client after the other."""
    e, (total, holders) = f.experiment, ({n: np.zeros(p.shape) for n, p in start.items()} for _ in range(2))
    for client in f.sample_clients(t):
        rate = RATES[client.budget]
        index, widths = kept(rate, t), tuple(math.floor(rate * n) for n in (5, 6))
        net = PlainResNet(replace(TOY, widths=widths), 10, tracks=False)
        net.load_state_dict({n: torch.tensor(start[n][np.ix_(*index[n])]).float() for n in start})
        for module in net.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.register_forward_pre_hook(lambda m, args, r=rate: (args[0] / r,))
        optimiser = torch.optim.SGD(net.parameters(), round_rate(e, t), momentum=0.9, weight_decay=1e-3)
        mine = f.data.client(client.id)
        present = sorted(set(f.data.labels[mine].tolist()))
        mask = torch.zeros(10).index_fill(0, torch.tensor(present), 1.0)
        order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
        for a in range(0, len(mine), e.batch_size):
            rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
            optimiser.zero_grad()
            logits = net(f.data.view(f.data.inputs, TOY.input_shape, rows)) * mask
            F.cross_entropy(logits, f.data.labels[rows]).backward()
            optimiser.step()
        for name, value in net.named_parameters():
            where, value = index[name], value.detach().double().numpy()
            if name.startswith("linear."):
                where, value = (present, *where[1:]), value[present]
            total[name][np.ix_(*where)] += value
            holders[name][np.ix_(*where)] += 1
    return {n: np.where(holders[n] > 0, total[n] / np.maximum(holders[n], 1), start[n]) for n in start}


def test_windows_by_hand():
    """n = 8 at rate 1/2 returns after eight rounds; two heads of four roll apart."""
    axis, half = Axis("a", (8,)), lambda n: n // 2
    want = {0: [0, 1, 2, 3], 1: [1, 2, 3, 4], 4: [4, 5, 6, 7], 5: [5, 6, 7, 0], 7: [7, 0, 1, 2], 8: [0, 1, 2, 3]}
    assert {r: list(axis.rolling(r, half)) for r in want} == want
    assert axis.rolling(4, half) == range(4, 8)
    assert sorted(i for r in range(8) for i in axis.rolling(r, half)) == sorted(list(range(8)) * 4)
    assert list(Axis("heads", (4, 4)).rolling(3, half)) == [3, 0, 7, 4]
    assert list(axis.rolling(-1, half)) == [7, 0, 1, 2]  # the release's second round
    with pytest.raises(ValueError, match="axis a: 0 of 8 entries cannot be kept"):
        axis.rolling(0, lambda n: 0)


@pytest.mark.parametrize(
    "windows, want",
    [("paper", {1: [0], 2: [1], 5: [4], 6: [0]}), ("release", {1: [0, 1], 2: [4, 0], 3: [3, 4], 6: [0, 1]})],
)
def test_the_window_of_a_round_follows_the_option(convnet, windows, want):
    """Five channels at rate 0.3: one by the paper, upwards; two by the release, downwards."""
    f = build_federation(convnet.replace(options={"rates": RATES, "windows": windows}))
    parts = {t: f.method.slice_for(Client(0, 0, 9), f.server, Round(t, (), f.setting)) for t in want}
    assert {t: list(part.index["stage1"]) for t, part in parts.items()} == want


def test_three_rounds_equal_a_plain_loop_with_index_lists(convnet):
    f = build_federation(convnet)
    assert sorted(c.budget for c in f.sample_clients(1)) == [0, 1, 2]
    want = {plain_name(n): p.double().numpy() for n, p in f.server.params.items()}
    for t in (1, 2, 3):
        want = plain_round(f, want, t)
    for size in (1, 3):
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size))
        for name, p in last.server.params.items():
            torch.testing.assert_close(p.double().numpy(), want[plain_name(name)], rtol=1e-4, atol=2e-5)


def test_full_rates_are_fedavg(convnet):
    options = {"rates": [1.0], "masked": False, "weighting": "examples"}
    *_, ours = run_rounds(build_federation(convnet.replace(options=options)), ONE)
    *_, fedavg = run_rounds(build_federation(convnet.replace(method="fedavg", options={})), ONE)
    for name, p in fedavg.server.params.items():  # the first rounds' windows are the whole net in another order
        torch.testing.assert_close(ours.server.params[name], p, rtol=1e-4, atol=1e-5)


def test_a_run_goes_on_where_it_stopped(convnet):
    f = build_federation(convnet)
    first, _, whole = run_rounds(f, ONE)
    *_, resumed = run_rounds(f, ONE, first.server)
    assert all(torch.equal(p, resumed.server.params[n]) for n, p in whole.server.params.items())


def test_a_client_answers_with_its_last_window(convnet):
    f = build_federation(convnet)
    served = f.method.serve(Client(0, 1, 9), f.server, Round(3, (), f.setting)).members[0].part
    assert served.scale == f.method.rates[1] and served.index["stage1"] == range(2, 4)
    dynamic = build_method("fedrolex", {"dynamic": True})
    assert dynamic.serve(Client(0, 1, 9), f.server, Round(3, (), f.setting)).members[0].part == f.setting.full()


def test_a_window_costs_what_a_leading_part_of_its_length_costs(convnet):
    even = {"rates": [0.5, 1.0], "windows": "release"}
    ours = exit_costs(convnet.replace(options=even), 10)
    assert ours == exit_costs(convnet.replace(method="heterofl", options={"rates": [0.5, 1.0]}), 10)


def test_what_cannot_be_is_refused(convnet, tiny):
    with pytest.raises(ValueError, match=r"fedrolex: rates = \[0.5, 0.25\] must increase within"):
        build_method("fedrolex", {"rates": [0.5, 0.25]})
    with pytest.raises(ValueError, match="'sideways'"):
        build_method("fedrolex", {"windows": "sideways"})
    full = dict(method="fedrolex", finetune="full", finetune_options={})
    with pytest.raises(ValueError, match=r"fedrolex: 0.02 of the 64 features .* is one, .* allowed: 0.0312 or more"):
        build_federation(tiny.replace(options={"rates": [0.02, 1.0]}, **full))
    with pytest.raises(ValueError, match="fedrolex: backbone = 'vim_micro' cannot be cut in width: what its input"):
        build_federation(tiny.replace(backbone="vim_micro", **full))
    with pytest.raises(ValueError, match=r"fedrolex: exit_blocks = \[5, 11\]: its network has one exit; allowed: one"):
        build_federation(tiny.replace(exit_blocks=(5, 11), num_exits=2, **full))
