"""What happens to a client's update on its way to the server: compressed, then clipped. Options of every method.

The update is what local training changed, delta = trained - received, over all tensors that the client holds. Its
compression is QSGD-like stochastic quantisation (Alistarh et al. 2017, scaled by the largest entry) or top-k by
magnitude, with error feedback (Seide et al. 2014; Stich et al. 2018) if wanted. Clipping (McMahan et al. 2018) comes
last, so that no update is longer than C whatever the compression did; it only rescales, which costs no further bits.
Cohorts of any size send the same up to float rounding, which may move an entry to the neighbouring step.
Read next: ``engine/privacy.py`` (the noise and its accountant), ``runs/costs.py`` (what an upload weighs).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Le, Lt

from ..core.annotations import NotNegative, Positive, Share, When
from .cohort import Cohort
from .sums import Tensors, Update


@dataclass(frozen=True)
class UploadOptions:
    """How updates are sent; the defaults send them as they are."""

    update_norm: Positive | None = None  # C: largest L2 norm of a client's whole update
    # z: the server adds noise of SD z C to every entry of the summed updates
    noise_multiplier: NotNegative = 0.0
    dp_delta: Annotated[Positive, Lt(1)] | None = None  # None: 1 / (10 * clients that may be sampled)
    compress: Literal["none", "quantise", "topk"] = "none"
    # of a quantised entry, stochastically rounded (to the nearest step with error feedback)
    bits: Annotated[int, Ge(2), Le(32), When(compress="quantise")] = 8
    # of each tensor's entries, at least one
    topk_fraction: Annotated[Share, When(compress="topk")] = 0.1
    # what compression left out is added to the client's next update
    error_feedback: Annotated[bool, When(compress=("quantise", "topk"))] = False

    def upload_bits(self, sizes: Iterable[int]) -> int:
        """Count the bits of one upload of tensors with ``sizes`` entries.

        32 an entry; quantised: ``bits`` an entry and a 32-bit scale a tensor; top-k: 32 a value and ceil(log2 n) an
        index into a tensor of n entries. Names, shapes and how many entries follow are known to both sides.
        """
        if self.compress == "quantise":
            return sum(self.bits * n + 32 for n in sizes)
        if self.compress == "topk":
            return sum(kept_entries(n, self.topk_fraction) * (32 + (n - 1).bit_length()) for n in sizes)
        return sum(32 * n for n in sizes)


def kept_entries(n: int, fraction: float) -> int:
    """Return k of top-k for a tensor of ``n`` entries: round(fraction * n), at least one."""
    return max(1, round(fraction * n))


def clip_factors(deltas: Tensors, rows: Mapping[str, Sequence[int]], clients: int, norm: float) -> torch.Tensor:
    """Return min(1, C / |delta_i|) per client, (K,) float64; the norm is over all tensors that client i holds."""
    device = next((d.device for d in deltas.values()), None)  # of nothing, where all is personal
    squares = torch.zeros(clients, dtype=torch.float64, device=device)
    for name, d in deltas.items():
        squares[list(rows[name])] += d.double().flatten(1).square().sum(1)
    return (norm / squares.sqrt()).clamp(max=1)  # a zero update gives C / 0 = inf, so 1


def quantise(x: torch.Tensor, uniform: torch.Tensor | float, bits: int) -> torch.Tensor:
    """Round per row to s/m * (floor(m x/s) + [u < frac(m x/s)]), s = max |x|, m = 2^(bits-1) - 1; E Q(x) = x.

    ``x`` and ``uniform`` in [0, 1) are (K, ...); u = 1/2 rounds to the nearest step instead. A row takes 2 m + 1
    steps, so ``bits`` an entry, and its s.
    """
    steps = 2 ** (bits - 1) - 1
    scale = x.double().flatten(1).abs().amax(1).view(-1, *(1,) * (x.dim() - 1))
    y = x.double() / torch.where(scale > 0, scale, 1) * steps
    low = y.floor()
    return (low + (uniform < y - low)) * (scale / steps)


def top_k(x: torch.Tensor, k: int) -> torch.Tensor:
    """Keep each row's ``k`` largest entries by magnitude, zero the others; of equal ones the first stay."""
    size = x.flatten(1).abs()
    least = size.topk(k, 1).values[:, -1:]
    above, tied = size > least, size == least
    kept = above | (tied & (tied.cumsum(1) <= k - above.sum(1, keepdim=True)))
    return x * kept.view_as(x)


def send(options: UploadOptions, cohort: Cohort) -> Update:
    """Send received + clip(compress(delta + residual)), in float64 so that the sums see what was sent.

    The residual of error feedback is what compression left out, not what clipping cut, and stays with the client. With
    it entries are rounded to the nearest step: the error of unbiased rounding can exceed the update and would grow.
    """
    update = cohort.update()
    if options.update_norm is None and options.compress == "none":
        return update
    received = _sent_rows(cohort.start, update, cohort)
    deltas = {n: p - received[n] for n, p in update.params.items()}
    if options.error_feedback:
        residual = _sent_rows(cohort.recall("residual"), update, cohort)
        deltas = {n: d + residual[n] for n, d in deltas.items()}
    sent = deltas
    if options.compress == "quantise":
        uniform = dict.fromkeys(deltas, 0.5) if options.error_feedback else _uniform(deltas, update, cohort)
        sent = {n: quantise(d, uniform[n], options.bits) for n, d in deltas.items()}
    elif options.compress == "topk":
        sent = {n: top_k(d, kept_entries(d[0].numel(), options.topk_fraction)) for n, d in deltas.items()}
    if options.error_feedback:
        cohort.remember("residual", {n: (d - sent[n]).to(d.dtype) for n, d in deltas.items()}, update.rows)
    if options.update_norm is not None:
        factors = clip_factors(sent, update.rows, len(update.clients), options.update_norm)
        rows = {n: factors[list(update.rows[n])].view(-1, *(1,) * (d.dim() - 1)) for n, d in sent.items()}
        sent = {n: d.double() * rows[n] for n, d in sent.items()}
    return replace(update, params={n: received[n].double() + d for n, d in sent.items()})


def _sent_rows(stacked: Tensors, update: Update, cohort: Cohort) -> dict[str, torch.Tensor]:
    """Select what the update sends of tensors stacked like the cohort's parameters, of the members that send it."""
    out = {}
    for name, rows in update.rows.items():
        held = list(cohort.rows[name])
        out[name] = stacked[name] if len(rows) == len(held) else stacked[name][[held.index(i) for i in rows]]
    return out


def _uniform(deltas: Tensors, update: Update, cohort: Cohort) -> dict[str, torch.Tensor]:
    """Draw numbers in [0, 1) like ``deltas``; each client's come from its own generator, so not from its cohort."""
    draws = [cohort.generator("quantise", c.id) for c in update.clients]
    return {
        n: torch.stack([torch.rand(d.shape[1:], generator=draws[i]) for i in update.rows[n]]).to(d.device)
        for n, d in deltas.items()
    }
