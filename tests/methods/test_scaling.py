"""ScaleFL and the methods on its levels: published levels, the loss by hand, a round of each against a plain loop."""

import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.engine.checks import check_experiment
from fedlib.engine.federation import _measured, budgets_of, build_model, setting_of
from fedlib.methods import Round, build_method
from fedlib.methods.losses import Batch
from fedlib.methods.scaling import Level, cluster_levels, solve, solve_widths
from fedlib.methods.sliced.scalefl import exit_shares
from fedlib.models import registry
from fedlib.models.resnet import ResNetSpec
from fedlib.runs.costs import load_shapes
from tests.helpers.plain_convnets import PlainBlock

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

ONE = Execution(workers=1)
TOY = ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=32)
WIDTHS = [0.5, 0.75, 1.0]


@pytest.fixture
def convnet(monkeypatch):
    monkeypatch.setitem(registry.OWN, "toy", TOY)
    yield Experiment(
        method="scalefl", options={"widths": WIDTHS}, backbone="toy", pretrained=False, finetune="full",
        num_exits=3, augment="none", momentum=0.9, weight_decay=1e-3, clip_value=None, lr=0.02, num_train=90,
        num_test=60, num_clients=3, clients_per_round=3, rounds=1, batch_size=16, partition="class_dirichlet",
        dirichlet_alpha=1.0, test_split="like_train",
    )  # fmt: skip


def setting_for(method, classes=10, **fields):
    e = Experiment(method=method, pretrained=False, finetune="full", num_exits=4, **fields)
    return build_method(e.method, e.options), setting_of(e, build_model(e, build_method(method, e.options), classes, meta=True))  # fmt: skip


# --- levels


def test_resnet110s_levels_solved_on_the_model_itself():
    """The slides' Table 1: splits, parameters and MACs."""
    method, setting = setting_for("scalefl", backbone="resnet110")
    assert setting.exit_units == (35, 41, 47, 53)
    assert method.levels(setting) == (Level(0.7, 36), Level(0.7, 42), Level(0.75, 48), Level(1.0, 54))
    parts = [method.part(j, setting) for j in range(3)]
    assert [setting.measure.parameters(p) for p in parts] == [210_253, 465_727, 866_730]
    assert [setting.measure.macs(p) for p in parts] == [83_443_932, 99_675_796, 138_499_248]
    alone = replace(setting.full(), exits=(3,))
    assert (setting.measure.parameters(alone), setting.measure.macs(alone)) == (1_730_714, 253_149_824)
    assert parts[1].scale == 0.7 and parts[1].exits == (0, 1)


@pytest.mark.parametrize("cost", ["macs", "memory", "upload"])
def test_every_cost_is_met_within_eps(cost):
    ratios = (0.3, 0.6, 1.0)
    e = Experiment(
        method="scalefl", options={"cost": cost, "ratios": ratios, "eps": 0.1}, backbone="resnet20",
        pretrained=False, finetune="full", num_exits=3,
    )  # fmt: skip
    method = build_method(e.method, e.options)
    setting = setting_of(e, build_model(e, method, 10, meta=True))

    def price(part):
        return setting.measure.cost(cost, part)

    whole = price(replace(setting.full(), exits=(2,)))
    for j, ratio in enumerate(ratios[:2]):
        assert abs(price(method.part(j, setting)) / (ratio * whole) - 1) <= 0.1


def test_each_form_of_scalefl_names_the_other():
    """The paper's runs on any backbone; on a ViT it says that ReeFL compares with another."""
    with pytest.raises(ValueError, match="method = 'scalefl_original' is unknown; it is now called 'scalefl'$"):
        build_method("scalefl_original", {})
    fields = {"pretrained": False, "finetune": "full", "augment": "none"}
    with pytest.warns(UserWarning, match="on a ViT ReeFL compares with 'scalefl_vit'"):
        check_experiment(Experiment(method="scalefl", backbone="deit_micro", **fields))
    with pytest.raises(ValueError, match="scalefl_vit: backbone: a ResNet .* a ViT; use 'scalefl'$"):
        check_experiment(Experiment(method="scalefl_vit", backbone="resnet20", **fields))


def test_the_ablations_cut_one_dimension_alone():
    method, setting = setting_for("scalefl", backbone="resnet56", options={"cut": "depth", "eps": 0.2})
    assert [x.width for x in method.levels(setting)] == [1.0] * 4 and setting.exit_units[-1] == 26
    method, setting = setting_for("scalefl", backbone="resnet56", options={"cut": "width", "eps": 0.12})
    levels = method.levels(setting)
    assert [x.depth for x in levels] == [27] * 4 and levels == tuple(sorted(levels, key=lambda x: x.width))
    assert method.part(0, setting).exits == (0, 1, 2, 3)


def test_width_alone_is_priced_with_all_the_exits_that_its_client_holds():
    """ResNet-20's three early exits of three convolutions are half of the net again."""
    method, setting = setting_for("scalefl", backbone="resnet20", options={"cut": "width", "eps": 0.1})
    whole = setting.measure.parameters(replace(setting.full(), exits=(3,)))
    held = [setting.measure.parameters(method.part(j, setting)) / whole for j in range(3)]
    assert held == pytest.approx([1 / 8, 1 / 4, 1 / 2], rel=0.1)
    assert all(method.part(j, setting).exits == (0, 1, 2, 3) for j in range(3))


@pytest.mark.parametrize("backbone", ["resnet20", "resnet56", "msdnet12_slim", "efficientnet_slim", "convnet3_slim"])
@pytest.mark.parametrize("options", [{}, {"cut": "depth", "eps": 0.6}, {"cost": "macs", "eps": 0.3}], ids=str)
def test_levels_are_those_that_placed_the_exits(backbone, options):
    """Where exits stand is solved before the model is there, widths at these depths after it: one answer."""
    exits = 2 if backbone == "convnet3_slim" else 4
    options = {"eps": 0.2, **options, "ratios": [0.4, 1.0]} if exits == 2 else options
    e = Experiment(
        method="scalefl", options=options, backbone=backbone, pretrained=False, finetune="full",
        num_exits=exits, exit_head="linear",
    )  # fmt: skip
    method, seen = build_method(e.method, e.options), []

    def measured(units):
        seen.append(_measured(e, method, 10, units))
        return seen[-1]

    units = method.place_exits(registry.backbone_spec(backbone, "linear"), exits, measured)
    setting = setting_of(e, build_model(e, method, 10, meta=True))
    assert setting.exit_units == units and method.levels(setting) == solve(method, seen[0], exits)
    assert method.levels(setting) is method.levels(setting)


def test_levels_that_the_exits_distort_are_said_at_load():
    """On ResNet-20 three convolutions an exit make level 2 narrower than level 1 and the whole 1.92 of the net."""
    with pytest.warns(UserWarning) as said:
        setting_checked("resnet20")
    words = [str(w.message) for w in said]
    assert any("level 2 is narrower (0.5) than level 1 (0.6)" in w for w in words)
    assert any("the whole with its 4 exits costs 1.92 times the net with its last one alone" in w for w in words)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        levels, setting = setting_checked("resnet20", exit_head="linear")
    assert [x.width for x in levels] == [0.7, 0.75, 0.85, 1.0]


def setting_checked(backbone, **fields):
    e = Experiment(method="scalefl", backbone=backbone, pretrained=False, finetune="full", **fields)
    shapes = load_shapes(e, 10)
    return shapes.method.levels(shapes.setting), shapes.setting


def test_widths_of_the_whole_depth_are_the_nearest_in_cost():
    assert solve_widths(lambda w, d, below: 100 * w * w, (0.25, 0.5, 1), 9, 100.0) == (
        Level(0.5, 9), Level(0.7, 9), Level(1.0, 9),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="within 1% of 0.5 of the whole; the nearest is width 0.7 of 9 units, 2.0% off"
    ):
        solve_widths(lambda w, d, below: 100 * w * w, (0.5, 1), 9, 100.0, eps=0.01)


def test_levels_from_what_clients_have():
    ratios, levels = cluster_levels([8, 1, 4.2, 8.5, 1.1, 4], 3)
    assert ratios == (1 / 8, 4 / 8, 1.0) and levels == (2, 0, 1, 2, 0, 1)
    with pytest.raises(ValueError, match="2 distinct values, too few for 3 levels"):
        cluster_levels([1, 1, 2], 3)
    with pytest.raises(ValueError, match="must be positive"):
        cluster_levels([1, 0, 2], 2)


def test_clients_get_the_levels_that_their_resources_say(convnet):
    resources = [0.2, 1.0, 0.6]
    e = convnet.replace(options={"resources": resources, "eps": 0.5, "depth_steps": 3})
    f = build_federation(e)
    assert f.budgets.tolist() == [0, 2, 1] == budgets_of(e, f.method).tolist()
    assert f.method.ratios_of(3) == (0.2, 0.6, 1.0)


# --- the loss


def outputs():
    return torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])[:, None, None]  # three exits, one member, one example


def by_hand(gamma, tau, classes=1.0):
    """(CE_i + gamma tau^2 KL(last || i)), exits 1..3, label 0."""
    z = outputs()[:, 0, 0].double()
    p = [(x / tau).softmax(-1) for x in z]
    ce = [-x.log_softmax(-1)[0] for x in z]
    kl = [(p[2] * (p[2] / q).log()).sum() for q in p]
    return ce, [gamma * tau**2 * k / classes for k in kl]


@pytest.mark.parametrize(
    "options, classes", [({}, 1), ({"kl_mean": "all"}, 2), ({"objective": "paper", "kd_weight": 0.3}, 1)]
)
def test_the_loss_by_hand(options, classes):
    method = build_method("scalefl", options)
    batch = Batch(outputs(), torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), t=26, rounds=100)
    ce, kl = by_hand(method.kd_weight, 3.0, classes)
    if method.objective == "paper":
        want = sum(i * (kl[i - 1] + 0.7 * ce[i - 1]) for i in (1, 2, 3)) / 12
    else:
        want = sum(i / 6 * (ce[i - 1] + kl[i - 1]) for i in (1, 2, 3))
    assert method.local_loss(batch).item() == pytest.approx(want.item(), abs=1e-6)
    early = method.local_loss(replace(batch, t=25)).item()  # the first quarter is without distillation
    share = 12 if method.objective == "paper" else 6
    assert early == pytest.approx(sum(i * ce[i - 1] for i in (1, 2, 3)).item() / share, abs=1e-6)


@pytest.mark.parametrize("rounds, first", [(100, 26), (30, 9), (2, 2), (1, None)])
def test_distillation_starts_in_the_first_round_that_has_a_quarter_behind_it(rounds, first):
    """The release counts rounds from 0 and starts at index >= 0.25 R: of 30 rounds the ninth, whose index is 8."""
    method = build_method("scalefl", {"kd_weight": 1.0})
    plain = build_method("scalefl", {"kd_weight": 0.0})
    batch = Batch(outputs(), torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), rounds=rounds)
    at = (replace(batch, t=t) for t in range(1, rounds + 1))
    distils = [b.t for b in at if method.local_loss(b).item() != plain.local_loss(b).item()]
    assert distils == (list(range(first, rounds + 1)) if first else [])


@pytest.mark.parametrize("detach", [True, False])
def test_the_teacher_learns_from_its_pupils_only_if_asked(detach):
    """With one pupil exit of no weight in the cross-entropy, what the last exit's gradient has beside CE's is the KL's."""
    z = outputs().requires_grad_()
    batch = Batch(z, torch.tensor([[0]]), torch.ones(1, 1), torch.ones(3, 1), t=2, rounds=2)
    method = build_method("scalefl", {"detach": detach, "kd_weight": 1.0})
    (grad,) = torch.autograd.grad(method.local_loss(batch).sum(), z)
    alone = z.detach()[2].requires_grad_()
    (own,) = torch.autograd.grad(0.5 * F.cross_entropy(alone[0], torch.tensor([0])), alone)
    assert torch.allclose(grad[2], own) == detach


def test_shares_of_members_of_unequal_depth():
    held = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [1.0, 0.0, 1.0]])
    want = torch.tensor([[1 / 6, 1.0, 0.0], [2 / 6, 0.0, 1 / 3], [3 / 6, 0.0, 2 / 3]])
    torch.testing.assert_close(exit_shares(held), want)


# --- one round against a plain loop


class PlainExit(nn.Module):
    def __init__(self, width, classes, early):
        super().__init__()
        self.early = early
        if early:
            self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(3))
            self.bns = nn.ModuleList(nn.BatchNorm2d(width, track_running_stats=False) for _ in range(3))
        self.linear = nn.Linear(width, classes)

    def forward(self, z, scale):
        if self.early:
            for conv, bn in zip(self.convs, self.bns, strict=True):
                z = F.relu(bn(conv(z) / scale))
        return self.linear(z.mean((-2, -1)))


class PlainNet(nn.Module):
    """The first ``depth`` blocks of TOY at ``widths``, an exit after each."""

    def __init__(self, widths, depth, classes=10):
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)})
        self.stem["bn"] = nn.BatchNorm2d(widths[0], track_running_stats=False)
        before = [widths[0], *widths]
        self.blocks = nn.ModuleList(PlainBlock(before[i], widths[i], 1 + (i > 0), "post", False) for i in range(depth))
        self.exits = nn.ModuleList(PlainExit(widths[i], classes, i < 2) for i in range(depth))

    def forward(self, x, scale):
        z, out = F.relu(self.stem["bn"](self.stem["conv"](x) / scale)), []
        for block, exit in zip(self.blocks, self.exits, strict=True):
            y = F.relu(block.bn1(block.conv1(z) / scale))
            y = block.bn2(block.conv2(y) / scale)
            z = F.relu(y + (block.projection_bn(block.projection(z)) if hasattr(block, "projection") else z))
            out.append(exit(z, scale))
        return out


def plain_name(name):
    return re.sub(r"^level\d/", "", name).removeprefix("backbone.").removeprefix("head.")


def kept(name, shape, width):
    """Kept indices of each dimension of parameter ``name``, from its name and sizes alone."""
    sizes = {n: list(range(int(width * n))) for n in TOY.widths}
    out = [sizes[n] if n in sizes and d < 2 else list(range(n)) for d, n in enumerate(shape)]
    if name.endswith("linear.weight"):
        out[0] = list(range(shape[0]))
    if name.endswith("linear.bias"):
        out[0] = list(range(shape[0]))
    if name == "stem.conv.weight":
        out[1] = [0, 1, 2]
    return out


def local_training(f, client, width, depth, start, loss):
    """``start`` (whole tensors by plain name) cut to the client's level, trained; by plain name."""
    e = f.experiment
    net = PlainNet([int(width * n) for n in TOY.widths], depth)
    index = {n: kept(n, start[n].shape, width) for n, _ in net.named_parameters()}
    net.load_state_dict({n: torch.tensor(start[n][np.ix_(*i)]).float() for n, i in index.items()})
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi / e.rounds)))
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=e.momentum, weight_decay=e.weight_decay)
    mine = f.data.client(client.id)
    order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", 1, client.id)).numpy()
    for a in range(0, len(mine), e.batch_size):
        rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
        optimiser.zero_grad()
        loss(net(f.data.view(f.data.images, TOY.input_shape, rows), width), f.data.labels[rows]).backward()
        optimiser.step()
    return {n: p.detach().double().numpy() for n, p in net.named_parameters() if p.grad is not None}, index


def whole(f, prefix=""):
    params = {n: p for n, p in f.server.params.items() if n.startswith(prefix) and (prefix or "/" not in n)}
    return {plain_name(n): p.double().numpy() for n, p in params.items()}


def mean_over_holders(start, trained):
    total, holders = ({n: np.zeros(x.shape) for n, x in start.items()} for _ in range(2))
    for values, index in trained:
        for name, value in values.items():
            total[name][np.ix_(*index[name])] += value
            holders[name][np.ix_(*index[name])] += 1
    return {n: np.where(holders[n] > 0, total[n] / np.maximum(holders[n], 1), x) for n, x in start.items()}


def scaled_loss(logits, labels):
    """Sum over exits i = 1..j of i / (j (j+1) / 2) (CE_i + 0.05 * 9 * KL(last || i at temperature 3))."""
    j = len(logits)
    teacher = (logits[-1].detach() / 3).softmax(-1)
    terms = [
        i / (j * (j + 1) / 2)
        * (F.cross_entropy(z, labels) + 0.45 * F.kl_div((z / 3).log_softmax(-1), teacher, reduction="batchmean"))
        for i, z in enumerate(logits, 1)
    ]  # fmt: skip
    return sum(terms)


def check(last, want, level=None):
    found = 0
    for name, p in last.server.params.items():
        if (level is None) != ("/" not in name) or (level is not None and not name.startswith(f"level{level}/")):
            continue
        torch.testing.assert_close(p.double().numpy(), want[plain_name(name)], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: n + m)  # fmt: skip
        found += 1
    assert found > 10


def test_a_round_of_scalefl_equals_a_plain_loop_with_index_lists(convnet):
    f = build_federation(convnet.replace(options={"widths": WIDTHS, "distill_from": 0.0}))
    clients = f.sample_clients(1)
    assert sorted(c.budget for c in clients) == [0, 1, 2]
    start = whole(f)
    trained = [local_training(f, c, WIDTHS[c.budget], c.budget + 1, start, scaled_loss) for c in clients]
    for size in (1, 3):
        (last,) = run_rounds(f, Execution(workers=1, cohort_size=size))
        check(last, mean_over_holders(start, trained))


def deepest(logits, labels):
    return F.cross_entropy(logits[-1], labels)


def test_a_round_of_fedavg_at_level_1_equals_a_plain_loop(convnet):
    f = build_federation(convnet.replace(method="fedavg_level1"))
    start = whole(f)
    trained = [local_training(f, c, 0.5, 1, start, deepest) for c in f.sample_clients(1)]
    (last,) = run_rounds(f, ONE)
    check(last, mean_over_holders(start, trained))
    assert len(set(last.metrics["exits"])) == 1  # level 1's model answers at every exit


def test_a_round_of_decoupled_equals_a_plain_loop(convnet):
    f = build_federation(convnet.replace(method="decoupled", num_clients=6, clients_per_round=6, num_train=120))
    (last,) = run_rounds(f, ONE)
    for level in range(3):
        start = whole(f, f"level{level}/")
        mine = [c for c in f.sample_clients(1) if c.budget == level]
        trained = [local_training(f, c, WIDTHS[level], level + 1, whole(f), deepest) for c in mine]
        assert len(trained) == 2
        check(last, mean_over_holders(start, [({n: v for n, v in t.items() if n in start}, i) for t, i in trained]), level)  # fmt: skip


def test_a_round_of_feddf_distils_every_level_on_the_mean_logits(convnet):
    """One pass over the public rows of which none judges: by hand from Decoupled's round with Adam."""
    e = convnet.replace(method="feddf", options={"widths": WIDTHS, "patience": 1000}, public_fraction=0.3)
    f = build_federation(e)
    (last,) = run_rounds(f, ONE)
    start, public = whole(f), torch.from_numpy(f.data.public)
    x = f.data.view(f.data.images, TOY.input_shape, public)
    fused, logits = {}, []
    for client in f.sample_clients(1):  # one client a level, so its model is the level's mean
        level = client.budget
        values, index = local_training(f, client, WIDTHS[level], level + 1, start, deepest)
        net = PlainNet([int(WIDTHS[level] * n) for n in TOY.widths], level + 1)
        net.load_state_dict({n: torch.tensor(v).float() for n, v in values.items()}, strict=False)
        fused[level] = net
        logits.append(net(x, WIDTHS[level])[-1].detach())
    target, compared, same = torch.stack(logits).mean(0).softmax(-1), 0, 0
    judge = np.arange(0, len(public), 10)
    learn = np.setdiff1d(np.arange(len(public)), judge)
    for level, net in fused.items():
        part = f.method.part(level, f.setting)

        def loss(rows, net=net, level=level):
            return -(target[rows] * net(x[rows], WIDTHS[level])[-1].log_softmax(-1)).sum(-1).mean()

        used = [p for n, p in net.named_parameters() if not n.startswith("exits.") or n.startswith(f"exits.{level}.")]
        before = {n: p.detach().clone() for n, p in net.named_parameters()}
        optimiser, first = torch.optim.Adam(used, 1e-3), loss(judge).item()
        rng = Round(1, (), f.setting).generator("distillation", level)
        for chosen in np.array_split(rng.permutation(learn), math.ceil(len(learn) / e.batch_size)):
            optimiser.zero_grad()
            loss(chosen).backward()
            optimiser.step()
        kept_ = dict(net.named_parameters()) if loss(judge).item() < first else before
        for name, alias in part.aliases.items():
            plain = plain_name(name)
            index = np.ix_(*kept(plain, tuple(f.server.params[alias].shape), WIDTHS[level]))
            found = last.server.params[alias].double().numpy()
            wanted = kept_[plain].detach().double().numpy()
            near = np.isclose(found[index], wanted, rtol=1e-3, atol=1e-4)
            compared, same = compared + near.size, same + near.sum()
            beyond = np.ones(found.shape, bool)
            beyond[index] = False
            assert (found[beyond] == f.server.params[alias].double().numpy()[beyond]).all()
    assert (
        same > 0.98 * compared > 1000
    )  # Adam's first steps are signs: where a gradient is all but zero, rounding decides


def test_full_widths_are_fedavg_with_the_same_exits(convnet):
    """Maximum budgets, no distillation: the whole model with the exit-weighted loss, by the plain loop of FedAvg."""
    f = build_federation(convnet.replace(options={"widths": WIDTHS, "kd_weight": 0.0}, budgets="maximum"))

    def weighted(logits, labels):
        return sum(i / 6 * F.cross_entropy(z, labels) for i, z in enumerate(logits, 1))

    start = whole(f)
    trained = [local_training(f, c, 1.0, 3, start, weighted)[0] for c in f.sample_clients(1)]
    (last,) = run_rounds(f, ONE)
    check(last, {n: np.mean([t[n] for t in trained], 0) for n in start})
    assert {m.part for c in f.clients(range(3)) for m in f.method.members(c, f.server, Round(1, (), f.setting))} == {f.setting.full()}  # fmt: skip


# --- bad input


def test_what_cannot_be_is_refused_in_words(convnet):
    def refused(match, **changes):
        with pytest.raises(ValueError, match=match):
            build_federation(convnet.replace(**changes))

    refused("axis stage1: 0 of 4 entries cannot be kept", options={"widths": [0.2, 0.5, 1.0]})
    refused(r"widths = \[0.5, 1.0\] must be 3 numbers", options={"widths": [0.5, 1.0]})
    refused(r"widths = \[0.5, 0.75, 0.9\] must end with 1, the whole model", options={"widths": [0.5, 0.75, 0.9]})
    refused(r"num_exits = 3: depths = \[0.3, 0.4, 1.0\] of 3 units give exits after \[1, 1, 3\]", options={"depths": [0.3, 0.4, 1.0]})  # fmt: skip
    refused(r"exit_blocks = \[0, 1, 3\]: toy has blocks 0..2", exit_blocks=(0, 1, 3))
    refused("the nearest is width", options={"eps": 0.0})
    refused("2 resources; allowed: 3, one a client", options={"resources": [1.0, 2.0], "eps": 0.5}, num_exits=2)
    refused("ratios = .* has no effect with resources", options={"ratios": [0.5, 0.7, 1.0], "resources": [1, 2, 3]})
    refused("feddf: public_fraction = 0 grants the server no examples", method="feddf")
    refused(
        "noise_multiplier protects sums; feddf looks at single clients",
        method="feddf",
        options={"noise_multiplier": 1.0, "update_norm": 1.0},
    )


def test_public_examples_are_nobodys(convnet):
    """Of 90 a fifth: from what ``num_train`` leaves out, so that clients lose none; held out where that is too little."""
    f = build_federation(convnet.replace(public_fraction=0.2))
    held = np.concatenate([f.data.client(i) for i in range(3)])
    assert len(held) == 90 and len(f.data.public) == 20 and not set(held) & set(f.data.public)
    assert np.bincount(f.data.labels[f.data.public]).tolist() == [2] * 10
    again = build_federation(convnet.replace(public_fraction=0.2, seed=7)).data.public
    assert again.tolist() == f.data.public.tolist()
    full = build_federation(convnet.replace(public_fraction=0.2, num_train=None)).data
    held = np.concatenate([full.client(i) for i in range(3)])
    assert len(held) + len(full.public) == len(full.labels) and not set(held) & set(full.public)
    with pytest.raises(ValueError, match="public examples must be nobody's: client 1 holds 2 of these 2"):
        replace(f.data, public=f.data.client(1)[:2])


def test_levels_by_latency_are_solved_offline(convnet):
    """With parameters in the place of seconds they are those of ``cost="parameters"``; a real clock gives a time."""
    from fedlib.papers.scalefl import levels_by_latency
    from fedlib.runs.latency import seconds_of

    e = Experiment(method="scalefl", backbone="resnet20", pretrained=False, finetune="full", num_exits=4)
    found = levels_by_latency(e, 10, lambda shapes, part: shapes.setting.measure.parameters(part))
    method, setting = setting_for("scalefl", backbone="resnet20")
    assert found["widths"] == tuple(x.width for x in method.levels(setting))
    again = build_method("scalefl", found)
    assert again.exit_units(9, 4) == setting.exit_units and again.levels(setting) == method.levels(setting)
    clocked = levels_by_latency(
        convnet.replace(options={"eps": 1e9}), 10, lambda shapes, part: seconds_of(shapes, part, seconds=0.001)
    )
    assert clocked["depths"][-1] == clocked["widths"][-1] == 1.0
