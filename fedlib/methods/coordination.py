"""CAFEDistill's coordination at the server: which exits are students (Section 4.2), which clients teach whom (4.3)."""

from collections.abc import Sequence

import torch

from .simplex import project_to_simplex


def student_counts(t: int, rounds: int, exits: int, clients: int) -> tuple[int, int]:
    """(l, q) at round t: everybody's l shallowest exits are students, and exit l + 1 of q clients.

    R = min(2t/T, 1) of the (m - 1)|C| exits before the last: l = floor((m - 1) R), q the rest, rounded half up.
    """
    share = (exits - 1) * min(2 * t, rounds)  # (m - 1) R T
    depth = share // rounds
    return depth, (2 * share * clients + rounds) // (2 * rounds) - clients * depth


def most_alike(
    similarities: torch.Tensor, keep: int, ties: torch.Tensor | None = None, places: Sequence[int] | None = None,
    clients: int | None = None,
) -> list[int]:  # fmt: skip
    """Indices of ``keep`` of n clients: again and again whoever is least similar to the rest is dropped (Eq. 6).

    ``similarities`` (k, k), those with oneself not counted, are of the clients ``places`` (None: of all n), all others
    are 0. Sums count to nine digits; of equals, the one with the lower sum of ``ties`` goes, then the later one.
    """
    n, places = clients or len(similarities), list(range(len(similarities)) if places is None else places)
    alike = torch.stack((similarities, similarities if ties is None else ties)).double()  # (2, k, k)
    sums = torch.zeros(2, n, dtype=torch.float64)
    sums[:, places] = alike.sum(2) - alike.diagonal(dim1=1, dim2=2)
    row, left = {i: k for k, i in enumerate(places)}, list(range(n))
    while len(left) > keep:
        scores = sums.round(decimals=9).T.tolist()
        dropped = min(left, key=lambda i, scores=scores: (*scores[i], -i))
        left.remove(dropped)
        if dropped in row:
            sums[:, places] -= alike[:, :, row[dropped]]
    return left


def students(
    cosine: torch.Tensor, t: int, rounds: int, exits: int, similarity: str = "clipped", drop_one_more: bool = False,
    places: Sequence[int] | None = None, clients: int | None = None,
) -> torch.Tensor:  # fmt: skip
    """S_i of n clients at round t as (n, exits) of zeros and ones; ``cosine`` (k, k) compares the last exits.

    It is that of the clients ``places`` of all n ``clients`` (None: of all); with the others it is 0.
    ``similarity``: ``clipped`` is min(0, cos), the plain cosine breaking its many ties; ``cosine`` is the plain one.
    ``drop_one_more``: Algorithm 2's loop as printed, which drops until fewer than q are left.
    """
    n = clients or len(cosine)
    depth, rest = student_counts(t, rounds, exits, n)
    out = torch.zeros(n, exits)
    out[:, :depth], out[:, -1] = 1, 1
    keep = max(rest - 1, 0) if drop_one_more and rest else rest
    if keep:
        alike = cosine.clamp(max=0) if similarity == "clipped" else cosine
        out[most_alike(alike, keep, cosine, places, n), depth] = 1
    return out


def teacher_shares(cosine: torch.Tensor, clients: int, mu: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Eq. 8: k = the projection of 1/n + c/(2 mu) on the simplex, for each row c of (k, seen).

    Of the n = ``clients``, those not seen so far have cosine 0 and share one exit, the initial one. Returns the shares
    of the seen (k, seen) and of all the others together (k,).
    """
    seen = cosine.shape[1]
    whole = torch.cat((cosine, cosine.new_zeros(len(cosine), clients - seen)), 1)
    shares = project_to_simplex(1 / clients + whole / (2 * mu))
    return shares[:, :seen], shares[:, seen:].sum(1)
