"""Convnets: a cohort equals plain PyTorch models, shapes per unit, axes that cut and permute, exits, bridges."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlib.core.slices import Slice, take_all
from fedlib.layers.norms import recomputed_statistics, set_policy_
from fedlib.models.exit_model import ExitModel
from fedlib.models.map_exits import PooledClassifiers
from fedlib.models.measure import Measure
from fedlib.models.parameter_info import axes_of
from fedlib.models.resnet import RESNETS, ResNetSpec
from fedlib.models.small import CONVNETS
from tests.helpers.plain_convnets import PlainResNet, plain_name, state_of

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

TINY = ResNetSpec(blocks=(3, 3, 3), widths=(4, 6, 8), size=8)  # ResNet-20 at a quarter of the width, on 8x8 pixels
CLASSES = 5
CLIENTS = 3


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def build(spec, num_classes=CLASSES, exit_units=None, seed=0, **kinds):
    """An initialised model."""
    exit_units = exit_units or (spec.depth - 1,)
    backbone = spec.build().init_(torch.Generator().manual_seed(seed))
    head = PooledClassifiers(spec, num_classes, exit_units, **kinds).init_(torch.Generator().manual_seed(seed + 1))
    return ExitModel(backbone, head, exit_units)


def put_(net, tensors):
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        owner = net.get_submodule(path)
        (owner._parameters if leaf in owner._parameters else owner._buffers)[leaf] = tensor


def cuttable(net):
    """Axis name -> size, of all but the classes."""
    return {a.name: a.size for a in axes_of(net, net.infos()).values() if a.name != "classes"}


# --- a cohort and plain PyTorch --------------------------------------------------------------------------------------


def train(params, losses, steps, lr=0.05, momentum=0.9):
    """SGD with momentum on leaves ``params`` by name; ``losses(step)`` is what is minimised."""
    velocity = {n: torch.zeros_like(p) for n, p in params.items()}
    for step in range(steps):
        grads = torch.autograd.grad(losses(step), list(params.values()))
        with torch.no_grad():
            for (name, p), g in zip(params.items(), grads, strict=True):
                velocity[name] = momentum * velocity[name] + g
                p -= lr * velocity[name]


@pytest.mark.parametrize("policy", ["batch", "tracked", "local", "static"])
@pytest.mark.parametrize("form", ["post", "fedepth"])
def test_a_cohort_of_three_equals_three_plain_models(form, policy):
    spec, final = replace(TINY, form=form), {"post": "linear", "fedepth": "norm_relu"}[form]
    sizes = ((6, 4, 3), (6, 2, 5))  # examples of each client, by step: two padded batches
    x, labels = normal(2, CLIENTS, 6, *spec.input_shape), torch.arange(2 * CLIENTS * 6).view(2, CLIENTS, 6) % CLASSES
    test = normal(CLIENTS, 4, *spec.input_shape, seed=3)
    weights = torch.tensor([[[(i < n) / n for i in range(6)] for n in step] for step in sizes])

    net = build(spec, final=final)
    context = set_policy_(net, policy)
    start = {n: t.detach().clone() for n, t in (*net.named_parameters(), *net.named_buffers())}
    stacked = {n: t.expand(CLIENTS, *t.shape).clone() for n, t in start.items()}
    leaves = {n: stacked[n].requires_grad_() for n, _ in net.named_parameters()}
    put_(net, stacked)

    def loss(step):
        context.weights = weights[step]
        each = F.cross_entropy(net(x[step])[-1].flatten(0, 1), labels[step].flatten(), reduction="none")
        return (each.view(CLIENTS, 6) * weights[step]).sum()

    train(leaves, loss, 2)
    context.training, context.weights = False, None
    if policy == "static":
        with recomputed_statistics(net):
            net(torch.cat((x[0], x[1]), 1))
    with torch.no_grad():
        ours = net(test)[-1]
    trained = dict((*net.named_parameters(), *net.named_buffers()))

    for k in range(CLIENTS):
        plain = PlainResNet(spec, CLASSES, tracks=policy in ("tracked", "local"))
        plain.load_state_dict({plain_name(n): t for n, t in start.items()}, strict=False)
        assert {plain_name(n) for n in start} == set(state_of(plain))

        def plain_loss(step, k=k, plain=plain):
            n = sizes[step][k]
            return F.cross_entropy(plain(x[step, k, :n]), labels[step, k, :n])

        train(dict(plain.named_parameters()), plain_loss, 2)
        for name, want in state_of(plain).items():
            (got,) = (t[k] for n, t in trained.items() if plain_name(n) == name)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        if policy == "static":  # as PyTorch's cumulative average in a pass over the data
            twin = PlainResNet(spec, CLASSES, tracks=True)
            twin.load_state_dict(plain.state_dict(), strict=False)
            for m in twin.modules():
                m.momentum = None
            with torch.no_grad():
                twin(torch.cat((x[0, k], x[1, k])))
            plain = twin
        with torch.no_grad():
            torch.testing.assert_close(ours[k], plain.eval()(test[k]), rtol=1e-4, atol=1e-4)


def test_a_unit_runs_for_the_clients_still_alive():
    net, x = build(TINY), normal(CLIENTS, 2, *TINY.input_shape)
    put_(net, {n: p.detach().expand(CLIENTS, *p.shape).clone() for n, p in net.named_parameters()})
    z = net.backbone.stem(x)
    feature, on = net.backbone.advance(z, 0, 2)
    assert len(feature) == CLIENTS and on.equal(feature[:2])
    both, none = net.backbone.advance(on, 1, 0)
    torch.testing.assert_close(both, net.backbone.advance(feature, 1, CLIENTS)[0][:2], rtol=1e-5, atol=1e-5)
    assert len(none) == 0 and net.head.step(8, none, []) == (None, None)


# --- shapes and axes -------------------------------------------------------------------------------------------------

NETS = [
    *((spec, {"final": "linear"}) for n, spec in RESNETS.items() if n in ("resnet20", "resnet18_cifar")),
    (RESNETS["preresnet20"], {"final": "norm_relu"}),
    (ResNetSpec(blocks=(2, 1), widths=(16, 32), form="pre"), {"final": "norm_relu"}),
    (CONVNETS["convnet3"], {"final": "flatten"}),
]


@pytest.mark.parametrize(("spec", "kinds"), NETS, ids=lambda v: getattr(v, "form", None) or type(v).__name__)
def test_units_make_the_maps_that_the_spec_promises(spec, kinds):
    with torch.device("meta"):
        backbone, x = spec.build(), torch.empty(1, 2, *spec.input_shape)
    z = backbone.stem(x)
    for unit in range(spec.depth):
        feature, z = backbone.advance(z, unit, 1)
        assert feature.shape == z.shape == (1, 2, *spec.feature(unit))
    assert spec.reads == "images" and len(backbone.blocks) == spec.depth


def test_the_published_depths():
    assert {name: spec.depth for name, spec in RESNETS.items()} == {
        "resnet8": 3, "resnet14": 6, "resnet20": 9, "resnet20.16": 9, "resnet32": 15, "resnet56": 27, "resnet110": 54,
        "resnet18_cifar": 8, "resnet18_cifar.64": 8, "resnet18_slim": 8, "preresnet20": 9,
    }  # fmt: skip
    assert [RESNETS["resnet18_cifar"].feature(u) for u in (1, 3, 5, 7)] == [
        (64, 32, 32), (128, 16, 16), (256, 8, 8), (512, 4, 4),
    ]  # fmt: skip
    assert [CONVNETS["convnet3"].feature(u) for u in range(3)] == [(128, 15, 15), (128, 6, 6), (128, 2, 2)]


CUTTABLE = [
    (TINY, {"early": "convolutions", "final": "linear"}),
    (TINY, {"early": "towers", "final": "linear"}),
    (replace(TINY, form="fedepth"), {"early": "norm", "final": "norm_relu"}),
    (replace(TINY, form="pre"), {"early": "linear", "final": "norm_relu"}),
    (replace(CONVNETS["convnet3"], widths=(4, 6, 8)), {"early": "linear", "final": "flatten"}),
]


@pytest.mark.parametrize(("spec", "kinds"), CUTTABLE, ids=["post", "towers", "fedepth", "pre", "convnet"])
def test_permuting_any_axis_leaves_the_logits_unchanged(spec, kinds):
    net, x = build(spec, exit_units=(spec.depth // 3, spec.depth - 1), **kinds), normal(1, 4, *spec.input_shape)
    where = net.infos()
    tensors = {n: normal(*p.shape, seed=i) / p[0].numel() ** 0.5 for i, (n, p) in enumerate(net.named_parameters())}
    put_(net, tensors)
    want = net(x)
    sizes = cuttable(net)
    assert len(sizes) >= 3
    for axis, size in sizes.items():
        order = tuple(torch.randperm(size, generator=torch.Generator().manual_seed(1)).tolist())
        whole = Slice.prefix(spec.depth, (0, 1), index={axis: order})
        permuted = take_all(tensors, where, whole)
        assert sum(not permuted[n].equal(t) for n, t in tensors.items()) >= 2, axis
        put_(net, permuted)
        torch.testing.assert_close(net(x), want, rtol=1e-3, atol=1e-4, msg=lambda m, a=axis: f"{a}: {m}")


@pytest.mark.parametrize(("spec", "kinds"), CUTTABLE, ids=["post", "towers", "fedepth", "pre", "convnet"])
def test_a_net_cut_on_every_axis_is_the_narrow_net(spec, kinds):
    exit_units = (spec.depth // 3, spec.depth - 1)
    net, narrow = build(spec, exit_units=exit_units, **kinds), replace(spec, widths=tuple(w // 2 for w in spec.widths))
    where, x = net.infos(), normal(1, 4, *spec.input_shape)
    sizes = cuttable(net)
    cut = take_all(
        dict(net.named_parameters()),
        where,
        Slice.prefix(spec.depth, (0, 1), index={a: range(n // 2) for a, n in sizes.items()}),
    )
    small = build(narrow, exit_units=exit_units, **kinds)
    assert {n: t.shape for n, t in cut.items()} == {n: p.shape for n, p in small.named_parameters()}
    put_(net, cut)
    put_(small, cut)
    assert net(x).equal(small(x))


# --- exits and bridges -----------------------------------------------------------------------------------------------


def test_a_bridge_reaches_the_last_shape_from_every_unit():
    spec = replace(TINY, form="fedepth")
    net = build(spec, final="norm_relu")
    for unit in range(spec.depth):
        z = normal(2, 3, *spec.feature(unit))
        y = net.backbone.bridge(z, unit)
        assert y.shape == (2, 3, 8, 2, 2) and net.head.step(spec.depth - 1, y, [])[0].shape == (2, 3, CLASSES)
    assert y is z or y.equal(z)
    y = net.backbone.bridge(z := normal(1, 1, *spec.feature(0)), 0)  # 4 channels of 8x8: every 4th pixel, 2 + 2 more
    assert y[0, 0, 2:6].equal(z[0, 0, :, ::4, ::4]) and not y[0, 0, [0, 1, 6, 7]].any()


def test_nothing_can_be_handed_back_to_a_convnet():
    for spec in (TINY, CONVNETS["convnet3"]):
        with pytest.raises(TypeError, match="read maps: there is no token to hand back"):
            spec.build().replace(None, 0, None)


def test_each_kind_of_exit_is_what_its_name_says():
    spec, x = replace(TINY, form="fedepth"), normal(1, 4, 8, 2, 2)
    pooled = {}
    for kind in ("linear", "norm", "norm_relu", "flatten"):
        exit = build(spec, final=kind).head.exits[0]
        with torch.no_grad():
            exit.linear.bias.copy_(normal(CLASSES))
        pooled[kind] = exit, exit(x)
    normed = F.batch_norm(x[0], None, None, training=True)
    for kind, seen in (("linear", x[0]), ("norm", normed), ("norm_relu", normed.relu())):
        exit, out = pooled[kind]
        torch.testing.assert_close(out[0], F.linear(seen.mean((-2, -1)), exit.linear.weight, exit.linear.bias))
    exit, out = pooled["flatten"]
    torch.testing.assert_close(out[0], F.linear(x[0].flatten(1), exit.linear.weight.flatten(1), exit.linear.bias))


def test_a_head_names_its_exits_and_refuses_an_unknown_kind():
    head = build(TINY, exit_units=(2, 8), early="convolutions").head
    assert [type(e).__name__ for e in head.exits] == ["Convolved", "Pooled"]
    assert head.place(["exits", "1", "linear", "weight"]) == ("head", 8, 1) and head.reads(2) and not head.reads(3)
    with pytest.raises(ValueError, match="exit head 'turret' is unknown; .*allowed: convolutions, dropped"):
        PooledClassifiers(TINY, 10, (8,), early="turret")


def test_a_models_numbers_are_those_that_autograd_keeps_on_the_cpu():
    kept = {}

    def keep(t):
        if t.dim() == 4 and t.shape[0] == 2 or t.dim() == 5:  # maps of two examples
            kept.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    backbone, x = TINY.build(), normal(1, 2, *TINY.input_shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        z = backbone.stem(x)
        for unit in range(TINY.depth):
            _, z = backbone.advance(z, unit, 1)
    widest, total = TINY.numbers(2)
    assert (widest, total) == (2 * 4 * 8 * 8, sum(t.numel() for t in kept.values()))


def test_measures_of_a_slice_are_those_of_the_narrow_net():
    net = build(TINY, exit_units=(2, 5, 8), early="convolutions")
    sizes = cuttable(net)
    part = Slice.prefix(6, (0, 1), index={a: range(n // 2) for a, n in sizes.items()})
    measure = Measure(net)
    narrow = build(
        replace(TINY, blocks=(3, 3), widths=(2, 3)), exit_units=(2, 5), early="convolutions", final="convolutions"
    )
    whole = Measure(narrow)
    assert measure.parameters(part) == sum(p.numel() for p in narrow.parameters())
    assert measure.macs(part) == whole.macs(Slice.prefix(6, (0, 1))) > 0
    assert (
        measure.macs(part) == measure.macs(part) < measure.macs(Slice.prefix(6, (0, 1)))
    )  # the skeleton is whole again
    assert measure.macs(Slice.prefix(6, (1,))) < measure.macs(Slice.prefix(6, (0, 1)))
