"""Experiments are values: validated in words, hashed stably."""

import json
import pathlib
from dataclasses import fields

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlib import Execution, Experiment
from fedlib.core.storage import read_json
from fedlib.core.validation import check_conditions
from fedlib.engine.checks import without_defaults
from fedlib_lab.runs.packed import listed
from tests.helpers.strategies import experiments
from tests.helpers.tracked import OUTPUTS


@pytest.mark.parametrize(
    "values, message",
    [
        ({"roundz": 3}, "unknown key 'roundz'; did you mean 'rounds'?"),
        ({"rounds": "3"}, "rounds = '3': expected int, got str"),
        ({"rounds": True}, "rounds = True: expected int"),
        ({"rounds": 0}, "rounds = 0 must be at least 1"),
        ({"lr": float("nan")}, "lr = nan: expected a finite number"),
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'?"),
        (
            {"budgets": "unifrom"},
            "budgets = 'unifrom' is not possible; did you mean 'uniform'? allowed: contiguous, maximum",
        ),
        ({"budgets": [0, "1"]}, "expected int, got str"),
        ({"budgets": 2}, "budgets = 2: expected a list"),
        ({"exit_head": "towerz"}, "exit_head = 'towerz' is not possible; did you mean 'towers'?"),
        ({"clients_per_round": 200}, "clients_per_round = 200 exceeds num_clients = 100"),
        ({"min_lr": 1.0}, "min_lr = 1.0 exceeds lr"),
        ({"exit_blocks": [5, 2, 8, 11]}, "exit_blocks = [5, 2, 8, 11] must be 4 increasing"),
        ({"options": 3}, "options = 3: expected a mapping"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises(ValueError) as error:
        Experiment.from_dict(values)
    assert message in str(error.value)


def test_hash_covers_every_choice_and_ignores_spelling():
    e = Experiment()
    assert e.hash == Experiment(lr=0.05, rounds=100).hash  # the defaults, written out
    assert e.hash != e.replace(seed=2).hash
    assert e.replace(options={"zeta": 0.1}).hash != e.hash
    assert Experiment.from_dict(e.to_dict()) == e


def test_hashes_of_stored_runs_stay():
    """A changed default would silently rename (or worse, re-use) stored runs."""
    assert Experiment().hash == "44136fa3"  # sha256 of "{}": nothing differs from the defaults
    assert Experiment(method="depthfl", rounds=10, lr=0.1).identity() == {"method": "depthfl", "rounds": 10, "lr": 0.1}


@given(st.text(min_size=1, max_size=300))
def test_slug_is_a_safe_folder_name(name):
    slug = Experiment(dataset=name).slug
    assert "/" not in slug and "\0" not in slug and slug not in (".", "..") and len(slug) < 100


def test_options_do_not_change():
    import copy
    import pickle

    e = Experiment(options={"mu": 1, "rates": [1, 2]})
    for change in (
        lambda o: o.update(mu=2), lambda o: o.__setitem__("mu", 2), lambda o: o.pop("mu"), lambda o: o.clear(),
        lambda o: o.__delitem__("mu"), lambda o: o.setdefault("nu", 1), lambda o: o.popitem(), lambda o: o.__ior__({}),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="does not change; make another: e.replace"):
            change(e.options)
    for other in (pickle.loads(pickle.dumps(e)), copy.deepcopy(e), e.replace(), Experiment.from_dict(e.to_dict())):
        assert other == e and other.hash == e.hash and other.options == {"mu": 1, "rates": (1, 2)}
    given = {"mu": 1}
    e = Experiment(options=given)
    given["mu"] = 2
    assert e.options == {"mu": 1}


STORED = [path / "experiment.json" for path in listed(OUTPUTS / "runs", "*", "experiment.json")]


@pytest.mark.parametrize(
    "values, message",
    [
        ({"momentum": 1.0}, "experiment: momentum = 1.0 must be at least 0 and below 1"),
        ({"crop_scale": 1.5}, "crop_scale = 1.5 must be above 0 and at most 1"),
        ({"crop_pad": -1}, "crop_pad = -1 must be at least 0"),
        ({"clip_value": 0}, "clip_value = 0.0 must be above 0"),
        ({"seed": -1}, "seed = -1 must be at least 0"),
        ({"exit_blocks": [-1, 2, 5, 8]}, "exit_blocks = -1 must be at least 0"),
        ({"num_train": 0}, "num_train = 0 must be at least 1"),
        ({"rounds": np.float64(3)}, "rounds = 3.0: expected int"),
        ({"roundz": 3}, "experiment: unknown key 'roundz'; did you mean 'rounds'?"),
    ],
)
def test_an_experiment_refuses_by_name_however_it_is_made(values, message):
    for make in (lambda: Experiment(**values), lambda: Experiment.from_dict(values), lambda: Experiment().replace(**values)):  # fmt: skip
        with pytest.raises(ValueError) as error:
            make()
        assert message in str(error.value)


def test_numpy_values_and_paths_are_taken_as_what_they_mean():
    plain = Experiment(rounds=3, lr=0.5, exit_blocks=(2, 5, 8, 11), pretrained=False, options={"zeta": 0.25})
    given = Experiment(
        rounds=np.int64(3), lr=np.float32(0.5), exit_blocks=np.array([2, 5, 8, 11]), pretrained=np.False_,
        options={"zeta": np.float64(0.25)},
    )  # fmt: skip
    assert given == plain and given.hash == plain.hash and type(given.rounds) is int
    assert Experiment(dataset=pathlib.Path("/data/digits")).dataset == "/data/digits"
    assert Experiment(dataset=pathlib.Path("mnist")).dataset == "./mnist"  # a folder, not the set of that name
    assert Experiment("depthfl", {"zeta": 0.1}) == Experiment(method="depthfl", options={"zeta": 0.1})


def test_every_field_is_documented():
    for cls in (Experiment, Execution):
        documented = cls.__doc__.replace(",", " ").split()
        assert {f.name for f in fields(cls)} <= set(documented), cls


@pytest.mark.skipif(not STORED, reason="no stored runs")
def test_stored_runs_keep_their_names_and_stay_possible():
    for file in STORED:
        e = Experiment.from_dict(read_json(file)["experiment"])
        assert file.parent.name in (e.slug, e.former_slug)
        without_defaults(e)  # its method can still be built
        check_conditions(e, "experiment")


def test_new_partitions_and_test_sets_rename_no_run():
    assert Experiment().identity() == {} and "test_split" not in Experiment(partition="dealt").identity()


@settings(deadline=None, max_examples=200)
@given(experiments)
def test_an_experiment_survives_dict_json_and_yaml(values):
    e = Experiment.from_dict(values)
    assert Experiment.from_dict(e.to_dict()) == e == Experiment.from_dict(json.loads(json.dumps(e.to_dict())))
    assert Experiment.from_dict(yaml.safe_load(yaml.safe_dump(e.to_dict()))).hash == e.hash
    assert Experiment.from_dict(e.identity()) == e and e.replace() == e
    assert "/" not in e.slug and len(e.slug.encode()) < 100 and e.slug.isascii() and e.slug.endswith(e.hash)


def test_a_curve_is_there_by_default():
    """A look every twentieth of the rounds, but not more often than every fifth round; 0 asks for none."""
    assert [Experiment(rounds=r).looks_every for r in (1, 20, 100, 250, 1000)] == [5, 5, 5, 12, 50]
    assert [Experiment(evaluate_every=n).looks_every for n in (0, 7)] == [0, 7]
    e = Experiment()
    assert e.former_slug == Experiment(evaluate_every=0).former_slug == e.slug  # what had no curve had no other name
