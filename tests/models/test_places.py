"""Axes: relabelling one changes no answer, cuts go round trip, a ranked cut is permuting and then cutting a prefix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.slices import Axis, ParamInfo, Slice, scatter_add_, take, take_all, within
from fedlib.models.bert import BertSpec
from fedlib.models.exit_model import ExitModel
from fedlib.models.exits import Classifiers
from fedlib.models.places import axes_of
from fedlib.models.ree import Ree
from fedlib.models.vit import ViTSpec

VIT = ViTSpec(img_size=8, patch_size=4, dim=16, depth=2, heads=2, ffn_dim=24)
BERT = BertSpec(length=6, vocab_size=30, dim=16, depth=2, heads=2, ffn_dim=24, marks=(1, 2))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def built(spec, ree=False):
    head = Ree(16, 2, 5, (0, 1)) if ree else Classifiers(16, 5, (0, 1))
    model = ExitModel(spec.build(), head.init_(generator(1)), (0, 1))
    for p in model.parameters():
        p.data += 0.3 * torch.randn(p.shape, generator=generator(2))
    return model.requires_grad_(False)


def inputs(spec):
    if spec is VIT:
        return torch.randn(1, 3, 3, 8, 8, generator=generator(4))
    return torch.tensor([[[1, 7, 9, 2, 0, 0], [1, 3, 2, 0, 0, 0], [1, 11, 12, 13, 14, 2]]])


@pytest.mark.parametrize("spec, ree", [(VIT, False), (VIT, True), (BERT, False)])
def test_permuting_any_axis_leaves_the_answers_unchanged(spec, ree):
    model = built(spec, ree)
    infos, x = model.infos(), inputs(spec)
    axes, before = axes_of(model, infos), model(inputs(spec))
    assert {a.split("/")[-1] for a in axes} == {"residual", "classes", "qk", "vo", "ffn"}
    params = {n: p.detach() for n, p in model.named_parameters()}
    for axis in axes.values():
        if not axis.permutable:
            continue
        order = axis.ranked(torch.randn(axis.size, generator=generator(5)), lambda n: n)
        if axis.name.endswith("/qk"):  # a query's feature goes with its key's, within a head
            assert axis.segments == (8, 8) and set(order[:8]) == set(range(8))
        part = Slice.prefix(2, (0, 1), index={axis.name: order})
        model.put_(take_all(params, infos, part))
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4, msg=lambda m, a=axis.name: a + m)
    model.put_(params)


segments = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(deadline=None)
@given(segments, st.integers(1, 3), st.integers(0, 99))
def test_cuts_go_round_trip_and_ranking_is_permuting_first(sizes, divisor, seed):
    axis = Axis("a", tuple(divisor * s for s in sizes))
    info, x = (
        ParamInfo(("a", None), "backbone", 0, (axis.size, 2)),
        torch.randn(axis.size, 2, generator=generator(seed)),
    )
    scores, keep = torch.randn(axis.size, generator=generator(seed + 1)), lambda n: max(1, n // 2)
    ranked, leading = axis.ranked(scores, keep), axis.leading(keep)
    for kept in (ranked, leading, axis.chunk(divisor - 1, divisor)):
        part, total = Slice.prefix(1, (0,), index={"a": kept}), torch.zeros_like(x)
        scatter_add_(total, take(x, info, part), info, part)
        held = torch.zeros(axis.size, 1)
        held[list(kept)] = 1
        assert torch.equal(total, x * held)
    permuted = x[list(axis.ranked(scores, lambda n: n))]
    assert torch.equal(take(x, info, Slice.prefix(1, (0,), index={"a": ranked})), permuted[list(leading)])
    chunks = [i for c in range(divisor) for i in axis.chunk(c, divisor)]
    assert sorted(chunks) == list(range(axis.size))


def test_slices_are_values():
    a = Slice.prefix(2, (0,), index={"x": range(3)})
    assert {a, Slice.prefix(2, (0,), index={"x": range(3)})} == {a} and a != Slice.prefix(
        2, (0,), index={"x": range(2)}
    )
    assert (
        a.shape_key() == Slice.prefix(1, (0,), index={"x": (5, 1, 2)}).shape_key() != Slice.prefix(2, (0,)).shape_key()
    )
    assert a.only(units=[1], x=range(1)).index["x"] == range(1)
    assert within(a.only(x=(2, 0)), a).index["x"] == (2, 0)
    assert within(Slice.prefix(2, (0,), index={"x": (9, 4)}), Slice.prefix(2, (0,), index={"x": (4, 7, 9)})).index["x"] == (2, 0)  # fmt: skip
    with pytest.raises(ValueError, match="axis x: what is sent must be among what is held"):
        within(a.only(x=(7,)), a)


def test_cuts_that_leave_nothing_are_refused():
    with pytest.raises(ValueError, match="axis a: 0 of 3 entries cannot be kept; allowed: 1 to 3"):
        Axis("a", (3,)).leading(lambda n: n // 4)
    with pytest.raises(ValueError, match=r"axis a: \[3\] cannot be cut into 2 equal parts"):
        Axis("a", (3,)).chunk(0, 2)
    with pytest.raises(ValueError, match="the order of its entries means something"):
        Axis("classes", (3,), permutable=False).ranked(torch.ones(3), lambda n: n)
