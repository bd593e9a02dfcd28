"""Backbones, Ree and adapters against timm, peft, explicit loops and the numbers of the released code."""

import pytest
import torch

from fedlib_lab.zoo.timm_nets import load_timm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "name, options",
    [
        ("deit_tiny_patch16_224", {"img_size": 32}),
        ("deit_tiny_distilled_patch16_224", {"img_size": 32}),
        ("deit3_small_patch16_224", {"img_size": 32, "depth": 3}),  # LayerScale, unembedded class token
        ("vit_small_patch14_reg4_dinov2", {"img_size": 28, "depth": 3}),  # registers
        ("vit_base_patch32_clip_224", {"img_size": 64, "depth": 3}),  # norm before the first block
    ],
)
def test_vit_equals_timm(name, options):
    import timm

    model = timm.create_model(name, pretrained=False, **options).eval()
    for i, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, 0.1, 0.1, generator=generator(i))
    vit = load_timm(model)
    x = torch.randn(2, 3, vit.spec.img_size, vit.spec.img_size, generator=generator())
    with torch.no_grad():
        ours = model.norm(vit.run(vit.stem(x[None]), 0, vit.spec.depth))[0]
        torch.testing.assert_close(ours, model.forward_features(x), rtol=1e-4, atol=1e-4)
