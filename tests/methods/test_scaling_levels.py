"""ScaleFL's levels and FeDepth's stages: published plans, and properties of any cost."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.methods.scaling import Level, solve_levels
from fedlib.methods.sliced.fedepth import pack

# --- levels


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


# --- stages

PRERESNET20 = (20.02, 20.02, 20.02, 14.06, 10.07, 10.07, 7.22, 5.28, 5.28)  # MiB of a block, batch 32
TOTAL = 116.04  # with stem and classifier


def blocks(*stages):
    """Stages as ranges, blocks counted from 1: (1, 2) is B1 and B2."""
    return tuple(range(a - 1, b) for a, b in stages)


@pytest.mark.parametrize(
    ("ratio", "stages"),
    [
        (1 / 8, blocks((4, 4), (5, 5), (6, 6), (7, 8), (9, 9))),  # B1-B3 fit nowhere
        (1 / 6, blocks((1, 1), (2, 2), (3, 3), (4, 4), (5, 6), (7, 9))),
        (1 / 3, blocks((1, 2), (3, 4), (5, 9))),
        (1 / 2, blocks((1, 3), (4, 9))),
        (1, blocks((1, 9))),
    ],
)
def test_fedepths_five_plans(ratio, stages):
    assert pack(PRERESNET20, ratio * TOTAL) == stages


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_the_papers_toy(slack):
    toy = (3, 2, 1, 0.5, 0.5, 0.5)
    assert pack(toy, 3, slack) == blocks((1, 1), (2, 3), (4, 6))
    assert pack(toy, 5, slack) == blocks((1, 2), (3, 6))


def test_without_slack_a_sixth_does_not_hold_the_first_blocks():
    assert pack(PRERESNET20, TOTAL / 6, slack=0.0)[0] == range(3, 4)


def test_a_block_that_fits_nowhere_parts_the_stages_beside_it():
    assert pack((1, 1, 9, 1, 0, 1), 3, 0.0) == (range(0, 2), range(3, 6))
    assert pack((0.1,) * 3, 0.3, 0.0) == (range(3),)  # 0.1 + 0.1 + 0.1 > 0.3 in floats
    with pytest.raises(ValueError, match="no block fits a budget of 2; the smallest needs 5"):
        pack((9, 5), 2)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=30), st.floats(0.1, 30))
def test_stages_are_greedy_contiguous_and_fit(memories, budget):
    if min(memories) > budget:
        return
    stages = pack(memories, budget, 0.0)
    trained = [b for s in stages for b in s]
    assert trained == [b for b, m in enumerate(memories) if m <= budget * (1 + 1e-9)]
    for stage, after in zip(stages, (*stages[1:], None), strict=True):
        held = sum(memories[b] for b in stage)
        assert stage and held <= budget * (1 + 1e-6)
        if after and after.start == stage.stop:  # no stage could have taken one block more
            assert held + memories[after.start] > budget
