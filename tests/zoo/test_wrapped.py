"""Any module with cut points against a plain PyTorch loop on the module itself, and what cannot be cut."""

import copy
import pickle
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import save_file
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import fedlib
from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.core.slices import take_all
from fedlib.methods import METHODS, Method
from fedlib.models import registry
from fedlib.models.measure import Measure
from fedlib_lab.runs.identity import OtherInputs
from fedlib_lab.runs.store import find_run
from fedlib_lab.zoo.wrapped import WrappedSpec
from tests.helpers.measured import unit_macs
from tests.helpers.stored import assert_same, assert_same_rounds, state

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

CUTS = ["enter", "middle.0", "middle.1"]


class Bottle(nn.Module):
    """A residual piece with group norm, or batch norm."""

    def __init__(self, width, norm):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, groups=2)
        self.norm = nn.BatchNorm2d(width, eps=1e-4, momentum=0.2) if norm == "batch" else nn.GroupNorm(2, width)

    def forward(self, x):
        return x + F.gelu(self.norm(self.conv(x)))


class Net(nn.Module):
    """Code between its modules, a parameter of its own, and a head that exits replace."""

    def __init__(self, classes=10):
        super().__init__()
        self.enter = nn.Conv2d(3, 4, 3, stride=4)
        self.gain = nn.Parameter(torch.full((4, 1, 1), 1.5))
        self.middle = nn.Sequential(Bottle(4, "batch"), Bottle(4, "group"))
        self.norm = nn.BatchNorm1d(4)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(4, classes)

    def forward(self, x):
        x = torch.relu(self.enter(x) * 2)
        x = self.middle(x * self.gain)
        return self.head(self.drop(self.norm(x.mean((2, 3)))))


def made():
    """A net whose norms have seen data."""
    torch.manual_seed(3)
    net = Net().train()
    net(torch.randn(64, 3, 32, 32))
    return net


@pytest.fixture
def wrapped():
    before = dict(registry.OWN)
    with pytest.warns(UserWarning, match="the dropout of 'net' is off"):
        name = fedlib.wrap(made(), [*CUTS, "norm"], (3, 32, 32))
    yield Experiment(
        method="fedavg", backbone=name, finetune="full", num_exits=1, augment="none", momentum=0.9, weight_decay=1e-3,
        clip_value=None, lr=0.02, num_train=90, num_test=60, num_clients=3, clients_per_round=3, rounds=2,
        batch_size=14, partition="class_dirichlet", dirichlet_alpha=1.0, evaluate_every=1, test_split="like_train",
    )  # fmt: skip
    registry.OWN.clear()
    registry.OWN.update(before)


def plain_round(f, net, t, tracks):
    """FedAvg of the net itself, one client after the other, its dropout off; the mean of all tensors by examples."""
    e, total, clients = f.experiment, {}, f.sample_clients(t)
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi * t / e.rounds)))
    for client in clients:
        mine = copy.deepcopy(net).train()
        mine.drop.eval()
        optimiser = torch.optim.SGD(mine.parameters(), rate, momentum=e.momentum, weight_decay=e.weight_decay)
        examples = f.data.client(client.id)
        order = torch.randperm(len(examples), generator=torch_generator(e.seed, "local", t, client.id)).numpy()
        for a in range(0, len(examples), e.batch_size):
            rows = torch.from_numpy(examples[order[a : a + e.batch_size]])
            optimiser.zero_grad()
            F.cross_entropy(mine(f.data.view(f.data.inputs, (3, 32, 32), rows)), f.data.labels[rows]).backward()
            optimiser.step()
        for name, x in mine.state_dict().items():
            total[name] = total.get(name, 0) + len(examples) * x.double()
    whole = copy.deepcopy(net)
    examples = sum(c.num_examples for c in clients)
    whole.load_state_dict({n: x / examples for n, x in total.items()})
    return whole


def own_name(name):
    """The net's own name of a tensor of the backbone, or of its one exit."""
    name = re.sub(r"^backbone\.blocks\.\d+\.base_layer\.", "", name)
    return name.replace("head.exits.0.linear", "head").removesuffix(".value")


LORA = {"r": 2, "lora_alpha": 6, "target_modules": ["enter", "middle.1.conv"]}


def tuned(net, finetune):
    """The net as its owner fine-tunes it, by peft itself."""
    net.requires_grad_(finetune == "full")
    if finetune == "lora":
        inject_adapter_in_model(LoraConfig(**LORA), net)
    net.head.requires_grad_(True)
    return net


@pytest.mark.parametrize("finetune", ["full", "frozen", "lora"])
@pytest.mark.parametrize("policy", ["batch", "tracked"])
def test_two_rounds_equal_a_plain_loop_on_the_net_itself(wrapped, policy, finetune):
    options = {"finetune_options": LORA} if finetune == "lora" else {}
    f = build_federation(wrapped.replace(batch_norm=policy, finetune=finetune, **options))
    assert all(piece.vmap for piece in f.model.backbone.blocks)
    net, begin = tuned(made(), finetune), {own_name(n): p for n, p in f.model.state_dict().items()}
    with torch.no_grad():
        for name, p in net.named_parameters():
            if "head" in name or "lora_A" in name:  # drawn
                p.copy_(begin[name])
    names = {n: own_name(n) for n in f.server.params}
    trained = {n for n, p in net.named_parameters() if p.requires_grad}
    assert trained <= {*names.values()} and (finetune != "lora" or len(trained) == 6)
    assert {n for n in names.values() if "running" not in n} == trained
    for name, there in names.items():  # it begins with the net's own weights and statistics
        torch.testing.assert_close(f.server.params[name], net.state_dict()[there], rtol=0, atol=0)
    for r in run_rounds(f, Execution(workers=1, cohort_size=3)):
        net = plain_round(f, net, r.t, policy == "tracked")
        after = net.state_dict()
        for name, there in names.items():
            torch.testing.assert_close(
                r.server.params[name], after[there], rtol=1e-5, atol=1e-5, msg=lambda m, n=name: n + m
            )
    assert ("running_mean" in {n.rpartition(".")[2] for n in names}) == (policy == "tracked")
    if policy == "tracked":
        x = f.data.view(f.data.test_inputs, (3, 32, 32), torch.arange(60))
        right = (net.eval()(x).argmax(1) == f.data.test_labels).double().mean().item()
        assert r.metrics["accuracy"] == pytest.approx(100 * right, abs=1e-3)


DEPTH_ONLY = {
    "fedavg": {}, "depthfl": {}, "exclusivefl": {}, "inclusivefl": {"momentum_distill": False}, "cafedistill": {},
    "fedepth": {"scenario": "own", "ratios": (0.5, 1.0)}, "ditto": {}, "fedrep": {}, "fedbabu": {}, "fedrod": {},
}  # fmt: skip


@pytest.mark.parametrize(
    "method, policy", [*zip(DEPTH_ONLY, ["tracked", "batch", "static", "local"] * 3, strict=False)]
)
def test_the_cohort_size_changes_nothing(wrapped, method, policy):
    e = wrapped.replace(method=method, options=DEPTH_ONLY[method], num_exits=2, batch_norm=policy, budgets="maximum")
    runs = [list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 3)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-4, atol=2e-5)
    assert runs[0].metrics["personal"]["accuracy"] == pytest.approx(runs[1].metrics["personal"]["accuracy"], abs=1.0)


class Residual(nn.Module):
    """Two stages with a shortcut each, and a last unit of features."""

    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 4, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.inner = nn.Sequential(nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.outer = nn.Conv2d(2 * width, width, 1)
        self.wider = nn.Conv2d(width, 2 * width, 3, 2, 1, bias=False)
        self.pool, self.last = nn.AdaptiveAvgPool2d(1), nn.Linear(2 * width, 2 * width)

    def forward(self, x):
        x = self.stem(x)
        x = F.relu(self.outer(self.inner(x)) + x)
        x = self.pool(self.wider(x) * 2).flatten(1)
        return self.last(x)


RESIDUAL = ["stem", "wider", "last"]


def test_widths_that_layers_share_are_found_and_cut_as_in_a_narrower_net(wrapped):
    """Half of every width; what goes past a shortcut is one axis, which the exits after it share."""
    torch.manual_seed(0)
    name = fedlib.wrap(Residual(8), RESIDUAL, (3, 32, 32), name="residual")
    f = build_federation(wrapped.replace(method="heterofl", backbone=name, options={"rates": (0.5, 1.0)}))
    infos = {own_name(n): i for n, i in f.setting.infos.items()}
    a, b, c, d = (infos[f"{n}.weight"].axes[0] for n in ("stem.0", "inner.0", "wider", "last"))
    assert len({a, b, c, d}) == 4 and infos["outer.weight"].axes == (a, b, None, None)
    assert infos["stem.0.weight"].axes == (a, None, None, None) and infos["stem.1.bias"].axes == (a,)
    assert infos["last.weight"].axes == (d, c) and registry.OWN[name].streams == (a, c, d)
    part = f.setting.cut(lambda size: size // 2)
    narrow, mine = Residual(4), {}
    for n, p in take_all(f.server.params, f.setting.infos, part).items():
        mine[own_name(n)] = p
    narrow.load_state_dict({n: mine[n] if n in mine else x for n, x in narrow.state_dict().items()})
    x = torch.randn(5, 3, 32, 32)
    with f.model.holding({n: p[None] for n, p in take_all(f.server.params, f.setting.infos, part).items()}):
        got = f.model(x[None])[-1, 0]
    torch.testing.assert_close(got, narrow(x) @ mine["head.weight"].T + mine["head.bias"], rtol=1e-5, atol=1e-5)
    assert Measure(f.model).parameters(part) == sum(p.numel() for p in mine.values())


@pytest.mark.parametrize("finetune", ["full", "lora"])
@pytest.mark.parametrize("method", ["heterofl", "fedrolex", "fjord", "splitmix"])
def test_methods_that_cut_widths_train_a_net_whose_widths_are_known(wrapped, method, finetune):
    name = fedlib.wrap(Residual, RESIDUAL, (3, 32, 32), name="residual")
    options = {"bases": 2} if method == "splitmix" else {"rates": (0.5, 1.0)}
    e = wrapped.replace(method=method, backbone=name, pretrained=False, rounds=1, options=options, finetune=finetune)
    if finetune == "lora":
        e = e.replace(finetune_options={"r": 2, "target_modules": ["stem.0", "wider", "last"]})
        f = build_federation(e)
        part = f.setting.cut(lambda size: size // 2)
        shapes = {own_name(n): tuple(p.shape) for n, p in take_all(f.server.params, f.setting.infos, part).items()}
        assert shapes["wider.lora_A.default.weight"] == (2, 4, 3, 3)  # the rank stays
        assert shapes["last.lora_B.default.weight"] == (8, 2)
    runs = [list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 3)]
    for key, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[key], p, rtol=1e-4, atol=2e-5)


class Tangled(Residual):
    def forward(self, x):
        return self.wider(torch.cat([x := self.stem(x), x], 1)[:, ::2])


@pytest.mark.parametrize(
    "net, cuts, why",
    [
        (Tangled(), ["stem", ""], "which widths its layers share is not known: cat cannot be followed"),
        (made(), ["enter", "middle.0"], "is not known: gain.value cannot be followed"),
        (nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 1, groups=2)), ["0", "1"], "Conv2d '1' cannot be followed"),
        (nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(1)), ["0", "1"], "maps whose channels are those of one layer"),
        (nn.Sequential(nn.Conv2d(3, 4, 4, 4), nn.Flatten(1), nn.Linear(256, 9)), ["0", "2"], "Linear '2' cannot be followed"),
        (nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 9)), ["0", "1"], "Linear '1' cannot be followed"),  # of rows
        (nn.Sequential(weight_norm(nn.Conv2d(3, 8, 4, 4))), ["0"], "ParametrizedConv2d '0' cannot be followed"),
    ],
)  # fmt: skip
def test_where_widths_are_not_known_none_is_cut_and_the_reason_is_said(wrapped, net, cuts, why):
    name = fedlib.wrap(net, cuts, (3, 32, 32), name="other")
    assert why in registry.OWN[name].not_cut and not registry.OWN[name].streams
    with pytest.raises(ValueError, match="heterofl: backbone = 'other' cannot be cut in width: "):
        build_federation(wrapped.replace(method="heterofl", backbone=name))


class Stubborn(nn.Module):
    """Writes into a tensor that is not batched, which ``vmap`` refuses."""

    def forward(self, x):
        out = torch.zeros(x.shape, device=x.device)
        out += x
        return out.exp()


def test_what_vmap_cannot_batch_runs_one_by_one_to_the_same_numbers(wrapped):
    """Beside a twin that it can."""
    twins = {}
    for name, odd in (("odd", Stubborn()), ("even", nn.ReLU())):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 4, 4), odd, nn.Conv2d(4, 4, 2, 2), nn.Flatten(2))
        twins[name] = fedlib.wrap(net, ["1", "2"], (3, 32, 32), name=name)
    with pytest.warns(UserWarning, match="up to cut '1' clients run one after the other: vmap cannot batch them"):
        f = build_federation(wrapped.replace(backbone="odd"))
    assert [piece.vmap for piece in f.model.backbone.blocks] == [False, True]
    runs = [list(run_rounds(f, Execution(workers=1, cohort_size=k)))[-1] for k in (1, 3)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-5, atol=1e-6)


class Tokens(nn.Module):
    """A transformer's encoder on patches, with a class token."""

    def __init__(self):
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 8, 8), nn.Parameter(torch.randn(1, 1, 16) * 0.1)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True) for _ in range(4))

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1)
        for layer in self.layers:
            x = layer(x)
        return x


def test_reefl_reads_and_hands_back_the_first_token(wrapped):
    name = fedlib.wrap(Tokens, [f"layers.{i}" for i in range(4)], (3, 32, 32), "tokens")
    spec = registry.OWN[name]
    assert name == "tokens" and spec.feature(0) == (16,) and spec.state(0) == (17, 16) and spec.hands_back
    e = wrapped.replace(method="reefl", backbone=name, pretrained=False, num_exits=2)
    f = build_federation(e)
    last = list(run_rounds(f, Execution(workers=1, cohort_size=3)))[-1]
    one = list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=1)))[-1]
    for key, p in one.server.params.items():
        torch.testing.assert_close(last.server.params[key], p, rtol=1e-4, atol=1e-5)
    with pytest.raises(
        ValueError, match="inclusivefl: momentum_distill = True adds up .* of backbone = 'tokens' differ"
    ):
        build_federation(e.replace(method="inclusivefl"))  # a block's parameters bear its own name
    backbone, z = f.model.backbone, torch.randn(2, 3, 17, 16)
    changed = backbone.replace(z, 0, torch.ones(2, 3, 16))
    assert (changed[:, :, 0] == 1).all() and torch.equal(changed[:, :, 1:], z[:, :, 1:])
    frozen = build_federation(e.replace(finetune="frozen"))
    assert frozen.train_cache is not None and list(run_rounds(frozen))[-1].t == 2


def test_features_by_shape_and_by_function():
    net = nn.Sequential(nn.Conv2d(3, 6, 4, 4), nn.Flatten(2), nn.Linear(64, 5), nn.Flatten(1))
    spec = WrappedSpec.of(net, ["0", "1", "2", ""], (3, 32, 32))
    assert spec.features == ((6, 8, 8), (64, 6, 1), (5, 6, 1), (30, 1, 1))  # tokens (T, d) are (d, T, 1)
    assert spec.states == ((6, 8, 8), (6, 64), (6, 5), (30,)) and spec.state(-1) == (3, 32, 32)
    last = WrappedSpec.of(net, ["0"], (3, 32, 32), lambda z: z.movedim(1, -1))
    assert last.feature(0) == (8, 8, 6)
    assert spec.peft_targets == ("blocks.2.base_layer.2",)  # linear layers first, else convolutions of one group
    assert WrappedSpec.of(Net(), CUTS, (3, 32, 32)).peft_targets == ("blocks.0.base_layer.enter",)


class Reads(nn.Sequential):
    """A layer whose weight is read, so that what stands around it would not run."""

    def forward(self, x):
        return F.conv2d(self[0](x), self[1].weight)


def test_adapters_stand_only_around_layers_that_are_called(wrapped):
    net = nn.Sequential(Reads(nn.Conv2d(3, 4, 4, 4), nn.Conv2d(4, 4, 1)), nn.ReLU())
    e = wrapped.replace(backbone=fedlib.wrap(net, ["0", "1"], (3, 32, 32), name="reads"), finetune="lora")
    f = build_federation(e.replace(finetune_options={"r": 2}))
    assert {n.split(".base_layer.")[1] for n in f.server.params if "lora" in n} == {
        "0.0.lora_A.default.weight", "0.0.lora_B.default.weight",
    }  # fmt: skip
    with pytest.raises(ValueError, match="blocks.0.base_layer.0.1 is no linear layer or convolution that is called"):
        build_federation(e.replace(finetune_options={"r": 2, "target_modules": ["0.1"]}))


def test_costs_are_those_of_the_net(wrapped):
    """By hand: 49 positions; a 3x3 convolution of 3 to 4 channels, then two of 4 in 2 groups; 4 features, 10 classes."""
    f = build_federation(wrapped.replace(num_exits=2, exit_blocks=(0, 3)))
    measure = Measure(f.model)
    sizes = [8 * 8 * 27 * 4, 8 * 8 * 18 * 4, 8 * 8 * 18 * 4, 0]
    assert list(unit_macs(measure)) == [0, *sizes]
    assert measure.macs(f.setting.full()) == sum(sizes) + 2 * 4 * 10


def test_threads_and_forked_processes_train_the_same_bits(wrapped):
    e = wrapped.replace(method="depthfl", num_exits=2, batch_norm="tracked")
    here = list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=1)))
    for executor in ("threads", "processes"):
        there = run_rounds(build_federation(e), Execution(workers=2, cohort_size=1, executor=executor))
        assert_same_rounds(here, there)


def test_a_worker_of_a_cluster_is_sent_the_net(wrapped):
    cloudpickle = pytest.importorskip("cloudpickle")
    f = build_federation(wrapped.replace(batch_norm="tracked"))
    model = pickle.loads(cloudpickle.dumps(f.model))
    doubled = {n: 2 * p for n, p in f.server.params.items()}
    x = torch.randn(1, 4, 3, 32, 32)
    with model.holding(doubled), f.model.holding(doubled):
        torch.testing.assert_close(model(x), f.model(x), rtol=0, atol=0)


# --- which run it is -------------------------------------------------------------------------------------------------


def test_a_run_says_the_net_its_code_and_its_weights(wrapped, tmp_path):
    e = wrapped.replace(rounds=1)
    first = run(e, folder=tmp_path, progress=False)
    registry.OWN.pop("net")
    fedlib.wrap(made(), [*CUTS, "norm"], (3, 32, 32))  # as a second process does
    assert find_run(e, tmp_path).summary == first.summary
    other = made()
    other.gain.data[0] += 1e-6
    deeper = made()
    deeper.middle[0].norm.eps = 1e-3
    for net, cuts in ((other, [*CUTS, "norm"]), (deeper, [*CUTS, "norm"]), (made(), [*CUTS[1:], "norm"])):
        fedlib.wrap(net, cuts, (3, 32, 32))
        with pytest.raises(OtherInputs, match="the backbone 'net', its shape or its code"):
            find_run(e, tmp_path)


def test_a_run_goes_on_from_its_checkpoint(wrapped, tmp_path, monkeypatch):
    class Stops(Method):
        stop: int = 9

        def aggregate(self, server, arrived, r):
            if r.t == Stops.stop:
                raise InterruptedError("here")
            return super().aggregate(server, arrived, r)

    monkeypatch.setitem(METHODS, "stops", Stops)
    e = wrapped.replace(method="stops", rounds=4, batch_norm="tracked", num_exits=2)
    settings = dict(progress=False, checkpoint_seconds=0.0)
    monkeypatch.setenv("FEDLIB_ACCEPT", "method")  # which the test changes
    run(e, Execution(workers=1), tmp_path / "whole", **settings)
    Stops.stop = 3
    with pytest.raises(InterruptedError):
        run(e, Execution(workers=1), tmp_path / "part", **settings)
    Stops.stop = 9
    run(e, Execution(workers=1), tmp_path / "part", **settings)
    assert_same(state(e, tmp_path / "whole"), state(e, tmp_path / "part"))


def test_a_function_is_called_for_every_seed_and_a_net_keeps_its_weights(wrapped):
    fedlib.wrap(Net, CUTS, (3, 32, 32), name="drawn")
    before = torch.random.get_rng_state()
    backbones = [registry.build_backbone("drawn", False, seed) for seed in (1, 1, 2)]
    assert torch.equal(before, torch.random.get_rng_state())
    first, same, other = (b.state_dict() for b in backbones)
    assert all(torch.equal(first[n], same[n]) for n in first) and not all(
        torch.equal(first[n], other[n]) for n in first
    )
    with pytest.raises(
        ValueError, match="pretrained = True is not possible .* 'drawn', .* a function that makes a net; al"
    ):
        build_federation(wrapped.replace(backbone="drawn"))
    with pytest.raises(
        ValueError, match="pretrained = False is not possible .* 'net', .* a net with its weights; allowed: T"
    ):
        build_federation(wrapped.replace(pretrained=False))


# --- what is refused -------------------------------------------------------------------------------------------------


class Skips(Net):
    def forward(self, x):
        early = self.enter(x)
        return self.middle[1](self.middle[0](early) + early)


class Branches(Net):
    def forward(self, x):
        x = self.enter(x)
        return self.middle(x) if x.sum() > 0 else x


class Draws(Net):
    def forward(self, x):
        return F.dropout(self.middle(self.enter(x)))


class Narrows(Tokens):
    def __init__(self):
        super().__init__()
        self.last = nn.Linear(16, 8)

    def forward(self, x):
        return self.last(super().forward(x))


class Ties(Net):
    def __init__(self):
        super().__init__()
        self.middle[1].conv.weight = self.middle[0].conv.weight


@pytest.mark.parametrize(
    "net, cuts, shape, feature, words",
    [
        (Net(), ["enter", "midle.0"], (3, 32, 32), "map", "cut 'midle.0' is no module that runs once .* such are enter, mi"),
        (Net(), ["middle.0", "enter"], (3, 32, 32), "map", "cut 'enter' does not run after the one before it"),
        (Skips(), ["enter", "middle.0", "middle.1"], (3, 32, 32), "map", "before cut 'middle.1' the net reads 'add'|'enter'"),
        (Branches(), CUTS, (3, 32, 32), "map", "the code of Branches around its cuts cannot be followed at 'return .*' .line [0-9]+.: it goes by a tensor's values or size; allowed: this code in a module without"),
        (Ties(), CUTS, (3, 32, 32), "map", "are one parameter that two layers or units share"),
        (Net(), CUTS, (1, 32, 32), "map", "up to cut 'enter' it does not run on shapes alone: .*channel"),
        (Net(), CUTS, (3, 32, 16), "map", "input_shape = .3, 32, 16.; allowed: .channels, pixels, as many pixels"),
        (Net(), "enter", (3, 32, 32), "map", "cuts = 'enter'; allowed: a list of names"),
        (Net(), CUTS, 32, "map", "input_shape = 32; allowed: .channels, pixels, as many pixels"),
        (Net(), CUTS, (3, 32.0, 32.0), "map", "input_shape = .3, 32.0, 32.0.; allowed: .channels"),
        (Net(), [0, 1], (3, 32, 32), "map", "cuts = .0, 1.; allowed: a list of names"),
        (Net(), CUTS, (3, 32, 32), "token", "feature = 'token' is unknown; did you mean 'tokens'. allowed: map, tokens"),
        (3, CUTS, (3, 32, 32), "map", "wrap: net = 3: expected Module, got int"),
        (lambda: 3, CUTS, (3, 32, 32), "map", "wrap: net = 3: expected Module, got int"),
        (Net(), CUTS, (3, 32, 32), "tokens", "feature = 'tokens' needs a state of tokens"),
        (Narrows(), ["layers.0", "last"], (3, 32, 32), "tokens", "needs tokens of one width, not of .*16,.*8,"),
        (nn.Sequential(nn.Flatten(1), nn.RNN(3072, 4)), ["0", "1"], (3, 32, 32), "map", "cut '1', RNN, gives several tensors; allowed: a m"),
        (nn.Sequential(nn.BatchNorm2d(3, affine=False)), ["0"], (3, 32, 32), "map", "otherwise than a plain batch norm"),
    ],
)  # fmt: skip
def test_what_cannot_be_cut_is_refused_in_one_sentence(wrapped, net, cuts, shape, feature, words):
    with pytest.raises(ValueError, match=words) as refused:
        fedlib.wrap(net, cuts, shape, feature)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_net_that_draws_to_answer_is_refused_before_any_compute(wrapped):
    with pytest.warns(UserWarning, match="dropout"):
        name = fedlib.wrap(Draws(), ["enter", ""], (3, 32, 32))
    with pytest.raises(ValueError, match="the net draws from PyTorch's global generator to answer"):
        build_federation(wrapped.replace(backbone=name))


def test_names_widths_and_other_modes_are_refused(wrapped):
    with pytest.raises(ValueError, match="wrap: name = 'resnet20' is a backbone of the kit's"):
        fedlib.wrap(Net(), CUTS, (3, 32, 32), name="resnet20")
    with pytest.raises(ValueError, match="wrap: name = 3 is a backbone of the kit's, or no word"):
        fedlib.wrap(Net(), CUTS, (3, 32, 32), name=3)
    with pytest.raises(ValueError, match="heterofl: backbone = 'net' cannot be cut in width: which widths"):
        build_federation(wrapped.replace(method="heterofl", num_exits=2))
    with pytest.raises(ValueError, match="finetune = 'ssf' is not defined on this backbone; did you mean"):
        build_federation(wrapped.replace(finetune="ssf"))
    with pytest.raises(ValueError, match="'lora' with .*gone.*: peft says: Target modules .*gone"):
        build_federation(wrapped.replace(finetune="lora", finetune_options={"r": 2, "target_modules": ["gone"]}))
    for key, value, allowed in (
        ("use_dora", "no", "true, false"),
        ("use_rslora", 1, "true, false"),
        ("lora_alpha", "8", "an integer"),
    ):
        with pytest.raises(ValueError, match=f"{key} = {value!r} is not possible; allowed: {allowed}"):
            build_federation(wrapped.replace(finetune="lora", finetune_options={"r": 2, key: value}))
    for key, value in (("inference_mode", True), ("use_qalora", True), ("target_parameters", ["head"])):
        with pytest.raises(ValueError, match=f"{key}"):
            build_federation(wrapped.replace(finetune="lora", finetune_options={"r": 2, key: value}))
    with pytest.raises(ValueError, match="lora_dropout = 0.1 is not possible; allowed: 0.0$"):
        build_federation(wrapped.replace(finetune="lora", finetune_options={"r": 2, "lora_dropout": 0.1}))
    with pytest.raises(ValueError, match="reefl: backbone: Ree needs a class token, a Wrapped's exits read maps"):
        build_federation(wrapped.replace(method="reefl", num_exits=2))


class Code:
    """What a file must not run."""

    def __reduce__(self):
        return open, ("executed", "w")


def test_weights_of_a_file_go_in_by_name_or_by_order_and_are_never_unpickled(wrapped, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    theirs = made()
    state = {n: t for n, t in theirs.state_dict().items() if not n.endswith("num_batches_tracked")}
    save_file({f"module.{n}": t for n, t in state.items()}, "named.safetensors")
    torch.save({"state_dict": dict(reversed(state.items()))}, "named.pth")
    torch.save({f"x{i}": t for i, t in enumerate(state.values())}, "ordered.pth")
    for file, other_names in (("named.safetensors", False), ("named.pth", False), ("ordered.pth", True)):
        with pytest.warns(UserWarning) as said:
            name = fedlib.wrap(Net, [*CUTS, "norm"], (3, 32, 32), name="loaded", weights=file)
        assert any("go in by their order, x0 as gain" in str(w.message) for w in said) is other_names
        f = build_federation(wrapped.replace(backbone=name, pretrained=True, batch_norm="tracked"))
        for n, p in f.server.params.items():
            if not n.startswith("head"):
                torch.testing.assert_close(p, state[own_name(n)], rtol=0, atol=0)
    torch.save({n: t for n, t in state.items() if "head" not in n}, "short.pth")
    torch.save(state | {"gain": torch.ones(3, 1, 1)}, "narrow.pth")
    torch.save({"x": Code()}, "code.pth")
    save_file({f"x.{n}": t for n, t in state.items()}, "renamed.safetensors")  # it would sort them by name
    save_file({n: t for n, t in state.items() if "head" not in n}, "short.safetensors")
    for file, why in (
        ("short.pth", r"nothing \(\) does not fit head.weight \(10, 4\) of the net"),
        ("renamed.safetensors", "enter.bias is not in both, and such a file keeps no order to go by"),
        ("short.safetensors", "head.bias is not in both, .*; allowed: the net's own names"),
        ("narrow.pth", r"gain \(3, 1, 1\) does not fit gain \(4, 1, 1\) of the net"),
        ("code.pth", "cannot be read: .*; allowed: a file of the net's state_dict"),
        ("absent.pth", "cannot be read: .*No such file"),
    ):
        with pytest.raises(ValueError, match=f"wrap: weights = '{file}'.*{why}"):
            fedlib.wrap(Net, [*CUTS, "norm"], (3, 32, 32), name="loaded", weights=file)
    assert not (tmp_path / "executed").exists()
