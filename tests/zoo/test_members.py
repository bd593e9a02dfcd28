"""Layers that know of one model, run for a cohort's members, and the switches of the process that ``vmap`` needs."""

import threading

import pytest
import torch
from torch import nn

from fedlib_lab.zoo.members import MemberNorm, unfused

SWITCHES = (
    torch.backends.mha.get_fastpath_enabled,
    torch.backends.cuda.flash_sdp_enabled,
    torch.backends.cuda.mem_efficient_sdp_enabled,
    torch.backends.cuda.math_sdp_enabled,
)


def test_no_switch_of_the_process_outlives_two_threads_that_overlap():
    before, inside = [ask() for ask in SWITCHES], []
    entered, first_left = threading.Event(), threading.Event()

    def second():
        with unfused("cpu"):
            entered.set()
            first_left.wait(10)
            inside.append([ask() for ask in SWITCHES])

    other = threading.Thread(target=second)
    with unfused("cpu"):
        other.start()
        entered.wait(10)
    first_left.set()
    other.join()
    assert inside == [[False, False, False, True]] and [ask() for ask in SWITCHES] == before != inside[0]
    with unfused("cuda"):
        assert [ask() for ask in SWITCHES] == [False, *before[1:]]
    try:
        with unfused("cpu"):
            raise KeyError
    except KeyError:
        assert [ask() for ask in SWITCHES] == before


def lying(x):
    """``x`` as its layers may leave it: as it is, channels last, or so with a stride of its own where there is one map."""
    last = x.flatten(2).mT.contiguous().flatten()
    own = torch.as_strided(last, x.flatten(2).shape, (x.shape[1], 1, x.shape[1])).view(x.shape) if len(x) == 1 else x
    return x.clone(), x.clone(memory_format=torch.channels_last) if x.dim() == 4 else x, own


@pytest.mark.parametrize("shape", [(1, 8, 4, 4), (2, 8, 4, 4), (1, 8, 16), (2, 8, 16), (3, 8)])
def test_a_batch_norm_learns_the_same_however_maps_and_gradients_lie(shape):
    """A client's last batch of one image learned something else, 0.4 for 1e-8, where a unit ends in the norm."""
    torch.manual_seed(0)
    norm = {4: nn.BatchNorm2d, 3: nn.BatchNorm1d, 2: nn.BatchNorm1d}[len(shape)](8)
    nn.init.uniform_(norm.weight)
    whole, grad = torch.randn(shape), torch.randn(shape)
    x = whole.double().requires_grad_()
    exact = norm.double()(x)
    wanted = torch.autograd.grad(exact, (x, norm.weight, norm.bias), grad.double())
    mine = MemberNorm(norm.float())
    for one in lying(whole) if len(shape) == 4 else (whole,):
        for g in lying(grad) if len(shape) == 4 else (grad,):
            x = one.detach().requires_grad_()
            y = mine(x)
            torch.testing.assert_close(y, exact.float(), rtol=1e-4, atol=1e-5)
            got = torch.autograd.grad(y, (x, mine.weight, mine.bias), g)
            for a, b in zip(got, wanted, strict=True):
                torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-4)
