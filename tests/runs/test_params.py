"""Layered params: later wins, unknown keys are errors, tables resolve to the paper's experiments."""

import itertools
import shutil

import pytest

from fedlib import Experiment
from fedlib.core.paths import params_dir
from fedlib.core.storage import read_json
from fedlib_lab.report.tables import load_cells, load_reported
from fedlib_lab.runs.packed import listed
from fedlib_lab.runs.params import load_experiment, load_grid, load_spec, recipe, recipe_cell
from fedlib_lab.runs.params_files import grids, load_profile, papers, profiles
from fedlib_lab.runs.store import run_path
from tests.helpers.tracked import OUTPUTS


def test_table1_at_paper_size_is_the_papers_setting():
    cells = load_grid("reefl", "table1", "paper")
    assert len(cells) == 6 * 5 * 5 * 3 and len({c.experiment.hash for c in cells}) == len(cells)
    by = {(c.finetune, c.method, c.column): c.experiment for c in cells if c.seed == 1}
    e = by["lora", "depthfl", "cifar100_alpha0.1"]
    assert (e.lr, e.min_lr, e.weight_decay, e.rounds, e.num_clients) == (0.1, 0.01, 0.001, 1000, 100)
    assert e.dirichlet_alpha == 0.1 and e.backbone == "deit_small_patch16_224.fb_in1k" and e.dataset == "cifar100"
    f = by["full", "reefl", "femnist"]
    assert (f.num_clients, f.clients_per_round, f.partition, f.augment, f.lr) == (381, 38, "natural", "rrc", 0.05)


def test_profiles_only_shrink():
    smoke, small = load_grid("reefl", "table1", "smoke"), load_grid("reefl", "table1", "small")
    assert len(smoke) == 10 and len(small) == 210
    assert {c.experiment.backbone for c in smoke + small} == {"deit_micro"}
    assert {c.experiment.lr for c in small if c.method == "depthfl"} == {0.1}  # the method's setting stays


def test_overrides_win_and_choose_cells():
    cells = load_grid(
        "reefl", "table1", "smoke", {"rounds": 7, "method": "reefl", "seeds": [4, 5], "options": {"zeta": 0.5}}
    )
    assert {(c.method, c.seed, c.experiment.rounds) for c in cells} == {("reefl", 4, 7), ("reefl", 5, 7)}
    assert cells[0].experiment.options == {"zeta": 0.5}


def test_a_profile_may_keep_fewer_variants_and_seeds_of_a_column():
    of = lambda cells: {(c.column, c.variant, c.seed) for c in cells if c.column == "cifar10_alpha0.1"}  # noqa: E731
    small = of(load_grid("cafedistill", "table1", "small"))
    assert {seed for *_, seed in small} == {1} and "cafedistill" in {v for _, v, _ in small}
    assert "fedamp" not in {v for _, v, _ in small}
    asked = of(load_grid("cafedistill", "table1", "small", {"seeds": [2], "variant": ["fedamp"]}))  # overrides win
    assert asked == {("cifar10_alpha0.1", "fedamp", 2)}
    assert {c.seed for c in load_grid("cafedistill", "table1", "small") if c.column == "cifar10_alpha0.3"} == {1, 2, 3}


@pytest.mark.parametrize("profile", ["smoke", "small", "paper"])
@pytest.mark.parametrize("paper", papers())
def test_what_a_row_says_stands_unless_its_own_section_says_otherwise(paper, profile):
    """A column's stand-in brings the exits of its backbone; a single-exit row keeps its one."""
    compared = 0
    for table in grids(paper):
        spec = load_spec(paper, table)
        for cell in load_grid(paper, table, profile):
            row = spec["variants"][cell.variant]
            otherwise = row.get(profile, {}).keys() | set(profiles())
            fixed = row.keys() - otherwise - {"label", "options", "finetune_options"}
            made = cell.experiment.to_dict()
            assert {k: made[k] for k in fixed} == {k: row[k] for k in fixed}, (table, cell.variant)
            compared += len(fixed)
    assert compared


def test_a_row_that_names_no_method_adds_to_the_row_below():
    below, tuned = (
        load_spec("atlas", "speakers_macs")["variants"],
        load_spec("atlas", "speakers_macs_tuned")["variants"],
    )
    assert tuned["decoupled"] == {**below["decoupled"], "small": {"lr": 0.2}}
    rates = {c.variant: c.experiment.lr for c in load_grid("atlas", "speakers_macs_tuned", "small", {"seeds": [1]})}
    assert rates["decoupled"] == 0.2 and rates["whole"] == 0.4
    whole = load_spec("reefl", "why_tuned")["variants"]  # these rows name theirs, and stand for themselves
    assert whole == {"depthfl": {"method": "depthfl", "lr": 0.05}, "reefl": {"method": "reefl", "lr": 0.1}}


def test_a_row_may_be_like_another_of_its_table(project):
    """It follows the row wherever a table above changes that; options are merged key by key."""
    rows = "variants:\n  heterofl: {small: {lr: 0.1}}\n  off: {like: heterofl, label: Off, options: {scaler: false}}\n"
    (project / "atlas/mine.yaml").write_text(f"extends: cifar10_macs\n{rows}")
    (project / "atlas/more.yaml").write_text("extends: mine\nvariants: {heterofl: {small: {lr: 0.3}}}\n")
    of = {"variant": ["heterofl", "off"], "seeds": [1]}
    for table, lr in {"mine": 0.1, "more": 0.3}.items():
        row, off = load_grid("atlas", table, "small", of)
        assert row.experiment.lr == lr and off.label == "Off"
        assert off.experiment == row.experiment.replace(options={**row.experiment.options, "scaler": False})
    for like in ("heterfl", "off"):  # none of this name; none that is like another itself
        (project / "atlas/mine.yaml").write_text(f"extends: cifar10_macs\n{rows}  on: {{like: {like}}}\n")
        with pytest.raises(ValueError, match=f"atlas/mine: like = '{like}'"):
            load_grid("atlas", "mine", "small", of)


def test_what_a_profile_keeps_of_a_column_ends_where_a_table_says_null(project):
    text = "extends: table1\nsmall: {columns: [cifar10_alpha0.1], variant: [cafedistill]%s}\n"
    for said, seeds in {"": [1], ", only: null": load_profile("small", "cafedistill")["seeds"]}.items():
        (project / "cafedistill/mine.yaml").write_text(text % said)
        assert [c.seed for c in load_grid("cafedistill", "mine", "small")] == seeds and len(seeds) > (said > "")


@pytest.mark.parametrize("only, message", [
    ({"cifar9": {"seeds": [1]}}, "only = 'cifar9' is unknown"),
    ({"cifar10_alpha0.3": {"seed": [1]}}, "only: cifar10_alpha0.3: unknown key 'seed'; did you mean 'seeds'?"),
    ({"cifar10_alpha0.3": {"variant": ["fedperr"]}}, "only = 'fedperr' is unknown; did you mean 'fedper'?"),
])  # fmt: skip
def test_what_a_profile_keeps_is_checked(only, message):
    from fedlib_lab.runs.params import _limits

    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        _limits(load_spec("cafedistill", "table1"), only, {})


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: load_grid("reefl", "table1", "smoke", {"roundz": 7}), "unknown key 'roundz'; did you mean 'rounds'?"),
        (lambda: load_grid("reefl", "table1", "smal"), "profile = 'smal' is unknown; did you mean 'small'?"),
        (lambda: load_grid("refl", "table1", "smoke"), "paper = 'refl' is unknown; did you mean 'reefl'?"),
        (lambda: load_grid("reefl", "table99", "smoke"), "table = 'table99' is unknown; did you mean 'table9'?"),
        (lambda: load_grid("reefl", "table1", "smoke", {"columns": ["cifar"]}), "columns = 'cifar'"),
        (
            lambda: load_grid("reefl", "table1", "smoke", {"method": ["refl"]}),
            "method = 'refl' is unknown; did you mean",
        ),
        (lambda: load_grid("reefl", "table1", "smoke", {"rounds": "7"}), "rounds = '7': expected int"),
        # schedules that follow from the size ended in a TypeError
        (
            lambda: load_grid("cafedistill", "table1", "small", {"rounds": "7"}),
            "experiment: rounds = '7': expected int",
        ),
        (
            lambda: load_grid("cafedistill", "table1", "small", {"local_epochs": [1]}),
            "local_epochs = [1]: expected int",
        ),
        (lambda: load_grid("cafedistill", "table1", "small", {"decay_every": 0}), "decay_every = 0 must be at least 1"),
        (
            lambda: load_grid("reefl", "table1", "smoke", {"options": None}),
            "overrides: options = None: expected a mapping",
        ),
        (
            lambda: load_grid("reefl", "table1", "smoke", {"finetune_options": 3}),
            "overrides: finetune_options = 3: expected",
        ),
        (
            lambda: load_grid("reefl", "table1", "smoke", {"seeds": [3], "seed": 4}),
            "overrides: seed = 4 is not among seeds = [3]",
        ),
        (lambda: load_grid("reefl", "table1", "smoke", {"seeds": [3, 4, 3]}), "seeds = [3, 4, 3] names one twice"),
        (
            lambda: load_grid("reefl", "table1", "smoke", {"method": ["reefl"] * 2}),
            "names one twice; allowed: each once",
        ),
        # tables said "0 stored runs found, nothing to train", and their figures ended in an error of NumPy's
        (
            lambda: load_grid("reefl", "table1", "small", {"seeds": []}),
            "reefl/table1 has no such cell at 'small'; allowed: rows",
        ),
        (
            lambda: load_grid("reefl", "table3", "small", {"variant": "inclusivefl_kd_fedavg", "finetune": "frozen"}),
            "no such cell",
        ),
        (lambda: load_experiment("reefl", "reefl", "smoke", {"num_exits": 7}), "does not divide 12 blocks"),
    ],
)
def test_bad_params_are_named(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_a_recipe_is_the_papers_experiment():
    """Table 1 of ReeFL: DepthFL has FedDyn's settings of Appendix A; the first mode, column and seed unless chosen."""
    e = recipe("reefl/table1", "paper", method="depthfl")
    assert e == load_grid("reefl", "table1", "paper", {"method": "depthfl"})[0].experiment
    assert (e.lr, e.min_lr, e.weight_decay, e.rounds, e.finetune) == (0.1, 0.01, 0.001, 1000, "full")
    chosen = {"finetune": "lora", "columns": "cifar10_alpha1", "seed": 3, "rounds": 20}
    e = recipe("reefl/table1", method="depthfl", profile="small", **chosen)
    assert (e.finetune, e.dataset, e.dirichlet_alpha, e.seed, e.rounds, e.lr) == ("lora", "cifar10", 1, 3, 20, 0.1)
    assert recipe("reefl/table3", variant="depthfl_no_kd_fedavg").options["distill"] == "none"
    assert recipe("reefl/table1", method="depthfl", seed=3, seeds=[1, 3]).seed == 3  # it was the first of seeds


def test_the_demos_recipe_is_what_the_demo_runs():
    for method, finetune in itertools.product(("reefl", "depthfl"), ("frozen", "lora")):
        e = load_experiment("reefl", method, "demo", finetune=finetune)
        assert recipe("reefl/table1", "demo", method=method, finetune=finetune) == e


@pytest.mark.parametrize(
    "name, choices, message",
    [
        ("reefl/table1", {}, "5 such rows at 'small': choose method = exclusivefl, inclusivefl, scalefl_vit, depthfl"),
        ("reefl/table3", {"method": "depthfl"}, "4 such rows at 'small': choose variant = depthfl_no_kd_fedavg, depth"),
        ("reefl", {}, "table = '' is unknown; allowed: decomposition, figure1"),
        ("reefl/table1", {"metod": "reefl"}, "unknown key 'metod'; did you mean 'method'?"),
    ],
)
def test_a_recipe_that_is_no_one_cell_says_what_to_choose(name, choices, message):
    with pytest.raises(ValueError) as error:
        recipe(name, **choices)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_cell_knows_which_layer_set_what():
    """By hand from the files: base.yaml, methods.yaml, columns.yaml with its section small, profiles/small.yaml."""
    choices = {"method": "depthfl", "options": {"temperature": 2.0}, "rounds": 20}
    found = recipe_cell("reefl/table1", "small", choices).explained()
    assert found["lr"] == {"base": 0.05, "method": 0.1}
    assert list(found["dataset"].items()) == [
        ("column", "cifar100"),
        ("profile", "cifar10"),
        ("column at small", "cifar100"),
    ]
    assert found["rounds"] == {"base": 1000, "profile": 100, "overrides": 20}
    assert found["options.temperature"] == {"overrides": 2.0} and "options" not in found
    e = recipe("scalefl/resnet110", "small", method="scalefl").to_dict()
    for key, layers in recipe_cell("scalefl/resnet110", "small", {"method": "scalefl"}).explained().items():
        name, _, option = key.partition(".")
        value = list(layers.values())[-1]
        assert (e[name][option] if option else e[name]) == (list(value) if isinstance(value, tuple) else value), key


def test_small_falls_back_to_digits_without_cifar(monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_CACHE", str(tmp_path))
    monkeypatch.delenv("FEDLIB_DATA", raising=False)
    cells = load_cells("reefl", "table1", "small", folder=tmp_path)
    assert {c.experiment.dataset for c in cells} == {"mnist"} and {c.experiment.augment for c in cells} == {"crop"}
    chosen = load_cells(
        "reefl", "table1", "small", {"dataset": "mnist", "num_train": 4000, "num_test": 500}, folder=tmp_path
    )
    assert {c.experiment.num_test for c in chosen} == {500}


@pytest.mark.parametrize(
    "table, spot",
    [("table1", {("full", "reefl", "cifar100_alpha1000"): (76.42, 0.12), ("ssf", "scalefl_vit", "speech_commands"): (27.01, 0.14)}),
     ("table2", {("pa", "depthfl", "cifar100_alpha0.1"): (6.88, 5.88), ("frozen", "inclusivefl", "femnist"): (53.35, 0.03)})],
)  # fmt: skip
def test_reported_numbers(table, spot):
    frame = load_reported("reefl", table)
    assert len(frame) == 180 and not frame.duplicated(["finetune", "method", "column"]).any()
    for key, (mean, sd) in spot.items():
        row = frame.set_index(["finetune", "method", "column"]).loc[key]
        assert (row["mean"], row["sd"]) == (mean, sd)


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the params to change."""
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    return tmp_path / "params"


def test_a_papers_profile_wins_over_the_general_one(project):
    (project / "reefl/profiles/smoke.yaml").write_text("dataset: mnist\nbackbone: deit_micro\nrounds: 9\n")
    e = load_grid("reefl", "table1", "smoke")[0].experiment
    assert (e.rounds, e.num_train) == (9, 320)
    (project / "extensions/profiles").mkdir()
    (project / "extensions/profiles/smoke.yaml").write_text("rounds: 4\n")  # over the paper that it extends
    assert load_grid("extensions", "compression", "smoke")[0].experiment.rounds == 4
    assert load_grid("reefl", "table1", "smoke")[0].experiment.rounds == 9


# papers, or single tables, of which some seeds or columns are not stored so far
UNFINISHED: set[str] = {
    "atlas",
    "reefl/horizon",
    "cafedistill",
    "fedepth/compute",
    "fedepth/figure2",
    "raffm/dose",
    "scalefl",
}


@pytest.mark.parametrize("paper", papers())
def test_every_small_grid_finds_its_stored_runs(paper):
    """No change of the params' layout may give a stored run another name; what is complete is not called unfinished."""
    folder = OUTPUTS / "runs"
    stored = {p.name for p in listed(folder, "*", "summary.json")}
    wanted = {t: {run_path(c.experiment, folder).name for c in load_grid(paper, t, "small")} for t in grids(paper)}
    assert all(wanted.values())
    lacking = {table for table, runs in wanted.items() if not runs <= stored}
    named = {table for table in wanted if f"{paper}/{table}" in UNFINISHED}
    assert bool(lacking) if paper in UNFINISHED else lacking == named, sorted(lacking ^ named)


def test_every_stored_run_is_found_under_its_name_however_often_it_is_looked_at():
    """Those too that were stored while ``evaluate_every`` was a part of the name."""
    paths, former = list(listed(OUTPUTS / "runs", "*", "experiment.json")), 0
    assert len(paths) > 700
    for path in paths:
        e = Experiment.from_dict(read_json(path / "experiment.json")["experiment"])
        assert run_path(e, path.parent) == run_path(e.replace(evaluate_every=7), path.parent) == path
        former += e.slug != path.name
    assert former > 700


def test_the_grid_is_text_at_every_profile():
    for profile, backbone in {
        "smoke": "bert_micro",
        "demo": "minilm.32",
        "small": "minilm.32",
        "paper": "minilm",
    }.items():
        cells = load_grid("extensions", "text", profile)
        assert {c.experiment.backbone for c in cells} == {backbone} and {c.method for c in cells} >= {
            "depthfl",
            "reefl",
        }
        assert {c.experiment.augment for c in cells} == {"none"} and {c.experiment.num_exits for c in cells} == {3}
        assert {c.experiment.dataset for c in cells} == ({"sst2"} if profile in ("small", "paper") else {"docstrings"})


@pytest.mark.parametrize(
    "overrides, word",
    [("rounds", "overrides"), ([1], "overrides"), ({1: 2}, "unknown key 1"), ({"seeds": 3.5}, "seeds"), ({"seeds": [True]}, "seeds"),
     ({"columns": [{}]}, "columns"), ({"columns": [[]]}, "columns"), ({"method": [[1]]}, "method"), ({"method": {}}, "method"),
     ({"finetune": 3}, "finetune"), ({"options": [1]}, "options"), ({"seed": "x"}, "seed"), ({"x" * 10**6: 1}, "unknown key"),
     ({"rounds": "9" * 10**6}, "rounds"), ({"num_clients": 10**500}, "num_clients")],
    ids=lambda x: str(x)[:20],
)  # fmt: skip
def test_overrides_of_any_shape_give_clear_errors(overrides, word):
    with pytest.raises(ValueError, match=word) as error:
        load_grid("reefl", "table1", "smoke", overrides)
    assert len(str(error.value)) < 4000
