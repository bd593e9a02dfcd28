"""FeDepth's decomposition of a model into stages that fit a memory budget."""

from collections.abc import Sequence


def pack(memories: Sequence[float], budget: float, slack: float = 0.05) -> tuple[range, ...]:
    """Stages as ranges of blocks: in order, a stage takes blocks as long as their sum fits the budget.

    ``memories`` and ``budget`` are in one unit; 5 % ``slack`` gives the released plans. A block that alone exceeds the
    budget is in no stage (partial training): it runs forward only. Raises ``ValueError`` if none fits.
    """
    limit = budget * (1 + slack) * (1 + 1e-9)  # sums of floats
    stages, start, held = [], None, 0.0
    for block, memory in enumerate(memories):
        if start is not None and held + memory > limit:
            stages.append(range(start, block))
            start = None
        if memory > limit:
            continue
        if start is None:
            start, held = block, 0.0
        held += memory
    if start is not None:
        stages.append(range(start, len(memories)))
    if not stages:
        raise ValueError(f"packing: no block fits a budget of {budget:g}; the smallest needs {min(memories):g}")
    return tuple(stages)
