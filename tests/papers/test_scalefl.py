"""ScaleFL: published numbers, claims that name real grids, BERT's and HeteroFL's sizes, tables of levels."""

import warnings

import numpy as np
import pandas as pd
import pytest

from fedlib import Experiment
from fedlib.core.paths import params_dir
from fedlib.engine.federation import build_model, setting_of
from fedlib.methods import METHODS, build_method
from fedlib.methods.scaling import Levels
from fedlib.models import registry
from fedlib.models.bert import BertSpec
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.papers.scalefl import level_accuracies, level_costs, plane, plot_levels, plot_plane
from fedlib_lab.report.claims import Published, compared, load_all_claims
from fedlib_lab.report.tables import load_reported
from fedlib_lab.runs.costs import kind_of, load_shapes, num_classes
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.params_files import grids, papers

pytestmark = pytest.mark.usefixtures("repeatable_convolutions")


CLAIMS = load_all_claims("scalefl")
ON_RUNS = [name for name, claim in CLAIMS.items() if "table" in claim]
ROWS = {"resnet110": 20, "msdnet24": 12, "efficientnetb4": 3, "bert": 16}
SPOTS = [
    ("resnet110", "scalefl", "cifar100_alpha100", 49.94), ("resnet110_local", "scalefl", "cifar10_alpha1", 79.61),
    ("resnet110", "heterofl", "cifar100_alpha1", 42.95), ("resnet110_local", "feddf", "cifar10_alpha100", 83.35),
    ("resnet110", "decoupled", "cifar100_alpha1", 35.78), ("msdnet24", "heterofl", "cifar100_alpha100", 47.77),
    ("msdnet24_local", "scalefl", "cifar100_alpha1", 46.25), ("efficientnetb4", "heterofl", "imagenet_alpha100", 46.61),
    ("efficientnetb4_local", "scalefl", "imagenet_alpha100", 46.63), ("bert", "feddf", "sst2_alpha100", 88.95),
    ("bert_local", "heterofl", "sst2_alpha1", 76.21), ("bert", "scalefl", "ag_news_alpha1", 91.20),
]  # fmt: skip


@pytest.mark.parametrize("table", ROWS)
def test_every_printed_number_stands_once(table):
    for name in (table, f"{table}_local"):
        frame = load_reported("scalefl", name)
        assert len(frame) == ROWS[table] and not frame.duplicated(["variant", "column"]).any()
        assert frame["mean"].between(35, 93).all() and set(frame.column) <= set(load_spec("scalefl", name)["columns"])
        assert set(frame.variant) <= set(load_spec("scalefl", name)["variants"])


@pytest.mark.parametrize("table, method, column, mean", SPOTS)
def test_spot_values(table, method, column, mean):
    assert load_reported("scalefl", table).set_index(["method", "column"])["mean"][method, column] == mean


def test_fedavg_and_decoupled_are_one_model_local_and_global():
    both = [load_reported("scalefl", n).set_index(["method", "column"])["mean"] for n in ("resnet110", "resnet110_local")]  # fmt: skip
    for method in ("fedavg_level1", "decoupled"):
        assert (both[0][method] == both[1][method]).all()


@pytest.mark.parametrize("name", ON_RUNS)
def test_every_claim_is_the_slides(name):
    claim = CLAIMS[name]
    spec = load_spec("scalefl", claim["table"])
    assert {v for pair in claim["pairs"] for v in pair} <= set(spec["variants"])
    signs = [d.mean > 0 for _, d in compared(claim, Published("scalefl")) if len(d.points)]
    printed = (params_dir() / "scalefl" / "reported" / f"{claim['table']}.csv").is_file()
    assert bool(signs) == printed
    if signs:
        assert np.mean(signs) > (0.5 if claim.get("need") == "most" else 0.98)


def test_the_paper_profile_is_the_slides_setting():
    cells = load_grid("scalefl", "resnet110", "paper")
    e = next(c.experiment for c in cells if c.method == "scalefl" and c.column == "cifar100_alpha1")
    assert len(cells) == 5 * 4 * 3 and (e.backbone, e.num_clients, e.clients_per_round, e.num_exits) == ("resnet110", 100, 10, 4)  # fmt: skip
    assert (e.partition, e.dirichlet_alpha, e.local_epochs, e.batch_size, e.lr) == ("grouped_dirichlet", 1.0, 5, 16, 0.1)  # fmt: skip
    assert (e.batch_norm, e.test_split, e.rounds) == ("batch", "like_train", 300)


@pytest.mark.parametrize("profile", ["small", "paper"])
def test_feddfs_server_takes_about_as_many_steps_a_level_as_a_rounds_clients_together(profile):
    """In FedDF's paper 10,000 at most, where eight clients take 12,500 together."""
    for cell in load_grid("scalefl", "resnet110", profile, {"method": ["feddf"]}):
        e, method = cell.experiment, build_method(cell.method, cell.experiment.options)
        examples = e.num_train or 50_000
        clients = e.clients_per_round * e.local_epochs * -(-(examples // e.num_clients) // e.batch_size)
        server = method.passes * 0.9 * e.public_fraction * examples / e.batch_size
        assert 0.8 < server / clients < 1


@pytest.mark.parametrize("table", ["resnet110", "msdnet24", "efficientnetb4", "bert", "ablation"])
@pytest.mark.parametrize("profile", ["smoke", "small", "paper"])
def test_every_grid_resolves(table, profile):
    assert load_grid("scalefl", table, profile)


def measured(method, backbone, options=None, classes=10, exits=None, **fields):
    e = Experiment(
        method=method, backbone=backbone, options=options or {}, pretrained=False, finetune="full", exit_blocks=exits,
        **fields,
    )  # fmt: skip
    method = build_method(e.method, e.options)
    return method, setting_of(e, build_model(e, method, classes, meta=True))


def test_berts_levels_have_the_releases_sizes(monkeypatch):
    """Per-head chunks of residual stream, attention and FFN; 512 positions, two classes, poolers: 13.80, 26.12, 54.78 M."""
    monkeypatch.setitem(registry.OWN, "bert512", BertSpec(length=512, dim=768, depth=12, heads=12, ffn_dim=3072, centred=False))  # fmt: skip
    method, setting = measured("scalefl", "bert512", {"widths": (0.4, 0.55, 0.75, 1.0)}, 2, (3, 5, 8, 11), dataset="sst2", augment="none")  # fmt: skip
    parts = [method.part(j, setting) for j in range(4)]
    assert [round(setting.measure.parameters(p) / 1e6, 2) for p in parts[1:3]] == [26.12, 54.78]
    assert setting.measure.parameters(parts[0]) + 2 * 300 == 13_795_598  # with both token types, as stored: 13.80 M
    assert [len(p.index["residual"]) for p in parts[:3]] == [300, 420, 576]
    assert [len(p.index["0/ffn"]) for p in parts[:3]] == [1224, 1680, 2304]
    assert parts[0].index["residual"][:26] == (*range(25), 64) and parts[0].index["3/qk"] == parts[0].index["residual"]


@pytest.mark.parametrize("backbone", ["resnet110", "resnet20"])
def test_heterofls_rates_cost_an_eighth_a_quarter_and_half(backbone):
    rates = load_grid("scalefl", "resnet110", "paper", {"method": ["heterofl"]})[0].experiment.options["rates"]
    costs = level_costs(Experiment(method="heterofl", options={"rates": rates}, backbone=backbone, pretrained=False, finetune="full"), 10)  # fmt: skip
    assert costs.share_of_parameters.tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1], rel=0.12)
    assert costs.s_w.tolist() == pytest.approx([0.36, 0.5, 0.71, 1.0], abs=0.02)


HEAVY = {"resnet110": 1.15, "msdnet24": 1.97}  # the slides' own nets: their exits are a part of them


@pytest.mark.parametrize("paper", papers())
@pytest.mark.parametrize("profile", ["smoke", "small", "paper"])
def test_no_grids_exits_distort_its_levels(paper, profile):
    """No level is narrower than the one below it, and the whole with all exits costs 1.1 times the net at most."""
    cells = (c for table in grids(paper) for c in load_grid(paper, table, profile) if c.seed == 1)
    cells = (c for c in cells if c.variant != "scalefl_convolutions")  # cross.yaml asks what such exits do
    mine = [c for c in cells if issubclass(METHODS[c.method], Levels) and c.experiment.budgets == "uniform"]
    for e in {kind_of(c.experiment): c.experiment for c in mine}.values():
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            load_shapes(e, num_classes(e))
        words = [str(w.message) for w in said if issubclass(w.category, UserWarning)]
        if words and profile == "paper" and e.backbone in HEAVY:
            (text,) = words
            assert float(text.partition("costs ")[2].split()[0]) <= HEAVY[e.backbone]
            continue
        assert not words, (e.method, e.backbone, dict(e.options), words)
    assert bool(mine) == (paper == "scalefl")


@pytest.mark.parametrize("table", ["resnet110", "msdnet24", "efficientnetb4"])
@pytest.mark.parametrize("profile", ["smoke", "small"])
def test_stand_ins_levels_are_solved_on_themselves(table, profile):
    cells = [c for c in load_grid("scalefl", table, profile) if issubclass(METHODS[c.method], Levels)]
    assert {c.experiment.exit_head for c in cells} == {"linear"} and {c.experiment.exit_blocks for c in cells} == {None}
    assert not any(c.experiment.options.get("widths") for c in cells)
    costs = level_costs(next(c.experiment for c in cells if c.method == "scalefl"))
    assert costs.s_w.is_monotonic_increasing and costs.share_of_parameters.tolist() == pytest.approx([1 / 8, 1 / 4, 1 / 2, 1], rel=0.16)  # fmt: skip


@pytest.mark.parametrize("table", ["resnet110", "msdnet24", "efficientnetb4", "bert"])
@pytest.mark.parametrize("profile", ["smoke", "small", "paper"])
def test_heterofl_has_one_exit_whatever_the_others_have(table, profile):
    """A grid's exits are those of its sub-models in depth; HeteroFL has none."""
    cells = load_grid("scalefl", table, profile)
    assert {c.experiment.exit_blocks for c in cells if c.method == "heterofl"} <= {None}
    assert {c.experiment.exit_head for c in cells if c.method == "heterofl"} <= {None}
    assert {c.experiment.num_exits for c in cells if c.method != "heterofl"} <= {3, 4}


def test_the_plane_of_splits_and_its_picture():
    e = Experiment(method="scalefl", backbone="resnet56", pretrained=False, finetune="full", num_exits=4)
    splits = plane(e, 10)
    chosen = splits[splits.chosen]
    assert chosen.level.tolist() == [1, 2, 3, 4] and chosen[:3].fits.all() and splits.s_w.nunique() == 20
    depths, before = sorted(splits.s_d.unique()), 0.0
    for level, row in chosen[:3].set_index("level").iterrows():  # deeper than the last, and room for the levels above
        free = splits[(splits.level == level) & splits.fits & (splits.s_d > before) & (splits.s_d <= depths[4 + level])]
        assert abs(row.s_w - row.s_d) == pytest.approx((free.s_w - free.s_d).abs().min())
        before = row.s_d
    assert len(plot_plane(splits).collections) >= 2


def test_accuracies_of_levels_are_read_from_stored_runs_only(tmp_path):
    frame = level_accuracies(load_grid("scalefl", "resnet110", "smoke"), tmp_path)
    assert frame.empty
    made = pd.DataFrame({"variant": "heterofl", "label": "heterofl", "method": "heterofl", "seed": 1, "level": [1, 2], "accuracy": [50.0, 60.0], "parameters": [1e6, 2e6], "macs": [9e7, 3.45e8]})  # fmt: skip
    ax = plot_levels(made, "macs", "CIFAR-10, 1 seed")
    assert sorted(t.get_text() for t in ax.texts) == ["1", "2"] and ax.get_title().endswith("CIFAR-10, 1 seed")
    assert ax.get_xlabel().startswith("MACs per example") and ax.lines[0].get_xdata().tolist() == [90, 345]
    ax.figure.canvas.draw()  # a level, a tick, in plain numbers
    assert [t.get_text() for t in ax.get_xticklabels()] == ["90", "340"] and not len(ax.xaxis.get_minorticklocs())


def setting_for(method, classes=10, **fields):
    e = Experiment(method=method, pretrained=False, finetune="full", num_exits=4, **fields)
    return build_method(e.method, e.options), setting_of(e, build_model(e, build_method(method, e.options), classes, meta=True))  # fmt: skip


def test_levels_by_latency_are_solved_offline(monkeypatch):
    """With parameters in the place of seconds they are those of ``cost="parameters"``; a real clock gives a time."""
    from fedlib_lab.papers.scalefl import levels_by_latency
    from fedlib_lab.runs.costs import seconds_of

    e = Experiment(method="scalefl", backbone="resnet20", pretrained=False, finetune="full", num_exits=4)
    found = levels_by_latency(e, 10, lambda shapes, part: shapes.setting.measure.parameters(part))
    method, setting = setting_for("scalefl", backbone="resnet20")
    assert found["widths"] == tuple(x.width for x in method.levels(setting))
    again = build_method("scalefl", found)
    assert again.exit_units(9, 4) == setting.exit_units and again.levels(setting) == method.levels(setting)
    monkeypatch.setitem(registry.OWN, "toy", ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=32))
    toy = e.replace(backbone="toy", num_exits=3, options={"eps": 1e9})
    clocked = levels_by_latency(toy, 10, lambda shapes, part: seconds_of(shapes, part, seconds=0.001))
    assert clocked["depths"][-1] == clocked["widths"][-1] == 1.0
