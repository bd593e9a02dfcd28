"""Trained models answer again."""

import pytest
import torch

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
