"""Switches of the process that a cohort under ``vmap`` needs: as they were, whichever thread leaves last."""

import threading

import torch

from fedlib_lab.zoo.members import unfused

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
