"""Leaving at the first exit that is confident enough."""

from fedlib.engine.leaving import first_confident


def test_the_first_exit_whose_confidence_exceeds_the_threshold():
    import torch

    confidence = torch.tensor([[0.8, 0.5, 0.9], [0.9, 0.6, 0.1]])
    assert first_confident(confidence, 0.8, strict=True).tolist() == [1, 1, 0]
    assert first_confident(confidence, 0.8).tolist() == [0, 1, 0]
