"""CAFEDistill's coordination at the server: which exits are students (Section 4.2), which clients teach whom (4.3)."""

import torch

from .simplex import project_to_simplex


def student_counts(t: int, rounds: int, exits: int, clients: int) -> tuple[int, int]:
    """(l, q) at round t: everybody's l shallowest exits are students, and exit l + 1 of q clients.

    R = min(2t/T, 1) of the (m - 1)|C| exits before the last: l = floor((m - 1) R), q the rest, rounded half up.
    """
    share = (exits - 1) * min(2 * t, rounds)  # (m - 1) R T
    depth = share // rounds
    return depth, (2 * share * clients + rounds) // (2 * rounds) - clients * depth


def most_alike(similarities: torch.Tensor, keep: int, ties: torch.Tensor | None = None) -> list[int]:
    """Indices of ``keep`` of n clients: again and again whoever is least similar to the rest is dropped (Eq. 6).

    ``similarities`` (n, n), those with oneself not counted; of equals, the one with the lower sum of ``ties``, then the
    later one.
    """
    left = list(range(len(similarities)))
    alike = (similarities, similarities if ties is None else ties)

    def score(k: int) -> tuple[float, float, int]:
        return (*(float(s[k, left].sum() - s[k, k]) for s in alike), -k)

    while len(left) > keep:
        left.remove(min(left, key=score))
    return left


def students(
    cosine: torch.Tensor, t: int, rounds: int, exits: int, similarity: str = "clipped", drop_one_more: bool = False
) -> torch.Tensor:
    """S_i of n clients at round t as (n, exits) of zeros and ones; ``cosine`` (n, n) compares their last exits.

    ``similarity``: ``clipped`` is min(0, cos), the plain cosine breaking its many ties; ``shifted`` is cos - 1.
    ``drop_one_more``: Algorithm 2's loop as printed, which drops until fewer than q are left.
    """
    n = len(cosine)
    depth, rest = student_counts(t, rounds, exits, n)
    out = torch.zeros(n, exits)
    out[:, :depth], out[:, -1] = 1, 1
    keep = max(rest - 1, 0) if drop_one_more and rest else rest
    if keep:
        alike = cosine.clamp(max=0) if similarity == "clipped" else cosine - 1
        out[most_alike(alike, keep, cosine), depth] = 1
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
