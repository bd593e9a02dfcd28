"""How long a run will take, as coarsely as it is known."""

import pytest

from fedlib import Execution, Experiment, run
from fedlib_lab.runs import durations
from fedlib_lab.runs.durations import Pace, about, describe, each_seconds
from fedlib_lab.runs.prices import training_macs
from fedlib_lab.runs.store import stored_pace
from tests.helpers.stored import ONE, short

SMALL = dict(num_train=60, num_test=10, num_clients=6, clients_per_round=3, rounds=2, evaluate_every=0)


def tiny(**changes):
    return short("reefl", **(SMALL | changes))


def test_durations_are_said_as_coarsely_as_they_are_known():
    said = {10: "under a minute", 60: "about 1 minute", 150: "about 2 minutes", 5000: "about 83 minutes",
            7200: "about 2 hours", 40 * 3600: "about 40 hours", 1e7: "about 116 days"}  # fmt: skip
    assert {s: about(s) for s in said} == said


def test_rounds_take_as_long_as_those_of_the_most_similar_run():
    pace, e = Pace(), Experiment(method="reefl", finetune="lora", num_train=1000, num_clients=10)
    assert pace.seconds_a_round(e) is None
    pace.add(e.replace(method="depthfl", finetune="frozen"), 10, 10)  # 1 s a round
    assert pace.seconds_a_round(e) == 1
    pace.add(e.replace(method="depthfl", seed=2), 20, 10)  # the same mode is more alike than the same method
    assert pace.seconds_a_round(e) == 2
    assert pace.seconds_a_round(e.replace(clients_per_round=5, num_train=3000)) == 2 * 0.5 * 3
    pace.add(e, 3, 1)
    pace.add(e, 5, 1)
    assert pace.seconds_a_round(e) == 4
    assert pace.seconds_a_round(e.replace(backbone="vim_micro", pretrained=False)) is None


def test_a_grid_is_priced_in_minutes_of_this_machine(monkeypatch):
    e = Experiment(num_train=1000, rounds=60)
    pace = Pace()
    pace.add(e, 30, 10)
    assert (
        describe([e, e.replace(seed=2)], [e.replace(seed=2)], pace)
        == "2 runs, 1 to do: about 3 minutes on this machine"
    )
    # unknown backbone: MACs over a timed rate, on each of two workers; long ones also in hours of a GPU
    other = e.replace(backbone="vit_digits", pretrained=False, finetune="frozen")
    monkeypatch.setattr(durations, "timed_macs_per_second", lambda *_: training_macs(other) / 100)
    assert each_seconds([other], pace, Execution(workers=2)) == [pytest.approx(50)]
    monkeypatch.setattr(durations, "timed_macs_per_second", lambda *_: training_macs(other) / 3e6)
    text = describe([other], [other], pace, Execution(workers=1))
    assert text.startswith("1 runs, 1 to do: about 35 days on this machine, or ") and "hours of a GPU" in text


def test_only_runs_of_this_machine_tell_its_pace(tmp_path):
    e = tiny()
    found = run(e, ONE, tmp_path, progress=False)
    assert stored_pace([found], ONE).seen == {e: (found.summary["seconds"], 2)}
    assert stored_pace([found], Execution(workers=2)).seen == {e: (found.summary["seconds"] / 2, 2)}
    found.record["provenance"]["device"] = "another"
    assert stored_pace([found], ONE).seen == {}
