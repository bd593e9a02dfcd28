"""EfficientNet: equal to timm's, parameters of the release's variant, cuts of depthwise layers, dropout in cohorts."""

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.core.slices import take_all
from fedlib.engine.federation import build_model, setting_of
from fedlib.layers.context import share
from fedlib.layers.dropout import Dropout
from fedlib.methods import build_method
from fedlib.methods.scaling import Level, split
from fedlib.models import registry
from fedlib_lab.runs.costs import load_shapes
from fedlib_lab.runs.params import load_grid
from fedlib_lab.zoo.efficientnet import EFFICIENTNETS, EfficientNetSpec

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

TINY = EfficientNetSpec(
    size=32, stem=8, stem_stride=2, repeats=(1, 2), widths=(8, 12), kernels=(3, 5), strides=(1, 2), expansions=(1, 4),
    head_width=0, dropout=0.3, drop_connect=0.4,
)  # fmt: skip


@pytest.fixture
def tiny_net(monkeypatch):
    monkeypatch.setitem(registry.OWN, "tiny_efficientnet", TINY)
    yield Experiment(
        method="scalefl", options={"widths": (0.5, 1.0)}, backbone="tiny_efficientnet", pretrained=False,
        finetune="full", num_exits=2, exit_blocks=(1, 2), augment="none", num_train=50, num_test=20, num_clients=4,
        clients_per_round=4, rounds=1, batch_size=4, partition="iid", clip_value=None,
    )  # fmt: skip


def timm_name(name, spec):
    """Translate parameter ``name`` of a backbone of shape ``spec`` to its name in timm's EfficientNet."""
    if name.startswith("stem."):
        return name.replace("stem.conv.", "conv_stem.").replace("stem.bn.", "bn1.")
    _, unit, layer = name.split(".", 2)
    stage = spec.stage(int(unit))
    first = sum(spec.repeats[:stage])
    names = {"depthwise": "conv_dw", "excite.reduce": "se.conv_reduce", "excite.expand": "se.conv_expand"}
    plain = {"bn": "bn1", "project": "conv_pw", "project_bn": "bn2"}
    wide = {"widen": "conv_pw", "widen_bn": "bn1", "bn": "bn2", "project": "conv_pwl", "project_bn": "bn3"}
    module, leaf = layer.rsplit(".", 1)
    names |= wide if spec.expansions[stage] > 1 else plain
    return f"blocks.{stage}.{int(unit) - first}.{names[module]}.{leaf}"


@torch.no_grad()
def load_efficientnet(model):
    """Load timm's ``efficientnet_b4`` into the kit's net, without the statistics of its norms."""
    backbone, state = EfficientNetSpec().build(), model.state_dict()
    for name, p in backbone.named_parameters():
        p.copy_(state[timm_name(name, backbone.spec)].reshape(p.shape))
    return backbone


def test_features_are_timms():
    """The same random weights in timm's network, batch statistics in both."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    theirs = timm.create_model("efficientnet_b4", pretrained=False, num_classes=0).train()
    for module in theirs.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    ours = load_efficientnet(theirs)
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        z = ours.stem(x[None])
        for unit in range(ours.spec.depth):
            feature, z = ours.advance(z, unit, 1)
        want = theirs.blocks(theirs.bn1(theirs.conv_stem(x)))
    torch.testing.assert_close(feature[0], want, rtol=1e-3, atol=1e-3)


def test_parameters_are_timms_and_those_of_the_variant_by_hand(monkeypatch):
    monkeypatch.setitem(registry.OWN, "b4", EfficientNetSpec())
    e = Experiment(method="fedavg", backbone="b4", pretrained=False, finetune="full")
    model = build_model(e, build_method("fedavg", {}), 1000, meta=True)
    assert sum(p.numel() for p in model.parameters()) == 19_341_616
    spec, total, before = EFFICIENTNETS["efficientnet_b4_scalefl"], 3 * 9 * 32 + 64, 32
    for n, width, k, wide in zip(spec.repeats, spec.widths, spec.kernels, spec.expansions, strict=True):
        for _ in range(n):
            mid, squeezed = before * wide, before // 4
            total += (before * mid + 2 * mid) * (wide > 1) + k * k * mid + 2 * mid
            total += 2 * mid * squeezed + squeezed + mid + mid * width + 2 * width
            before = width
    assert sum(p.numel() for p in spec.build().parameters()) == total and spec.depth == 32
    assert [spec.feature(u)[1:] for u in (-1, 21, 25, 29, 31)] == [(112, 112), (14, 14), (7, 7), (4, 4), (4, 4)]


def test_the_small_nets_smallest_level_can_tell_many_classes_apart():
    """Exits at a sixth of 24 channels, cut to 0.65, had two features for Tiny ImageNet's 200 classes: no exit learnt."""
    (cell,) = (c for c in load_grid("scalefl", "efficientnetb4", "small") if c.variant == "scalefl")
    shapes = load_shapes(cell.experiment, 200)
    held = shapes.held(shapes.method.part(0, shapes.setting), shapes.everything)
    weights = {n: p.shape for n, p in held.items() if n.endswith("linear.weight")}
    assert {tuple(shape[-2:]) for shape in weights.values()} == {(200, 36)}  # floor(0.75 x 48)


def test_a_cut_net_is_the_whole_net_with_the_other_channels_silent(tiny_net):
    method = build_method(tiny_net.method, tiny_net.options)
    model = build_model(tiny_net, method, 10).requires_grad_(False)
    setting, generator = setting_of(tiny_net, model), torch.Generator().manual_seed(0)
    params = {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    part = split(setting.axes, setting.spec, Level(0.5, 3), (0, 1))
    assert len(part.index["1/mid"]) == 16 and len(part.index["stage2"]) == 6
    x = torch.randn(1, 3, 3, 32, 32, generator=generator)
    model.put_(take_all(params, setting.infos, part))
    narrow, silent = model(x), dict(params)
    for name, info in setting.infos.items():
        axis = info.axes[0]
        if axis in part.index and len(info.shape) == 1 and ("bn" in name):
            kept = torch.zeros(info.shape)
            kept[list(part.index[axis])] = 1
            silent[name] = params[name] * kept
        if name.endswith("excite.reduce.weight"):  # SiLU of the other squeezed channels is not zero
            silent[name.replace("reduce", "expand")] = params[name.replace("reduce", "expand")].clone()
            silent[name.replace("reduce", "expand")][:, len(part.index[info.axes[0]]) :] = 0
    model.put_(silent)
    torch.testing.assert_close(narrow, model(x), rtol=1e-3, atol=1e-3)


def test_every_client_drops_by_its_own_generator():
    layer, other = Dropout(0.5), Dropout(0.5, whole=True)
    holder = torch.nn.ModuleList([layer, other])
    context, x = share(holder), torch.ones(2, 3, 40)
    context.weights = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    context.generators = [torch_generator(1, "dropout", 1, k) for k in (5, 6)]
    y = layer(x)
    assert set(y[0].unique().tolist()) == {0.0, 2.0} and y[1, 1:].eq(1).all()  # padding is let through
    context.weights, context.generators = torch.ones(1, 1), [torch_generator(1, "dropout", 1, 6)]
    assert torch.equal(layer(x[1:, :1]), y[1:, :1])  # alone as beside others
    context.weights, context.generators = None, [torch_generator(1, "dropout", 1, k) for k in (5, 6)]
    z = other(x)
    assert all(len(set(row.tolist())) == 1 for row in z.flatten(0, 1))
    context.generators = None
    assert layer(x) is x
    with pytest.raises(ValueError, match=r"p = 1 must be in \[0, 1\)"):
        Dropout(1)


def test_the_cohort_size_changes_nothing_with_dropout(tiny_net):
    runs = [list(run_rounds(build_federation(tiny_net), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 4)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-3, atol=1e-4)
