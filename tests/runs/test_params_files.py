"""Data sets that stand in for others, profile by profile."""

import math
import shutil

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedlib import Experiment
from fedlib.core.paths import params_dir
from fedlib_lab.runs.params import load_grid
from fedlib_lab.runs.params_files import SIZES, load_profile, load_yaml, merge
from tests.helpers.strategies import experiments, scalar


def test_a_stand_in_counts_at_its_profile_only():
    of = {p: {c.column: c.experiment for c in load_grid("reefl", "table1", p, {"columns": ["femnist", "speech_commands"]})}
          for p in ("paper", "small", "smoke", "demo")}  # fmt: skip
    assert {p: (x["femnist"].dataset, x["speech_commands"].dataset) for p, x in of.items()} == {
        "paper": ("femnist", "speech_commands"), "small": ("omniglot", "fsdd"), "smoke": ("omniglot", "fsdd"),
        "demo": ("mnist", "mnist"),
    }  # fmt: skip
    e = of["small"]["speech_commands"]
    assert (e.partition, e.num_clients, e.num_train, e.rounds, e.augment) == ("natural_split", 60, None, 100, "none")
    assert of["paper"]["femnist"].partition == "natural" and of["paper"]["femnist"].num_clients == 381
    # whoever names a data set gets the profile's partition of it, not the stand-in's
    own = load_grid("reefl", "table1", "small", {"columns": ["femnist"], "dataset": "mnist", "num_train": 4000})
    assert {(c.experiment.partition, c.experiment.num_clients) for c in own} == {("dirichlet", 100)}


class Quoted(yaml.SafeDumper):
    """Text in quotes: PyYAML writes YAML 1.1, where 0E0 is text without them; a params file is YAML 1.2."""


Quoted.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


@settings(deadline=None, max_examples=100)
@given(experiments)
@example({"method": "0E0"})
def test_a_params_file_reads_back_as_written(values):
    import tempfile
    from pathlib import Path

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "e.yaml"
        file.write_text(yaml.dump(values, Dumper=Quoted, allow_unicode=False))
        assert Experiment.from_dict(load_yaml(file)) == Experiment.from_dict(values)


layers = st.lists(
    st.fixed_dictionaries(
        {}, optional={"lr": scalar, "rounds": scalar, "options": st.dictionaries(st.sampled_from("xyz"), st.integers())}
    )
)


@given(layers, st.integers(0, 9))
def test_merging_layers_is_associative_and_later_wins(given_layers, cut):
    out = merge(*given_layers)
    assert merge(merge(*given_layers[:cut]), merge(*given_layers[cut:])) == out == merge({}, *given_layers, {})
    for key in out:
        last = [layer[key] for layer in given_layers if key in layer][-1]
        assert all(out[key][k] == v for k, v in last.items()) if isinstance(last, dict) else out[key] == last
    assert set(out) == set().union(*given_layers)


def test_layers_in_order_and_options_key_by_key():
    assert merge({"lr": 1, "options": {"a": 1, "b": 2}}, {"lr": 2}, {"options": {"b": 3}}) == {
        "lr": 2, "options": {"a": 1, "b": 3},
    }  # fmt: skip


def test_yaml_builds_no_objects(tmp_path):
    file = tmp_path / "evil.yaml"
    file.write_text("a: !!python/object/apply:os.system ['true']\n")
    with pytest.raises(ValueError, match="not plain YAML"):
        load_yaml(file)
    file.write_text("- 1\n")
    with pytest.raises(ValueError, match="expected a mapping"):
        load_yaml(file)


def test_general_profiles_hold_sizes_and_a_papers_profiles_its_backbone_and_data():
    for profile in ("smoke", "demo", "small", "paper"):
        assert set(load_profile(profile)) <= SIZES
        choices = set(load_profile(profile, "reefl")) - SIZES
        assert choices <= {"dataset", "partition", "augment", "crop_pad", "backbone", "fallback"}
    assert load_profile("small", "reefl")["dataset"] == "cifar10"
    assert load_profile("small", "extensions") == load_profile("small", "reefl")  # it extends ReeFL's


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the params to change."""
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    return tmp_path / "params"


@pytest.mark.parametrize(
    "file, text, message",
    [
        ("profiles/smoke.yaml", "rouns: 3", "smoke.yaml: unknown key 'rouns'; did you mean 'rounds'?"),
        ("profiles/smoke.yaml", "backbone: deit_micro", "smoke.yaml: unknown key 'backbone'"),  # the paper's to say
        ("reefl/profiles/smoke.yaml", "backbon: deit_micro", "smoke.yaml: unknown key 'backbon'; did you mean 'backbone'?"),
        ("reefl/profiles/smal.yaml", "rounds: 3", "smal.yaml: no profile has this name; did you mean 'small'?"),
        ("reefl/methods.yaml", "depthfll: {lr: 0.1}", "methods.yaml: unknown method 'depthfll'; did you mean 'depthfl'?"),
        ("reefl/base.yaml", "extends: extensions", "papers extend each other in a circle"),
        ("reefl/base.yaml", "extends: refl", "paper = 'refl' is unknown; did you mean 'reefl'?"),
    ],
)  # fmt: skip
def test_every_file_is_checked(project, file, text, message):
    (project / file).write_text(text + "\n")
    with pytest.raises(ValueError) as error:
        load_grid("reefl", "table1", "smoke")
    assert message in str(error.value)


def test_scalars_are_those_of_yaml_1_2(tmp_path):
    said = {
        "010": 10, "-7": -7, "0o17": 15, "0x1F": 31, "1e-3": 0.001, "-1.5E+2": -150.0, ".5": 0.5, "3.": 3.0, "+12": 12,
        "1:30": "1:30", "1_000": "1_000", "2026-10-01": "2026-10-01", "on": "on", "no": "no", "true": True,
        "False": False, "~": None, "null": None, "": None, ".inf": math.inf, "1e": "1e", "e3": "e3", "'010'": "010",
    }  # fmt: skip
    (tmp_path / "a.yaml").write_text("".join(f"k{i}: {text}\n" for i, text in enumerate(said)))
    found = load_yaml(tmp_path / "a.yaml")
    assert [(type(v), v) for v in found.values()] == [(type(v), v) for v in said.values()]


@pytest.mark.parametrize("path", sorted(params_dir().rglob("*.yaml")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_the_kits_own_files_mean_the_same_in_both_versions(path):
    """Stored runs were named from files that were read as YAML 1.1."""
    assert load_yaml(path) == (yaml.safe_load(path.read_text(encoding="utf-8")) or {})
