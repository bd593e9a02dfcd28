"""FlexLoRA (Bai et al., NeurIPS 2024): the mean of the clients' products B A, cut to each client's rank by SVD.

Client (rank r_k): receives A = V_r^T and B = U_r S_r of the largest r_k singular values of every adapter's product;
trains them. Server: of every adapter the mean of the products B_k A_k, by examples, U S V^T; heads by examples. The
backbone never changes: what a rank cannot hold is lost of its clients' share.
Read next: ``rivals/ranks.py``, ``flora.py``.

Deviations: the server keeps the largest rank's factors, so that is what is evaluated, where the paper evaluates the
whole mean. In the release all clients train rank 8; here budgets are ranks. LoRA's scaling is one constant for all
(the paper's alpha is, so that a smaller rank's product counts more). Signs of singular vectors are fixed, and where
there is no singular value A stays as it was.
"""

from dataclasses import dataclass, replace

import torch

from fedlib.methods.base import Arrived, Round, Server

from .ranks import Products, factors, rest_and_products


@dataclass(frozen=True)
class FlexLoRA(Products):
    """Truncation by singular values."""

    label, color, marker = "FlexLoRA", "#347eea", "h"

    def aggregate(self, server: Server, arrived: Arrived, r: Round) -> Server:
        new, products = rest_and_products(server, arrived, r)
        for axis, (a, b) in factors(r.setting).items():
            new[a], new[b] = truncated(products[axis], server.params[a])
        return replace(server, t=r.t, params=new)


def truncated(product: torch.Tensor, old: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Truncate ``product`` (out, in) to A (r, in) = V_r^T and B (out, r) = U_r S_r, of ``old`` A's rank and dtype."""
    rank, fine = len(old), product.isfinite().all()
    u, s, vt = torch.linalg.svd(product.nan_to_num(), full_matrices=False)
    u, s, vt = u[:, :rank], torch.where(fine, s[:rank], torch.nan), vt[:rank]  # a run that diverges says so by itself
    sign = vt.gather(1, vt.abs().argmax(1, keepdim=True)).sign()  # of a row's largest entry, (r, 1)
    some = ~(s <= 1e-9 * s[0])[:, None]
    a, b = torch.where(some, sign * vt, old), torch.where(some.T, u * s * sign.T, 0)
    return a.to(old.dtype).contiguous(), b.to(old.dtype).contiguous()  # as they are stored and sent: sums round alike
