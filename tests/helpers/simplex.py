"""The minimum over the simplex by a general solver."""

import numpy as np
import torch
from scipy.optimize import minimize


def solved(objective, gradient, n):
    """The minimum over the simplex by SLSQP."""
    return minimize(
        objective, np.full(n, 1 / n), jac=gradient, method="SLSQP", bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1, "jac": np.ones_like}, options={"ftol": 1e-12, "maxiter": 1000},
    )  # fmt: skip


def on_simplex(objective, n=3):
    """The minimiser over the simplex by scipy's general solver."""
    found = minimize(
        lambda x: float(objective(torch.tensor(x))), np.full(n, 1 / n), method="SLSQP", bounds=[(0, 1)] * n,
        constraints={"type": "eq", "fun": lambda x: x.sum() - 1}, options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    assert found.success
    return torch.tensor(found.x)
