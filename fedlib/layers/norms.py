"""Cohort-shaped normalisation; see ``linear.py`` for what a stacked parameter is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from .context import Context, Policy, share
from .conv import fold_clients, split_clients
from .linear import alive_rows, own_rows, per_client, uses_autocast


class LayerNorm(nn.LayerNorm):
    """Layer normalisation over the last dimension, whatever its size (sub-models may be narrower)."""

    def __init__(self, dim: int, eps: float = 1e-5):
        super().__init__(dim, eps=eps)
        self.axes = {"weight": ("residual",), "bias": ("residual",)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = own_rows(self.weight, x, 1), own_rows(self.bias, x, 1)
        if weight.dim() == bias.dim() == 1:
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.eps)
        if weight.dim() == bias.dim() and not uses_autocast(x):
            return _StackedLayerNorm.apply(x.reshape(x.shape[0], -1, x.shape[-1]), weight, bias, self.eps).view(x.shape)
        plain = F.layer_norm(x, x.shape[-1:], eps=self.eps)
        return torch.addcmul(per_client(bias, x), plain, per_client(weight, x))


class _StackedLayerNorm(torch.autograd.Function):
    """Layer normalisation of x (K, N, d) with each client's weight and bias (K, d)."""

    @staticmethod
    def forward(ctx, x, weight, bias, eps):
        y, *kept = norm(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, *kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, *kept = ctx.saved_tensors
        return *norm_backward(grad, x, kept, weight, ctx.needs_input_grad[:3]), None


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> tuple[torch.Tensor | None, ...]:
    """Normalise x (K, N, d) by weight and bias (d,) or (K, d); return also what ``norm_backward`` asks for."""
    if weight.dim() == 1:
        y, mean, scale = torch.native_layer_norm(x, x.shape[-1:], weight, bias, eps)
        return y, bias, mean, scale
    one, zero = x.new_ones(x.shape[-1]), x.new_zeros(x.shape[-1])  # without them a CPU takes twice as long
    plain, mean, scale = torch.native_layer_norm(x, x.shape[-1:], one, zero, eps)
    return torch.addcmul(bias.unsqueeze(1), plain, weight.unsqueeze(1)), plain, mean, scale


def norm_backward(
    grad: torch.Tensor, x: torch.Tensor, kept: Sequence[torch.Tensor], weight: torch.Tensor, needed: Sequence[bool]
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients of x, weight and bias, as far as they are ``needed``."""
    backward, size = torch.ops.aten.native_layer_norm_backward, x.shape[-1:]
    if weight.dim() == 1:
        bias, mean, scale = kept
        return tuple(backward(grad, x, size, mean, scale, weight, bias, list(needed)))
    plain, mean, scale = kept
    into = (grad * weight.unsqueeze(1), x, size, mean, scale, None, None, [True, False, False])
    return (
        backward(*into)[0] if needed[0] else None,
        (grad * plain).sum(1) if needed[1] else None,
        grad.sum(1) if needed[2] else None,
    )


class BatchNorm2d(nn.Module):
    """Batch normalisation of maps (K, B, C, H, W), of each client by its own statistics; padding rows do not count.

    The run's policy (``Context.policy``) says which statistics:

    - ``batch``: those of the current batch in training, in evaluation those of all examples that are asked for (the
      central test set, a client's own): :func:`settled_statistics`. The layer has no statistics.
    - ``tracked``: in training the batch's; in evaluation ``running_mean`` and ``running_var`` (C,) or (K, C), which
      every training batch moves as ``nn.BatchNorm2d`` does (momentum 0.1, unbiased variance) and the server averages.
    - ``local``: the same, but a client's statistics stay with it.
    - ``static``: in training the batch's, and nothing is tracked; in evaluation those that
      :func:`recomputed_statistics` found in the training data. ``ValueError`` without them.

    Statistics are buffers, named like parameters in ``axes``. A batch that moves them puts *new* tensors in their
    place and never writes into those it was given: put them in before local training, read them (:func:`statistics`)
    after it. Clients beyond the map's K, and clients whose rows are all padding, keep theirs.
    """

    def __init__(self, channels: int, axis: str, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum, self.context = eps, momentum, Context()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", None)
        self.register_buffer("running_var", None)
        self.axes = dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (axis,))
        self.first: tuple[torch.Tensor, torch.Tensor] | None = None  # statistics before the first batch; None: 0, 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = self.context
        if context.policy != "batch" and not context.training:
            if self.running_mean is None and context.gathered is not None:  # in ``settled_statistics``
                mean, var = _unmasked_moments(x)
                count = torch.full_like(mean[:, :1], x[:, :, 0].numel() / len(x))
                context.gathered.setdefault(self, []).append((count, mean, var))
                raise Unsettled
            if self.running_mean is None:
                raise ValueError(f"batch_norm = {context.policy!r}: evaluation needs statistics, and none are there")
            return self._native(x, self._rows(self.running_mean, x), self._rows(self.running_var, x), training=False)
        real = context.real(x.device)
        if real is None and context.gathered is None and x.shape[1] * x.shape[3] * x.shape[4] > 1:
            if not context.training:
                return self._native(x, *_unmasked_moments(x), training=False)
            if not context.tracks:
                return self._native(x, None, None, training=True)
            mean, var = (self._rows(p, x).clone() for p in (self.running_mean, self.running_var))
            y = self._native(x, mean, var, training=True)  # writes into the clones
            self._keep(mean, var)
            return y
        x = x if x.dtype is torch.float64 else x.float()
        count, mean, var = _moments(x, real)
        with torch.no_grad():
            unbiased = var * (count / (count - 1).clamp(min=1))
            if context.gathered is not None:
                context.gathered.setdefault(self, []).append((count, mean.detach(), var.detach()))
            elif context.tracks:
                old = (self._rows(self.running_mean, x), self._rows(self.running_var, x))
                rate = self.momentum * (count > 0)
                self._keep(*(o * (1 - rate) + n * rate for o, n in zip(old, (mean, unbiased), strict=True)))
        # a client without a real row gets the bias: of variance 0, some ten layers would overflow
        scale = self._rows(self.weight, x) * torch.rsqrt(var + self.eps) * (count > 0)
        shift = self._rows(self.bias, x) - mean * scale
        return torch.addcmul(shift[:, None, :, None, None], x, scale[:, None, :, None, None])

    @staticmethod
    def _rows(p: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return ``p`` (C,) or of all clients as (K, C) for the clients of ``x``."""
        return alive_rows(p, x) if p.dim() == 2 else p.expand(x.shape[0], -1)

    def _native(self, x, mean, var, training: bool) -> torch.Tensor:
        """Run PyTorch's own kernel on the channels of all clients side by side."""
        weight, bias = self._rows(self.weight, x).flatten(), self._rows(self.bias, x).flatten()
        mean, var = (p.flatten() if p is not None else None for p in (mean, var))
        layout = torch.contiguous_format if is_slow_channels_last(x) else torch.channels_last
        maps = fold_clients(x).contiguous(memory_format=layout)
        y = F.batch_norm(maps, mean, var, weight, bias, training, self.momentum, self.eps)
        return split_clients(y.contiguous(memory_format=torch.channels_last), len(x))

    def _keep(self, mean: torch.Tensor, var: torch.Tensor) -> None:
        self.replace_("running_mean", mean)
        self.replace_("running_var", var)

    def replace_(self, leaf: str, fresh: torch.Tensor) -> None:
        """Replace old statistics by new ones (K, C), in the old shape where K is one."""
        if (old := self._buffers[leaf]).dim() == 1:
            self._buffers[leaf] = fresh.squeeze(0) if len(fresh) == 1 else fresh
        else:
            self._buffers[leaf] = fresh if len(old) == len(fresh) else torch.cat((fresh, old[len(fresh) :]))


def is_slow_channels_last(x: torch.Tensor) -> bool:
    """Return whether PyTorch's kernel is faster on channels-first copies of maps (K, B, C, H, W).

    Its channels-last form falls out of its vectors where these do not divide the channels. Milliseconds forward and
    backward on one thread of an Intel Xeon, 32 maps, as they are | with copies: 32x32 pixels of 5 channels 7.2 | 1.0,
    of 8 0.8 | 1.6, of 11 7.3 | 2.3; 16x16 of 22 2.0 | 1.1, of 25 1.8 | 1.3, of 55 2.2 | 3.0; 8x8 of 44 0.5 | 0.6.
    C decides, not K C, so that numbers round alike whatever the cohort. Of a single map PyTorch 2.11 takes a gradient
    that lies channels last for one that does not.
    """
    return x.device.type == "cpu" and x.shape[1] > 1 and x.shape[2] % 8 > 0 and x.shape[2] < 32


def _unmasked_moments(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return mean and biased variance (K, C) of maps, the second about the first.

    PyTorch's channels-last batch norm loses digits on many values; its ``var_mean`` takes a CPU 7 to 20 times as long.
    """
    mean = x.float().mean((1, 3, 4))
    parts = x.split(64 if x.device.type == "cpu" else x.shape[1], 1)  # that stay in cache
    around = [(p.float() - mean[:, None, :, None, None]).square().sum((1, 3, 4)) for p in parts]
    return mean, torch.stack(around).sum(0) / x[0, :, 0].numel()


def _moments(x: torch.Tensor, real: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return values per channel (K, 1), mean and biased variance (K, C) of each client's rows that are ``real``.

    One sum of x and one of its squares: half the time of centring first; a mean of 30 standard deviations costs the
    variance three digits of seven.
    """
    real = x.new_ones(x.shape[:2]) if real is None else real[: x.shape[0], :, None].to(x.dtype)
    real = real.view(*x.shape[:2], 1)
    count = real.sum(1) * x.shape[3] * x.shape[4]
    total = count.clamp(min=1)  # a client without a real row: everything is zero, and finite
    mean, square = (x.sum((3, 4)) * real).sum(1) / total, (x.square().sum((3, 4)) * real).sum(1) / total
    return count, mean, (square - mean.square()).clamp(min=0)


def set_policy_(model: nn.Module, policy: Policy) -> Context:
    """Set ``policy`` for every ``BatchNorm2d`` in ``model``; return the context that all its layers now share.

    ``tracked`` and ``local`` layers get statistics (0, 1), or those that they begin with; the others lose theirs.
    """
    context = share(model, policy)
    for layer in model.modules():
        if isinstance(layer, BatchNorm2d):
            like = layer.weight.detach()
            first = layer.first or (torch.zeros_like(like), torch.ones_like(like))
            tracks = policy in ("tracked", "local")
            layer.running_mean, layer.running_var = (x.to(like, copy=True) if tracks else None for x in first)
    return context


def statistics(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the statistics of every ``BatchNorm2d`` in ``model`` by name, as its last training batch left them."""
    owners = {n: m for n, m in model.named_modules() if isinstance(m, BatchNorm2d)}
    return {n: b for n, b in model.named_buffers() if n.rpartition(".")[0] in owners}


@contextmanager
def recomputed_statistics(model: nn.Module) -> Iterator[None]:
    """Collect batch norm's statistics from the training data that is run through ``model`` inside the block.

    Each layer sees what the layers before it make with batch statistics, all in one pass. They are mean and variance of
    all values that passed, whatever the batches.
    """
    layers = [m for m in model.modules() if isinstance(m, BatchNorm2d)]
    with layers[0].context.overridden(training=True, gathered={}) as context:
        with torch.no_grad():
            yield
        for layer, seen in context.gathered.items():
            mean, var = _pooled_moments(seen, unbiased=True)
            layer.running_mean, layer.running_var = (
                x.squeeze(0) if len(x) == 1 and layer.weight.dim() == 1 else x for x in (mean, var)
            )


class Unsettled(Exception):
    """A layer has gathered what it must see all of before anything after it can run."""


@contextmanager
def settled_statistics(model: nn.Module) -> Iterator[Callable[[Callable, Sequence], list]]:
    """Make batch norm use the statistics of all examples together inside the block, whatever their batches.

    What is given is ``settle(run, batches)``, what ``run`` makes of each batch: every layer that it uses sees all of
    them with the layers before it settled, and ends ``run`` until then, so a layer costs a pass up to it. Without batch
    norm it is one pass. Afterwards statistics are what they were.
    """
    layers = [m for m in model.modules() if isinstance(m, BatchNorm2d)]
    before = [(layer.running_mean, layer.running_var) for layer in layers]
    for layer in layers:
        layer.running_mean = layer.running_var = None

    def settle(run: Callable, batches: Sequence) -> list:
        while True:
            context.gathered, made = {}, []
            for batch in batches:
                with suppress(Unsettled):
                    made.append(run(batch))
            if len(made) == len(batches):
                return made
            for layer, seen in context.gathered.items():
                layer.running_mean, layer.running_var = (x.squeeze(0) for x in _pooled_moments(seen, unbiased=False))

    context = layers[0].context if layers else Context()
    try:
        with context.overridden(policy="static", training=False, gathered={}):
            yield settle
    finally:
        for layer, (mean, var) in zip(layers, before, strict=True):
            layer.running_mean, layer.running_var = mean, var


def _pooled_moments(seen: Sequence[tuple[torch.Tensor, ...]], unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Pool batches into mean and variance (K, C): of each its count (K, 1), mean and biased variance (K, C)."""
    count, mean, var = (torch.stack(part).double() for part in zip(*seen, strict=True))  # (batches, K, C)
    total = count.sum(0)
    weight = count / total.clamp(min=1)
    whole = (weight * mean).sum(0)
    around = (weight * (var + (mean - whole).square())).sum(0)
    around = around * total / (total - 1).clamp(min=1) if unbiased else around
    return whole.to(seen[0][1].dtype), around.to(seen[0][1].dtype)
