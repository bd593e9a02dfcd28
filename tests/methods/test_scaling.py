"""ScaleFL and the methods on its levels: published levels, the loss by hand, a round of each against a plain loop."""

import warnings
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Experiment, build_federation
from fedlib.engine.checks import check_experiment
from fedlib.engine.federation import _measured, budgets_of, build_model, setting_of
from fedlib.methods import build_method
from fedlib.methods.scaling import Level, cluster_levels, solve, solve_levels
from fedlib.models import registry
from fedlib.models.measure import Measure
from fedlib_lab.runs.costs import load_shapes

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")


def setting_for(method, classes=10, **fields):
    e = Experiment(method=method, pretrained=False, finetune="full", num_exits=4, **fields)
    return build_method(e.method, e.options), setting_of(e, build_model(e, build_method(method, e.options), classes, meta=True))  # fmt: skip


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


def test_levels_are_solved_once_for_all_models_of_the_same_shapes(monkeypatch):
    """Another batch or seed changes nothing; other exits, classes or tuned tensors do."""
    monkeypatch.setattr("fedlib.methods.scaling.SOLVED", {})
    asked, price = [], Measure.macs
    monkeypatch.setattr(Measure, "macs", lambda self, part: asked.append(part) or price(self, part))
    first = setting_for("scalefl", backbone="resnet20")[1]
    method = build_method("scalefl", {})
    levels, count = method.levels(first), len(asked)
    again = setting_for("scalefl", backbone="resnet20", seed=2, batch_size=5)[1]
    assert method.levels(again) == levels and len(asked) == count and again.measure.shapes == first.measure.shapes
    first = setting_for("scalefl", backbone="resnet20")[1].measure.shapes
    for same, fields in (True, dict(batch_size=7)), (False, dict(classes=100)), (False, dict(exit_head="linear")):
        assert (setting_for("scalefl", backbone="resnet20", **fields)[1].measure.shapes == first) == same, fields


def test_shapes_of_every_kind_of_backbone_can_be_looked_up():
    kinds = {"deit_micro": "lora", "bert_micro": "full", "vim_micro": "frozen", "msdnet12_slim": "full", "convnet3": "full",
             "efficientnet_slim": "full", "llama_tiny": "lora", "preresnet20": "full"}  # fmt: skip
    for backbone, finetune in kinds.items():
        e = Experiment(method="fedavg", backbone=backbone, pretrained=False, finetune=finetune, num_exits=1)
        hash(setting_of(e, build_model(e, build_method("fedavg", {}), 10, meta=True)).measure.shapes)


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
    with pytest.raises(ValueError, match="scalefl_vit: backbone: a ResNet .* a ViT; use 'scalefl'(\n|$)"):
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
    assert solve_levels(lambda w, d, below: 100 * w * w, (0.25, 0.5, 1), [3, 6, 9], 100.0, cut="width") == (
        Level(0.5, 9), Level(0.7, 9), Level(1.0, 9),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match="within 1% of 0.5 of the whole; the nearest is width 0.7 of 9 units, 2.0% off"
    ):
        solve_levels(lambda w, d, below: 100 * w * w, (0.5, 1), [9], 100.0, eps=0.01, cut="width")


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


def resnet110(width, depth, below=(), exits=True, classes=10):
    """Parameters of a CIFAR ResNet-110 cut to ``depth`` of its 54 blocks, with exits of three 3x3 convolutions."""
    c = [int(width * n) for n in (16, 32, 64)]
    total = 3 * c[0] * 9 + 2 * c[0]
    for block in range(depth):
        stage = block // 18
        new, old = c[stage], c[(block - 1) // 18 if block else 0]
        total += 9 * (old + new) * new + 4 * new + (old * new + 2 * new) * (old != new)
    for d in [x.depth for x in below] + [depth] * exits:
        last = c[(d - 1) // 18]
        total += 3 * (9 * last**2 + 2 * last) + (last + 1) * classes
    return total if exits else total + (c[2] + 1) * classes


FULL = resnet110(1.0, 54, exits=False)
DEPTHS = [*range(6, 55, 6)]


def test_resnet110s_levels_are_the_published_ones():
    assert FULL == 1_730_714
    levels = solve_levels(resnet110, (1 / 8, 1 / 4, 1 / 2, 1), DEPTHS, FULL)
    assert levels == (Level(0.7, 36), Level(0.7, 42), Level(0.75, 48), Level(1.0, 54))
    costs = [resnet110(x.width, x.depth, levels[:i]) for i, x in enumerate(levels[:3])]
    assert costs == [210_253, 465_727, 866_730]


def area(width, depth, below):
    return 100 * width**2 * depth


def test_a_plain_cost_by_hand():
    # 100 w^2 d of 10 units, half of 1000 within 8 %: (0.7, 10) costs 490, (0.75, 9) 506, (0.8, 8) 512: as balanced as can be
    assert solve_levels(area, (0.5, 1), range(1, 11), 1000.0) == (Level(0.8, 8), Level(1.0, 10))


def test_a_level_that_a_solved_one_makes_dearer():
    asked = []

    def cost(width, depth, below):
        asked.append(below)
        return area(width, depth, below) + 100 * len(below)  # an exit costs as much as a unit

    small, large = solve_levels(cost, (0.25, 0.5), range(1, 11), 1000.0)
    assert set(asked) == {(), (small,)}
    assert abs(cost(large.width, large.depth, (small,)) / 500 - 1) <= 0.08


def test_of_equally_balanced_splits_the_nearest_in_cost_then_the_deeper_wins():
    def flat(width, depth, below):
        return 50.0

    assert solve_levels(flat, (0.5,), (1, 2, 4), 100.0, grid=0.5) == (Level(1.0, 4),)

    def near(width, depth, below):  # balanced at (0.5, 2) and (1, 4); the shallower is nearer to half of 100
        return 48.0 + depth

    assert solve_levels(near, (0.5,), (1, 2, 4), 100.0, grid=0.5) == (Level(0.5, 2),)


def test_no_split_is_priced_that_is_less_balanced_than_the_chosen():
    """Half of the area is 0.7 by 0.7 (49 of 100): only the nine balanced splits are priced."""
    asked = []

    def price(width, depth, below):
        asked.append((width, depth))
        return 100 * width * depth / 10

    assert solve_levels(price, (0.5, 1), range(1, 11), 100.0, grid=0.1) == (Level(0.7, 7), Level(1.0, 10))
    assert sorted(asked) == [(d / 10, d) for d in range(1, 10)]  # the whole depth is the second level's


def test_where_no_split_fits_the_nearest_is_named():
    with pytest.raises(
        ValueError, match=r"within 1% of 0.5 of the whole; the nearest is width 0.05 of 1 units, 100.0% off"
    ):
        solve_levels(lambda w, d, below: 100.0 * d, (0.5, 1), (1, 2), 100.0, eps=0.01)
    with pytest.raises(ValueError, match="depths = .1, 2. leave none for ratio 0.25"):
        solve_levels(area, (0.25, 0.5, 1), (1, 2), 200.0)


@pytest.mark.parametrize("ratios", [(), (0.5, 0.25), (0.5, 0.5), (0.0, 1.0), (0.5, 1.5)])
def test_ratios_increase_to_the_whole(ratios):
    with pytest.raises(ValueError, match="ratios = .* must increase"):
        solve_levels(area, ratios, range(1, 11), 1000.0)


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0.5, 2.0), st.floats(0.5, 2.0), st.integers(6, 20),
    st.lists(st.sampled_from([0.1, 0.2, 0.3, 0.5, 0.8, 1.0]), min_size=1, max_size=4, unique=True).map(sorted),
)  # fmt: skip
def test_every_level_costs_what_it_should_and_is_the_most_balanced(a, b, units, ratios):
    def cost(width, depth, below):
        return width**a * (depth / units) ** b

    try:
        levels = solve_levels(cost, ratios, range(1, units + 1), 1.0)
    except ValueError as error:
        assert "the nearest is" in str(error) or "leave none" in str(error)
        return
    assert [x.depth for x in levels] == sorted({x.depth for x in levels}) and len(levels) == len(ratios)
    for i, (level, ratio) in enumerate(zip(levels, ratios, strict=True)):
        if ratio == 1:
            assert level == Level(1.0, units)
            continue
        assert abs(cost(level.width, level.depth, ()) / ratio - 1) <= 0.08
        shallowest = levels[i - 1].depth + 1 if i else 1
        for w in (k / 20 for k in range(1, 21)):
            for d in range(shallowest, units - (len(ratios) - 1 - i) + 1):
                if abs(cost(w, d, ()) / ratio - 1) <= 0.08:
                    assert abs(level.width - level.depth / units) <= abs(w - d / units) + 1e-8
