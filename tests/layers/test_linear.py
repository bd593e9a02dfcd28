"""Layers of a stack of clients against loops over them, and their gradients against autograd's."""

import pytest
import torch

from fedlib.layers.linear import Linear
from fedlib.layers.norms import LayerNorm


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("stacked_bias", [True, False])
def test_stacked_layers_equal_a_loop_over_clients(stacked_bias):
    layer, norm = Linear(6, 3), LayerNorm(6)
    x, g = torch.randn(4, 2, 5, 6, generator=generator()), generator(1)
    weight, bias = torch.randn(4, 3, 6, generator=g), torch.randn(4 if stacked_bias else 1, 3, generator=g)
    layer._parameters.update(weight=weight, bias=bias if stacked_bias else bias[0])
    expected = torch.stack([x[i] @ weight[i].T + bias[i if stacked_bias else 0] for i in range(4)])
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x[:2]), expected[:2])  # fewer clients alive than stacked
    torch.testing.assert_close(layer(x[:1]), expected[:1])
    gamma, beta = torch.randn(4, 6, generator=g), torch.randn(4, 6, generator=g)
    norm._parameters.update(weight=gamma, bias=beta)
    plain = torch.nn.functional.layer_norm(x, (6,), eps=1e-5)
    expected = plain * gamma[:, None, None] + beta[:, None, None]
    torch.testing.assert_close(norm(x), expected)
    torch.testing.assert_close(norm(x[:1]), expected[:1])


def stacked(layer, clients, seed):
    """``layer`` with weights of each client's own."""
    g = generator(seed)
    own = {n: torch.randn(clients, *p.shape, generator=g) for n, p in layer.named_parameters()}
    layer._parameters.update(own)
    return layer


@pytest.mark.parametrize("bias", ["stacked", "shared", "none"])
def test_a_stacked_linear_has_autograds_gradients_in_the_weights_order(bias):
    layer = stacked(Linear(4, 6, bias=bias != "none"), 3, 0)
    if bias == "shared":
        layer._parameters["bias"] = layer.bias[0].clone()
    x = torch.randn(3, 2, 5, 4, generator=generator(1)).requires_grad_()
    leaves = [x] + [p.requires_grad_() for p in layer._parameters.values() if p is not None]
    weights = torch.randn(3, 2, 5, 6, generator=generator(2))
    y = torch.einsum("kbti,koi->kbto", x, layer.weight)
    if bias != "none":
        y = y + (layer.bias[:, None, None] if bias == "stacked" else layer.bias)
    torch.testing.assert_close(layer(x), y)
    ours, wanted = (torch.autograd.grad(out, leaves, weights, retain_graph=True) for out in (layer(x), y))
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b)
    assert ours[1].stride() == layer.weight.stride()  # what _StackedLinear is for
