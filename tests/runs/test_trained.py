"""Trained models answer again."""

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, extend, run
from fedlib.core.storage import read_lines, write_lines
from fedlib.report.early_leaving import adaptive_inference
from fedlib.report.statistics import correct
from fedlib.runs.trained import all_logits, class_accuracies, client_accuracies, load_trained

pytestmark = pytest.mark.usefixtures("cache")


def test_a_clients_accuracy_is_that_on_its_owners_held_out_examples(fake):
    from fedlib import build_federation
    from fedlib.runs.trained import client_accuracies

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
    from fedlib.runs.store import find_run, run_path

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
