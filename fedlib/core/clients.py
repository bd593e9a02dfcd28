"""Clients as values: who trains, and how much of the model it can hold."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Client:
    """A sampled client: its id, its budget (deepest exit it can hold, 0-based), its number of training examples."""

    id: int
    budget: int
    num_examples: int
