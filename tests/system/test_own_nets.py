"""A net of one's own is trained as its owner made it: one step equals one of plain PyTorch, or a sentence says why not."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

import fedlib
from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.models import registry
from fedlib.models.measure import Measure
from fedlib_lab.runs.identity import inputs_of
from tests.zoo.test_wrapped import own_name

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

CUTS = ["enter", "middle"]


@pytest.fixture(autouse=True)
def forgotten():
    before = dict(registry.OWN)
    yield
    registry.OWN.clear()
    registry.OWN.update(before)


class Net(nn.Module):
    """Two units, the second of which holds what a test is about, and a head."""

    def __init__(self, *middle):
        super().__init__()
        self.enter, self.middle = nn.Conv2d(3, 8, 3, 4, 1), nn.Sequential(*middle, nn.Conv2d(8, 8, 1))
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        return self.head(self.middle(F.relu(self.enter(x))).mean((2, 3)))


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, dropout=0.5)

    def forward(self, x):
        z = x.flatten(2).mT
        return x + self.attention(z, z, z, need_weights=False)[0].mT.view(x.shape)


class Volume(nn.Module):
    """A module that wants another number of dimensions."""

    def __init__(self, layer, shape):
        super().__init__()
        self.layer, self.shape = layer, shape

    def forward(self, x):
        return self.layer(x.reshape(len(x), 8, *self.shape)).view(x.shape)


class Picks(nn.Module):
    """A parameter that cannot be trained."""

    def __init__(self):
        super().__init__()
        self.gain, self.order = nn.Parameter(torch.ones(8, 1, 1)), nn.Parameter(torch.arange(8).flip(0), False)

    def forward(self, x):
        return x[:, self.order] * self.gain


class Doubles(nn.Module):
    """Something else in training than in evaluation."""

    def forward(self, x):
        return 2 * x if self.training else x


class Caches(nn.Module):
    """In evaluation it keeps what it made of its parameter, as timm's LeViT does."""

    def __init__(self):
        super().__init__()
        self.bias, self.kept = nn.Parameter(torch.ones(8, 1, 1)), {}

    def forward(self, x):
        if self.training:
            return x + self.bias.square()
        if not self.kept:
            self.kept["bias"] = self.bias.square()
        return x + self.kept["bias"]


class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Moves(nn.Module):
    """A buffer that the forward pass updates, in place or not, always or in training."""

    def __init__(self, how="in place"):
        super().__init__()
        self.how = how
        self.register_buffer("mean", torch.zeros(8, 1, 1))

    def forward(self, x):
        if self.how == "in place":
            self.mean.lerp_(x.detach().mean((0, 2, 3)).view(8, 1, 1), 0.1)
        elif self.how == "anew" or self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean((0, 2, 3)).view(8, 1, 1)
        return x - self.mean


def frozen(*paths, net=None):
    """The net with everything below these paths frozen."""
    net = net or Net(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1))
    for path in paths:
        net.get_submodule(path).requires_grad_(False)
    return net


def seen(net):
    """Its statistics are no longer those of a new net."""
    net.train()
    with torch.no_grad():
        net(torch.randn(64, 3, 32, 32) + 1)
    return net


def still(*paths, net=None):
    """The net with these modules in eval mode."""
    net = seen(net or Net(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1)))
    for path in paths:
        net.get_submodule(path).eval()
    return net


def only(leaf, path="middle.0"):
    net = Net(nn.BatchNorm2d(8), nn.ReLU())
    net.get_submodule(path).get_parameter(leaf).requires_grad_(False)
    return net


class Twice(Net):
    """One convolution runs twice."""

    def forward(self, x):
        return self.head(self.middle(self.middle[0](F.relu(self.enter(x)))).mean((2, 3)))


ONCE = nn.Conv2d(8, 8, 1)
NETS = {
    "plain": lambda: Net(),
    "frozen convolution": lambda: frozen("enter"),
    "frozen in between": lambda: frozen("middle.2"),
    "frozen affine of a batch norm": lambda: frozen("middle.0"),
    "frozen unit with a batch norm": lambda: frozen("enter", "middle"),
    "frozen first unit with a batch norm": lambda: frozen("middle", net=Net(nn.BatchNorm2d(8))),
    "frozen bias": lambda: only("bias"),
    "frozen weight of a convolution": lambda: only("weight", "enter"),
    "all frozen but the head": lambda: frozen("", net=Net(nn.GroupNorm(2, 8))),
    "integers": lambda: Net(Picks()),
    "batch norm in eval": lambda: still("middle.0"),
    "unit in eval": lambda: still("middle"),
    "frozen batch norm in eval": lambda: frozen("middle.0", net=still("middle.0")),
    "batch norm without weights in eval": lambda: still("middle.0", net=Net(nn.BatchNorm2d(8, affine=False))),
    "instance norm with statistics in eval": lambda: still(
        "middle.0", net=Net(nn.InstanceNorm2d(8, track_running_stats=True))
    ),
    "all in eval": lambda: seen(Net(nn.BatchNorm2d(8))).eval(),
    "dropout in eval": lambda: still("middle.0", net=Net(nn.Dropout(0.5), nn.BatchNorm2d(8))),
    "dropout as a function": lambda: Net(Drops()),
    "random slopes": lambda: Net(nn.RReLU()),
    "one layer twice": lambda: Twice(),
    "one module under two names": lambda: Net(ONCE, nn.ReLU(), ONCE),
    "batch norm 1d": lambda: Net(Volume(nn.BatchNorm1d(8), (64,))),
    "batch norm 3d": lambda: Net(Volume(nn.BatchNorm3d(8), (2, 4, 8))),
    "instance norm 1d": lambda: Net(Volume(nn.InstanceNorm1d(8, affine=True), (64,))),
    "instance norm 2d": lambda: Net(nn.InstanceNorm2d(8, affine=True)),
    "instance norm 3d": lambda: Net(Volume(nn.InstanceNorm3d(8), (2, 4, 8))),
    "group norm": lambda: Net(nn.GroupNorm(2, 8)),
    "weight norm": lambda: Net(parametrizations.weight_norm(nn.Conv2d(8, 8, 3, padding=1))),
    "orthogonal": lambda: Net(parametrizations.orthogonal(nn.Conv2d(8, 8, 1))),
    "attention": lambda: Net(Attends()),
    "other in training": lambda: Net(Doubles()),
    "kept in evaluation": lambda: Net(Caches()),
}  # fmt: skip


def experiment(net, cuts=CUTS, shape=(3, 32, 32), **changes):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of dropout
        name = fedlib.wrap(net, cuts, shape, name="mine")
    values = dict(
        method="fedavg", backbone=name, finetune="full", num_exits=1, augment="none", momentum=0.9, weight_decay=1e-2,
        clip_value=None, lr=0.1, num_train=24, num_test=20, num_clients=1, clients_per_round=1, rounds=2,
        batch_size=24, partition="iid", evaluate_every=1, batch_norm="tracked", schedule="constant",
    )  # fmt: skip
    return Experiment(**values | changes)


def plain_step(f, net, t):
    """``net`` after one step of SGD in training, as its owner made it, its dropout off; its head begins as the exit."""
    mixed = len({m.training for m in net.modules()}) > 1
    off = [m for m in net.modules() if (mixed and not m.training) or isinstance(m, nn.Dropout | Drops | nn.RReLU)]
    for m in net.train().modules():
        m.training = m not in off
        if isinstance(m, nn.MultiheadAttention):
            m.dropout = 0.0
    net.zero_grad()
    net.head.requires_grad_(True)
    if t == 1:
        with torch.no_grad():
            for name, p in net.head.named_parameters():
                p.copy_(f.server.params[f"head.exits.0.linear.{name}"])
    e, examples = f.experiment, f.data.client(0)
    order = torch.randperm(len(examples), generator=torch_generator(e.seed, "local", t, 0)).numpy()
    rows = torch.from_numpy(examples[order])
    optimiser = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], e.lr, 0.9, weight_decay=1e-2)
    out = net(f.data.view(f.data.inputs, f.model.backbone.spec.input_shape, rows))
    F.cross_entropy(out, f.data.labels[rows]).backward()
    optimiser.step()
    return net


@pytest.mark.parametrize("kind", NETS)
def test_a_step_in_each_of_two_rounds_is_that_of_plain_pytorch_on_the_net_itself(kind):
    torch.manual_seed(1)
    net = NETS[kind]()
    frozen = {n: p.detach().clone() for n, p in net.named_parameters() if not p.requires_grad and "head" not in n}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what runs one after the other, or stays off
        f = build_federation(experiment(net))
        measure = Measure(f.model)
        r = list(run_rounds(f, Execution(workers=1)))[-1]
    plain = plain_step(f, plain_step(f, net, 1), 2)
    after, names = plain.state_dict(), {own_name(n): n for n in r.server.params}
    trained = {n for n, p in plain.named_parameters() if p.requires_grad}
    moved = {
        n for m, x in plain.named_modules() for n in ([f"{m}.running_mean", f"{m}.running_var"] if moves(x) else [])
    }
    assert names.keys() == trained | moved  # so much is sent
    for own, name in names.items():
        torch.testing.assert_close(r.server.params[name], after[own], rtol=1e-4, atol=1e-5, msg=lambda m, n=own: n + m)
    held = {own_name(n): p for n, p in f.frozen.items()}
    assert held.keys() == frozen.keys()
    assert all(torch.equal(p, frozen[n]) and torch.equal(p, after[n]) for n, p in held.items())
    buffers = {own_name(n): b for n, b in f.model.named_buffers()}
    assert all(torch.equal(b, after[n]) for n, b in buffers.items() if n not in moved and n in after)
    part = f.setting.full()
    assert measure.cost("upload", part) == sum(p.numel() for n, p in plain.named_parameters() if n in trained)
    assert measure.parameters(part) == sum(p.numel() for p in plain.parameters())
    x = f.data.view(f.data.test_inputs, (3, 32, 32), torch.arange(20))
    right = (plain.eval()(x).argmax(1) == f.data.test_labels).double().mean().item()
    assert r.metrics["accuracy"] == pytest.approx(100 * right, abs=1e-3)


def moves(layer):
    return isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training


class Branches(Net):
    """Other code around the cuts in training: inside what leads to them, or beside it (an auxiliary head)."""

    def __init__(self, beside):
        super().__init__()
        self.beside, self.aux = beside, nn.Linear(8, 10)

    def forward(self, x):
        x = self.enter(x)
        if self.training:
            self.aux(x.mean((2, 3))) if self.beside else (x := 2 * x)
        return self.head(self.middle(x).mean((2, 3)))


class Reads(Net):
    """Code around the cuts uses a weight of a layer that runs, too."""

    def forward(self, x):
        x = F.conv2d(F.relu(self.enter(x)), self.middle[0].weight)
        return self.head(self.middle(x).mean((2, 3)))


def tied(a, b, leaf="weight", net=None):
    net = net or Net(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8))
    setattr(net.get_submodule(b), leaf, getattr(net.get_submodule(a), leaf))
    return net


NORM = nn.BatchNorm2d(8)
REFUSED = {
    "buffer in place": (lambda: Net(Moves()), "'middle.0' moves its buffer 'mean' in training"),
    "buffer anew": (lambda: Net(Moves("anew")), "'middle.0' moves its buffer 'mean'"),
    "buffer in training": (lambda: Net(Moves("training")), "'middle.0' moves its buffer 'mean'"),
    "spectral norm": (
        lambda: Net(parametrizations.spectral_norm(nn.Conv2d(8, 8, 1))),
        "'middle.0.parametrizations.weight.0' moves its buffer '_[uv]'",
    ),
    "old spectral norm": (lambda: Net(nn.utils.spectral_norm(nn.Conv2d(8, 8, 1))), "'middle.0' moves its buffer"),
    "instance norm 1d with statistics": (
        lambda: Net(Volume(nn.InstanceNorm1d(8, track_running_stats=True), (64,))), "'middle.0.layer' moves its buffer"
    ),
    "instance norm 2d with statistics": (
        lambda: Net(nn.InstanceNorm2d(8, track_running_stats=True)), "'middle.0' moves its buffer 'running_mean'"
    ),
    "instance norm 3d with statistics": (
        lambda: Net(Volume(nn.InstanceNorm3d(8, track_running_stats=True), (2, 4, 8))), "moves its buffer"
    ),
    "batch norm of all batches": (lambda: Net(nn.BatchNorm2d(8, momentum=None)), "wrap: 'middle.0': .*otherwise than a"),
    "batch norm without weights": (lambda: Net(nn.BatchNorm2d(8, affine=False)), "wrap: 'middle.0': .*otherwise than a"),
    "old weight norm": (lambda: Net(nn.utils.weight_norm(nn.Conv2d(8, 8, 1))), "Net cannot be copied: Only Tensors created"),
    "tied in a unit": (lambda: tied("middle.0", "middle.2"), "'middle.0.weight' and 'middle.2.weight' are one parameter"),
    "tied across units": (
        lambda: tied("middle.0", "enter", "bias"), "'enter.bias' and 'middle.0.bias' are one parameter that two layers or"
    ),
    "tied norms": (lambda: tied("middle.1", "middle.3", "bias"), "'middle.1.bias' and 'middle.3.bias' are one parameter"),
    "a batch norm under two names": (lambda: Net(NORM, nn.ReLU(), NORM), "share"),
    "a module in two units": (lambda: Outside(), "share"),
    "a weight read beside its layer": (lambda: Reads(), "share its parameter 'weight'"),
    "other code in training": (lambda: Branches(False), "the code of Branches around its cuts is another in training"),
}  # fmt: skip


class Outside(Net):
    """A layer of the second unit runs in the first, too."""

    def __init__(self):
        super().__init__()
        self.between = nn.Conv2d(8, 8, 1)
        self.middle = nn.Sequential(self.between, nn.ReLU())
        self.enter = nn.Sequential(self.enter, self.between)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_run_as_its_owner_made_it_is_refused_in_one_sentence(kind):
    make, words = REFUSED[kind]
    with pytest.raises(ValueError, match=words) as refused:
        fedlib.wrap(make(), CUTS, (3, 32, 32))
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_what_is_tied_or_moves_behind_the_last_cut_does_not_matter():
    net = Net(nn.Conv2d(8, 8, 1))
    net.tail = nn.Sequential(nn.Linear(8, 10), Moves())
    net.tail[0].weight = net.head.weight
    assert fedlib.wrap(net, CUTS, (3, 32, 32)) == "net"
    assert fedlib.wrap(Branches(True), CUTS, (3, 32, 32)) == "branches"


def test_what_stands_still_or_is_off_is_said():
    with pytest.warns(UserWarning, match="'middle.0' of 'net' is in eval mode while others train, and stays so"):
        fedlib.wrap(still("middle.0"), CUTS, (3, 32, 32))
    with pytest.warns(UserWarning, match="what Drops of the net would draw from the global generator is off"):
        build_federation(experiment(Net(nn.ReLU(), Drops())))


PARTS = {
    "fedavg": {}, "depthfl": {}, "inclusivefl": {"momentum_distill": False}, "ditto": {}, "fedrep": {}, "fedbabu": {},
    "fedepth": {"scenario": "own", "ratios": (0.5, 1.0)}, "heterofl": {"rates": (0.5, 1.0)}, "splitmix": {"bases": 2, "init": "own"},
}  # fmt: skip


@pytest.mark.parametrize("policy", ["batch", "tracked", "static"])
@pytest.mark.parametrize("method", PARTS)
def test_what_is_frozen_stays_whatever_the_method_and_the_cohort(method, policy):
    """A frozen first unit with a batch norm: nothing of it is kept from batch to batch."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 2, 2), nn.ReLU(), nn.Conv2d(8, 8, 1)
    net = nn.Sequential(*layers)
    net[:2].requires_grad_(False)
    clients = dict(num_train=90, num_clients=3, clients_per_round=3, batch_size=14, num_exits=2, rounds=2)
    e = experiment(net, ["2", "5"], method=method, options=PARTS[method], batch_norm=policy, **clients)
    runs = []
    for k in (1, 3):
        f = build_federation(e)
        assert f.train_cache is None and {own_name(n) for n in f.frozen} == {"0.weight", "0.bias", "1.weight", "1.bias"}
        runs.append(list(run_rounds(f, Execution(workers=1, cohort_size=k)))[-1].server.params)
    assert not f.frozen.keys() & runs[0].keys()
    for name, p in runs[0].items():
        torch.testing.assert_close(runs[1][name], p, rtol=1e-4, atol=2e-5)


def test_a_net_of_timm_s_keeps_what_timm_froze():
    """Its frozen batch norms go by statistics that stand still, so that the first unit is computed once."""
    timm = pytest.importorskip("timm")
    net = timm.create_model("resnet18", num_classes=10)
    timm.utils.freeze(net, ["conv1", "bn1", "layer1"])
    f = build_federation(experiment(net, [f"layer{i}" for i in range(1, 5)]))
    before = {n: p.clone() for n, p in f.frozen.items()}
    list(run_rounds(f, Execution(workers=1)))
    assert {own_name(n) for n in f.frozen} == {n for n, p in net.named_parameters() if not p.requires_grad}
    assert f.model.frozen_units() == 1 and all(torch.equal(before[n], p) for n, p in f.frozen.items())


def test_a_run_that_trained_all_of_a_frozen_net_is_not_taken_for_one_that_did_not():
    nets = Net(), frozen("enter", net=Net())
    whole, part = (inputs_of(build_federation(experiment(net)))["backbone"] for net in nets)
    assert part.endswith(", as frozen") and "frozen" not in whole
