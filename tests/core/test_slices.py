"""Slices: take and scatter are adjoint, and relabelling an axis changes nothing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.core.slices import STEM, ParamInfo, Slice, scatter_add_, take

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
