"""Views of images in a batch: shifted, flipped, cropped and normalised exactly."""

import pytest
import torch

from fedlib import Experiment
from fedlib.core.validation import field_hints
from fedlib.data.transforms import render, sample_views

ZERO, ONE = torch.zeros(3), torch.ones(3)


def test_identity_view_reproduces_the_image():
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    views = sample_views("none", 4, 8, torch.Generator().manual_seed(0))
    torch.testing.assert_close(render(images, views, 8, ZERO, ONE), images.float() / 255, rtol=0, atol=1e-6)
    torch.testing.assert_close(render(images, None, 8, ZERO, ONE), images.float() / 255)


def test_views_shift_flip_and_crop_exactly():
    x = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    see = lambda *view: (render(x, torch.tensor([view]), 4, ZERO, ONE)[0, 0] * 255).round().int()  # noqa: E731
    assert torch.equal(see(0.0, 0.0, 1.0, 1.0, 1.0), x[0, 0].flip(1).int())
    shifted = torch.zeros(4, 4, dtype=torch.int)
    shifted[:3, 1:] = x[0, 0, 1:, :3].int()
    assert torch.equal(see(0.25, -0.25, 1.0, 1.0, 0.0), shifted)  # one pixel down and left, black outside


def test_crop_equals_interpolation_of_the_cropped_pixels():
    x = torch.randint(0, 256, (1, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    ours = render(x, torch.tensor([[0.25, 0.5, 0.5, 0.5, 0.0]]), 8, ZERO, ONE)
    crop = torch.nn.functional.interpolate(x[:, :, 2:6, 4:8].float() / 255, (8, 8), mode="bilinear")
    torch.testing.assert_close(ours[..., 1:-1, 1:-1], crop[..., 1:-1, 1:-1], rtol=0, atol=1e-5)  # borders differ


@pytest.mark.parametrize("augment", field_hints(Experiment)["augment"].__args__)
def test_views_are_within_bounds_and_reproducible(augment):
    views = sample_views(augment, 2000, 32, torch.Generator().manual_seed(7), pad=4, min_scale=0.08)
    assert torch.equal(views, sample_views(augment, 2000, 32, torch.Generator().manual_seed(7), pad=4, min_scale=0.08))
    top, left, height, width, flip = views.unbind(1)
    assert flip.mean() == pytest.approx(0.5, abs=0.05) if augment.endswith("flip") else not flip.any()
    if augment.startswith("rrc"):
        area = height * width
        assert area.max() <= 1 and area.min() >= 0.05 and (top + height).max() <= 1 + 1e-6 and top.min() >= 0
        assert area.mean() == pytest.approx(0.54, abs=0.06)
    elif augment.startswith("crop"):
        assert set((top * 32).round().int().tolist()) == set(range(-4, 5))


def test_grey_images_become_three_normalised_channels():
    x = torch.full((2, 1, 4, 4), 51, dtype=torch.uint8)
    out = render(x, None, 8, torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.1, 0.1, 0.2]))
    assert out.shape == (2, 3, 8, 8)
    torch.testing.assert_close(out[0, :, 0, 0], torch.tensor([1.0, 0.0, -0.5]), rtol=0, atol=1e-6)


def test_large_images_are_shrunk_with_anti_aliasing():
    """One white pixel in nine: a plain bilinear sample of a third of the size would see all of it or nothing."""
    x = torch.zeros(1, 1, 96, 96, dtype=torch.uint8)
    x[..., 1::3, 1::3] = 255
    for views in (None, torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]])):
        seen = render(x, views, 32, torch.zeros(3), torch.ones(3))
        assert seen[..., 2:-2, 2:-2].sub(1 / 9).abs().max() < 0.07
    same = render(x, None, 96, torch.zeros(3), torch.ones(3))
    assert torch.equal(same[0, 0], x[0, 0].float() / 255)
