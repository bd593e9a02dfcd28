"""Where time and memory go: a round's named phases, for whoever measures them; what autograd keeps.

The phases are data, download, forward, backward, step, aggregation, evaluation and files. An inner one may lie in an
outer one. By itself a phase does nothing; ``profiling.timer = torch.profiler.record_function`` shows all of them in
the traces of PyTorch's profiler. Threads share the timer, and forks have it too.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

timer: Callable[[str], AbstractContextManager] = nullcontext  # what is called with a phase's name; put yours in place


def phase(name: str) -> AbstractContextManager:
    """Return a context manager around a part of the round: the ``timer``'s."""
    return timer(name)


@contextmanager
def saved_for_backward(parameters: Iterable[torch.Tensor]) -> Iterator[dict[int, torch.Tensor]]:
    """Record what autograd keeps beside ``parameters`` inside the block: each storage's first tensor, by address."""
    own = {p.untyped_storage()._cdata for p in parameters}
    kept: dict[int, torch.Tensor] = {}  # the tensors stay, so that no storage gets a second one's address

    def keep(x: torch.Tensor) -> torch.Tensor:
        if (storage := x.untyped_storage()._cdata) not in own:
            kept.setdefault(storage, x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        yield kept
