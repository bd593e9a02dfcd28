"""Slices: take and scatter are adjoint, and relabelling an axis changes nothing."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.slices import STEM, Axis, ParamInfo, Slice, scatter_add_, take, within

INFO = ParamInfo(("out", "in"), "backbone", 0, (5, 4))
kept_rows = st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)
kept_cols = st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True)


def cut(rows, cols):
    return Slice.prefix(1, (0,), index={"out": tuple(rows), "in": tuple(cols)})


def matrix(seed=0):
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(kept_rows, kept_cols)
def test_scatter_is_the_adjoint_of_take(rows, cols):
    part, x, y = (
        cut(rows, cols),
        matrix(),
        torch.randn(len(rows), len(cols), generator=torch.Generator().manual_seed(1)),
    )
    total = torch.zeros(5, 4)
    scatter_add_(total, y, INFO, part)
    assert (take(x, INFO, part) * y).sum().item() == pytest.approx((x * total).sum().item(), abs=1e-5)
    torch.testing.assert_close(take(total, INFO, part), y)  # round trip


@settings(deadline=None)
@given(kept_rows, kept_cols, st.permutations(range(5)), st.permutations(range(4)))
def test_permuting_model_and_slice_together_changes_nothing(rows, cols, p, q):
    x = matrix()
    permuted = x[list(p)][:, list(q)]
    moved = cut([p.index(r) for r in rows], [q.index(c) for c in cols])
    torch.testing.assert_close(take(permuted, INFO, moved), take(x, INFO, cut(rows, cols)))


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(1, 4))
def test_prefixes_are_views_and_equal_to_listed_indices(n, m):
    x, prefix = matrix(), Slice.prefix(1, (0,), index={"out": range(n), "in": range(m)})
    view = take(x, INFO, prefix)
    torch.testing.assert_close(view, take(x, INFO, cut(range(n), range(m))))
    assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


def test_indices_out_of_range_are_refused():
    with pytest.raises(IndexError, match="axis 'in' has 4 entries; the slice keeps up to index 9"):
        take(matrix(), INFO, Slice.prefix(1, (0,), index={"in": range(10)}))


def test_holds_by_unit_and_exit_not_by_name():
    part = Slice.prefix(2, (1,))
    assert part.holds(ParamInfo((), "backbone", STEM, ())) and part.holds(ParamInfo((), "backbone", 1, ()))
    assert not part.holds(ParamInfo((), "backbone", 10, ()))
    assert part.holds(ParamInfo((), "head", 1, (), 1)) and not part.holds(ParamInfo((), "head", 0, (), 0))
    assert part.depth == 2


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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


@st.composite
def cut_tensor(draw):
    """A shape, its axes (one may occur twice), and two nested lists of kept indices per axis."""
    names = draw(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=3))
    length = {n: draw(st.integers(1, 5)) for n in ("a", "b", None)}
    info = ParamInfo(tuple(names), "backbone", 0, tuple(length[n] for n in names))
    outer = {n: draw(st.lists(st.integers(0, length[n] - 1), min_size=1, unique=True)) for n in ("a", "b")}
    inner = {n: draw(st.lists(st.integers(0, len(v) - 1), min_size=1, unique=True)) for n, v in outer.items()}
    return info, outer, inner


def keep(index):
    return Slice.prefix(1, (), index={n: tuple(v) for n, v in index.items()})


def drawn(shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@settings(deadline=None)
@given(cut_tensor())
def test_take_and_scatter_are_adjoint_in_any_number_of_dimensions(case):
    info, outer, _ = case
    x = drawn(info.shape, 0)
    small = take(x, info, keep(outer))
    y, total = drawn(small.shape, 1), torch.zeros(info.shape, dtype=torch.float64)
    scatter_add_(total, y, info, keep(outer))
    assert (small * y).sum().item() == pytest.approx((x * total).sum().item())
    assert torch.equal(take(total, info, keep(outer)), y)
    grid = np.ix_(*[outer.get(n, range(s)) for n, s in zip(info.axes, info.shape, strict=True)])
    np.testing.assert_array_equal(small, x.numpy()[grid])  # an independent reading of the same indices


@settings(deadline=None)
@given(cut_tensor())
def test_a_slice_of_a_slice_is_the_slice_of_composed_indices(case):
    info, outer, inner = case
    x, composed = drawn(info.shape, 0), {n: [outer[n][i] for i in v] for n, v in inner.items()}
    middle = take(x, info, keep(outer))
    inside = ParamInfo(info.axes, info.kind, info.unit, tuple(middle.shape))
    assert torch.equal(take(middle, inside, keep(inner)), take(x, info, keep(composed)))


@settings(deadline=None)
@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 8), st.integers(1, 8))
def test_prefixes_are_nested_in_depth_and_width(d1, d2, w1, w2):
    small, large = sorted((d1, d2)), sorted((w1, w2))
    one, other = (Slice.prefix(d, (), index={"a": range(w)}) for d, w in zip(small, large, strict=True))
    for unit in range(-1, 12):
        info = ParamInfo(("a",), "backbone", unit, (8,))
        assert not one.holds(info) or other.holds(info)
    info, x = ParamInfo(("a",), "backbone", 0, (8,)), drawn((8,), 0)
    assert torch.equal(take(x, info, other)[: large[0]], take(x, info, one))
