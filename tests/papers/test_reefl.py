"""ReeFL's published numbers and its tables as grids: what they say about each other, and that nothing runs twice."""

import subprocess
import sys

import pytest

from fedlib.core.paths import params_dir
from fedlib.methods import METHODS
from fedlib_lab.report.tables import load_claims, load_reported
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.params_files import grids, load_yaml

TABLES = grids("reefl")


def hashes(table, profile="paper", **overrides):
    return {c.experiment.hash: c for c in load_grid("reefl", table, profile, overrides)}


@pytest.mark.parametrize("table", TABLES)
def test_no_variant_spells_out_a_default(table):
    """Options equal to a method's defaults would give a known run another name."""
    for name, variant in load_spec("reefl", table)["variants"].items():
        defaults = METHODS[variant["method"]]()
        assert all(getattr(defaults, k) != v for k, v in variant.get("options", {}).items()), name
    for one, other in load_claims("reefl", table):
        assert {one, other} <= set(load_spec("reefl", table)["variants"])


@pytest.mark.parametrize(
    "table, base, shared",
    [("table3", "table1", 6), ("table4", "table1", 5), ("table5", "table1", 5), ("table6", "table1", 12),
     ("table7", "table2", 12), ("table8", "table1", 0), ("table10", "table2", 6), ("table11", "table2", 5),
     ("decomposition", "table3", 8), ("figure3", "table4", 5), ("figure1", "table2", 2)],
)  # fmt: skip
def test_tables_share_runs(table, base, shared):
    """Rows shared with another table, at paper size: (mode, variant) pairs with one run under two names."""
    other = hashes(base)
    pairs = {(c.finetune, c.variant) for h, c in hashes(table).items() if h in other}
    assert len(pairs) == shared, pairs


def test_variants_are_the_papers_rows():
    cells = {(c.finetune, c.variant): c.experiment for c in load_grid("reefl", "table3", "paper") if c.seed == 1}
    assert len(cells) == 18
    fedavg, feddyn = cells["lora", "depthfl_kd_fedavg"], cells["lora", "depthfl"]
    assert (fedavg.lr, fedavg.min_lr, fedavg.weight_decay) == (0.05, 0.001, 0.0)  # Appendix A
    assert (feddyn.lr, feddyn.min_lr, feddyn.weight_decay) == (0.1, 0.01, 0.001)
    assert fedavg.options == {"aggregation": "mean", "weighting": "examples"} and feddyn.options == {}
    assert {e.num_exits for e in (c.experiment for c in load_grid("reefl", "table10", "paper"))} == {12}
    assert {c.experiment.backbone for c in load_grid("reefl", "table8", "paper")} == {"deit_base_patch16_224.fb_in1k"}


def test_overrides_choose_variants():
    assert {c.variant for c in hashes("table3", "smoke", variant="reefl").values()} == {"reefl"}
    assert {c.variant for c in hashes("table3", "smoke", method="reefl").values()} == {"reefl", "reefl_no_kd"}
    for overrides, message in (
        ({"variant": "reefl_nokd"}, "variant = 'reefl_nokd' is unknown; did you mean 'reefl_no_kd'?"),
        ({"method": "scalefl_vit"}, "method = 'scalefl_vit' is not in this table"),
    ):
        with pytest.raises(ValueError) as error:
            hashes("table3", "smoke", **overrides)
        assert message in str(error.value)


def test_a_tables_unknown_key_is_named(tmp_path, monkeypatch):
    import shutil

    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    file = tmp_path / "params/reefl/table4.yaml"
    file.write_text(file.read_text().replace("claims:", "claim:"))
    with pytest.raises(ValueError, match="unknown key 'claim'; did you mean 'claims'"):
        load_grid("reefl", "table4", "smoke")
    assert "claim" in load_yaml(file)


def test_small_profile_stays_affordable():
    """All small tables together: runs of about a minute on two cores."""
    runs = {h for t in TABLES for h in hashes(t, "small")}
    assert len(runs) <= 480


def test_a_stored_table_and_the_start_of_lora_import_neither_peft_nor_timm_nor_scipys_statistics():
    """Their import takes seconds, in every notebook and at every start."""
    code = "import sys; from fedlib import Experiment, build_federation; from fedlib_lab.report.table import Table\n"
    code += (
        "table = Table('reefl', 'table1', 'small'); table.run(run_missing=False); table.obtained(); table.verdicts()\n"
    )
    code += (
        "assert {'frozen', 'lora'} == {c.finetune for c in table.cells}; build_federation(Experiment(num_train=100))\n"
    )
    code += "assert not {'peft', 'timm', 'transformers', 'scipy.stats'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


KEYS = ["finetune", "variant", "column"]
ROWS = {  # rows of numbers x 5 data columns
    "table1": 6 * 5, "table2": 6 * 5, "table3": 8 + 10, "table4": 2 * 5, "table5": 5, "table6": 2 * 6,
    "table7": 2 * 6, "table8": 5 * 2, "table10": 8 + 10, "table11": 2 * 5,
}  # fmt: skip
SPOTS = [
    ("table1", "full", "reefl", "cifar100_alpha1000", 76.42, 0.12),
    ("table1", "ssf", "scalefl_vit", "speech_commands", 27.01, 0.14),
    ("table2", "pa", "depthfl", "cifar100_alpha0.1", 6.88, 5.88),
    ("table2", "frozen", "inclusivefl", "femnist", 53.35, 0.03),
    ("table3", "frozen", "depthfl_no_kd_feddyn", "cifar100_alpha0.1", 38.27, 4.84),
    ("table3", "lora", "inclusivefl_no_kd_fedadam", "speech_commands", 77.81, 0.1),
    ("table3", "lora", "inclusivefl_kd_fedavg", "femnist", 82.26, 0.05),
    ("table3", "lora", "reefl_no_kd", "cifar100_alpha1", 72.76, 0.07),
    ("table4", "frozen", "reefl_unmodulated", "speech_commands", 20.14, 0.21),
    ("table4", "ssf", "reefl_unmodulated", "cifar100_alpha1000", 67.32, 0.02),
    ("table5", "frozen", "reefl_only_at_exits", "femnist", 68.93, 0.03),
    ("table5", "sa", "reefl_only_at_exits", "speech_commands", 76.79, 0.05),
    ("table6", "full", "reefl", "cifar100_alpha0.1", 79.0, None),
    ("table6", "ssf", "depthfl", "cifar100_alpha1000", 44.53, None),
    ("table7", "sa", "depthfl", "cifar100_alpha0.1", 1.0, None),
    ("table7", "ssf", "reefl", "speech_commands", 67.24, None),
    ("table8", "frozen", "depthfl", "femnist", 35.2, 1.0),
    ("table8", "lora", "reefl", "speech_commands", 77.07, 0.05),
    ("table10", "frozen", "depthfl", "cifar100_alpha0.1", 25.2, 1.89),
    ("table10", "lora", "inclusivefl", "femnist", 78.32, 0.14),
    ("table10", "lora", "reefl", "speech_commands", 75.96, 0.18),
    ("table11", "frozen", "reefl_unmodulated", "cifar100_alpha0.1", 25.6, 17.4),
    ("table11", "ssf", "reefl", "femnist", 78.05, 0.03),
    ("decomposition", "lora", "reefl_no_kd_unmodulated", "cifar100_alpha1000", 73.21, None),
    ("decomposition", "lora", "shared_classifier", "cifar100_alpha1000", 70.74, None),
    ("decomposition", "frozen", "shared_classifier", "cifar100_alpha1000", 41.74, None),
]  # fmt: skip


def values(table, column="mean"):
    return load_reported("reefl", table).set_index(KEYS)[column]


@pytest.mark.parametrize("table", ROWS)
def test_every_row_has_five_columns_once(table):
    frame = load_reported("reefl", table)
    frame = frame[frame.column != "upload_mib"]  # Tables 1 and 2 print a cost, too
    assert len(frame) == 5 * ROWS[table] and not frame.duplicated(KEYS).any()
    assert (frame.groupby(["finetune", "variant"]).size() == 5).all()
    assert frame["mean"].between(1, 87).all() and frame.sd.isna().all() == (table in ("table6", "table7"))


@pytest.mark.parametrize("table, finetune, variant, column, mean, sd", SPOTS)
def test_spot_values(table, finetune, variant, column, mean, sd):
    row = load_reported("reefl", table).set_index(KEYS).loc[(finetune, variant, column)]
    assert row["mean"] == mean and (row.sd == sd if sd is not None else row.sd != row.sd)


@pytest.mark.parametrize("table", [*ROWS, "decomposition"])
def test_every_number_belongs_to_a_cell_of_the_grid(table):
    spec = load_spec("reefl", table)
    cells = {(c.finetune, c.variant, c.column) for c in load_grid("reefl", table, "paper")}
    reported = {key for key in values(table).index if key[-1] != "upload_mib"}
    assert reported <= cells
    unreported = {(f, v) for f, v, _ in cells - reported}
    from_table1 = {(f, "reefl") for f in spec["axes"]["finetune"]}  # Table 5 prints differences to Table 1's row
    assert unreported == {"table5": from_table1, "decomposition": {("frozen", "reefl_no_kd_unmodulated")}}.get(
        table, set()
    )


def same(a, b, pairs):
    """The published rows (finetune, variant) of two tables are the same runs: equal in mean and SD."""
    one, two = (
        load_reported("reefl", t).query("column != 'upload_mib'").set_index(["finetune", "variant"])[["mean", "sd"]]
        for t in (a, b)
    )
    for finetune, of_a, of_b in pairs:
        assert (one.loc[(finetune, of_a)].to_numpy() == two.loc[(finetune, of_b)].to_numpy()).all(), (finetune, of_a)


def test_lost_check_marks_agree_with_tables_1_and_2():
    """Tables 3 and 10 lost their check marks in print-to-text; rows that repeat Tables 1 and 2 fix the order."""
    full = [(f, m, m) for f in ("frozen", "lora") for m in ("depthfl", "reefl")]
    same("table3", "table1", [*full, ("lora", "inclusivefl", "inclusivefl"), ("frozen", "inclusivefl_none_fedadam", "inclusivefl")])  # fmt: skip
    # Table 2's LoRA row of InclusiveFL is the one without distillation
    same("table10", "table2", [*full, ("lora", "inclusivefl_no_kd_fedadam", "inclusivefl"), ("frozen", "inclusivefl_none_fedadam", "inclusivefl")])  # fmt: skip


def test_modulated_rows_are_tables_1_and_2():
    modes = ("frozen", "lora", "pa", "sa", "ssf")
    same("table4", "table1", [(f, "reefl", "reefl") for f in modes])
    same("table11", "table2", [(f, "reefl", "reefl") for f in modes])


def test_table5s_differences_are_to_table1():
    table5, table1 = load_reported("reefl", "table5"), values("table1")
    for row in table5.itertuples():
        assert row.difference == pytest.approx(row.mean - table1[row.finetune, "reefl", row.column], abs=1e-9), row


def test_decomposition_repeats_tables_1_and_3():
    here, table1, table3 = values("decomposition"), values("table1"), values("table3")
    for (finetune, variant, column), mean in here.items():
        printed = {**table1, **table3}.get((finetune, variant, column))
        assert (printed == mean) if printed is not None else variant in ("shared_classifier", "reefl_no_kd_unmodulated")


def test_table9_is_the_papers_setting_and_small_profiles_keep_vim():
    cells = load_grid("reefl", "table9", "paper")
    assert len(cells) == 2 * 2 * 5 * 3
    by = {(c.finetune, c.method, c.column): c.experiment for c in cells if c.seed == 1}
    e = by["full", "reefl", "cifar100_alpha1"]
    assert (e.backbone, e.pretrained, e.lr, e.min_lr, e.num_exits) == ("vim_tiny", True, 0.01, 0.001, 4)
    f = by["frozen", "depthfl", "femnist"]
    assert (f.lr, f.min_lr, f.weight_decay, f.num_clients) == (0.01, 0.01, 0.001, 381)
    for profile in ("smoke", "small"):
        small = load_grid("reefl", "table9", profile)
        assert {(c.experiment.backbone, c.experiment.pretrained) for c in small} == {("vim_micro", False)}
    own = load_grid("reefl", "table9", "smoke", {"backbone": "vim_micro.stream", "finetune": "full"})
    assert {c.experiment.backbone for c in own} == {"vim_micro.stream"} and {c.finetune for c in own} == {"full"}


def test_table9_reported():
    frame = load_reported("reefl", "table9").set_index(["finetune", "method", "column"])[["mean", "sd"]]
    assert len(frame) == 20 and not frame.index.duplicated().any()
    assert tuple(frame.loc[("frozen", "reefl", "speech_commands")]) == (11.95, 1.45)
    assert tuple(frame.loc[("full", "depthfl", "cifar100_alpha0.1")]) == (56.93, 0.18)
