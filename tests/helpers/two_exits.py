"""A batch of two exits, small enough for values worked out by hand."""

import math

import torch

from fedlib.methods.losses import Batch

LN2, LN3 = math.log(2), math.log(3)


def two_exits(held=((1.0,), (1.0,))):
    """One client, two examples (the second is padding), two classes; p = (1/2, 1/2) at exit 0, (3/4, 1/4) at exit 1."""
    logits = torch.zeros(2, 1, 2, 2)
    logits[1, 0, 0] = torch.tensor([LN3, 0.0])
    logits[:, 0, 1] = 100.0 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]])  # must not matter
    return Batch(logits, torch.tensor([[0, 1]]), torch.tensor([[1.0, 0.0]]), torch.tensor(held), t=1, rounds=1000)
