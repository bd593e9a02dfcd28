"""Memory and seconds of a staged training, measured."""

import gc

import pytest
import torch

from fedlib_lab.papers.fedepth.training_memory import memory_of_stages, peaks_mib, seconds_of_stages


def peak_mib(work):
    return peaks_mib([work])[0]


def test_a_peak_by_hand():
    def work():
        a = torch.zeros(2**18)  # 1 MiB
        b = torch.zeros(2**19)  # 2 MiB: 3 at once
        del a
        return torch.zeros(2**17) + b.sum()

    assert peak_mib(work) == pytest.approx(3.0, abs=0.1)
    stays = []
    works = [lambda: stays.append(torch.zeros(2**18)), lambda: torch.zeros(2**19), lambda: stays.clear()]
    assert peaks_mib(works) == pytest.approx([1.0, 3.0, 1.0], abs=0.1)


def test_what_one_operator_needs_for_a_moment_counts():
    x = torch.zeros(2**9, 2**9).T  # 1 MiB

    def work():
        return (x.contiguous() + 1).sum()  # the copy, and the sum beside it

    def inverse():
        return torch.linalg.inv(torch.eye(2**9))  # what it returns, and a copy that it works in

    assert peak_mib(work) == pytest.approx(2.0, abs=0.1)
    assert peak_mib(inverse) > 2.5


def test_what_earlier_work_left_behind_is_not_counted_as_released():
    def leaves():
        ring = [torch.zeros(2**18)]
        ring.append(ring)  # only a collection lets it go

    def work():
        gc.collect()
        return torch.zeros(2**19)

    assert [peak_mib(w) for w in (leaves, work)] == pytest.approx([1.0, 2.0], abs=0.1)


def test_a_staged_client_holds_less_than_the_whole_net(measured):
    """Of 64 examples in steps of 16: a third of the whole net's peak in every stage, where the share is a sixth."""
    poor, whole = measured[measured.r == "0.167"], measured[measured.r == "all"].iloc[0]
    assert poor.blocks.tolist() == ["1", "2", "3", "4", "5-6", "7-9"] and whole.blocks == "1-9"
    assert (poor.measured_mib < 0.35 * whole.measured_mib).all() and (poor.measured_mib > 4).all()
    assert (poor.kept_mib == 0).all()  # z of 64 examples is 4 MiB; a sixth of the estimate at batch 16 is 9.7
    assert poor.budget_mib.tolist() == pytest.approx([whole.measured_mib / 6] * 6)
    assert measured[measured.r == "1"].measured_mib.item() == pytest.approx(whole.measured_mib, rel=1e-6)


def test_a_measurement_is_the_same_whatever_was_measured_before(small_net):
    e = small_net.replace(num_train=16, num_clients=1)
    first, again = (memory_of_stages(e).measured_mib.tolist() for _ in range(2))
    assert first == again


def test_what_is_kept_is_measured_with_the_stage(small_net):
    """Of 8 examples z is kept: 8/16 MiB beside blocks 2 to 4, 8/32 later; the chain holds two of them at a time."""
    e = small_net.replace(num_train=8, num_clients=1)
    kept, anew = (memory_of_stages(e.replace(options={**e.options, "buffered": b})).head(6) for b in (True, False))
    assert kept.kept_mib.tolist() == [0, 0.5, 0.5, 0.5, 0.25, 0.25] and not anew.kept_mib.any()
    assert ((kept.estimate_mib - anew.estimate_mib).round(6) == kept.kept_mib).all()
    assert kept.measured_mib[1] - anew.measured_mib[1] > 0.4 * 0.5
    assert kept.measured_mib[0] == pytest.approx(anew.measured_mib[0], abs=0.3)


def test_stages_are_timed_against_the_whole_net(small_net):
    e = small_net.replace(num_clients=1, clients_per_round=1, num_train=32, num_test=10, partition="iid",
                          augment="none", options={"scenario": "fair"})  # fmt: skip
    stages, staged, once = seconds_of_stages(e, 1 / 3, 1)
    assert stages == 3 and 0.2 * once < staged < 6 * once  # what a busy machine leaves of 1.2
