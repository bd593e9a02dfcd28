"""The schemas are those of what is stored and written: every file validates, and a misspelt key does not."""

import json

import pytest

from fedlib import Experiment
from fedlib.core.paths import params_dir, root
from fedlib_lab.runs.packed import runs_in
from fedlib_lab.runs.params_files import NO_GRIDS, load_yaml, papers
from fedlib_lab.runs.schema import schemas

jsonschema = pytest.importorskip("jsonschema")
SCHEMAS = schemas("params") | schemas("experiment")
VALIDATORS = {name: jsonschema.Draft202012Validator(schema) for name, schema in SCHEMAS.items()}


def kind_of(path):
    inside = path.relative_to(params_dir()).parts
    if "profiles" in inside:
        return "sizes" if len(inside) == 2 else "profile"
    return path.stem if path.stem in ("base", "methods", "columns") else "table"


def files():
    found = [*params_dir().glob("profiles/*.yaml"), *(p for x in papers() for p in (params_dir() / x).rglob("*.yaml"))]
    return sorted(p for p in found if p.stem not in NO_GRIDS - {"base", "methods", "columns"})


def test_schemas_are_schemas():
    assert len({json.dumps(schema["$defs"]) for name, schema in SCHEMAS.items() if name != "experiment"}) == 1
    for name in ("experiment", "table"):
        jsonschema.Draft202012Validator.check_schema(json.loads(json.dumps(SCHEMAS[name])))


def test_every_file_of_params_validates_and_a_misspelt_key_does_not():
    paths = files()
    assert {kind_of(p) for p in paths} == SCHEMAS.keys() - {"experiment"} and len(paths) > 60
    for path in paths:
        validator, content = VALIDATORS[kind_of(path)], load_yaml(path)
        errors = [f"{list(e.absolute_path)}: {e.message[:200]}" for e in validator.iter_errors(content)]
        assert not errors, f"{path}: {errors}"
    misspelt = {kind_of(p): load_yaml(p) | {"roundz": 3} for p in paths}
    assert not [kind for kind, content in misspelt.items() if VALIDATORS[kind].is_valid(content)]
    assert not VALIDATORS["columns"].is_valid({"cifar10": {"roundz": 3}})
    assert not VALIDATORS["table"].is_valid({"variants": {"a": {"method": "reefl", "options": {"zetta": 0.2}}}})


def test_every_stored_run_validates():
    """Of runs that differ in the seed alone, one is looked at."""
    stored = {}
    for pack in (root() / "outputs/runs").glob("*.runs.jsonl"):
        for name, texts in runs_in(str(pack)).items():
            e = json.loads(texts["experiment.json"])["experiment"]
            stored[json.dumps(e | {"seed": 1}, sort_keys=True)] = name, e
    assert len(stored) > 300
    for name, e in stored.values():
        errors = [f"{list(x.absolute_path)}: {x.message[:200]}" for x in VALIDATORS["experiment"].iter_errors(e)]
        assert not errors, f"{name}: {errors}"


@pytest.mark.parametrize(
    "changes",
    [{"roundz": 3}, {"rounds": 0}, {"lr": -0.1}, {"partition": "iidd"}, {"method": "refl"}, {"options": {"zetta": 1}},
     {"options": {"zeta": "much"}}, {"exit_blocks": [-1]}, {"clip_value": 0}],
)  # fmt: skip
def test_what_the_kit_refuses_the_schema_refuses(changes):
    good = Experiment().to_dict()
    assert VALIDATORS["experiment"].is_valid(good) and not VALIDATORS["experiment"].is_valid(good | changes)


def test_a_field_says_what_it_means_and_its_default():
    properties = SCHEMAS["experiment"]["$defs"]["fields"]["properties"]
    assert properties["lr"]["default"] == 0.05 and properties["lr"]["exclusiveMinimum"] == 0
    assert properties["milestones"]["description"] == "rounds, or below 1 shares of all rounds; schedule = step"
    assert properties["decay"]["description"] == properties["decay_every"]["description"] != ""


def test_an_unknown_word_is_refused():
    with pytest.raises(ValueError, match="did you mean 'params'"):
        schemas("param")
