"""What a run tells while it goes on: rounds to a function, early stopping, trackers; none of it is identity."""

import sys
import types

import pytest
import torch
from accelerate.utils import LoggerType

from fedlib import Experiment, extend, run, run_all
from fedlib.core.storage import read_tensors, write_tensors
from fedlib_lab.runs.callbacks import Callback, EarlyStopping, KeepBest, Tracker
from fedlib_lab.runs.run_paths import run_path
from fedlib_lab.runs.store import find_run
from tests.helpers.stored import ONE, assert_nothing_left_over, assert_same, small, state

FIVE = small("reefl", rounds=5, evaluate_every=2)
CHOSEN = small("reefl", rounds=5, evaluate_on="validation", validation_fraction=0.3, num_train=100)


class Noted(Callback):
    """All that a run says, in order."""

    def __init__(self, stop=None):
        self.said, self.stop = [], stop

    def begin(self, e, t, metrics):
        self.said.append(("begin", t, [m["t"] for m in metrics]))

    def round(self, r):
        self.said.append((r.t, r.metrics is not None))
        return r.t == self.stop

    def end(self, run):
        self.said.append(run and run.summary["status"])


def test_a_run_tells_its_rounds_and_is_stored_as_without(tmp_path):
    run(FIVE, ONE, tmp_path / "alone", progress=False)
    noted, rounds = Noted(), []
    run(FIVE, ONE, tmp_path / "watched", progress=False, on_round=lambda r: rounds.append(r.t), callbacks=[noted])
    assert rounds == [1, 2, 3, 4, 5]
    every = [(1, False), (2, True), (3, False), (4, True), (5, True)]
    assert noted.said == [("begin", 0, []), *every, "finished"]
    assert_same(state(FIVE, tmp_path / "alone"), state(FIVE, tmp_path / "watched"))
    run(FIVE, ONE, tmp_path / "watched", progress=False, callbacks=[again := Noted()])
    assert not again.said  # read from the store


@pytest.mark.parametrize("stop", [2, 3])
def test_what_a_callback_stops_is_unfinished_and_goes_on_to_the_same_numbers(stop, tmp_path):
    """Also in a round that is not evaluated: its numbers are measured for who stopped it."""
    run(FIVE, ONE, tmp_path / "whole", progress=False)
    stopped = run(FIVE, ONE, tmp_path / "parts", progress=False, callbacks=[first := Noted(stop)])
    assert stopped.summary["status"] == "stopped" and stopped.summary["t"] == stop and 0 <= stopped.accuracy <= 100
    assert first.said[-1] == "stopped" and find_run(FIVE, tmp_path / "parts") is None
    rest = run(FIVE, ONE, tmp_path / "parts", progress=False, callbacks=[second := Noted()])
    assert second.said[:2] == [("begin", stop, [2]), (stop + 1, stop == 3)] and rest.summary["status"] == "finished"
    assert_same(state(FIVE, tmp_path / "whole"), state(FIVE, tmp_path / "parts"))
    assert_nothing_left_over(tmp_path)


class Vandal(Callback):
    """Changes all that it may and returns what counts as true."""

    def begin(self, e, t, metrics):
        for m in metrics:
            m["accuracy"], m["exits"][0] = 100.0, 100.0
        return "told"

    def round(self, r):
        assert not r.metrics or r.metrics["accuracy"] <= 100
        if r.metrics:
            r.metrics["accuracy"], r.metrics["exits"][0], r.metrics["personal"]["accuracy"] = 999.0, 999.0, 999.0
        for mapping in (r.losses, r.server.params, r.server.memory, r.memories):
            mapping.clear()
        return 1


def test_what_a_callback_changes_or_returns_changes_nothing_but_true(tmp_path):
    e = FIVE.replace(method="depthfl", test_split="like_train")
    run(e, ONE, tmp_path / "alone", progress=False)
    watched = tmp_path / "watched"
    run(e, ONE, watched, progress=False, callbacks=[Noted(2)])
    run(e, ONE, watched, progress=False, on_round=lambda r: Vandal().round(r), callbacks=[Vandal(), Vandal()])
    assert_same(state(e, tmp_path / "alone"), state(e, watched))


def test_a_callback_that_fails_ends_the_run_and_the_others_hear_of_it(tmp_path):
    noted = Noted()
    with pytest.raises(ZeroDivisionError):
        run(FIVE, ONE, tmp_path, progress=False, callbacks=[noted], on_round=lambda r: 1 / 0)
    assert noted.said[-2:] == [(1, False), None]
    assert run(FIVE, ONE, tmp_path, progress=False).summary["status"] == "finished"


def test_early_stopping_waits_for_patience_evaluations_without_a_better_one():
    """60, 61, 61, 60.5: the third and the fourth are not above 61; by a point, 61 is not above 60."""
    for least, patience, expected in ((0, 2, [None, False, False, True]), (1, 2, [None, False, True, True])):
        stopping = EarlyStopping(patience, least=least)
        assert not stopping.begin(CHOSEN, 0, [{"accuracy": 60.0}])
        found = [stopping._look({"accuracy": a}) for a in (61.0, 61.0, 60.5)]
        assert found == expected[1:]
        assert stopping.begin(CHOSEN, 4, [{"accuracy": a} for a in (60.0, 61.0, 61.0, 60.5)])


def test_early_stopping_of_a_run_stops_again_at_the_same_round(tmp_path):
    stopping = EarlyStopping(patience=1, least=100.0)  # nothing is better by a hundred points than the first
    first = run(CHOSEN, ONE, tmp_path, progress=False, callbacks=[stopping])
    again = run(CHOSEN, ONE, tmp_path, progress=False, callbacks=[stopping])
    assert [r.summary["t"] for r in (first, again)] == [2, 2]
    assert first.accuracy == again.accuracy and again.summary["status"] == "stopped"


@pytest.mark.parametrize(
    "changes, words, sentence",
    [
        ({"evaluate_on": "test"}, {}, "evaluate_on = 'test' would choose by test examples"),
        ({"evaluate_every": 0}, {}, "evaluate_every = 0 evaluates after the last round alone"),
    ],
)
def test_early_stopping_that_could_not_work_is_refused_before_any_compute(changes, words, sentence, tmp_path):
    with pytest.raises(ValueError, match=sentence):
        run(CHOSEN.replace(**changes), ONE, tmp_path, callbacks=[EarlyStopping(**words)])
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match="patience = 0"):
        EarlyStopping(patience=0)


def test_a_grid_tells_of_one_run_after_the_other(tmp_path):
    grid = [small("reefl", rounds=1, seed=s) for s in (1, 2)]
    run_all(grid, ONE, tmp_path, progress=False, callbacks=[noted := Noted()])
    assert noted.said == [("begin", 0, []), (1, True), "finished"] * 2


def test_tensorboard_s_event_files_hold_every_number_by_round(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    e = FIVE.replace(test_split="like_train")
    done = run(e, ONE, tmp_path / "runs", progress=False, callbacks=[Tracker("tensorboard", tmp_path / "events")])
    events = accumulator.EventAccumulator(str(tmp_path / "events" / e.slug)).Reload()
    read = {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert read["accuracy"] == [(m["t"], pytest.approx(m["accuracy"])) for m in done.metrics]
    assert read["exits/4"][-1] == (5, pytest.approx(done.summary["exits"][3]))
    assert read["personal/sd"][-1] == (5, pytest.approx(done.summary["personal"]["sd"]))
    assert [t for t, _ in read["train_loss"]] == [1, 2, 3, 4, 5] and not any("by_client" in tag for tag in read)


def test_mlflow_holds_fields_and_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow")
    mlflow.set_tracking_uri(uri := (tmp_path / "mlruns").as_uri())
    done = run(FIVE, ONE, tmp_path / "runs", progress=False, callbacks=[Tracker("mlflow", "mine")])
    client = mlflow.MlflowClient(uri)
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert found.info.run_name == FIVE.slug and found.info.status == "FINISHED"
    assert found.data.params["rounds"] == "5" and found.data.metrics["accuracy"] == done.accuracy
    assert [m.step for m in client.get_metric_history(found.info.run_id, "accuracy")] == [2, 4, 5]

    def fails(r):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(FIVE, ONE, tmp_path / "cut", progress=False, callbacks=[Tracker("mlflow", "cut")], on_round=fails)
    (cut,) = client.search_runs([client.get_experiment_by_name("cut").experiment_id])
    assert cut.info.status == "KILLED"


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_wandb_and_trackio_are_called_as_both_are(name, tmp_path, monkeypatch):
    """By a stand-in for the package: ``init`` gives a run that has ``log(numbers, step)`` and ``finish()``."""
    told = []
    log = lambda values, step=None, **_: told.append((step, values))  # noqa: E731
    config = types.SimpleNamespace(update=lambda values, **_: told.append(values))
    session = types.SimpleNamespace(log=log, config=config, finish=lambda: told.append("finish"))
    there = types.SimpleNamespace(init=lambda **options: told.append(options) or session, config=config)
    monkeypatch.setitem(sys.modules, name, there)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [*LoggerType])
    done = run(FIVE, ONE, tmp_path, progress=False, callbacks=[Tracker(name, "mine", group="g")])
    assert told[0] == {"project": "mine", "name": FIVE.slug, "group": "g"}
    assert told[1]["rounds"] == 5 and told[1]["exit_blocks"] == "null" and told[-1] == "finish"
    assert [step for step, _ in told[2:-1]] == [1, 2, 3, 4, 5] and told[-2][1]["accuracy"] == done.accuracy


def test_a_tracker_that_is_not_there_is_refused_before_any_compute(tmp_path, monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ImportError, match="Tracker: wandb needs a package: pip install wandb"):
        run(FIVE, ONE, tmp_path, callbacks=[Tracker("wandb")])
    with pytest.raises(ValueError, match="name = 'wandd' is not possible; did you mean 'wandb'"):
        Tracker("wandd")
    assert not list(tmp_path.iterdir())


def tiny(**changes):
    values = dict(
        method="depthfl", backbone="vit_digits", pretrained=False, finetune="full", augment="none", num_train=120,
        num_test=40, num_clients=4, clients_per_round=2, rounds=6, evaluate_every=1, test_split="like_train", lr=0.1,
    )  # fmt: skip
    return Experiment(**(values | changes))


def test_the_best_model_is_kept_beside_the_last_and_is_the_one_it_says(tmp_path):
    e = tiny(validation_fraction=0.3, evaluate_on="validation", lr=0.3)
    servers, stops = {}, KeepBest(folder=tmp_path)
    done = run(
        e, folder=tmp_path, callbacks=[stops], progress=False, on_round=lambda r: servers.update({r.t: r.server})
    )
    scores = {m["t"]: m["accuracy"] for m in done.metrics}
    tensors, said = read_tensors(done.path / "best.safetensors")
    best = max(scores, key=lambda t: (scores[t], -t))
    assert said["t"] == best and said["accuracy"] == scores[best] and done.accuracy == scores[6]
    assert all(torch.equal(tensors[f"params/{n}"], p) for n, p in servers[best].params.items())


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_that_goes_on_keeps_the_best_of_all_its_rounds(tmp_path, stop):
    e = tiny(validation_fraction=0.3, evaluate_on="validation", lr=0.3)
    whole = run(e, folder=tmp_path / "whole", callbacks=[KeepBest(folder=tmp_path / "whole")], progress=False)
    parts = tmp_path / "parts"
    run(e, folder=parts, callbacks=[KeepBest(folder=parts)], on_round=lambda r: r.t == stop, progress=False)
    again = run(e, folder=parts, callbacks=[KeepBest(folder=parts)], progress=False)
    assert again.metrics[-1]["accuracy"] == whole.metrics[-1]["accuracy"]
    files = [(folder / "best.safetensors") for folder in (whole.path, run_path(e, parts))]
    (a, told), (b, said) = map(read_tensors, files)
    assert said == told and all(torch.equal(a[n], b[n]) for n in a)


def test_the_best_model_is_of_the_training_that_is_stored(tmp_path):
    e = tiny(method="fedavg", validation_fraction=0.3, evaluate_on="validation", lr=0.3, schedule="constant")
    best = [KeepBest(folder=tmp_path)]
    done = run(e, folder=tmp_path, callbacks=best, progress=False)
    file = done.path / "best.safetensors"
    tensors, said = read_tensors(file)
    write_tensors(file, tensors, {"t": e.rounds, "accuracy": 101.0})  # an older training's was better
    run(e, folder=tmp_path, callbacks=best, progress=False, again=True)
    assert read_tensors(file)[1] == said
    write_tensors(file, tensors, {"t": e.rounds, "accuracy": 101.0})
    longer = extend(e, e.rounds + 2, tmp_path, callbacks=best, progress=False)
    assert read_tensors(longer.path / "best.safetensors")[1]["accuracy"] == 101.0  # of all rounds, these too
    run(e, folder=tmp_path, progress=False, again=True)
    assert not file.exists()


@pytest.mark.parametrize("kind", [KeepBest, EarlyStopping])
def test_no_model_is_chosen_by_test_examples(tmp_path, kind):
    with pytest.raises(ValueError, match=f"{kind.__name__}: evaluate_on = 'test' would choose by test examples"):
        run(tiny(), folder=tmp_path, callbacks=[kind()], progress=False)
