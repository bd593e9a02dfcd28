"""Sentences of libraries' docstrings are real and distinct."""

import torch

from fedlib.data.datasets import is_available


def test_docstrings_are_real_distinct_sentences(docstrings):
    assert docstrings.train_labels.bincount().tolist() == [250] * 3 and docstrings.num_classes == 3
    assert docstrings.test_labels.bincount().tolist() == [50] * 3 and is_available("docstrings")
    both = torch.cat((docstrings.train_inputs, docstrings.test_inputs))
    assert len(both.unique(dim=0)) > 0.98 * len(both)  # equal up to capitals or a cut
    assert (both[:, 0] == 101).all() and ((both != 0).sum(1) >= 6).all()
