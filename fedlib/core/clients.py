"""Clients as values: who trains, and how much of the model it can hold."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Client:
    """A client as the server knows it: id, budget (the deepest exit it can hold, 0-based), training examples."""

    id: int
    budget: int
    num_examples: int


def clients_of(budgets: np.ndarray, ids: Iterable[int], num_examples: np.ndarray) -> list[Client]:
    """Return the clients ``ids`` as values."""
    return [Client(int(i), int(budgets[i]), int(num_examples[i])) for i in ids]
