"""CAFEDistill: printed numbers, params, claims, what tables and figures make of clients' numbers."""

import numpy as np
import pandas as pd
import pytest

from fedlib.core.storage import read_json, write_json, write_lines
from fedlib.engine.leaving import THRESHOLDS
from fedlib_lab.papers import cafedistill
from fedlib_lab.papers.cafedistill import by_main_label, coordination, students_by_round
from fedlib_lab.report.claims import Published, Stored, compared, judge_claim, load_all_claims
from fedlib_lab.report.clients import inference_costs, leaving_curve, macs_of, numbers_of, spread_out
from fedlib_lab.report.tables import collect, load_reported, mean_sd, obtained, reported_beside
from fedlib_lab.runs.params import load_grid, load_spec
from fedlib_lab.runs.store import run_path

CLAIMS = load_all_claims("cafedistill")
ON_RUNS = [name for name, claim in CLAIMS.items() if "table" in claim]


@pytest.mark.parametrize(
    "table, rows, spots",
    [
        ("table1", 14 * 7, {("cafedistill", "cifar100_alpha0.3"): (50.41, 5.47), ("depthfl", "tiny_imagenet_alpha0.1"): (0.55, 0.71),
                            ("fedavg", "ag_news_alpha0.3"): (25.11, 33.16), ("pfedgraph", "cifar10_alpha0.1"): (67.66, 24.1)}),
        ("table2", 12 * 4, {("fedpac", "cifar10_alpha0.3"): (76.5, 9.51), ("local", "ag_news_alpha0.3"): (72.49, 20.85)}),
        ("table3", 10 * 4, {("fedbabu_kd", "cifar100_alpha0.3, exit 4"): (30.82, 8.3), ("fedrod", "cifar100_alpha0.3, exit 3"): (48.27, 8.23)}),
        ("table4", 2 * 4 * 4, {("cafedistill", "tiny_imagenet_alpha0.3, exit 4"): (41.37, 10.09), ("fedper_kd", "cifar100_alpha0.3, exit 1"): (36.45, 5.65)}),
    ],
)  # fmt: skip
def test_printed_numbers(table, rows, spots):
    frame = load_reported("cafedistill", table).set_index(["variant", "column"])
    assert len(frame) == rows and not frame.index.duplicated().any() and frame["mean"].between(0, 100).all()
    for key, numbers in spots.items():
        assert tuple(frame.loc[key, ["mean", "sd"]]) == numbers
    known = set(load_spec("cafedistill", table)["variants"])
    assert {v for v, _ in frame.index} <= known


def test_the_mean_of_the_exits_in_table_4_is_table_1s():
    exits, means = (
        load_reported("cafedistill", t).set_index(["variant", "column"])["mean"] for t in ("table4", "table1")
    )
    for column, atol in (("cifar100_alpha0.3", 0.01), ("tiny_imagenet_alpha0.3", 0.01)):
        mine = np.mean([exits["cafedistill", f"{column}, exit {j}"] for j in (1, 2, 3, 4)])
        assert mine == pytest.approx(means["cafedistill", column], abs=atol)


def test_the_grid_at_paper_size_is_table_6():
    cells = {(c.variant, c.column): c.experiment for c in load_grid("cafedistill", "table1", "paper") if c.seed == 1}
    e = cells["cafedistill", "cifar100_alpha0.1"]
    assert (e.rounds, e.local_epochs, e.batch_size, e.lr, e.decay, e.momentum, e.weight_decay) == (300, 5, 64, 0.1, 0.99, 0.9, 1e-4)  # fmt: skip
    assert (e.num_clients, e.clients_per_round, e.num_exits, e.backbone, e.schedule) == (100, 10, 4, "resnet18_cifar", "exponential")  # fmt: skip
    e = cells["fedrep", "ag_news_alpha0.3"]
    assert (e.rounds, e.local_epochs, e.backbone, e.clip_value, e.test_split) == (100, 1, "transformer4", None, "like_train")  # fmt: skip
    assert cells["local", "cifar10_alpha0.3"].num_exits == 3
    single = {c.variant: c.experiment.num_exits for c in load_grid("cafedistill", "table2", "paper") if c.column == "cifar10_alpha0.3"}  # fmt: skip
    assert single.pop("cafedistill") == single.pop("cafedistill_literal") == 3 and set(single.values()) == {1}
    bounds = {c.variant: c.experiment.clip_norm for t in ("table1", "table2", "figure2", "table4") for c in load_grid("cafedistill", t, "paper")}  # fmt: skip
    assert bounds.pop("depthfl_clipped") == 5.0 and set(bounds.values()) == {None}  # the row that the paper has not


def test_thresholds_of_tables_are_recorded():
    assert set(load_spec("cafedistill", "table2")["thresholds"].values()) <= set(THRESHOLDS)


@pytest.mark.parametrize("name", ON_RUNS)
def test_every_claim_names_what_exists_and_is_the_papers(name):
    claim = CLAIMS[name]
    spec = load_spec("cafedistill", claim["table"])
    assert {v for pair in claim["pairs"] for v in pair} <= set(spec["variants"])
    if "by" in claim:
        return  # the figures print no numbers
    assert set(claim.get("columns", [])) <= set(spec["columns"])
    signs = [d.mean + claim.get("margin", 0) > 0 for _, d in compared(claim, Published("cafedistill")) if len(d.points)]
    if claim["table"].startswith("figure") or "Figure 6" in claim["where"]:
        assert not signs
    else:
        assert np.mean(signs) > (0.5 if claim.get("need") == "most" else 0.98)


def told(cells, folder, accuracies):
    """Runs of three exits, with the accuracies of the first evaluated round and of all later; an example leaves at exit 1 or 3, ever more often at 1."""
    for cell in cells:
        exits = accuracies[cell.variant]
        store(cell, folder, SUMMARY)
        lines, every = [], cell.experiment.evaluate_every
        for t in range(every, cell.experiment.rounds + 1, every):
            late = 1 if t == every else 2
            at = exits[late - 1]
            leaving = {
                s: {
                    "accuracy": at[2] - 4 * (1 - float(s)),
                    "sd": 1.0,
                    "share": [1 - float(s) / late, 0.0, float(s) / late],
                }
                for s in ("0.4", "0.6", "0.8", "0.9")
            }
            personal = {
                "accuracy": float(np.mean(at)),
                "sd": 1.0,
                "exits": at,
                "exits_sd": [1.0] * 3,
                "leaving": leaving,
            }
            lines.append({"t": t, "accuracy": 1.0, "exits": [1.0] * 3, "personal": personal})
        path = run_path(cell.experiment, folder)
        write_lines(path / "metrics.jsonl", lines)
        write_json(path / "summary.json", read_json(path / "summary.json") | lines[-1])


def test_claims_on_curves_are_judged_by_hand(tmp_path):
    """CAFEDistill's curve lies 10 above FedPer's at every cost; its third exit is 5 below its first at first."""
    cells = [
        c
        for c in load_grid("cafedistill", "table1", "small")
        if c.column in ("cifar10_alpha0.3", "cifar100_alpha0.3")
        and c.variant in ("cafedistill", "fedper")
        and c.seed < 3
    ]
    assert len(cells) == 8
    told(cells, tmp_path / "runs", {
        "cafedistill": ([50.0, 40.0, 45.0], [50.0, 52.0, 60.0]), "fedper": ([40.0, 40.0, 40.0], [50.0, 50.0, 50.0])
    })  # fmt: skip
    stored, published = Stored("cafedistill", "small", tmp_path), Published("cafedistill")
    found = judge_claim("x", CLAIMS["more_accurate_at_equal_macs"], stored, published)
    rows = found.comparisons.dropna(subset=["mean"])
    assert rows["mean"].tolist() == pytest.approx([10.0, 10.0]) and set(rows.data) == {"cifar10", "cifar100"}
    assert found.verdict == "undecided" and found.printed == "–"  # four of the five rivals have no runs there
    assert "left out: CAFEDistill – FedRep-EE, at equal MACs, CAFEDistill – FedBABU-EE" in found.numbers
    alone = CLAIMS["more_accurate_at_equal_macs"] | {"pairs": [["cafedistill", "fedper"]]}
    found = judge_claim("x", alone, stored, published)
    assert found.verdict == "holds" and found.on == "not on AG News and Tiny ImageNet"

    found = judge_claim("x", CLAIMS["exits_over_the_rounds"], stored, published)
    rows = found.comparisons[found.comparisons.data == "cifar100"].set_index("comparison")["mean"]
    assert {k.removeprefix("CAFEDistill: "): v for k, v in rows.items()} == {
        "exit 3 – exit 1, at its worst round": -5.0, "exit 3 – exit 2, at its worst round": 5.0,
        "exit 1 – exit 2, at the first evaluated round": 10.0, "exit 2 – exit 1, at the last round": 2.0,
    }  # fmt: skip
    assert found.verdict == "contradicted" and found.numbers.startswith("8 comparisons: ")

    found = judge_claim("x", CLAIMS["threshold_trades_accuracy_for_macs"], stored, published)
    rows = found.comparisons[found.comparisons.data == "cifar100"].set_index("comparison")["mean"]
    e = next(c.experiment for c in cells if c.column == "cifar100_alpha0.3")
    first, _, whole = macs_of(e)
    of_whole = lambda share: 100 * ((1 - share) * first + share * whole) / whole  # noqa: E731
    expected = [
        2.0,
        -1.6 + 2.01,
        100 - of_whole(0.3) - 37.15,
        *(of_whole(s) - of_whole(s / 2) for s in (0.4, 0.6, 0.8, 0.9)),
    ]
    assert rows.tolist() == pytest.approx(expected, abs=0.006)


def test_a_claim_is_judged_on_what_was_run_and_says_so_unless_data_are_its_content(tmp_path):
    """Table 4 is of CIFAR-100 and Tiny ImageNet; CIFAR-10 stands in for them, unless a claim is ``of`` these alone."""
    claim, shift = CLAIMS["student_selection_helps_every_exit"], {"cafedistill": 20.0, "cafedistill_unselected": 0.0}

    def keep(column, sign):
        for c in load_grid("cafedistill", "table4", "small", {"columns": [column], "variant": list(shift)}):
            personal = SUMMARY["personal"] | {"exits": [40.0 + sign * shift[c.variant] + 0.1 * c.seed] * 3}
            store(c, tmp_path / "runs", SUMMARY | {"personal": personal})

    keep("cifar10_alpha0.3", 1)
    found = judge_claim("x", claim, Stored("cafedistill", "small", tmp_path), Published("cafedistill"))
    assert (found.verdict, found.on) == ("holds", "on CIFAR-10 in place of CIFAR-100 and Tiny ImageNet")
    content = claim | {"of": ["cifar100", "tiny_imagenet"]}
    found = judge_claim("x", content, Stored("cafedistill", "small", tmp_path), Published("cafedistill"))
    assert (found.verdict, found.on) == ("not testable", "")
    assert found.numbers == "not on its data (cifar100 and tiny_imagenet); on cifar10, cifar100: 3 comparisons: 3 hold; 1 not testable"  # fmt: skip
    keep("cifar100_alpha0.3", -1)
    found = judge_claim("x", content, Stored("cafedistill", "small", tmp_path), Published("cafedistill"))
    assert (found.verdict, found.numbers) == ("contradicted", "3 comparisons: 3 contradicted")
    assert len(found.comparisons) == 6 and found.on == "not on Tiny ImageNet"
    found = judge_claim("x", claim, Stored("cafedistill", "small", tmp_path), Published("cafedistill"))
    assert (found.verdict, found.numbers) == ("contradicted", "6 comparisons: 3 hold, 3 contradicted")
    assert found.on == "on CIFAR-10 in place of Tiny ImageNet"
    claim = CLAIMS["joint_training_beats_training_afterwards"]
    for c in load_grid("cafedistill", "figure2", "small"):
        personal = SUMMARY["personal"] | {"accuracy": 70.0 if c.variant == "fedper" else 50.0}
        if not run_path(c.experiment, tmp_path / "runs").exists():
            store(c, tmp_path / "runs", SUMMARY | {"personal": personal})
    found = judge_claim("x", claim, Stored("cafedistill", "small", tmp_path), Published("cafedistill"))
    assert (found.verdict, found.numbers) == ("holds", "1 comparison: 1 holds")
    assert found.on == "on CIFAR-10 in place of CIFAR-100"


def test_claims_that_are_arithmetic():
    stored = Stored("cafedistill", "small")
    holds, text = cafedistill.printed_savings(stored)
    assert not holds and "46.86, 46.15, 30.74, 44.97" in text  # the text says 46.15, 44.73, 30.74, 48.49
    assert cafedistill.last_exit_share(stored) == (True, "51,300 of 11,168,832 parameters: 0.46 %")
    holds, text = cafedistill.single_exit_macs(stored)
    assert not holds and text.startswith("30.39, 555.47, 2221.77,") and text.endswith("3 of 4 agree")


SUMMARY = {
    "status": "finished", "accuracy": 20.0, "exits": [10.0, 30.0, 20.0], "seconds": 1.0, "t": 2,
    "personal": {
        "accuracy": 50.0, "sd": 8.0, "exits": [40.0, 50.0, 60.0], "exits_sd": [1.0, 2.0, 3.0],
        "leaving": {"0.8": {"accuracy": 55.0, "sd": 7.0, "share": [0.5, 0.25, 0.25]}},
    },
}  # fmt: skip


def store(cell, folder, summary):
    path = run_path(cell.experiment, folder)
    path.mkdir(parents=True)
    write_json(path / "experiment.json", {"experiment": cell.experiment.to_dict()})
    write_json(path / "summary.json", summary | {"t": cell.experiment.rounds})
    every = cell.experiment.evaluate_every
    write_lines(path / "metrics.jsonl", [{"t": t} for t in range(every, cell.experiment.rounds + 1, every)])


@pytest.fixture
def frame(tmp_path):
    cells = load_grid("cafedistill", "table2", "small", {"columns": ["cifar10_alpha0.3"], "variant": ["fedper", "cafedistill"], "seeds": [1, 2]})  # fmt: skip
    for c in cells:
        better = {**SUMMARY["personal"], "accuracy": 50.0 + c.seed, "sd": 8.0 + c.seed}
        single = {"accuracy": 45.0, "sd": 5.0, "exits": [45.0], "exits_sd": [5.0]}
        personal = better if c.variant == "cafedistill" else single
        exits = SUMMARY["exits"] if c.variant == "cafedistill" else [20.0]
        store(c, tmp_path, SUMMARY | {"personal": personal, "exits": exits})
    return cells, collect(cells, tmp_path)


def test_tables_show_clients_means_and_their_sd(frame):
    cells, frame = frame
    assert set(frame.clients) == {51.0, 52.0, 45.0}
    ours = mean_sd(frame, "clients").set_index("variant").loc["cafedistill"]
    assert (ours["mean"], ours.sd, ours.seeds) == (51.5, 9.5, 2)  # SD over clients, mean over seeds
    table = obtained(frame, reported_beside("cafedistill", "table2"), "left", {"cifar10_alpha0.3": 0.8})
    shown = table.set_index("method")
    assert shown.loc["CAFEDistill", "obtained"] == "55.00 ± 7.00"
    assert shown.loc["FedPer", "obtained"] == "45.00 ± 5.00" and shown.loc["FedPer", "reported"] == "73.98 ± 10.82"
    by_exit = spread_out(frame[frame.variant == "cafedistill"], "client_exits")
    assert by_exit.column.tolist() == [f"cifar10_alpha0.3, exit {j}" for j in (1, 2, 3)] * 2
    assert by_exit.clients.tolist() == [40, 50, 60] * 2 and by_exit.clients_sd.tolist() == [1, 2, 3] * 2
    with pytest.raises(ValueError, match=r"thresholds: cifar10_alpha0.3 = 0.85 was not recorded"):
        spread_out(frame, "left", {"cifar10_alpha0.3": 0.85})
    assert numbers_of({"accuracy": 3.0}) == {}


def test_macs_of_leaving_early_by_hand(frame):
    """ConvNet of 32, 64, 64 channels on 32 x 32 pixels; exits read pooled maps, the last all 2 x 2 pixels."""
    cells, frame = frame
    ours = next(c for c in cells if c.variant == "cafedistill")
    units = [30 * 30 * 32 * 27, 13 * 13 * 64 * 32 * 9, 4 * 4 * 64 * 64 * 9]
    exits = [32 * 10, 64 * 10, 4 * 64 * 10]
    expected = [sum(units[: j + 1]) + sum(exits[: j + 1]) for j in range(3)]
    assert macs_of(ours.experiment) == expected
    (point,) = leaving_curve(ours.experiment, SUMMARY["personal"]["leaving"])
    spent = 0.5 * expected[0] + 0.25 * expected[1] + 0.25 * expected[2]
    assert point["macs"] == pytest.approx(spent) and point["accuracy"] == 55.0
    costs = inference_costs(cells, frame, {"cifar10_alpha0.3": 0.8}).set_index(["variant", "seed"])
    assert costs.loc[("cafedistill", 1), "macs_millions"] == round(spent / 1e6, 2)
    assert costs.loc[("cafedistill", 1), "saved_percent"] == round(100 * (1 - spent / expected[2]), 2)
    assert costs.loc[("fedper", 1), "macs_millions"] == round((sum(units) + exits[2]) / 1e6, 2)
    assert costs.loc[("fedper", 1), "saved_percent"] == 0


def test_claims_judge_what_clients_get(tmp_path):
    for c in load_grid("cafedistill", "table2", "small", {"columns": ["cifar10_alpha0.3"], "seeds": [1, 2, 3]}):
        single = {"accuracy": 44.0 - 0.1 * c.seed, "sd": 5.0, "exits": [54.0], "exits_sd": [5.0]}
        personal = SUMMARY["personal"] if c.variant == "cafedistill" else single
        exits = [20.0] if c.variant != "cafedistill" else SUMMARY["exits"]
        store(c, tmp_path / "runs", SUMMARY | {"personal": personal, "exits": exits})
    stored, name = Stored("cafedistill", "small", tmp_path), "early_exits_beat_single_exit_models"
    found = judge_claim(name, CLAIMS[name], stored, Published("cafedistill"))
    assert (
        found.verdict == "undecided" and "left out: CAFEDistill – FedAvg, CAFEDistill – FedProx" in found.numbers
    )  # small has four rivals
    assert set(found.comparisons.dropna()["mean"]) == {11.2}  # 55 - (44 - 0.2)
    kept = {c.variant for c in load_grid("cafedistill", "table2", "small")}
    of_them = CLAIMS[name] | {"pairs": [pair for pair in CLAIMS[name]["pairs"] if set(pair) <= kept]}
    assert judge_claim(name, of_them, stored, Published("cafedistill")).verdict == "holds" and len(of_them["pairs"]) > 2
    assert found.printed == "44 of 44"
    name = "leads_at_every_exit"
    assert judge_claim(name, CLAIMS[name], stored, Published("cafedistill")).verdict == "not testable"


def test_coordination_is_that_of_the_run():
    """Decisions told afterwards are those that a run takes: same students and shares in every round."""
    from dataclasses import replace

    import torch

    from fedlib import Execution, build_federation, run_rounds
    from fedlib.methods import METHODS
    from tests.helpers.plain_personal import experiment

    e = experiment("cafedistill", num_clients=6, clients_per_round=3, rounds=4, num_train=120)
    f, decided = coordination(e, Execution(workers=1))
    taken, original = [], METHODS["cafedistill"].prepare
    g = build_federation(e)

    class Told(METHODS["cafedistill"]):
        def prepare(self, server, r):
            taken.append(original(self, server, r))
            return taken[-1]

    list(run_rounds(replace(g, method=Told()), Execution(workers=1)))
    assert len(decided) == 5 and len(taken) == 4
    for told, notes in zip(decided, taken, strict=False):
        torch.testing.assert_close(torch.from_numpy(told.students), notes["students"])
        torch.testing.assert_close(torch.from_numpy(told.shares), notes["shares"])
    assert students_by_round(decided[:-1])[:, -1].tolist() == [100, 100]
    order = by_main_label(f, decided[-1].clients)
    labels = [int(f.setting.label_counts(decided[-1].clients[k]).argmax()) for k in order]
    assert labels == sorted(labels)
    with pytest.raises(ValueError, match="method = 'fedper' selects no students"):
        coordination(e.replace(method="fedper"))


def test_published_numbers_exit_by_exit():
    rows = compared(CLAIMS["student_selection_helps_every_exit"], Published("cafedistill"))
    assert [round(d.mean, 2) for _, d in rows] == [3.39, 4.05, 5.21, 1.17, 1.17, 2.23, 2.87, 3.09]
    assert isinstance(pd.DataFrame([w for w, _ in rows]).column.iloc[0], str)
