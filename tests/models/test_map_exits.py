"""Exits that continue the backbone's shape (DepthFL's towers): sizes by hand, plain PyTorch, cuts, every method."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.engine.checks import check_experiment
from fedlib.engine.federation import build_model, setting_of
from fedlib.layers.norms import set_policy_
from fedlib.models import registry
from fedlib.models.exit_model import ExitModel
from fedlib.models.map_exits import KINDS, PooledClassifiers
from fedlib.models.resnet import RESNETS, ResNetSpec
from tests.helpers.measured import unit_macs
from tests.helpers.plain_convnets import PlainResNet, state_of

TINY = ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=8)
CLASSES, CLIENTS = 5, 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- sizes -----------------------------------------------------------------------------------------------------------


def separable(a, b, pixels=1):
    """(parameters, MACs) of a separable convolution from a to b channels whose output has so many ``pixels``."""
    products = 9 * a + a * a + 9 * a + a * b  # depthwise, 1x1, depthwise, 1x1
    return products + 2 * a + 2 * b, products * pixels  # and two norms


def test_depthfls_resnet18_by_hand():
    e = Experiment(
        method="depthfl", dataset="cifar100", backbone="resnet18_cifar", pretrained=False, finetune="full", augment="none",
        num_exits=4, exit_head="towers",
    )  # fmt: skip
    model = build_model(e, check_experiment(e), 100, meta=True)
    sizes = {j: sum(math.prod(i.shape) for i in model.infos().values() if i.exit == j) for j in (None, 0, 1, 2, 3)}
    steps = {0: [(64, 128), (128, 256), (256, 512)], 1: [(128, 256), (256, 512)], 2: [(256, 512)], 3: []}
    size = {64: 32, 128: 16, 256: 8, 512: 4}  # pixels a side
    macs = 0
    for j, taken in steps.items():
        last = (512 + 1) * 100
        if not taken:  # the last exit is pooled, then linear
            assert sizes[j] == last
            macs += 512 * 100
            continue
        a = taken[0][0]
        gate = separable(a, a, (size[a] // 2) ** 2)
        tower = [separable(x, y, size[y] ** 2) for x, y in taken]
        assert sizes[j] == gate[0] + 2 * a + sum(t[0] for t in tower) + last
        macs += gate[1] + sum(t[1] for t in tower) + 512 * 100
    assert [sizes[j] for j in range(4)] == [329_828, 342_116, 391_268, 51_300]
    assert sizes[None] == 11_168_832  # the backbone, as with pooled exits
    setting = setting_of(e, model)
    backbone = sum(unit_macs(setting.measure))
    assert backbone == 555_468_800 - 512 * 100  # CAFEDistill's 555.47 million, less the last layer
    assert setting.measure.macs(setting.full()) == backbone + macs


def test_a_tower_follows_the_maps_that_shrink():
    assert [RESNETS["resnet18_cifar"].narrowing(u) for u in (0, 1, 3, 5, 7)] == [
        (128, 256, 512), (128, 256, 512), (256, 512), (512,), (),
    ]  # fmt: skip
    assert registry.OWN["convnet3"].narrowing(0) == (128, 128)
    pytest.importorskip("fedlib_lab")
    slim = registry.OWN["efficientnet_slim"]  # 12, 18, 24, 48, 96 channels; 48 shares a size with 24
    assert slim.narrowing(0) == (18, 48, 96)
    assert registry.OWN["msdnet24"].narrowing(3) == ()  # the coarsest maps keep their size


# --- plain PyTorch ---------------------------------------------------------------------------------------------------


class PlainSeparable(nn.Sequential):
    def __init__(self, a, b):
        super().__init__(
            nn.Conv2d(a, a, 3, 2, 1, groups=a, bias=False), nn.Conv2d(a, a, 1, bias=False), nn.BatchNorm2d(a), nn.ReLU(),
            nn.Conv2d(a, a, 3, 1, 1, groups=a, bias=False), nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
        )  # fmt: skip


class PlainTowers(PlainResNet):
    """TINY with a tower after its first block, and its own last exit."""

    def __init__(self):
        super().__init__(TINY, CLASSES, tracks=True)
        self.gate = nn.Sequential(PlainSeparable(4, 4), nn.BatchNorm2d(4), nn.ReLU(), nn.Upsample(scale_factor=2, mode="bilinear"), nn.Sigmoid())  # fmt: skip
        self.tower = nn.Sequential(PlainSeparable(4, 6), PlainSeparable(6, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, CLASSES))  # fmt: skip

    def forward(self, x):
        z = self.blocks[0](F.relu(self.stem["bn"](self.stem["conv"](x))))
        last = self.blocks[2](self.blocks[1](z)).mean((2, 3))
        return self.tower(self.gate(z) * z), self.linear(last)


NAMES = {
    "gate.separable": "gate.0", "gate.bn": "gate.1", "linear": "tower.4", "depthwise1": "0", "pointwise1": "1",
    "bn1": "2", "depthwise2": "4", "pointwise2": "5", "bn2": "6",
}  # fmt: skip


def plain_name(name):
    """The name in :class:`PlainTowers`."""
    if not name.startswith("head.exits.0."):
        return name.removeprefix("backbone.").removeprefix("head.exits.1.")
    name = name.removeprefix("head.exits.0.")
    for ours, plain in NAMES.items():
        name = name.replace(ours, plain)
    return name


def put_(net, tensors):
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = net.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = tensor


def test_a_cohort_of_three_equals_three_plain_models():
    x, labels = normal(2, CLIENTS, 6, *TINY.input_shape), torch.arange(2 * CLIENTS * 6).view(2, CLIENTS, 6) % CLASSES
    sizes, lr = ((6, 4, 3), (6, 2, 5)), 0.05  # examples of each client, by step: padded batches
    weights = torch.tensor([[[(i < n) / n for i in range(6)] for n in step] for step in sizes])
    generator = torch.Generator().manual_seed(0)
    head = PooledClassifiers(TINY, CLASSES, (0, 2), early="towers").init_(generator)
    net = ExitModel(TINY.build().init_(generator), head, (0, 2))
    context = set_policy_(net, "tracked")
    start = {n: t.detach().clone() for n, t in (*net.named_parameters(), *net.named_buffers())}
    stacked = {n: t.expand(CLIENTS, *t.shape).clone() for n, t in start.items()}
    leaves = {n: stacked[n].requires_grad_() for n, _ in net.named_parameters()}
    put_(net, stacked)
    for step in range(2):
        context.weights = weights[step]
        out = net(x[step]).flatten(1, 2)  # (2, CLIENTS * 6, CLASSES)
        each = sum(F.cross_entropy(o, labels[step].flatten(), reduction="none") for o in out)
        grads = torch.autograd.grad((each.view(CLIENTS, 6) * weights[step]).sum(), list(leaves.values()))
        with torch.no_grad():
            for p, g in zip(leaves.values(), grads, strict=True):
                p -= lr * g
    trained = dict((*net.named_parameters(), *net.named_buffers()))
    for k in range(CLIENTS):
        plain = PlainTowers()
        assert {plain_name(n) for n in start} == set(state_of(plain))
        plain.load_state_dict({plain_name(n): t for n, t in start.items()}, strict=False)
        sgd = torch.optim.SGD(plain.parameters(), lr)
        for step in range(2):
            n = sizes[step][k]
            sgd.zero_grad()
            sum(F.cross_entropy(o, labels[step, k, :n]) for o in plain(x[step, k, :n])).backward()
            sgd.step()
        want = state_of(plain)
        for name, got in trained.items():
            torch.testing.assert_close(got[k], want[plain_name(name)], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")  # fmt: skip


# --- methods ---------------------------------------------------------------------------------------------------------

TOY = ResNetSpec(blocks=(1, 1), widths=(4, 6), size=16)


@pytest.fixture
def towers(monkeypatch):
    """Three clients of unequal size, images of 16x16 pixels, two exits of which the first is a tower."""
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="fedavg", backbone="toy", pretrained=False, finetune="full", num_exits=2, augment="none", momentum=0.9,
        batch_norm="tracked", exit_head="towers", clip_value=None, lr=0.02, num_train=90, num_test=60, num_clients=3,
        clients_per_round=3, rounds=2, batch_size=16, partition="class_dirichlet", budgets="maximum",
        test_split="like_train",
    )  # fmt: skip


@pytest.mark.parametrize("method", ["depthfl", "fedper", "fedrod", "fedpac", "cafedistill", "ditto"])
def test_methods_train_towers_alike_in_any_cohort(towers, method):
    rounds = []
    for size in (1, 3):
        f = build_federation(towers.replace(method=method))
        assert any(".gate." in n for n in f.setting.infos)
        memories = {}
        rounds.append((list(run_rounds(f, Execution(workers=1, cohort_size=size), memories=memories))[-1], memories))
    (one, kept), (three, also) = rounds
    for name, x in one.server.params.items():
        torch.testing.assert_close(three.server.params[name], x, rtol=0, atol=1e-5)
    assert kept.keys() == also.keys()
    for k in kept:
        for name, x in kept[k].items():
            torch.testing.assert_close(also[k][name], x, rtol=1e-5, atol=1e-5)
    moved = [n for n, x in one.server.params.items() if ".gate." in n and not x.equal(f.server.params[n])]
    assert bool(moved) == (method in ("depthfl", "fedrod", "ditto"))  # elsewhere shallow exits are the clients' own


def test_fedrods_own_exits_keep_their_statistics_and_count_a_batch_once(towers):
    once = towers.replace(rounds=1, batch_size=90)  # one batch a client
    f = build_federation(once.replace(method="fedrod", options={"head_epochs": None}))
    memories = {}
    done = list(run_rounds(f, Execution(workers=1), memories=memories))[-1]
    own = {n for n, i in f.setting.infos.items() if i.kind == "statistic" and n.startswith("head.personal.")}
    assert own and all({f"model/{n}" for n in own} <= set(kept) for kept in memories.values())
    assert all(done.server.params[n].equal(f.server.params[n]) for n in own)  # the server's are the initial ones
    plain = list(run_rounds(build_federation(once.replace(options={"exits": "all"})), Execution(workers=1)))[-1]
    tracked = [n for n in plain.server.params if n.startswith("head.") and n.endswith(("running_mean", "running_var"))]
    assert len(tracked) == 10  # five norms
    for name in tracked:  # generic exits start as FedAvg's, and saw the same batch
        found = done.server.params[name.replace("head.", "head.generic.")]
        torch.testing.assert_close(found, plain.server.params[name], rtol=0, atol=1e-6)


def test_a_method_with_exits_of_its_own_takes_the_kind_that_is_named(towers):
    for method, options in (("scalefl", {"cut": "width", "eps": 0.9}), ("fedepth", {"heads": "auxiliary"})):
        changes = dict(method=method, options=options, num_exits=2 if method != "fedepth" else 1, budgets="uniform")
        e = towers.replace(**changes)
        for kind in (None, "towers", "linear"):
            model = build_model(e.replace(exit_head=kind), check_experiment(e.replace(exit_head=kind)), 10, meta=True)
            own = {"scalefl": "Convolved", "fedepth": "Normed"}[method]
            assert type(model.head.exits[0]).__name__ == (KINDS[kind].__name__ if kind else own)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"exit_head": "tower"}, "experiment: exit_head = 'tower' is not possible; did you mean 'towers'?"),
        ({"num_exits": 1}, "exit_head = 'towers' has no effect: no exit comes before the last unit"),
        ({"backbone": "deit_micro", "num_exits": 4}, "exit_head = 'towers' is for exits that read maps, and those of"),
    ],
)
def test_a_kind_that_cannot_be_is_one_sentence(towers, changes, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        check_experiment(towers.replace(**changes))
