"""Mixing weights on the simplex against a general solver, and by hand."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedlib.methods.mixtures import project_to_simplex
from fedlib.methods.personal.fedamp import attention
from fedlib.methods.personal.fedpac import mixing_weights, smallest_mixture


def solved(objective, gradient, n):
    """The minimum over the simplex by SLSQP."""
    return minimize(
        objective, np.full(n, 1 / n), jac=gradient, method="SLSQP", bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like}, options={"ftol": 1e-12, "maxiter": 1000},
    )  # fmt: skip


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


@pytest.mark.parametrize("rank", [3, 10])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2])
def test_the_smallest_mixture_is_a_general_solvers(scale, rank):
    for seed in range(4):
        z = normal(10, rank, seed=seed)
        a = z @ z.T
        x = smallest_mixture(torch.from_numpy(z * scale)).numpy()
        best = solved(lambda x, a=a: x @ a @ x, lambda x, a=a: 2 * a @ x, 10)
        assert x.min() >= 0 and abs(x.sum() - 1) < 1e-9
        assert x @ a @ x <= best.fun + 1e-6


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 30), st.integers(0, 3), st.integers(0, 2**31))
def test_no_mixture_is_smaller_however_unequal_the_points(n, rank, decades, seed):
    """The duality gap of FedPAC's points: an own direction for each, and what they share, over six decades."""
    rng = np.random.default_rng(seed)
    own, shared = (10.0 ** rng.uniform(-decades, decades, n) for _ in range(2))
    z = np.hstack((np.diag(own), rng.normal(size=(n, rank)) * shared[:, None]))
    x = smallest_mixture(torch.from_numpy(z)).numpy()
    slope = z @ (z.T @ x)  # every vertex, and so every mixture, against the one found
    assert x.min() >= 0 and abs(x.sum() - 1) < 1e-9 and x @ slope - slope.min() <= 1e-4 * (x @ slope)


def test_one_client_of_a_huge_variance_does_not_hide_the_others():
    """Squares of 81 and of 4e-7 to 1.5e-6: x_i ~ 1 / square, up to what the large one leaves."""
    squares = torch.tensor([81.0, 4e-7, 1.5e-6, 1.5e-6])
    wanted = (1 / squares) / (1 / squares).sum()
    torch.testing.assert_close(smallest_mixture(torch.diag(squares.sqrt())).float(), wanted, rtol=1e-5, atol=0)


def test_fedpacs_weights_by_hand():
    # Variances 1 and 3 of equal heads: x_i ~ 1 / V_i. At a distance of 4 from head 1 (D_1 = diag(0, 4)): 1 / 1 : 1 / 7.
    v, h = torch.tensor([1.0, 3.0]), torch.zeros(2, 1, 1)
    np.testing.assert_allclose(mixing_weights(v, h, 0), [0.75, 0.25], atol=1e-12)
    h[1] = 2.0
    np.testing.assert_allclose(mixing_weights(v, h, 0), [0.875, 0.125], atol=1e-12)
    np.testing.assert_allclose(mixing_weights(v, h, 1), [3 / 8, 5 / 8], atol=1e-12)  # D_2 = diag(4, 0): 1 / 5 : 1 / 3
    np.testing.assert_allclose(smallest_mixture(torch.zeros(3, 2)), [1 / 3] * 3)  # nothing to choose by


def test_points_on_both_sides_of_zero_cancel():
    np.testing.assert_allclose(smallest_mixture(torch.tensor([[-1.0], [3.0]])), [0.75, 0.25], atol=1e-12)
    np.testing.assert_allclose(smallest_mixture(torch.tensor([[1.0, 0], [0, 2.0**0.5], [0, 0]])), [0, 0, 1], atol=1e-12)


def test_what_is_not_finite_gives_no_weights():
    bad = torch.tensor([[1.0, torch.nan], [1.0, 2.0], [torch.inf, 0.0]])
    assert smallest_mixture(bad).isnan().all()
    assert project_to_simplex(bad)[0].isnan().all() and project_to_simplex(bad)[1].tolist() == [0, 1]


def test_attention_by_hand():
    cosines = torch.tensor([[1.0, 0.1, 0.2], [0.1, 1.0, 0.5], [0.2, 0.5, 1.0]])
    weights = attention(cosines, own_share=0.4, sharpness=10.0)
    e = np.exp(1.0)
    np.testing.assert_allclose(weights[0], [0.4, 0.6 / (1 + e), 0.6 * e / (1 + e)])  # exp(1) and exp(2) of the rest
    np.testing.assert_allclose(weights.sum(1), 1.0)
    np.testing.assert_allclose(weights.diagonal(), 0.4)
    np.testing.assert_allclose(attention(torch.full((4, 4), 0.3))[2], [1 / 6, 1 / 6, 0.5, 1 / 6])
    assert attention(torch.ones(1, 1)).tolist() == [[1.0]]
