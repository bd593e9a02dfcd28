"""Models of clients compared and mixed, one of them in memory at a time: they may lie on disk (``Server.mirrors``).

Ids are taken in increasing order, whatever the mapping's own, so that an interrupted run sums as an undisturbed one.
The weights are points of the simplex {x >= 0, sum x = 1}, in float64. With a spherical quadratic term the best are a
projection: ``argmin_x mu ||x - p||^2 - c.x`` over the simplex is ``project_to_simplex(p + c / (2 mu))``.
Read next: ``personal/fedamp.py``.
"""

from collections.abc import Mapping, Sequence

import torch

from .values import Tensors

Models = Mapping[int, Tensors]


def cosines(models: Models, of: Sequence[int], origin: Tensors | None = None) -> torch.Tensor:
    """Compare the changes from ``origin`` (None: zero) of all tensors: cosines (len(of), len(models)), float64.

    A model that did not change, and one of ``of`` that is not among ``models``, has cosine 0 with all.
    """
    known = {row: direction(models[i], origin) for row, i in enumerate(of) if i in models}
    out = torch.zeros(len(of), len(models), dtype=torch.float64)
    if known:
        together = torch.stack(list(known.values()))  # (known, numbers)
        columns = [(together @ direction(models[j], origin)).clamp(-1, 1) for j in sorted(models)]
        out[list(known)] = torch.stack(columns, 1).cpu()
    return out


def direction(model: Tensors, origin: Tensors | None = None) -> torch.Tensor:
    """Flatten all tensors less ``origin``, by name, to a float64 vector of length 1; 0 if none moved, or overflowed."""
    x = torch.cat([(model[n] if origin is None else model[n] - origin[n]).double().flatten() for n in sorted(model)])
    norm = x.norm()
    return torch.where((0 < norm) & (norm < torch.inf), x / norm, 0.0)


def mixtures(models: Models, shares: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mix sum_j shares[i, j] models[j] for every row i, stacked: name -> (len(shares), ...).

    ``shares`` (k, n), in host memory, has a column for every model, by id. Models without a share are not read.
    """
    total: dict[str, torch.Tensor] = {}
    kinds: dict[str, torch.dtype] = {}
    for column, j in zip(shares.double().T, sorted(models), strict=True):
        if not column.any():
            continue
        for name, tensor in models[j].items():
            part = column.to(tensor.device).view(-1, *(1,) * tensor.dim()) * tensor.double()
            total[name] = total[name] + part if name in total else part
            kinds[name] = tensor.dtype
    return {name: tensor.to(kinds[name]) for name, tensor in total.items()}


def project_to_simplex(points: torch.Tensor) -> torch.Tensor:
    """Project each row of (..., n) to the nearest point of the simplex (Held, Wolfe and Crowder 1974).

    It is max(y - theta, 0); theta is found from the rows' sorted entries. NaN where a row is not finite.
    """
    y = points.double()
    ranked = y.sort(-1, descending=True).values
    rank = torch.arange(1, y.shape[-1] + 1, dtype=y.dtype, device=y.device)
    theta = (ranked.cumsum(-1) - 1) / rank  # if the first ``rank`` entries are those above zero
    support = (ranked > theta).sum(-1, keepdim=True).clamp(min=1)
    return (y - theta.gather(-1, support - 1)).clamp(min=0)


def class_means(means: torch.Tensor, weights: torch.Tensor, old: Tensors) -> dict[str, torch.Tensor]:
    """Average n clients' ``means`` (n, C, d) to the ``mean`` (C, d) of every class, and say which are ``known`` (C,).

    ``weights`` (n, C), whole numbers. A class that none of them has keeps what it has in ``old``, the last such.
    """
    total = weights.sum(0)
    mean, known = (weights[..., None] * means).sum(0) / total.clamp(min=1)[:, None], total > 0
    if old:
        mean, known = torch.where(known[:, None], mean, old["mean"]), known | old["known"]
    return {"mean": mean, "known": known}


def part_of(tensors: Tensors, key: str) -> dict[str, torch.Tensor]:
    """Select the tensors under ``key/``, without it."""
    return {n.removeprefix(f"{key}/"): x for n, x in tensors.items() if n.startswith(f"{key}/")}


def under(key: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    """Put ``tensors`` under ``key/``: the inverse of :func:`part_of`."""
    return {f"{key}/{n}": x for n, x in tensors.items()}


def row(stacked: Tensors, i: int) -> dict[str, torch.Tensor]:
    """Copy row ``i`` of every tensor."""
    return {n: x[i].clone() for n, x in stacked.items()}
