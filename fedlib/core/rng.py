"""Randomness as a function of (seed, purpose, round, client): any round can be replayed.

Nothing in fedlib reads a global generator, so results depend neither on the order in which clients run nor on
how many workers run them, and a resumed run needs no stored generator state.
"""

import random
import zlib
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def numpy_generator(seed: int, purpose: str, t: int = 0, client: int = 0) -> np.random.Generator:
    """Return the generator that belongs to ``(seed, purpose, round t, client)``; equal arguments, equal stream."""
    key = [seed, zlib.crc32(purpose.encode()), t, client]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(key)))


def torch_generator(seed: int, purpose: str, t: int = 0, client: int = 0) -> torch.Generator:
    """Return the CPU torch generator for the same key (drawn on the CPU, so a GPU run sees the same numbers)."""
    state = np.random.SeedSequence([seed, zlib.crc32(purpose.encode()), t, client]).generate_state(2, np.uint32)
    return torch.Generator().manual_seed((int(state[0]) << 31) ^ int(state[1]))


def global_states() -> dict[str, Any]:
    """Return the states of the global generators by whose they are."""
    numpy: Any = np.random.get_state()
    states = {"PyTorch's": torch.get_rng_state().numpy().tobytes(), "NumPy's": (numpy[1].tobytes(), *numpy[2:])}
    return states | {"Python's": random.getstate()}


@contextmanager
def no_global_draws(who: str):
    """Raise ``ValueError`` if the block draws from a global generator: numbers would follow from what ran before."""
    before = global_states()
    yield
    if drawn := [whose for whose, state in global_states().items() if state != before[whose]]:
        raise ValueError(f"{who} draws from {drawn[0]} global generator; allowed: cohort.generator(…), r.generator(…)")
