"""Experiments are values: validated in words, hashed stably."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.engine.checks import check_experiment


@pytest.mark.parametrize(
    "values, message",
    [
        ({"roundz": 3}, "unknown key 'roundz'; did you mean 'rounds'?"),
        ({"rounds": "3"}, "rounds = '3': expected int, got str"),
        ({"rounds": True}, "rounds = True: expected int"),
        ({"rounds": 0}, "rounds = 0 must be at least 1"),
        ({"lr": float("nan")}, "lr = nan: expected a finite number"),
        ({"partition": "dirichlett"}, "did you mean 'dirichlet'?"),
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


@pytest.mark.parametrize(
    "values, message",
    [
        ({"method": "refl"}, "method = 'refl' is unknown; did you mean 'reefl'?"),
        ({"options": {"zetta": 0.3}}, "options of reefl: unknown key 'zetta'; did you mean 'zeta'?"),
        ({"options": {"distill": "bets"}}, "did you mean 'best'?"),
        ({"options": {"ree_heads": 7}}, "ree_heads = 7 does not divide ree_width = 16"),
        ({"num_exits": 5}, "num_exits = 5 does not divide 12 blocks; allowed: [1, 2, 3, 4, 6, 12]"),
        ({"exit_blocks": [2, 5, 8, 12]}, "deit_micro has blocks 0..11"),
        ({"finetune": "lorra"}, "finetune = 'lorra' is unknown; did you mean 'lora'?"),
        ({"finetune_options": {"rank": 4}}, "unknown key 'rank' for lora"),
        ({"finetune": "pa", "finetune_options": {"r": 0}}, "r = 0 is not possible; allowed: 1..64"),
        ({"backbone": "deit_smal_patch16_224"}, "did you mean 'deit_small_patch16_224'?"),
        ({"backbone": "vit_base_patch16_siglip_224"}, "has no class token"),
        ({"backbone": "resnet34"}, "is not a VisionTransformer"),
        ({"finetune": "lily"}, "finetune = 'lily' with {}: peft says: it shares tensors between blocks"),
        ({"finetune": "vera"}, "does not support PeftType.VERA"),
        ({"method": "scalefl_vit", "finetune": "ia3"}, "cannot be cut in width; allowed: full"),
        ({"method": "scalefl_vit", "num_exits": 3}, "set options.widths for 3 exits"),
        ({"method": "inclusivefl", "options": {"aggregation": "feddyn"}}, "needs momentum_distill = False"),
    ],
)
def test_impossible_combinations_are_refused_before_compute(values, message):
    with pytest.raises(ValueError) as error:
        check_experiment(Experiment.from_dict(values))
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
