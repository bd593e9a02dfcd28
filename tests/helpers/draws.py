"""The generators of a round's clients, as a cohort has them."""

from functools import cache, partial

from fedlib.core.rng import torch_generator


def client_generators(seed, t):
    return cache(partial(torch_generator, seed, "local", t))
