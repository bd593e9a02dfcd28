"""ReeFL's tables as grids: nothing runs twice, variants are what they say, claims and overrides name real ones."""

import subprocess
import sys

import pytest

from fedlib.core.paths import params_dir
from fedlib.methods import METHODS
from fedlib.report.tables import load_claims
from fedlib.runs.params import load_grid, load_spec
from fedlib.runs.params_files import grids, load_yaml

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


def test_looking_at_a_grid_imports_neither_peft_nor_timm():
    """Their import takes seconds in every notebook."""
    code = "import sys; from fedlib.runs.params import load_grid; cells = load_grid('reefl', 'table1', 'small')\n"
    code += "assert {'frozen', 'lora'} == {c.finetune for c in cells} and not {'peft', 'timm'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
