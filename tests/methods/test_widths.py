"""What answers on the central test set is what clients train: over all methods, where nobody holds the whole."""

from dataclasses import replace

import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.slices import NOTHING, take
from fedlib.engine.serving import client_outputs
from fedlib.methods import METHODS, Round
from fedlib.models.registry import OWN
from fedlib.models.vit import ViTSpec
from fedlib_lab.rivals.ranks import Ranks
from fedlib_lab.runs.trained import all_logits
from tests.helpers.granted import granted

pytestmark = pytest.mark.usefixtures("kept_cache")

ROUNDS = 40  # in which a random sub-model, or a window, comes by
POOR = {  # options by which nobody holds the whole net
    "heterofl": {"rates": (0.25, 0.5)}, "fedrolex": {"rates": (0.25, 0.5)}, "fjord": {"rates": (0.25, 0.5)},
    "splitmix": {"scenario": "own", "ratios": (0.25, 0.5), "bases": 4}, "fedepth": {"scenario": "own", "ratios": (0.5, 0.6)},
    "raffm": {"shares": (0.6, 0.9), **dict.fromkeys(("attention", "ffn", "residual"), (0.5, 1.0))},
    **dict.fromkeys(("hetlora", "flexlora", "flora"), {"rank_shares": (0.25, 0.5)}),
}  # fmt: skip
SMALL = {  # of methods whose defaults are for larger nets
    "scalefl_vit": {"widths": (0.25, 0.5, 0.75, 1.0)}, "darkdistill": {"hidden": 8, "made": 8, "passes": 1},
    **dict.fromkeys(("scalefl", "decoupled", "feddf", "fedavg_level1"), {"eps": 0.9}),
}  # fmt: skip
EXEMPT = {
    "exclusivefl",  # refuses to begin without clients of the whole
    "fiarse",  # holds single entries: see sliced/test_fiarse.py
    "fedproto",  # has no central model but the initial one
}
RATES = {"rates": (0.25, 0.5, 1.0)}
OF_BUDGETS = ("fedavg_level1", "inclusivefl", "decoupled", "feddf", "scalefl_vit", "depthfl", "reefl", "darkdistill")
CASES = [
    *((m, POOR[m], "uniform") for m in POOR),
    *((m, {**POOR[m], "dynamic": True}, "uniform") for m in ("heterofl", "fedrolex")),
    *((m, RATES, (0, 1)) for m in ("heterofl", "fedrolex", "fjord")),  # the rate of 1 is nobody's
    ("depthfl", {"scenario": "own", "ratios": (0.3, 0.6)}, "uniform"),
    *((m, SMALL.get(m, {}), (0, 1)) for m in METHODS if m not in {*POOR, *EXEMPT}),
    *((m, SMALL.get(m, {}), (0, 2)) for m in ("inclusivefl", "decoupled", "feddf", "scalefl_vit", "scalefl")),
]


def federation(monkeypatch, method, options, budgets="uniform", **changes):
    """Six clients on a ViT of four blocks."""
    monkeypatch.setitem(OWN, "four_blocks", ViTSpec(img_size=16, depth=4, dim=24, heads=2, ffn_dim=32))
    lora = issubclass(METHODS[method], Ranks)
    return build_federation(Experiment(
        method=method, options=options, budgets=budgets, backbone="four_blocks", pretrained=False, lr=0.1,
        finetune="lora" if lora else "full", finetune_options={"r": 8} if lora else {}, num_train=120, num_test=30,
        num_clients=6, clients_per_round=6, rounds=2, partition="iid", **granted(method), **changes,
    ))  # fmt: skip


@pytest.mark.parametrize("method", OF_BUDGETS)
def test_an_exit_answers_centrally_as_the_clients_do_whose_last_it_is(method, monkeypatch):
    f = federation(monkeypatch, method, SMALL.get(method, {}), test_split="like_train")
    *_, last = run_rounds(f, Execution(workers=1))
    central = all_logits(f, last.server)
    for ids, outputs, _, counts in client_outputs(f, last.server, {}):
        for k, (client, n) in enumerate(zip(ids, counts, strict=True)):
            exit = 0 if method == "fedavg_level1" else f.budgets[client]
            want = outputs[exit, k, :n]
            torch.testing.assert_close(central[exit, f.data.client_test(client)], want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method, options, budgets", CASES)
def test_no_answer_reads_what_nobody_trains(method, options, budgets, monkeypatch):
    """Entries that no client's model has, in any round, may be zero: nothing that is evaluated reads them."""
    f = federation(monkeypatch, method, options, budgets)
    *_, last = run_rounds(f, Execution(workers=1))
    seen = {n: torch.zeros(p.shape) for n, p in last.server.params.items()}
    for t in range(1, ROUNDS + 1):
        r = Round(t, tuple(f.clients(range(6))), f.setting)
        r = Round(t, r.clients, f.setting, f.method.prepare(last.server, r))
        for part in {m.part for c in r.clients for m in f.method.members(c, last.server, r)} - {NOTHING}:
            for name, info in f.setting.infos.items():
                if part.holds(info) and (source := part.source(name)) in seen:
                    mark_(seen[source], info, part)
    trained = {n: p * seen[n] for n, p in last.server.params.items()}
    before, after = (all_logits(f, s)[f.answering] for s in (last.server, replace(last.server, params=trained)))
    assert torch.equal(before, after) and before.abs().amax((1, 2)).min() > 0


def mark_(seen, info, part):
    """Ones where ``part`` keeps an entry."""
    own = take(torch.arange(seen.numel()).view(seen.shape), info, part)
    seen.view(-1)[own.reshape(-1)] = 1
