"""Data sets as tensors, split among clients: partitions, transforms, text, tasks and their metrics."""
