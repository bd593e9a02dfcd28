"""Batched image transforms on the training device: crop, flip, resize and normalise in one sampling step.

Every random choice of an example is drawn by the caller's CPU generator (see ``rng``) as one row of a *view*
``(top, left, height, width, flip)`` in fractions of the image; ``render`` then samples all views of a batch at
once. Evaluation uses the identity view, so train and test share one code path.

Deviations: images larger than the network's input are shrunk to it, with anti-aliasing, before a crop is taken (PIL
crops first), so that a small crop of a large image is blurred; images of at most the input's size are never shrunk.
"""

import math

import torch
import torch.nn.functional as F


def sample_views(
    augment: str, n: int, size: int, generator: torch.Generator, pad: int = 4, min_scale: float = 0.08
) -> torch.Tensor:
    """Draw ``n`` views ``(n, 5)``: top, left, height, width (fractions of the image; may reach outside) and flip.

    ``crop`` shifts by up to ``pad`` of ``size`` pixels a side (zero padding); ``rrc`` is the random resized crop of
    area U(min_scale, 1) and aspect ratio log-U(3/4, 4/3); ``_flip`` adds a horizontal flip with probability 1/2.
    """
    u = torch.rand(n, 5, generator=generator)
    top, left, height, width = torch.zeros(n), torch.zeros(n), torch.ones(n), torch.ones(n)
    if augment.startswith("crop"):
        top, left = (((2 * pad + 1) * u[:, i]).floor().sub(pad) / size for i in (0, 1))
    elif augment.startswith("rrc"):
        area, ratio = min_scale + (1 - min_scale) * u[:, 2], torch.exp((2 * u[:, 3] - 1) * math.log(4 / 3))
        height, width = (area / ratio).sqrt().clamp(max=1), (area * ratio).sqrt().clamp(max=1)
        top, left = u[:, 0] * (1 - height), u[:, 1] * (1 - width)
    flip = (u[:, 4] < 0.5).float() if augment.endswith("_flip") else torch.zeros(n)
    return torch.stack((top, left, height, width, flip), 1)


def render(
    images: torch.Tensor, views: torch.Tensor | None, size: int, mean: torch.Tensor, std: torch.Tensor,
    channels: int = 3,
) -> torch.Tensor:  # fmt: skip
    """Turn uint8 ``images (B, C, H, W)`` into normalised floats ``(B, channels, size, size)`` seen through ``views``.

    ``views=None`` is the identity view. Grey images are repeated to ``channels``. ``mean`` and ``std`` have
    shape (3,) in [0, 1] units; what a view sees outside the image is black before normalisation.
    """
    x = images.float().div_(255)
    if max(x.shape[-2:]) > size:
        x = F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=True)
    if views is not None:
        top, left, height, width, flip = views.to(x.device).unbind(1)
        theta = torch.zeros(len(x), 2, 3, device=x.device)
        theta[:, 0, 0] = width * (1 - 2 * flip)
        theta[:, 0, 2] = 2 * left + width - 1
        theta[:, 1, 1] = height
        theta[:, 1, 2] = 2 * top + height - 1
        grid = F.affine_grid(theta, [len(x), x.shape[1], size, size], align_corners=False)
        x = F.grid_sample(x, grid, mode="bilinear", align_corners=False)
    elif x.shape[-1] != size or x.shape[-2] != size:
        x = F.interpolate(x, (size, size), mode="bilinear", align_corners=False)
    mean, std = (stat[:channels].view(channels, 1, 1) for stat in (mean, std))
    return x.expand(-1, channels, -1, -1).sub(mean).div_(std)
