"""Tokens read and exchanged against PyTorch's own indexing."""

import pytest
import torch

from fedlib.layers.tokens import put_token, take_token


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("at", [0, 2, 4])
@pytest.mark.parametrize("reads", ["token", "rest", "both"])
def test_taking_and_putting_a_token_has_autograds_gradients(at, reads):
    z = torch.randn(2, 3, 5, 4, generator=generator()).requires_grad_()
    w = torch.randn(2, 3, 5, 4, generator=generator(1))

    def loss(token, on, put):
        on = put(on, token * token)
        return (reads != "rest") * (token * w[:, :, 0]).sum() + (reads != "token") * (on * w).sum()

    def by_indexing(on, new):
        return torch.cat((on[..., :at, :], new.unsqueeze(-2), on[..., at + 1 :, :]), -2)

    ours = loss(*take_token(z, at), lambda on, new: put_token(on, new, at))
    expected = loss(z[..., at, :], z, by_indexing)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(*(torch.autograd.grad(x, z)[0] for x in (ours, expected)))


def test_only_what_is_used_has_a_part_in_the_gradient():
    z = torch.randn(2, 3, 5, 4, generator=generator()).requires_grad_()
    token, on = take_token(z, 1)
    (of_token,) = torch.autograd.grad(token.sum(), z, retain_graph=True)
    assert of_token[..., 1, :].eq(1).all() and of_token.sum() == 2 * 3 * 4
    (of_rest,) = torch.autograd.grad(on.sum(), z)
    assert of_rest.eq(1).all()
    assert torch.equal(put_token(z, token.detach() + 1, 1)[..., 1, :], z[..., 1, :] + 1) and z.is_leaf
