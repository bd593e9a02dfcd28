"""Trained models answer again."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlib import Execution, Experiment, build_federation, extend, run, save_model
from fedlib.core.storage import read_lines, write_lines
from fedlib.engine.rounds import measure
from fedlib.engine.serving import client_outputs
from fedlib.methods import METHODS
from fedlib.models.registry import OWN
from fedlib.models.vit import ViTSpec
from fedlib_lab.report.clients import adaptive_inference, correct
from fedlib_lab.rivals.ranks import Ranks
from fedlib_lab.runs.export import FORMATS
from fedlib_lab.runs.trained import all_logits, class_accuracies, client_accuracies, load_state, load_trained
from tests.helpers.granted import granted
from tests.helpers.stored import ONE

pytestmark = pytest.mark.usefixtures("cache")

OPTIONS = {  # of methods whose defaults are for larger nets
    "scalefl_vit": {"widths": (0.25, 0.5, 0.75, 1.0)}, "splitmix": {"bases": 2}, "fedrolex": {"rates": (0.25, 0.5, 1.0)},
    "fedepth": {"scenario": "own", "ratios": (0.5, 1.0)}, "darkdistill": {"hidden": 8, "made": 8, "passes": 1},
    **dict.fromkeys(("scalefl", "decoupled", "feddf", "fedavg_level1"), {"eps": 0.9}),
}  # fmt: skip

NO_MODEL = {"fedbabu", "splitmix", "fiarse", "raffm", "local", "ditto", "fedper", "fedrep", "fedrod", "fedpac",
            "fedamp", "pfedgraph", "fedproto", "cafedistill", "hetlora"}  # of a budget: clients answer by several, or their own  # fmt: skip


@pytest.fixture(scope="module")
def small_net():
    """A ViT of four blocks, and one cache for all runs on it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(OWN, "four_blocks", ViTSpec(img_size=16, depth=4, dim=24, heads=2, ffn_dim=32))
        yield "four_blocks"


def trained(method, net, folder, **changes):
    """A run of ``method`` on few digits, of whose six clients one takes no part in a round; and its last round."""
    lora = issubclass(METHODS[method], Ranks)
    e = Experiment(**dict(
        method=method, options=OPTIONS.get(method, {}), backbone=net, pretrained=False, num_train=150, num_test=40,
        finetune="lora" if lora else "full", finetune_options={"r": 8} if lora else {}, num_clients=6,
        clients_per_round=5, rounds=2, lr=0.2, batch_size=16, test_split="like_train", **granted(method),
    ) | changes)  # fmt: skip
    rounds = []
    return run(e, ONE, folder, progress=False, on_round=rounds.append), rounds[-1]


@pytest.mark.parametrize("method", METHODS)
def test_what_is_loaded_and_exported_answers_as_what_was_stored(method, small_net, kept_cache, tmp_path, monkeypatch):
    done, last = trained(method, small_net, tmp_path)
    f, server, memories = load_state(done.experiment, ONE, tmp_path)
    assert measure(f, server, memories) == {k: done.summary[k] for k in last.metrics}
    found, expected = all_logits(*load_trained(done.experiment, ONE, tmp_path)), all_logits(f, last.server)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # strides of an SVD are not stored
    scores = [100 * float((x.argmax(-1) == f.data.test_labels).double().mean()) for x in found[f.answering]]
    assert scores == pytest.approx(done.summary["exits"], abs=1e-3)
    for ids, outputs, _, counts in client_outputs(f, server, memories):
        for k, (client, n) in enumerate(zip(ids, counts, strict=True)):
            try:
                model, exits = exported(done, f.budgets[client], tmp_path, monkeypatch)
            except ValueError as error:
                assert f"cannot be exported: what {method} answers is" in str(error) and method in NO_MODEL
                continue
            rows = torch.from_numpy(f.data.client_test(client))
            answers = model(f.data.view(f.data.test_inputs, f.model.backbone.spec.input_shape, rows))
            torch.testing.assert_close(answers, outputs[list(exits), k, :n], rtol=0, atol=1e-5)


def exported(done, budget, folder, monkeypatch):
    """What :func:`save_model` would write a graph of, and its exits."""
    kept = []
    monkeypatch.setattr(torch.export, "export", lambda model, *_, **__: model)
    monkeypatch.setitem(FORMATS, "torch", lambda model, path, about: kept.extend([model, about["exits"]]))
    save_model(done, int(budget), folder / f"model{budget}")
    return kept


def test_a_clients_accuracy_is_that_on_its_owners_held_out_examples(fake):
    from fedlib import build_federation
    from fedlib_lab.runs.trained import client_accuracies

    f = build_federation(fake().replace(method="depthfl", finetune="frozen"))
    # test owners 0, 1, 2, -1 three times over, labels 0, 1, 2, 0, 1, 2, ...: owner 0 has labels 0, 1, 2, so do 1 and 2
    truth, n = f.data.test_labels, len(f.data.test_labels)
    right = torch.nn.functional.one_hot(truth, 3).float()
    wrong = right.roll(1, 1)
    first = (torch.arange(n) < 4)[:, None]
    # exit 1 is always wrong, exit 2 right on the first of three examples of every owner, exits 3 and 4 always
    logits = torch.stack([wrong, torch.where(first, right, wrong), right, right])
    # budgets 0, 1, 2, 3, 0, 1 of clients 0..5
    assert client_accuracies(f, logits) == pytest.approx([0, 100 / 3, 100, 100, 0, 100 / 3])


def logits_of(*confidences):
    """Two classes: each entry (predicted class, confidence) as logits."""
    rows = [[(np.log(p), np.log(1 - p)) if c == 0 else (np.log(1 - p), np.log(p)) for c, p in e] for e in confidences]
    return torch.tensor(rows, dtype=torch.float32)


def test_clients_have_no_accuracy_where_labels_are_no_classes(tiny):
    f = build_federation(tiny)
    with pytest.raises(ValueError, match="dataset = 'mnist': its labels are no classes"):
        client_accuracies(replace(f, data=replace(f.data, classes=())), torch.zeros(4, 50, 10))


def test_class_and_client_accuracies_by_hand(tiny):
    # exit 0 right on 1 of 2 examples of class 0 and none of 1 of class 1; exit 1 right on all
    logits = logits_of([(0, 0.9), (1, 0.9), (0, 0.9)], [(0, 0.9), (0, 0.9), (1, 0.9)])
    labels = torch.tensor([0, 0, 1])
    assert class_accuracies(logits, labels).tolist() == [[50.0, 0.0], [100.0, 100.0]]
    assert correct(logits, labels).tolist() == [100.0, 50.0, 50.0]

    f = build_federation(tiny)
    by_class = torch.nn.functional.one_hot(f.data.test_labels, 10).float()
    half = by_class * (f.data.test_labels < 5)[:, None].float()  # right on classes 0-4, else class 0
    mine = client_accuracies(f, half.expand(4, -1, -1))
    counts = f.data.label_counts()
    assert np.allclose(mine, 100 * counts[:, :5].sum(1) / counts.sum(1))


@pytest.mark.parametrize("method", ["reefl", "inclusivefl"])
def test_trained_models_answer_as_recorded(tiny, method, tmp_path, monkeypatch):
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    e = tiny.replace(method=method)
    f, server = load_trained(e)
    logits = all_logits(f, server)
    exits = (logits.argmax(-1) == f.data.test_labels).double().mean(1) * 100
    from fedlib_lab.runs.store import find_run, run_path

    assert exits.tolist() == pytest.approx(find_run(e).summary["exits"], abs=1e-3)
    last = adaptive_inference(e, (0.0, 1.0))
    assert [r.get("exit") for r in last] == [None, None, 1, 2, 3, 4]
    assert last[0]["accuracy"] == pytest.approx(exits[0].item()) and last[0]["share"][0] == 1
    assert last[1]["macs"] > last[0]["macs"]

    # a run stored without its weights is trained again, beside it
    kept = (run_path(e) / "checkpoint.safetensors").rename(tmp_path / "kept")
    again = all_logits(*load_trained(e))
    assert torch.allclose(again, logits, atol=1e-4) and (tmp_path / "retrained").is_dir()

    kept.rename(run_path(e) / "checkpoint.safetensors")
    assert torch.equal(all_logits(*load_trained(e)), logits)


@pytest.mark.parametrize("where", ["trained", "extend"])
def test_weights_beside_the_files_of_another_go_are_not_taken(where, tiny, tmp_path, monkeypatch):
    """A run trained here, whose text files were replaced by those that another machine stored: git does this."""
    monkeypatch.setenv("FEDLIB_OUTPUTS", str(tmp_path))
    e = tiny.replace(method="fedavg", rounds=1, schedule="constant")
    there = run(e, Execution(workers=1), progress=False)
    line, *_ = read_lines(there.path / "metrics.jsonl")
    write_lines(there.path / "metrics.jsonl", [line | {"seconds": line["seconds"] + 1}])
    if where == "extend":
        with pytest.raises(ValueError, match="came without its weights"):
            extend(e, 2)
    else:
        load_trained(e)
        assert len(list((tmp_path / "retrained").glob("fedavg*"))) == 1
