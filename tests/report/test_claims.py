"""The paper's claims: data that name real runs and agree with the printed numbers; verdicts against hand-made stores."""

from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from fedlib.core.paths import params_dir
from fedlib.core.storage import write_json
from fedlib_lab.papers import reefl
from fedlib_lab.report.claims import (
    COLUMNS,
    Published,
    Stored,
    beside,
    compared,
    judge,
    judge_claim,
    load_all_claims,
    load_others,
)
from fedlib_lab.report.flags import over_budget
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.store import run_path
from tests.helpers.tracked import OUTPUTS

CLAIMS = load_all_claims("reefl")
ON_RUNS = [name for name, claim in CLAIMS.items() if "table" in claim]
PAIR = {"where": "x", "says": "y", "table": "table4", "finetune": ["lora"], "pairs": [["reefl", "reefl_unmodulated"]]}


def tables_of(claim):
    return claim["table"] if isinstance(claim["table"], list) else [claim["table"]]


@pytest.mark.parametrize("name", ON_RUNS)
def test_every_claim_names_variants_modes_and_columns_that_exist(name):
    claim = CLAIMS[name]
    for table in tables_of(claim):
        spec = load_spec("reefl", table)
        sides = [side.partition("@") for pair in claim["pairs"] for side in pair]
        assert {v for v, _, _ in sides} <= set(spec["variants"])
        assert {m for _, _, m in sides if m} | set(claim.get("finetune", [])) <= set(spec["axes"]["finetune"])
        assert set(claim.get("columns", [])) <= set(spec["columns"])


@pytest.mark.parametrize("name", ON_RUNS)
def test_every_claim_is_the_papers(name):
    """The printed means agree: nearly all of them, or more than half where the paper says most or often."""
    claim = CLAIMS[name]
    signs = [d.mean + claim.get("margin", 0) > 0 for _, d in compared(claim, Published("reefl")) if len(d.points)]
    if claim.get("value") == "exits":
        assert not signs  # a figure: no numbers in print
    else:
        assert np.mean(signs) > (0.5 if claim.get("need") == "most" else 0.98)


def test_printed_counts_by_hand():
    """Table 1: 4 rivals x 6 modes x 5 columns; only DepthFL with SA at Dirichlet 1000 is ahead (72.63 > 72.15)."""
    rows = compared(CLAIMS["reefl_leads_four_exits"], Published("reefl"))
    behind = [(w["mode"], w["column"], w["comparison"], round(d.mean, 2)) for w, d in rows if d.mean <= 0]
    assert len(rows) == 120 and behind == [("SA", "cifar100_alpha1000", "ReeFL – DepthFL", -0.48)]
    (grown,) = [d for w, d in compared(CLAIMS["lead_grows_with_heterogeneity"], Published("reefl")) if w["mode"] == "LoRA"]  # fmt: skip
    assert grown.mean == pytest.approx((69.29 - 64.33) - (73.37 - 70.18))
    ensembles = compared(CLAIMS["ensembles_help"], Published("reefl"))  # Table 6 minus Table 1
    (first,) = [d for w, d in ensembles if (w["table"], w["mode"], w["column"]) == ("table6", "Full", "cifar100_alpha1") and w["comparison"].startswith("ReeFL")]  # fmt: skip
    assert first.mean == pytest.approx(80.69 - 75.69)
    once = compared(CLAIMS["full_finetuning_overfits"], Published("reefl"))
    assert len(once) == 2 * 2 * 4  # tables x methods x columns, not once a mode


def test_an_unknown_key_is_named(tmp_path, monkeypatch):
    import shutil

    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    (tmp_path / "params/reefl/claims.yaml").write_text("one: {where: here, says: this, pair: [[a, b]]}\n")
    with pytest.raises(ValueError, match="one: unknown key 'pair'; did you mean 'pairs'"):
        load_all_claims("reefl")


def store(folder, exits, table="table4", **only):
    """Runs at profile small with made-up accuracies: (finetune, variant) -> a list of exits per seed."""
    for cell in load_grid("reefl", table, "small", only):
        by_seed = exits.get((cell.finetune, cell.variant), [])
        if cell.seed > len(by_seed):
            continue
        mine, path = by_seed[cell.seed - 1], run_path(cell.experiment, folder / "runs")
        path.mkdir(parents=True, exist_ok=True)
        write_json(path / "experiment.json", {"experiment": cell.experiment.to_dict()})
        summary = {"accuracy": float(np.mean(mine)), "ensemble": max(mine) + 1, "exits": mine, "seconds": 1.0, "status": "finished", "t": 0}  # fmt: skip
        write_json(path / "summary.json", summary)
        (path / "metrics.jsonl").write_text("")
    return Stored("reefl", "small", folder)


def verdict_on(stored, **changes):
    return judge_claim("c", PAIR | changes, stored, Published("reefl"))


def test_verdicts_on_hand_made_runs(tmp_path):
    plain = [[40.0, 44.0], [41.0, 45.0], [42.0, 46.0]]
    stored = store(tmp_path, {
        ("lora", "reefl"): [[50.0, 54.0], [51.2, 55.2], [52.0, 56.0]],  # means 10, 10.2 and 10 above 42, 43, 44
        ("lora", "reefl_unmodulated"): plain,
        ("frozen", "reefl"): [[32.0, 36.0], [33.0, 37.0], [34.0, 38.0]],  # 8 points below
        ("frozen", "reefl_unmodulated"): plain,
        ("pa", "reefl"): [[50.0, 50.0]], ("pa", "reefl_unmodulated"): [[40.0, 40.0]],  # one seed
    })  # fmt: skip
    held = verdict_on(stored)
    assert (held.verdict, held.numbers, held.indicative) == ("holds", "1 comparison: 1 holds", True)
    # of 5,000 examples: (0.43 x 0.57 + 0.5307 x 0.4693) / 5000, about 0.99 points; SD 0.1155 of three seeds
    half = np.hypot(4.3027 * 0.11547 / 3**0.5, 1.96 * 100 * ((0.43 * 0.57 + 0.53067 * 0.46933) / 5000) ** 0.5)
    (row,) = held.comparisons[COLUMNS[5:]].values.tolist()
    assert row == [
        10.07,
        pytest.approx(10.067 - half, abs=0.01),
        pytest.approx(10.067 + half, abs=0.01),
        3,
        "",
        "holds",
    ]
    assert verdict_on(stored, finetune=["frozen"]).verdict == "contradicted"
    assert verdict_on(stored, finetune=["frozen"], margin=10.5).verdict == "holds"
    assert verdict_on(stored, finetune=["frozen"], margin=0.5).verdict == "contradicted"
    assert verdict_on(stored, finetune=["frozen"], pairs=[["reefl_unmodulated", "reefl"]]).verdict == "holds"
    one = verdict_on(stored, finetune=["pa"])
    assert (one.verdict, one.numbers) == ("not testable", "one seed only")
    none = verdict_on(stored, finetune=["sa"])
    assert (none.verdict, none.numbers) == ("not testable", "no runs on its data here (table4: sa)")

    both = verdict_on(stored, finetune=["frozen", "lora"])  # all: one is contradicted
    assert (both.verdict, both.numbers) == ("contradicted", "2 comparisons: 1 holds, 1 contradicted")
    assert both.comparisons.data.tolist() == ["cifar10", "cifar10"]  # what stands in for the column at this profile
    # lora's differences 10, 10.2, 10 minus frozen's -8
    over = verdict_on(stored, finetune=["lora"], over={"finetune": "frozen"})
    assert over.comparisons["mean"].tolist() == [18.07]
    exits = verdict_on(stored, value="exits", need="most")
    assert exits.verdict == "holds" and exits.comparisons["mean"].tolist() == [10.07, 10.07]
    gain = verdict_on(stored, value="ensemble", against="accuracy", pairs=[["reefl", "reefl"]])
    assert gain.comparisons["mean"].tolist() == [3.0]  # the last exit, 2 above the mean, and 1
    assert verdict_on(stored, only={"backbone": "deit_base_patch16_224.fb_in1k"}).verdict == "not testable"


def test_what_others_found_stands_beside_a_verdict(tmp_path):
    plain, better = [[40.0], [41.0], [42.0]], [[60.0], [61.0], [62.0]]
    stored = store(tmp_path, {("lora", "reefl"): plain, ("lora", "reefl_unmodulated"): better})
    found = verdict_on(stored)
    assert found.verdict == "contradicted" and beside(found, {}) == ("alone in this",)
    other = {"who": "A", "source": "https://a.org", "found": "x > y"}
    assert beside(found, {"a": other | {"disagrees": ["c"]}}) == (
        "as others found",
        "[A](https://a.org) disagrees: x > y",
    )
    assert beside(found, {"a": other | {"related": ["c"]}}) == ("alone in this", "[A](https://a.org) related: x > y")
    held = verdict_on(stored, pairs=[["reefl_unmodulated", "reefl"]])
    assert beside(held, {"a": other | {"agrees": ["c"]}}) == ("[A](https://a.org) agrees: x > y",)
    shown = {j.name: j.others for j in judge(Stored("scalefl", "small", tmp_path))}
    assert any("FedLASE" in text for text in shown["scalefl_leads_global"])


def test_every_result_of_others_names_a_claim_and_where_it_stands(tmp_path, monkeypatch):
    import shutil

    from fedlib_lab.runs.params_files import papers

    every = [o for paper in papers() for o in load_others(paper).values()]
    assert len(every) >= 8 and all(o["source"].startswith("http") and o["who"] and o["found"] for o in every)
    shutil.copytree(params_dir(), tmp_path / "params")
    monkeypatch.setenv("FEDLIB_ROOT", str(tmp_path))
    (tmp_path / "params/scalefl/others.yaml").write_text(
        "a: {who: A, source: b, found: c, agrees: [scalefl_leads_globel]}\n"
    )
    with pytest.raises(ValueError, match="did you mean 'scalefl_leads_global'"):
        load_others("scalefl")


def test_equal_cost_is_interpolated(tmp_path):
    stored = store(tmp_path, {
        ("lora", "reefl"): [[40.0, 50.0], [42.0, 52.0]], ("lora", "reefl_unmodulated"): [[41.0, 49.0], [41.0, 49.0]],
    })  # fmt: skip
    claim = {"value": "exits", "at": "macs", "costs": "figure4"}
    assert verdict_on(stored, **claim).verdict == "not testable"  # the notebook stored no costs
    (tmp_path / "reefl/tables").mkdir(parents=True)
    costs = pd.DataFrame({"finetune": "lora", "variant": ["reefl"] * 2 + ["reefl_unmodulated"] * 2, "macs": [10, 20, 15, 30]})  # fmt: skip
    costs.to_csv(tmp_path / "reefl/tables/figure4_small.csv")
    # at 15: 45, 47 against 41; at 30, beyond its last exit: 50, 52 against 49
    assert verdict_on(stored, **claim).comparisons["mean"].tolist() == [5.0, 2.0]


def test_a_lead_on_one_data_set_is_never_compared_with_one_on_another(tmp_path, monkeypatch):
    claim = CLAIMS["lead_grows_with_heterogeneity"]
    results = {("frozen", m): [[40.0], [41.0], [42.0]] for m in ("reefl", "depthfl")}
    stored = store(tmp_path, results, "table1", columns=["cifar100_alpha1", "cifar100_alpha0.1"])
    assert judge_claim("c", claim, stored, Published("reefl")).numbers.startswith("1 comparison: 1 undecided")
    monkeypatch.setattr(Stored, "data", lambda self, table, column: column)  # two columns on two data sets
    assert judge_claim("c", claim, stored, Published("reefl")).verdict == "not testable"


def test_teachers_are_judged_from_the_notebooks_table(tmp_path):
    stored = Stored("reefl", "small", tmp_path)
    (tmp_path / "reefl/tables").mkdir(parents=True)
    rows = [(1, 1, 40.0, 2, 5), (1, 2, 50.0, 8, 5), (2, 1, 42.0, 5, 6), (2, 2, 44.0, 5, 4)]
    pd.DataFrame(rows, columns=["seed", "exit", "accuracy", "running", "batch"]).to_csv(tmp_path / "reefl/tables/figure7_small_4exits.csv")  # fmt: skip
    shares, means = (
        judge_claim(n, CLAIMS[n], stored, None).comparisons.iloc[0] for n in ("best_exit_teaches", "running_estimate_teaches_better")
    )  # fmt: skip
    assert (shares["mean"], shares.seeds) == (30.0, 2)  # 80 - 20 and 50 - 50 percent
    assert (means["mean"], means.high) == (1.6, pytest.approx(1.6 + 12.706 * 1.4, abs=0.01))  # 48 - 45 and 43 - 42.8


def test_stored_uploads_are_what_the_shapes_give(monkeypatch):
    """A sample of ``outputs/reefl/tables/uploads.csv`` computed again, and the exact claims on broken numbers."""
    stored = Stored("reefl", "small", OUTPUTS).table("uploads")
    real = reefl.load_reported
    some = "finetune == 'frozen' and method in ['depthfl', 'reefl']"
    monkeypatch.setattr(reefl, "load_reported", lambda *a: real(*a).query(some))
    again, kept = reefl.upload_table("reefl"), stored.query(some).reset_index(drop=True)
    pd.testing.assert_frame_equal(again, kept, check_dtype=False)
    of = lambda uploads: SimpleNamespace(table=lambda _: uploads)  # noqa: E731
    assert len(stored) == 60 and reefl.communication(of(stored)) == (True, "60 of 60 cells equal to two decimals")
    assert reefl.extra_upload(of(stored))[0] and reefl.fewer_parameters(of(stored))[0]
    broken = stored.assign(paper=stored.paper.where(stored.index != 7, 0.0))
    assert reefl.communication(of(broken)) == (False, "59 of 60 cells equal to two decimals")
    assert not reefl.extra_upload(of(stored.assign(paper=stored.paper * (1 + (stored.method == "reefl")))))[0]
    assert not reefl.fewer_parameters(of(stored.assign(largest=500_000)))[0]


def test_a_claim_is_judged_at_the_longest_training_of_which_two_seeds_are_stored(tmp_path):
    """100 rounds say one thing, 1,000 the opposite; of one seed they do not count, and a claim's own may be longer."""
    place = {"columns": ["cifar10_alpha1"], "finetune": ["frozen"]}
    claim = {"where": "x", "says": "y", "table": "table1", **place, "pairs": [["reefl", "depthfl"]]}
    ahead, behind = [[50.0], [51.0], [52.0]], [[40.0], [41.0], [42.0]]
    short = {("frozen", "reefl"): behind, ("frozen", "depthfl"): ahead}
    long = {("frozen", "reefl"): ahead[:1], ("frozen", "depthfl"): behind[:1]}
    store(tmp_path, short, "table1", **place)
    found = judge_claim("c", claim, store(tmp_path, long, "horizon", **place), Published("reefl"))
    assert found.verdict == "contradicted" and found.comparisons.comparison.tolist() == ["ReeFL – DepthFL"]
    stored = store(tmp_path, {k: v[::-1] for k, v in short.items()} | {("frozen", "reefl"): ahead, ("frozen", "depthfl"): behind}, "horizon", **place)  # fmt: skip
    for table in ("table1", "table6", "horizon"):
        found = judge_claim("c", claim | {"table": table}, stored, Published("reefl"))
        after = "" if table == "horizon" else ", after 1,000 rounds"
        assert found.verdict == "holds" and found.comparisons["mean"].tolist() == [10.0]
        assert found.comparisons.comparison.tolist() == [f"ReeFL – DepthFL{after}"]


def test_claims_on_a_pre_trained_net_need_one():
    """Their runs here begin at random: a tiny Vision Mamba, a tiny LLaMA."""
    for paper, name in (("reefl", "reefl_leads_on_vim_full"), ("raffm", "on_par_llama")):
        found = judge_claim(name, load_all_claims(paper)[name], Stored(paper, "small", OUTPUTS), Published(paper))
        assert found.verdict == "not testable" and "pretrained = True" in found.numbers


def test_levels_of_text_cost_what_is_said_and_are_judged():
    """Counted from shapes: 0.12, 0.26 and 0.49 of MiniLM; by the widths of BERT 0.22, 0.35 and 0.58, which are told."""
    for name in ("scalefl_leads_text", "scalefl_leads_text_local"):
        found = judge_claim(name, load_all_claims("scalefl")[name], Stored("scalefl", "small", OUTPUTS), Published("scalefl"))  # fmt: skip
        assert found.verdict == "undecided" and "are said" not in found.numbers
    now = next(c.experiment for c in load_grid("scalefl", "bert", "small") if c.variant == "scalefl")
    before = now.replace(options={"widths": (0.4, 0.55, 0.75, 1.0)})
    told = "levels of ScaleFL cost 0.219, 0.349, 0.579 where 0.125, 0.25, 0.5 of the whole are said"
    assert over_budget(now) == "" and over_budget(before) == told
