"""Weights of a mixture: points of the simplex {x >= 0, sum x = 1}, in float64.

FedAMP, pFedGraph, FedPAC and CAFEDistill mix models or heads of several clients. Their quadratic programmes need no
solver: with a spherical quadratic term the solution is a projection, ``argmin_x mu ||x - p||^2 - c.x`` over the simplex
being ``project_to_simplex(p + c / (2 mu))``; the others are small.
"""

import torch


def project_to_simplex(points: torch.Tensor) -> torch.Tensor:
    """The nearest point of the simplex to each row of (..., n), Euclidean (Held, Wolfe and Crowder 1974).

    It is max(y - theta, 0); theta is found from the rows' sorted entries.
    """
    y = points.double()
    ranked = y.sort(-1, descending=True).values
    rank = torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device)
    theta = (ranked.cumsum(-1) - 1) / rank  # if the first ``rank`` entries are those above zero
    support = (ranked > theta).sum(-1, keepdim=True)
    return (y - theta.gather(-1, support - 1)).clamp(min=0)


def minimise_on_simplex(
    quadratic: torch.Tensor, linear: torch.Tensor | None = None, tolerance: float = 1e-8, max_steps: int = 100_000
) -> torch.Tensor:
    """argmin x.A x + b.x over the simplex, (n,); A (n, n) symmetric (made so), b (n,) or none. FedPAC's mixing weights.

    Negative eigenvalues of A, which numerics leave behind, count as zero. Accelerated projected gradient (Beck and
    Teboulle 2009), restarted where it overshoots; it ends when the objective is within ``tolerance`` of the best
    possible, relative to itself, by the duality gap x.g - min g. Raises ``RuntimeError`` if it does not get there.
    """
    a = quadratic.double()
    values, vectors = torch.linalg.eigh((a + a.T) / 2)
    values = values.clamp(min=0)
    a = (vectors * values) @ vectors.T
    b = torch.zeros_like(a[0]) if linear is None else linear.double()
    scale = max(values[-1].item(), b.abs().max().item())
    x = torch.full_like(b, 1 / len(b))
    if scale == 0:
        return x
    ahead, momentum, step = x, 1.0, 1 / (2 * max(values[-1].item(), 1e-3 * scale))
    for _ in range(max_steps):
        slope = 2 * a @ x + b
        if x @ slope - slope.min() <= tolerance * (x @ slope).abs() + 1e-15 * scale:
            return x
        new = project_to_simplex(ahead - step * (2 * a @ ahead + b))
        if (ahead - new) @ (new - x) > 0:  # momentum points uphill
            ahead, momentum = x, 1.0
            new = project_to_simplex(x - step * slope)
        faster = (1 + (1 + 4 * momentum**2) ** 0.5) / 2
        ahead, momentum, x = new + (momentum - 1) / faster * (new - x), faster, new
    raise RuntimeError(f"minimise_on_simplex: no solution within {tolerance} after {max_steps} steps")


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
