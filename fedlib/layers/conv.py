"""Cohort-shaped convolution and pooling on maps (K, B, C, H, W); see ``linear.py`` for what a stacked parameter is.

In memory a map lies as (B, H, W, K, C): channels last, the clients' channels side by side. So a stacked convolution is
one grouped convolution and batch norm one call, both on views, and a cohort of one is plain channels last.
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from .linear import Linear, own_rows, zero_

LOOP_FROM = 1024  # channels of all clients; see ``path_of``
CHOSEN: dict[str, str] = {}  # on a GPU: which path was fastest, by shape; a run stores it and goes on with it


def fold_clients(x: torch.Tensor) -> torch.Tensor:
    """Fold clients into channels, (K, B, C, H, W) -> (B, K*C, H, W), channels last; a view of a map in this layout."""
    k, b, c, h, w = x.shape
    x = x.permute(1, 3, 4, 0, 2).reshape(b, h, w, k * c).permute(0, 3, 1, 2)
    return x.contiguous(memory_format=torch.channels_last)  # of one client, a view of any layout came through


def split_clients(x: torch.Tensor, clients: int) -> torch.Tensor:
    """Split clients off the channels, (B, K*C, H, W) -> (K, B, C, H, W), a view."""
    return x.unflatten(1, (clients, x.shape[1] // clients)).transpose(0, 1)


def one_batch(x: torch.Tensor) -> torch.Tensor:
    """Fold clients into the batch, (K, B, C, H, W) -> (K*B, C, H, W), channels last."""
    return x.permute(0, 1, 3, 4, 2).flatten(0, 1).permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)


def path_of(x: torch.Tensor, weight: torch.Tensor, run: Callable[[str], None], stride: int) -> str:
    """Choose how a stacked convolution runs: one ``grouped`` call, a ``loop`` over clients, or products of ``columns``.

    ``run`` convolves x (K, B, C, H, W) with ``weight`` (K, O, C / groups, h, w) on a path, and learns. On a GPU each
    shape is tried once: on an H100 the products are the fastest of small maps in float32, the grouped one of large ones
    and in TF32 (docs/gpu.md).

    CPU seconds of the loop over those of the grouped one: 3x3, forward and backward, one thread of an Intel Xeon, maps
    of 32x32 pixels at 16 channels down to 8x8 from 64 (128: 16x16), batch 8 | 32:

    ======== =========== =========== =========== ===========
    channels 2 clients   3           5           more
    ======== =========== =========== =========== ===========
    16       1.93 | 1.51 1.56 | 1.65 1.32 | 1.25
    32       1.40 | 1.21 1.29 | 1.27 1.39 | 1.31
    64       1.23 | 1.18 1.22 | 1.12 1.21 | 1.12 16: 1.11 | 1.05; 20: 0.99 | 0.94
    128      1.13 | 1.07 1.09 | 1.09 1.05 | 0.99 8: 1.00 | 0.93
    256      1.08 | 1.03 1.02 | 0.99 0.95 | 0.88 8: 0.61 | 0.65
    512      1.04 | 0.93             0.56 | 0.62
    ======== =========== =========== =========== ===========

    So the loop is faster where a thousand channels and more lie side by side. A cohort of one is neither.
    """
    if x.device.type != "cuda":
        return "loop" if x.device.type == "cpu" and x.shape[0] * x.shape[2] >= LOOP_FROM else "grouped"
    kind = "autocast" if torch.is_autocast_enabled("cuda") else str(x.dtype).removeprefix("torch.")
    inner = "" if weight.shape[2] == x.shape[2] else f" of {weight.shape[2]}"
    channels = f"{x.shape[2]} to {weight.shape[1]} channels{inner}"
    key = f"{len(x)} clients, {channels}, {weight.shape[3]}x{weight.shape[4]} / {stride}, {x.shape[-1]} px, {kind}"
    if key not in CHOSEN:
        paths = ("grouped", "loop") if inner else ("grouped", "loop", "columns")
        CHOSEN[key] = min(paths, key=lambda path: _seconds(run, path, x.device))
    return CHOSEN[key]


def _seconds(run: Callable[[str], None], path: str, device: torch.device) -> float:
    """Time ``run`` on ``path``: the least of three runs after one that warms up."""
    taken, wait = [], torch.cuda.synchronize if device.type == "cuda" else lambda device: None  # once a shape
    for _ in range(4):
        wait(device)
        began = time.perf_counter()
        run(path)
        wait(device)
        taken.append(time.perf_counter() - began)
    return min(taken[1:])


class Conv2d(nn.Conv2d):
    """2-D convolution with zero padding. ``axes`` names the axis of its output and input channels.

    The number of groups follows from the shapes of map and weight, so that a cut depthwise weight, axes
    ``(a, None)``, needs nothing else.
    """

    def __init__(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, padding: int = 0, groups: int = 1,
        bias: bool = False, axes=(None, None),
    ):  # fmt: skip
        super().__init__(in_channels, out_channels, kernel, stride, padding, groups=groups, bias=bias)
        self.axes = {"weight": (*axes, None, None), "bias": (axes[0],)}

    reset_parameters = zero_

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (K, B, C, H, W) -> (K, B, O, H', W')
        weight, bias = own_rows(self.weight, x, 4), own_rows(self.bias, x, 1)
        clients, examples, channels = x.shape[:3]
        groups = channels // weight.shape[-3]
        if weight.dim() == 4:
            shared = bias is None or bias.dim() == 1
            y = self._convolve(one_batch(x), weight, bias if shared else None, groups).unflatten(0, (clients, examples))
            return y if shared else y + bias[:, None, :, None, None]
        bias = bias.expand(clients, -1) if bias is not None else None
        trial = lambda path: self._try(path, x, weight, bias, groups)  # noqa: E731
        return self._stacked(path_of(x, weight, trial, self.stride[0]), x, weight, bias, groups)

    def _stacked(
        self, path: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int
    ) -> torch.Tensor:
        """Convolve x (K, B, C, H, W) with each client's weight (K, O, C / groups, h, w) -> (K, B, O, H', W')."""
        clients = len(x)
        if path == "grouped":
            flat = bias.flatten() if bias is not None else None
            return split_clients(self._convolve(fold_clients(x), weight.flatten(0, 1), flat, clients * groups), clients)
        if path == "columns":  # F.unfold would launch a kernel an image
            (height, width), (up, left), side = weight.shape[3:], self.padding, self.stride[0]
            rows = F.pad(x.permute(0, 1, 3, 4, 2), (0, 0, left, left, up, up))
            windows = rows.unfold(2, height, side).unfold(3, width, side).movedim(4, 6)  # (K, B, H', W', h, w, C)
            columns = windows.reshape(clients, -1, height * width * x.shape[2])
            y = torch.bmm(columns, weight.permute(0, 3, 4, 2, 1).flatten(1, 3))
            y = y.unflatten(1, windows.shape[1:4]).movedim(4, 2)
        else:
            each = zip(x.unbind(), weight.unbind(), strict=True)
            maps = [self._convolve(one_batch(one.unsqueeze(0)), w, None, groups).permute(0, 2, 3, 1) for one, w in each]
            y = torch.stack(maps, 3).permute(3, 0, 4, 1, 2)
        return y if bias is None else y + bias[:, None, :, None, None]

    @torch.inference_mode(False)
    @torch.enable_grad()
    def _try(self, path: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> None:
        """Run forward and backward on copies."""
        x, weight = (t.detach().clone().requires_grad_() for t in (x, weight))
        torch.autograd.grad(self._stacked(path, x, weight, bias, groups).sum(), (x, weight))

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, groups: int) -> torch.Tensor:
        stride = self.stride
        if self.kernel_size == (1, 1) and stride != (1, 1) and self.padding == (0, 0):
            # oneDNN's strided 1x1 convolution of fewer than 16 channels, channels last, has wrong weight gradients or
            # crashes (uxlfoundation/oneDNN#6035); the same pixels at stride 1 do not. Cut channels last, so that the
            # gradient lies so too: added to one of another layout, it costs as much as the convolution
            pixels = x.permute(0, 2, 3, 1)[:, :: stride[0], :: stride[1]].permute(0, 3, 1, 2)
            x, stride = pixels.contiguous(memory_format=torch.channels_last), 1
        return F.conv2d(x, weight, bias, stride, self.padding, groups=groups)


def max_pool(x: torch.Tensor, size: int) -> torch.Tensor:
    """Take the maximum of every ``size`` x ``size`` window of maps (K, B, C, H, W).

    An incomplete last one is dropped.
    """
    if x.permute(0, 1, 3, 4, 2).is_contiguous():  # of products of columns
        return F.max_pool2d(one_batch(x), size).unflatten(0, x.shape[:2])
    return split_clients(F.max_pool2d(fold_clients(x), size), x.shape[0])


def average_pool(x: torch.Tensor) -> torch.Tensor:
    """Average maps over all pixels, (K, B, C, H, W) -> (K, B, C)."""
    # folded, so that the gradient, too, lies as a map: of another layout a ReLU's takes seven times as long
    return x.permute(1, 3, 4, 0, 2).flatten(3).mean((1, 2)).unflatten(1, (len(x), -1)).transpose(0, 1)


def sample_and_pad(x: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
    """Bring maps (K, B, C, H, W) to the ``shape`` (C', H', W') of smaller, wider ones without a parameter (option A).

    Every H // H'-th row and column, and zero channels, as many before as behind.
    """
    channels, height, width = shape
    x = x[..., :: x.shape[-2] // height, :: x.shape[-1] // width][..., :height, :width]
    more = channels - x.shape[-3]
    return F.pad(x, (0, 0, 0, 0, more // 2, more - more // 2)) if more else x


def init_kaiming_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise for ReLU (He), in place: convolutions N(0, 2 / fan-in), norms (1, 0).

    What answers classes, a ``Linear`` or a convolution of a whole map, gets U(-1/sqrt(d), 1/sqrt(d)) of d inputs; all
    biases are zero.
    """
    for m in module.modules():
        if isinstance(m, (nn.Conv2d, Linear)):
            if isinstance(m, Linear) or m.axes["weight"][0] == "classes":
                _uniform_(m.weight, m, generator)
            else:
                nn.init.kaiming_normal_(m.weight, nonlinearity="relu", generator=generator)
        elif isinstance(weight := getattr(m, "weight", None), nn.Parameter):
            nn.init.ones_(weight)
        if isinstance(bias := getattr(m, "bias", None), nn.Parameter):
            nn.init.zeros_(bias)


def init_uniform_(module: nn.Module, generator: torch.Generator) -> None:
    """Initialise as PyTorch does, in place: norms (1, 0), all other weights and biases U(-1/sqrt(d), 1/sqrt(d)).

    d is the fan-in. A convolution's weights have 1/6 of He's variance.
    """
    for m in module.modules():
        if isinstance(weight := getattr(m, "weight", None), nn.Parameter):
            weighs, bias = isinstance(m, (nn.Conv2d, nn.Linear)), getattr(m, "bias", None)
            _uniform_(weight, m, generator) if weighs else nn.init.ones_(weight)
            if bias is not None:
                _uniform_(bias, m, generator) if weighs else nn.init.zeros_(bias)


def _uniform_(p: torch.Tensor, layer: nn.Module, generator: torch.Generator) -> None:
    bound = layer.weight[0].numel() ** -0.5
    nn.init.uniform_(p, -bound, bound, generator=generator)


INITIALISATIONS = {"he": init_kaiming_, "uniform": init_uniform_}  # of convnets
