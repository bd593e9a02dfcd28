"""Weights of a mixture: points of the simplex {x >= 0, sum x = 1}, in float64.

FedAMP, pFedGraph, FedPAC and CAFEDistill mix models or heads of several clients. With a spherical quadratic term the
solution is a projection: ``argmin_x mu ||x - p||^2 - c.x`` over the simplex is ``project_to_simplex(p + c / (2 mu))``.
FedPAC asks for the smallest of all mixtures of some points.
"""

import numpy as np
import torch


def project_to_simplex(points: torch.Tensor) -> torch.Tensor:
    """The nearest point of the simplex to each row of (..., n), Euclidean (Held, Wolfe and Crowder 1974).

    It is max(y - theta, 0); theta is found from the rows' sorted entries. NaN where a row is not finite.
    """
    y = points.double()
    ranked = y.sort(-1, descending=True).values
    rank = torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device)
    theta = (ranked.cumsum(-1) - 1) / rank  # if the first ``rank`` entries are those above zero
    support = (ranked > theta).sum(-1, keepdim=True).clamp(min=1)
    return (y - theta.gather(-1, support - 1)).clamp(min=0)


def smallest_mixture(points: torch.Tensor) -> torch.Tensor:
    """argmin |sum_i x_i points_i| over the simplex, (n,), of points (n, D); all alike where every point is zero.

    FedPAC's mixing weights. The minimum is that of non-negative least squares, |sum_i y_i points_i|^2 + (sum y - 1)^2,
    scaled to sum 1: both have points_i . (their mixture) equal where y_i > 0, and no smaller elsewhere. Found by an
    active set (Lawson and Hanson 1974, in SciPy), which unequal points do not slow. NaN where a point is not finite.
    """
    from scipy.optimize import nnls  # half a second, which other methods are spared

    # a rotation makes n numbers of each point; SciPy works on the CPU
    rotated = torch.linalg.qr(points.double().T, mode="r").R.cpu().numpy()
    lengths, n = np.linalg.norm(rotated, axis=0), len(points)
    if not 0 < lengths.max() < np.inf:
        alike = 1 / n if lengths.max() == 0 else np.nan
        return torch.full((n,), alike, dtype=torch.float64, device=points.device)
    system = np.vstack((rotated / lengths[lengths > 0].min(), np.ones(n)))
    y, _ = nnls(system, np.append(np.zeros(len(rotated)), 1.0), maxiter=100 * n)
    return torch.from_numpy(y / y.sum()).to(points.device)


def attention(
    similarities: torch.Tensor, own_share: float = 0.5, sharpness: float = 10.0, own: torch.Tensor | None = None
) -> torch.Tensor:
    """FedAMP's weights in its heuristic form: rows of the simplex, (k, n), of the cosines of k clients with n models.

    ``own_share`` (xi_ii) goes to the client's own model, where ``own`` (k, n) is True (None: the diagonal); the rest
    by softmax of ``sharpness`` (sigma) times the cosine over the others. A cosine of -inf leaves a model out. A client
    alone keeps all.
    """
    s = similarities.double()
    own = torch.eye(*s.shape, dtype=torch.bool, device=s.device) if own is None else own
    others = (sharpness * s).masked_fill(own, -torch.inf)
    alone = others.isneginf().all(-1, keepdim=True)
    others = others.masked_fill(alone, 0.0).softmax(-1)
    return torch.where(alone, own.double(), (1 - own_share) * others + own_share * own)
