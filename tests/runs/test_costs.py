"""What runs and tables cost: the papers' numbers from shapes alone, hours, bytes and seconds by hand and as measured."""

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch

from fedlib import Execution, Experiment, build_federation, run, run_rounds
from fedlib.core.clients import Client
from fedlib.engine.federation import budgets_of
from fedlib.methods import METHODS
from fedlib.methods.sliced.fedavg import FedAvg
from fedlib_lab import cli
from fedlib_lab.executors.meter import count_training
from fedlib_lab.papers.fedepth.training_memory import peaks_mib
from fedlib_lab.report.tables import load_reported
from fedlib_lab.runs import costs
from fedlib_lab.runs.costs import (
    CARDS,
    Pace,
    about,
    count_bytes,
    describe_time,
    downloads,
    each_seconds,
    examples_per_client,
    exit_costs,
    forecast,
    gpu_hours,
    kind_of,
    load_shapes,
    macs_per_second,
    num_classes,
    taken,
    taken_by,
    training_macs,
    upload_mib,
    upload_parameters,
)  # fmt: skip
from fedlib_lab.runs.params import Cell
from fedlib_lab.runs.store import stored_pace
from tests.helpers.stored import ONE, short

MODES = ("full", "frozen", "lora", "pa", "sa", "ssf")
HONEST = {  # 4 / 12 exits; what the released code really sends (facts 2.6)
    "depthfl": {"full": (52.56, 46.39), "frozen": (0.37, 0.97), "lora": (1.78, 2.19), "pa": (1.80, 2.21), "ssf": (0.63, 1.21)},
    "exclusivefl": {"full": (83.24, 84.44), "frozen": (0.60, 1.80), "lora": (2.85, 4.05), "pa": (2.89, 4.09), "ssf": (1.00, 2.22)},
    "scalefl_vit": {"full": (34.31, 26.40), "frozen": (0.29, 0.70), "lora": (1.40, 1.58), "pa": (1.42, 1.60), "ssf": (0.49, 0.87)},
    "inclusivefl": {"full": (52.33, 45.57), "frozen": (0.15, 0.15), "lora": (1.56, 1.37), "pa": (1.58, 1.39), "ssf": (0.40, 0.37)},
    "reefl": {"full": (53.98, 47.21), "frozen": (1.79, 1.79), "lora": (3.20, 3.01), "pa": (3.22, 3.03), "ssf": (2.04, 2.01)},
}  # fmt: skip
SMALL = dict(num_train=60, num_test=10, num_clients=6, clients_per_round=3, rounds=2, evaluate_every=0)
GIB = 2**30
WHOLE = Experiment(
    method="fedavg", num_exits=1, pretrained=False, finetune="full", num_train=64, num_test=16, num_clients=2,
    clients_per_round=1, rounds=2, partition="iid", augment="none", batch_size=64,
)  # fmt: skip

CONVNET = Experiment(dataset="cifar100", backbone="resnet8", pretrained=False, finetune="full", exit_head="linear")


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


def test_a_mean_upload_is_of_each_budgets_own():
    """SplitMix's clients send a base, two or four; FIARSE's so much of the model as they hold."""
    for method in ("splitmix", "fiarse"):
        e = CONVNET.replace(method=method, num_exits=4, exit_head=None)
        each = [load_shapes(e, 100).upload_mib(part, b) for b, part in enumerate(load_shapes(e, 100).slices)]
        assert (
            each == sorted(each) and each[0] < each[-1] and upload_mib(e, 100) == pytest.approx(sum(each) / len(each))
        )


def test_what_personal_methods_send_beside_the_model_is_counted():
    """FedPAC: head, prototypes and class means, counts and a variance; CAFEDistill: its last exit, both ways."""
    e = Experiment(dataset="cifar100", backbone="convnet3_slim", pretrained=False, finetune="full", num_exits=1)
    shapes = load_shapes(e.replace(method="fedpac"), 100)
    sizes = {n: p.numel() for n, p in shapes.trainable.items()}
    body, head = sum(n for k, n in sizes.items() if "head" not in k), 100 * 256 + 100
    assert sum(sizes.values()) == body + head
    down, up = shapes.traffic_mib(shapes.slices[0])
    assert down == pytest.approx(4 * (body + head + 100 * 256 + 100) / 2**20)  # prototypes, and which are known
    assert up == pytest.approx(4 * (body + head + 2 * 100 * 256 + 100 + 1) / 2**20)
    sent = taken_by(e.replace(method="fedpac"), 0).sent
    assert up == pytest.approx(4 * (body + sent) / 2**20)  # as it is counted when it runs
    shapes = load_shapes(e.replace(method="cafedistill", num_exits=3), 100)
    last = {n: p.numel() for n, p in shapes.trainable.items() if shapes.setting.infos[n].exit == 2}
    body = {n: p.numel() for n, p in shapes.trainable.items() if shapes.setting.infos[n].exit is None}
    down, up = shapes.traffic_mib(shapes.slices[-1], 2)
    assert up == pytest.approx(4 * sum((last | body).values()) / 2**20)
    assert down == pytest.approx(up + 4 * 3 / 2**20)  # which exits are students


@pytest.mark.parametrize(
    "method, backbone", [("fedpac", "msdnet12_slim"), ("fedpac", "resnet8"), ("darkdistill", "deit_micro.w32")]
)
def test_what_goes_beside_the_model_is_charged_as_it_is_sent(method, backbone):
    """Class means were as large as the last exit's largest weight, a convolution's; labels and difficulties were none."""
    e = Experiment(method=method, dataset="cifar10", backbone=backbone, pretrained=False, num_clients=100)
    e = e.replace(finetune="full", num_exits=2 if method == "darkdistill" else 1)
    shapes = load_shapes(e, 10)
    own = sum(p.numel() for n, p in shapes.trainable.items() if not shapes.method.personal(shapes.setting.infos[n]))
    sent = 2 * 500 if method == "darkdistill" else taken_by(e, 0).sent
    assert shapes.upload_mib(shapes.slices[-1], shapes.budgets - 1) == 4 * (own + sent) / 2**20


def test_what_stays_with_a_client_is_not_charged():
    """FedBABU's exits, which are as they began, and statistics of batch norm that are a client's own."""
    mib = lambda method, norm="batch": [  # noqa: E731
        (c["upload_mib"], c["download_mib"])
        for c in exit_costs(CONVNET.replace(method=method, batch_norm=norm, num_exits=3), 10)
    ]
    assert mib("fedbabu") == mib("fedper") and mib("fedavg", "local") == mib("fedavg") < mib("fedavg", "tracked")


@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])
def test_narrow_nets_are_priced_where_batch_norm_keeps_statistics(method):
    """It was PyTorch's error: running_mean should contain 1 elements not 4."""
    e = CONVNET.replace(method=method, options={"rates": (0.25, 1.0)})
    tracked, batch = (exit_costs(e.replace(batch_norm=x), 10) for x in ("tracked", "batch"))
    assert [c["macs"] for c in tracked] == [c["macs"] for c in batch]


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
        shapes = load_shapes(e, 10)
        each = [
            count_training(e, shapes.method, shapes.setting, shapes.model, Client(-1, b, 40)).macs for b in range(4)
        ]
        assert training_macs(e) == pytest.approx(100 * 10 * 40 * sum(each) / 4)
        assert [t / m for t, m in zip(each, macs, strict=True)] == pytest.approx([2.8] * 4, rel=0.07)
        assert set(budgets_of(e.replace(budgets="maximum"), Narrow())) == {3}
        patch.setattr(Narrow, "travels", lambda *_: None, raising=False)
        with pytest.raises(ValueError, match="narrow: travels\\(\\) = None: expected tuple, got NoneType"):
            load_shapes(e, 10).upload_mib(shapes.slices[0])


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
    assert 1e6 < macs_per_second(Experiment(finetune="frozen"), seconds=0.05) < 1e15
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), state)


# --- MACs of training ------------------------------------------------------------------------------------------------


def test_training_macs_by_hand():
    e = CONVNET.replace(method="depthfl", rounds=7, clients_per_round=4, num_clients=50, local_epochs=2, num_exits=3)
    macs = [cost["macs"] for cost in exit_costs(e, 100)]
    first = 27 * 32 * 32 * 32 // 2  # MACs of the stem, 16 channels, whose input needs no gradient
    # 7 rounds x 4 clients x 2 epochs x 50,000 / 50 images x the mean over 50 clients, budgets 17 17 16
    mean = np.dot([3 * m - first for m in macs], [17, 17, 16]) / 50
    assert training_macs(e) == pytest.approx(7 * 4 * 2 * 1000 * mean)


def test_exclusivefl_pays_for_its_few_clients_only():
    e = CONVNET.replace(method="exclusivefl", num_exits=3, rounds=10, num_clients=100)
    whole = training_macs(e.replace(budgets="maximum"))
    assert training_macs(e) == pytest.approx(whole)  # 33 of 100 clients hold 3 exits, and all 10 of a round are of them
    few = e.replace(num_clients=20, clients_per_round=10)  # six of twenty
    assert training_macs(few) == pytest.approx(0.6 * 5 * whole)


@pytest.mark.parametrize("method", ["depthfl", "reefl"])
def test_what_lies_between_counted_depths_is_interpolated(method):
    e = Experiment(method=method, dataset="mnist", backbone="deit_micro", num_exits=12)
    shapes = load_shapes(e, 10)
    all_, some = range(12), taken(kind_of(e))
    each = [count_training(e, shapes.method, shapes.setting, shapes.model, Client(-1, b, 40)) for b in all_]
    assert [t.macs for t in some] == pytest.approx([t.macs for t in each], rel=0.01)
    assert [t.peak for t in some] == pytest.approx([t.peak for t in each], rel=0.05)


def test_examples_per_client():
    assert examples_per_client(Experiment(dataset="cifar100")) == 500
    assert examples_per_client(Experiment(num_train=320, num_clients=16, clients_per_round=4)) == 20
    assert examples_per_client(Experiment(dataset="femnist", partition="natural", num_clients=381)) == 204
    held = Experiment(dataset="femnist", partition="natural", num_clients=381, validation_fraction=0.25)
    assert examples_per_client(held) == 153


@pytest.mark.parametrize("asked", [{"num_train": 400}, {}])
@pytest.mark.parametrize("held", [{"validation_fraction": 0.2}, {"public_fraction": 0.1}, {}])
def test_what_is_held_out_is_not_priced_as_trained(held, asked):
    e = Experiment(dataset="mnist", backbone="vit_digits", pretrained=False, finetune="full", partition="iid", **asked)
    trained = build_federation(e.replace(**held)).data.num_examples
    assert examples_per_client(e.replace(**held)) == pytest.approx(sum(trained) / len(trained), rel=0.005)


def test_what_a_drawn_population_trains_is_what_each_of_it_draws():
    """However many draw, and however many examples they draw from; of which those of frozen units are kept once."""
    few = Experiment(method="fedavg", dataset="mnist", finetune="frozen", augment="none", partition="drawn")
    few = few.replace(examples_per_client=50, num_clients=20)
    many = few.replace(num_clients=100_000)
    divided = few.replace(partition="iid", examples_per_client=100, num_clients=80)  # 4,000 digits
    assert training_macs(few) == training_macs(many) == training_macs(divided)
    assert count_bytes(few)["client"] == count_bytes(divided)["client"]


def test_budgets_without_exits_of_their_own_are_priced():
    """FedAvg has one exit whatever ``num_exits`` says, and clients whose budgets it ignores."""
    e = Experiment(method="fedavg", backbone="vit_digits", pretrained=False, finetune="full", num_train=4000)
    assert training_macs(e.replace(num_exits=3)) == training_macs(e.replace(num_exits=1))


def test_a_large_model_is_priced_by_its_macs_and_never_built(monkeypatch):
    e = Experiment(num_train=1000, rounds=60, finetune="frozen")
    assert 4e4 < sum(p.numel() for p in load_shapes(e, 10).everything.values()) < costs.LARGE  # ``vit_digits``
    monkeypatch.setattr(costs, "training_step", lambda *_, **__: pytest.fail("built"))
    monkeypatch.setattr(costs, "LARGE", 0)
    assert 1e7 < macs_per_second(e, seconds=0.05) < 1e15
    monkeypatch.setattr(costs, "median_seconds", lambda *_: 1024**3 * 100 / training_macs(e))
    assert each_seconds([e], Pace(), Execution(workers=2)) == [pytest.approx(50)]


@pytest.mark.parametrize(
    ("data", "classes"), [({"dataset": "fsdd"}, 10), ({"dataset": "omniglot", "label_groups": True}, 8)]
)
def test_stored_runs_are_priced_where_their_data_are_absent(data, classes, monkeypatch, tmp_path):
    monkeypatch.setenv("FEDLIB_DATA", str(tmp_path))
    e = Experiment(**data, partition="natural", num_clients=10, clients_per_round=2)
    assert num_classes(e) == classes and examples_per_client(e) > 0 and training_macs(e) > 0


# --- seconds here ----------------------------------------------------------------------------------------------------


def tiny(**changes):
    return short("reefl", **(SMALL | changes))


def test_durations_are_said_as_coarsely_as_they_are_known():
    said = {10: "under a minute", 60: "about 1 minute", 150: "about 2 minutes", 5000: "about 83 minutes",
            7200: "about 2 hours", 40 * 3600: "about 40 hours", 1e7: "about 116 days"}  # fmt: skip
    assert {s: about(s) for s in said} == said


def test_rounds_take_as_long_as_those_of_the_most_similar_run():
    pace, e = Pace(), Experiment(method="reefl", finetune="lora", num_train=1000, num_clients=10)
    assert pace.seconds_a_round(e) is None
    pace.add(e.replace(method="depthfl", finetune="frozen"), 10, 10)  # 1 s a round
    assert pace.seconds_a_round(e) == 1
    pace.add(e.replace(method="depthfl", seed=2), 20, 10)  # the same mode is more alike than the same method
    assert pace.seconds_a_round(e) == 2
    assert pace.seconds_a_round(e.replace(clients_per_round=5, num_train=3000)) == 2 * 0.5 * 3
    pace.add(e, 3, 1)
    pace.add(e, 5, 1)
    assert pace.seconds_a_round(e) == 4
    assert pace.seconds_a_round(e.replace(backbone="vim_micro", pretrained=False)) is None


def test_a_grid_is_priced_in_minutes_of_this_machine(monkeypatch):
    e = Experiment(num_train=1000, rounds=60)
    pace = Pace()
    pace.add(e, 30, 10)
    assert describe_time(2, [e.replace(seed=2)], pace) == "2 runs, 1 to do: about 3 minutes on this machine"
    # unknown backbone: MACs over a timed rate, on each of two workers; long ones also in hours of a GPU
    other = e.replace(backbone="vit_digits", pretrained=False, finetune="frozen")
    monkeypatch.setattr(costs, "macs_per_second", lambda *_: training_macs(other) / 100)
    assert each_seconds([other], pace, Execution(workers=2)) == [pytest.approx(50)]
    monkeypatch.setattr(costs, "macs_per_second", lambda *_: training_macs(other) / 3e6)
    text = describe_time(1, [other], pace, Execution(workers=1))
    assert text.startswith("1 runs, 1 to do: about 35 days on this machine, or ") and "hours of a GPU" in text


def test_only_runs_of_this_machine_tell_its_pace(tmp_path):
    e = tiny()
    found = run(e, ONE, tmp_path, progress=False)
    assert stored_pace([found], ONE).seen == {e: (found.summary["seconds"], 2)}
    assert stored_pace([found], Execution(workers=2)).seen == {e: (found.summary["seconds"] / 2, 2)}
    found.record["provenance"]["device"] = "another"
    assert stored_pace([found], ONE).seen == {}


# --- GPU hours, memory, disk and downloads ---------------------------------------------------------------------------


def cells(*experiments):
    return [Cell(e.finetune, e.method, e.method, e.method, "column", e.seed, e) for e in experiments]


def test_hours_are_macs_over_a_share_of_the_peak_in_the_precision_asked_for():
    e = Experiment(method="depthfl", dataset="cifar100", rounds=7)
    assert gpu_hours([e, e])["A100"] == pytest.approx(2 * training_macs(e) / (0.4 * 19.5e12 / 2) / 3600)
    bfloat16 = e.replace(precision="bfloat16")
    for name, card in CARDS.items():
        assert gpu_hours([e])[name] / gpu_hours([bfloat16])[name] == pytest.approx(card["bfloat16"] / card["float32"])


def measured(e):
    work = lambda: list(run_rounds(build_federation(e), Execution(workers=1, executor="threads")))  # noqa: E731
    return peaks_mib([work])[0] * 2**20


@pytest.mark.parametrize("backbone", ["resnet8", "deit_micro.w32"])
def test_the_peak_of_a_round_is_what_was_told(backbone):
    e = WHOLE.replace(backbone=backbone)
    build_federation(e)  # the data are read before anything is measured
    assert count_bytes(e)["client"] == pytest.approx(measured(e), rel=0.25)


def text(backbone):
    return WHOLE.replace(
        backbone=backbone, dataset="mrpc", optimiser="adamw", batch_size=2, num_train=None, num_test=None
    )


@pytest.mark.parametrize("backbone, gigabytes", [("bert_base", 4.91), ("distilbert", 3.32)])
def test_large_models_are_told_as_they_were_measured(backbone, gigabytes):
    """Peaks of a whole process with random weights, in 10^9 bytes; 0.63 of them are the process itself."""
    assert count_bytes(text(backbone))["client"] / 1e9 + 0.63 == pytest.approx(gigabytes, rel=0.1)


@pytest.mark.slow
def test_a_large_model_takes_what_was_told():
    e = text("distilbert").replace(dataset="docstrings", num_train=8, num_test=8)
    build_federation(e)
    assert count_bytes(e)["client"] == pytest.approx(measured(e), rel=0.1)


def test_what_arrives_in_float64_weighs_more_where_widths_are_cut():
    """Eight copies of four bytes of what is trained, ten where every entry has a weight of its own."""
    e = WHOLE.replace(backbone="minilm.32.stream", dataset="sst2", batch_size=1, num_train=4, num_test=4)
    size = sum(p.numel() for p in load_shapes(e, 2).everything.values())
    assert count_bytes(e)["client"] == 32 * size
    assert count_bytes(e.replace(method="heterofl"))["client"] == 40 * size


def test_disk_is_two_checkpoints_and_what_clients_keep():
    numbers = count_bytes(WHOLE)["disk"] / 8  # two checkpoints of four bytes each
    assert numbers == sum(p.numel() for p in build_federation(WHOLE).server.params.values())
    head = 2 * 64 + 64 * 10 + 10  # a norm and a layer
    assert count_bytes(WHOLE.replace(method="fedper"))["disk"] == 8 * numbers + 2 * 4 * head


def test_what_is_at_hand_is_not_downloaded(monkeypatch):
    monkeypatch.setattr(costs, "is_available", lambda name, tokenizer: name == "mnist")
    e = Experiment(dataset="cifar10", backbone="deit_tiny")
    needed = downloads([e, e.replace(dataset="mnist", backbone="deit_micro")])
    assert set(needed) == {"deit_tiny", "cifar10"} and needed["deit_tiny"] == pytest.approx(4 * 5.5, rel=0.02)


def test_a_row_counts_its_runs_and_what_is_stored():
    both = [WHOLE, WHOLE.replace(seed=2)]
    (row,) = forecast(cells(*both), both)
    assert (row["runs"], row["missing"], row["row"]) == (2, 2, "fedavg")
    assert row["GiB a client"] == round(count_bytes(WHOLE)["client"] / GIB, 2)
    (row,) = forecast(cells(*both), both[1:])
    assert row["missing"] == 1


def test_the_command_prints_every_row_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    words = ["explain", "reefl/table1", "--cost", "--profile", "smoke", "--set", "finetune=frozen", "method=[depthfl]"]
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert "frozen depthfl" in " ".join(out.split()) and "A100 h" in out and "To download: nothing" in out
    assert "at 40% of its peak" in out and not list(tmp_path.iterdir())


def test_traffic_of_data_that_are_not_at_hand_is_known_where_a_client_s_examples_do_not_matter(monkeypatch):
    """A table of stored runs is shown without their data."""
    shapes = load_shapes(short("fedavg", num_train=None), classes=10)
    told = [shapes.upload_mib(p) for p in shapes.slices]
    monkeypatch.setattr(costs, "DATA", {})
    monkeypatch.setattr(costs, "_read", lambda e: pytest.fail("read"))
    assert [shapes.upload_mib(p) for p in shapes.slices] == told
