"""One token of every sequence, read or exchanged, without gradients the size of all tokens full of zeros."""

import torch
from torch.autograd.function import once_differentiable


def take_token(z: torch.Tensor, at: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ``at`` of z (K, B, T, d), which is (K, B, d), and z to go on with."""
    return _Take.apply(z, at) if z.requires_grad and torch.is_grad_enabled() else (z[..., at, :], z)


def put_token(z: torch.Tensor, token: torch.Tensor, at: int) -> torch.Tensor:
    """Return a copy of z (K, B, T, d) with ``token`` (K, B, d) at ``at``."""
    return _Put.apply(z, token, at)


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, at):
        ctx.at, ctx.shape = at, z.shape
        ctx.set_materialize_grads(False)
        return z[..., at, :].clone(), z.view_as(z)

    @staticmethod
    @once_differentiable
    def backward(ctx, by_token, by_z):
        if by_token is None:
            return by_z, None
        out = by_token.new_zeros(ctx.shape) if by_z is None else by_z.clone()
        out[..., ctx.at, :] += by_token
        return out, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z, token, at):
        ctx.at = at
        out = z.clone(memory_format=torch.contiguous_format)
        out[..., at, :] = token
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        by_z = None
        if ctx.needs_input_grad[0]:
            by_z = grad.clone()
            by_z[..., ctx.at, :] = 0
        return by_z, grad[..., ctx.at, :], None
