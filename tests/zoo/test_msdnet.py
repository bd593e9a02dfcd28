"""MSDNet: channels layer by layer, parameters and MACs derived by hand, cuts of concatenations, cohorts."""

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.slices import STEM, Slice, take_all
from fedlib.engine.federation import build_model, setting_of
from fedlib.methods import build_method
from fedlib.methods.scaling import Level, split
from fedlib.models import registry
from fedlib_lab.zoo.msdnet import MSDNetSpec

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")

TINY = MSDNetSpec(layers=6, base=4, growth=4, exit_width=8, size=32)
PUBLISHED = {"widths": (0.65, 0.7, 0.85, 1.0)}


def model_of(backbone, classes=10, exits=(14, 17, 20, 23), options=PUBLISHED):
    e = Experiment(
        method="scalefl", backbone=backbone, pretrained=False, finetune="full", num_exits=len(exits),
        exit_blocks=exits, options=options,
    )  # fmt: skip
    method = build_method(e.method, e.options)
    model = build_model(e, method, classes, meta=True)
    return method, setting_of(e, model), model


def hand_count(classes=10):
    """(parameters, MACs) of msdnet24 with exits after layers 15, 18, 21 and 24, written down layer by layer."""
    factor, base, growth = (1, 2, 4), 16, 6
    size = {0: 32 * 32, 1: 16 * 16, 2: 8 * 8}
    parameters = macs = 0

    def conv(before, after, kernel, pixels):
        nonlocal parameters, macs
        parameters += before * after * kernel**2 + 2 * after  # and the norm
        macs += before * after * kernel**2 * pixels

    def bottleneck(before, after, wide, pixels_before, pixels):
        inner = min(before, wide * after)
        conv(before, inner, 1, pixels_before)
        conv(inner, after, 3, pixels)

    before, live = 3, {}
    for s in range(3):
        live[s] = base * factor[s]
        conv(before, live[s], 3, size[s])
        before = live[s]
    for layer in range(1, 25):
        first, drops, old = (layer - 1) // 8, layer in (9, 17), dict(live)
        live = {}
        for s in range(first, 3):
            new = growth * factor[s]
            if s == first and not drops:
                bottleneck(old[s], new, factor[s], size[s], size[s])
            else:
                bottleneck(old[s - 1], new // 2, factor[s - 1], size[s - 1], size[s])
                bottleneck(old[s], new // 2, factor[s], size[s], size[s])
            live[s] = old[s] + new
            if drops:  # half of the channels in terms of the finest scale's growth, times the scale's factor
                halved = int(0.5 * live[s] / factor[s]) * factor[s]
                conv(live[s], halved, 1, size[s])
                live[s] = halved
        if layer in (15, 18, 21, 24):  # 8x8 pixels, then 4x4 and 2x2
            conv(live[2], 128, 3, 16)
            conv(128, 128, 3, 4)
            parameters += 128 * classes + classes
            macs += 128 * classes
    return parameters, macs


def test_parameters_and_macs_are_those_derived_by_hand():
    method, setting, _ = model_of("msdnet24")
    whole = setting.full()
    assert (setting.measure.parameters(whole), setting.measure.macs(whole)) == hand_count() == (2_646_556, 101_377_024)


def test_published_splits_cost_an_eighth_a_quarter_and_half():
    method, setting, _ = model_of("msdnet24")
    assert method.levels(setting) == (Level(0.65, 15), Level(0.7, 18), Level(0.85, 21), Level(1.0, 24))
    shares = [setting.measure.parameters(method.part(j, setting)) / 2_646_556 for j in range(4)]
    assert shares == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1], rel=0.06)


def test_channels_and_scales_layer_by_layer():
    spec = registry.OWN["msdnet24"]
    channels = lambda s, layer: sum(spec.segments[spec.axis_of(s, layer - 1)])  # noqa: E731
    assert [channels(s, 8) for s in range(3)] == [64, 128, 256]  # 16 + 8 * 6, and twice, four times as many
    assert [channels(s, 9) for s in (1, 2)] == [70, 140]  # (128 + 12) / 2, (256 + 24) / 2
    assert [channels(s, 16) for s in (1, 2)] == [154, 308] and channels(2, 17) == 164 and channels(2, 24) == 332
    assert [spec.first_scale(layer - 1) for layer in (1, 8, 9, 16, 17, 24)] == [0, 0, 1, 1, 2, 2]
    assert [spec.feature(layer - 1) for layer in (15, 18, 21, 24)] == [(284, 8, 8), (188, 8, 8), (260, 8, 8), (332, 8, 8)]  # fmt: skip
    model = spec.build()
    z, shapes = model.stem(torch.zeros(1, 2, 3, 32, 32)), []
    for unit in range(spec.depth):
        feature, z = model.advance(z, unit, 1)
        shapes.append([tuple(m.shape[2:]) for m in z.maps])
        assert tuple(feature.shape) == (1, 2, *spec.feature(unit))
    assert shapes[7] == [(64, 32, 32), (128, 16, 16), (256, 8, 8)] and shapes[8] == [(70, 16, 16), (140, 8, 8)]


def built(spec, monkeypatch):
    monkeypatch.setitem(registry.OWN, "tiny_msdnet", spec)
    e = Experiment(
        method="scalefl", backbone="tiny_msdnet", pretrained=False, finetune="full", num_exits=3,
        exit_blocks=(2, 4, 5), options={"widths": (0.5, 0.75, 1.0)},
    )  # fmt: skip
    method = build_method(e.method, e.options)
    model = build_model(e, method, 10)
    return method, setting_of(e, model), model.requires_grad_(False)


def test_a_cut_net_is_the_whole_net_with_the_other_channels_silent(monkeypatch):
    """Norms' scale and shift of dropped channels are set to zero: then nothing of them reaches any concatenation."""
    method, setting, model = built(TINY, monkeypatch)
    generator = torch.Generator().manual_seed(0)
    params = {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in model.named_parameters()}
    part = split(setting.axes, setting.spec, Level(0.5, 6), (0, 1, 2))
    x = torch.randn(1, 3, 3, 32, 32, generator=generator)
    model.put_(take_all(params, setting.infos, part))
    narrow = model(x)
    silent = dict(params)
    for name, info in setting.infos.items():
        if ".bn." in name or ".bns." in name:
            kept = torch.zeros(info.shape)
            kept[list(part.index[info.axes[0]])] = 1
            silent[name] = params[name] * kept
    model.put_(silent)
    torch.testing.assert_close(narrow, model(x), rtol=1e-3, atol=1e-3)
    assert setting.infos["backbone.stem.convs.0.conv.weight"].unit == STEM


def test_a_concatenation_is_not_ranked_alone(monkeypatch):
    _, setting, _ = built(TINY, monkeypatch)
    axis = setting.axes[setting.spec.stream(3)]
    assert axis.tied and len(axis.segments) == 3  # its transition, and two of the layer after it
    with pytest.raises(ValueError, match="cannot be ranked alone: it is a concatenation"):
        axis.ranked(torch.ones(axis.size), lambda n: n)
    assert Slice.prefix(1, ()).index == {} and len(axis.leading(lambda n: n // 2)) < axis.size


def test_the_cohort_size_changes_nothing(monkeypatch):
    built(TINY, monkeypatch)
    e = Experiment(
        method="scalefl", backbone="tiny_msdnet", pretrained=False, finetune="full", num_exits=3, momentum=0.9,
        exit_blocks=(2, 4, 5), options={"widths": (0.5, 0.75, 1.0), "distill_from": 0.0}, augment="none", num_train=48,
        num_test=20, num_clients=6, clients_per_round=6, rounds=1, batch_size=4, partition="iid", clip_value=None,
    )  # fmt: skip
    runs = [list(run_rounds(build_federation(e), Execution(workers=1, cohort_size=k)))[-1] for k in (1, 6)]
    for name, p in runs[0].server.params.items():
        torch.testing.assert_close(runs[1].server.params[name], p, rtol=1e-3, atol=1e-4)
