"""Costs from shapes alone: the papers' communication columns to two decimals, and the honest figures."""

import math
from dataclasses import dataclass

import pandas as pd
import pytest
import torch

from fedlib import Experiment
from fedlib.engine.federation import budgets_of
from fedlib.methods import METHODS
from fedlib.methods.sliced.fedavg import FedAvg
from fedlib_lab.report.tables import load_reported
from fedlib_lab.runs.costs import exit_costs, load_shapes, upload_mib, upload_parameters
from fedlib_lab.runs.latency import timed_macs_per_second
from fedlib_lab.runs.prices import training_macs

MODES = ("full", "frozen", "lora", "pa", "sa", "ssf")
HONEST = {  # 4 / 12 exits; what the released code really sends (facts 2.6)
    "depthfl": {"full": (52.56, 46.39), "frozen": (0.37, 0.97), "lora": (1.78, 2.19), "pa": (1.80, 2.21), "ssf": (0.63, 1.21)},
    "exclusivefl": {"full": (83.24, 84.44), "frozen": (0.60, 1.80), "lora": (2.85, 4.05), "pa": (2.89, 4.09), "ssf": (1.00, 2.22)},
    "scalefl_vit": {"full": (34.31, 26.40), "frozen": (0.29, 0.70), "lora": (1.40, 1.58), "pa": (1.42, 1.60), "ssf": (0.49, 0.87)},
    "inclusivefl": {"full": (52.33, 45.57), "frozen": (0.15, 0.15), "lora": (1.56, 1.37), "pa": (1.58, 1.39), "ssf": (0.40, 0.37)},
    "reefl": {"full": (53.98, 47.21), "frozen": (1.79, 1.79), "lora": (3.20, 3.01), "pa": (3.22, 3.03), "ssf": (2.04, 2.01)},
}  # fmt: skip


def deit_small(method, finetune, num_exits):
    return Experiment(
        method=method, finetune=finetune, num_exits=num_exits, backbone="deit_small_patch16_224.fb_in1k", augment="none"
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("table, num_exits", [("table1", 4), ("table2", 12)])
def test_communication_column_in_the_papers_convention(table, num_exits, mode):
    reported = load_reported("reefl", table)
    rows = reported[(reported.column == "upload_mib") & (reported.finetune == mode)]
    assert len(rows) == 5
    for row in rows.itertuples():
        ours = upload_mib(deit_small(row.method, mode, num_exits), 100, "paper")
        assert f"{ours:.2f}" == f"{row.mean:.2f}", row.method


@pytest.mark.parametrize("method", HONEST)
def test_honest_upload(method):
    for mode, pair in HONEST[method].items():
        for num_exits, expected in zip((4, 12), pair, strict=True):
            assert f"{upload_mib(deit_small(method, mode, num_exits), 100):.2f}" == f"{expected:.2f}", (mode, num_exits)


def test_upload_counts_of_the_facts():
    assert upload_parameters(deit_small("reefl", "frozen", 4), 100) == [469_914] * 4
    assert upload_parameters(deit_small("inclusivefl", "frozen", 4), 100) == [39_268] * 4
    assert upload_parameters(deit_small("depthfl", "frozen", 4), 100) == [39_268 * n for n in (1, 2, 3, 4)]


def test_exit_costs_grow_and_match_hand_arithmetic():
    rows = pd.DataFrame(exit_costs(deit_small("depthfl", "frozen", 4), 100))
    assert rows.macs.is_monotonic_increasing and rows.training_memory_mib.is_monotonic_increasing
    # Per block: q, k, v, proj 4 d^2 and the MLP 8 d^2 per token, attention 2 T^2 d; T = 197, d = 384. Patches 196 * 768 d.
    tokens, d = 197, 384
    block = tokens * 12 * d * d + 2 * tokens * tokens * d
    assert rows.macs[3] == 12 * block + 196 * 768 * d + 4 * d * 100
    assert rows.parameters[3] == 371_328 + 12 * 1_774_464 + 4 * 39_268


def test_frozen_heads_keep_almost_no_activations_but_ree_keeps_the_chain():
    depthfl = exit_costs(deit_small("depthfl", "frozen", 4), 100)[-1]["training_memory_mib"]
    reefl = exit_costs(deit_small("reefl", "frozen", 4), 100)[-1]["training_memory_mib"]
    assert depthfl < 200 < 1000 < reefl


def test_unknown_convention_is_refused():
    with pytest.raises(ValueError, match="convention = 'both'; allowed: honest, paper"):
        upload_mib(deit_small("reefl", "lora", 4), 100, "both")


def test_budgets_need_not_be_exits():
    """Four budgets on one exit: clients are dealt them, and each is priced with its own sub-model."""

    @dataclass(frozen=True)
    class Narrow(FedAvg):
        def num_budgets(self, num_exits):
            return 4

        def slice_for(self, client, server, r):
            return r.setting.cut(lambda n: n * (client.budget + 1) // 4)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(METHODS, "narrow", Narrow)
        e = Experiment(method="narrow", finetune="full", pretrained=False, num_exits=1, num_train=4000)
        macs = [cost["macs"] for cost in exit_costs(e, 10)]
        assert len(macs) == 4 and macs == sorted(macs)
        assert budgets_of(e, Narrow())[:6].tolist() == [0, 1, 2, 3, 0, 1]
        assert training_macs(e) == pytest.approx(3 * 100 * 10 * 40 * sum(macs) / 4)
        assert set(budgets_of(e.replace(budgets="maximum"), Narrow())) == {3}


def test_a_method_can_measure_parts():
    """``Setting.measure`` counts slices of the experiment's own model."""
    e = Experiment(method="fedavg", finetune="full", pretrained=False, num_exits=1)
    setting = load_shapes(e, 10).setting
    everything = sum(math.prod(i.shape) for i in setting.infos.values())
    assert setting.measure.parameters(setting.full()) == everything


def test_costs_by_hand():
    e = Experiment(
        method="depthfl", dataset="sst2", augment="none", backbone="minilm.32", finetune="frozen", num_exits=3
    )
    rows = exit_costs(e, 2)
    # A block: 4 * 384^2 + 2 * 384 * 1536 per token, attention 2 * 32 * 384 per token; 32 tokens. Embeddings: no product.
    block = 32 * (4 * 384**2 + 2 * 384 * 1536 + 2 * 32 * 384)
    assert [r["macs"] for r in rows] == [2 * j * block + j * 2 * 384 for j in (1, 2, 3)]
    assert [r["block"] for r in rows] == [2, 4, 6] and all(r["training_memory_mib"] > 0 for r in rows)
    classifier = 2 * 384 + 385 * 2
    assert upload_parameters(e, 2) == [j * classifier for j in (1, 2, 3)]
    # LoRA, r = 32, on q and v: 2 * 2 * 32 * 384 parameters a block.
    assert upload_parameters(e.replace(finetune="lora"), 2) == [j * classifier + 2 * j * 49_152 for j in (1, 2, 3)]


def test_costs_count_the_scan():
    e = Experiment(method="depthfl", backbone="vim_tiny", finetune="frozen", augment="none")
    rows = exit_costs(e, 100)
    # A token and block: in_proj 768 * 192, out_proj 192 * 384, and per direction x_proj 44 * 384, dt_proj 12 * 384 and
    # four products per channel and state, 4 * 16 * 384. 197 tokens; patches 196 * 768 * 192; heads 192 * 100.
    token = 768 * 192 + 192 * 384 + 2 * (44 * 384 + 12 * 384 + 4 * 16 * 384)
    assert [r["macs"] for r in rows] == [
        196 * 768 * 192 + 197 * token * 6 * j + j * 192 * 100 for j in (1, 2, 3, 4)
    ]  # 1.51e9 at the last exit; published for Vim-T: 1.5 G
    assert [r["block"] for r in rows] == [6, 12, 18, 24] and rows[3]["parameters"] == 6_954_816 + 4 * 19_684
    # Ree at d = 192: 25 positions and the meta token; two norms; qkv 192 -> 48 and 16 -> 192; MLP 259 wide; classifier.
    ree = 26 * 192 + 2 * 384 + 193 * 48 + 17 * 192 + 193 * 259 + 260 * 192 + 384 + 193 * 100
    assert upload_parameters(e.replace(method="reefl"), 100) == [ree] * 4


def test_a_timed_step_tells_the_machines_speed_and_changes_nothing():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    assert 1e6 < timed_macs_per_second(Experiment(finetune="frozen"), 10, seconds=0.05) < 1e15
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), state)
