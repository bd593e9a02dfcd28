"""Mixing weights on the simplex against a general solver, and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib.methods.mixtures import project_to_simplex
from fedlib.methods.personal.fedpac import smallest_mixture
from tests.helpers.simplex import solved


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def test_projection_by_hand():
    points = torch.tensor([[0.2, 0.3, 0.5], [2.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.9, 0.5, -3.0], [1.0, 1.0, 0.0]])
    wanted = [[0.2, 0.3, 0.5], [1, 0, 0], [1 / 3] * 3, [0.7, 0.3, 0], [0.5, 0.5, 0]]
    np.testing.assert_allclose(project_to_simplex(points).numpy(), wanted, atol=1e-7)
    assert project_to_simplex(torch.tensor([[-7.0]])).item() == 1.0
    assert project_to_simplex(points.expand(2, 5, 3)).shape == (2, 5, 3)


@pytest.mark.parametrize("n", [2, 5, 20])
def test_projection_is_the_nearest_point(n):
    for seed in range(5):
        y = normal(n, seed=seed)
        best = solved(lambda x, y=y: ((x - y) ** 2).sum(), lambda x, y=y: 2 * (x - y), n)
        np.testing.assert_allclose(project_to_simplex(torch.from_numpy(y)).numpy(), best.x, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=30))
def test_a_projection_is_on_the_simplex_and_satisfies_its_optimality(values):
    y = torch.tensor(values, dtype=torch.float64)
    x = project_to_simplex(y)
    assert (x >= 0).all() and abs(x.sum().item() - 1) < 1e-9
    theta = (y - x)[x > 0]  # one shift for all that stay, at least as much for those cut to zero
    assert theta.max() - theta.min() < 1e-9 and (y[x == 0] <= theta.min() + 1e-9).all()
    torch.testing.assert_close(project_to_simplex(y + 5), x)


def test_cafedistills_weights_go_from_itself_to_all_alike():
    cosines = torch.tensor([[1.0, 0.2, -0.4, 0.1]])  # with itself, and with others
    near, far = (project_to_simplex(1 / 4 + cosines / (2 * mu))[0] for mu in (1e-3, 1e6))
    assert near.tolist() == [1, 0, 0, 0]
    torch.testing.assert_close(far, torch.full((4,), 0.25, dtype=torch.float64), atol=1e-6, rtol=0)


def test_what_is_not_finite_gives_no_weights():
    bad = torch.tensor([[1.0, torch.nan], [1.0, 2.0], [torch.inf, 0.0]])
    assert smallest_mixture(bad).isnan().all()
    assert project_to_simplex(bad)[0].isnan().all() and project_to_simplex(bad)[1].tolist() == [0, 1]
