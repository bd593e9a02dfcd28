"""An accelerator without values: PyTorch's meta device, made to refuse CPU tensors and to say what crosses to and fro.

Meta tensors have shapes and no values. Inside :func:`accelerator` an experiment runs on them as on a GPU: an operation
that mixes them with tensors of the CPU is an error, and whatever the host must wait for (a copy to the CPU, a number, a
truth, a shape that depends on values) is given plausible values and counted where fedlib asked for it. So is what a
local step copies from the host's pageable memory, for which it waits too; ``core.devices.to_device`` pins it first.
"""

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

import fedlib
from fedlib.engine import checks, executors, rounds
from fedlib.engine.cohort import Cohort
from fedlib.engine.optimisers import LocalOptimiser
from fedlib_lab.executors.meter import INDEXED, twin, waits_for_values
from fedlib_lab.runs.checkpoints import Checkpoints

PACKAGE = str(Path(fedlib.__file__).parent)
aten, Tag = torch.ops.aten, torch.Tag
COPIES = (aten._to_copy.default, aten.copy_.default)
JOINED = (aten.cat.default, aten.stack.default)
# What the parts of a run are, by the function that is one; the rest of a round is the server's: aggregation
PARTS = {
    "training": (executors, "train_cohort"), "evaluation": (rounds, "evaluate"),
    "clients": (rounds, "evaluate_clients"), "checkpoint": (Checkpoints, "save"),
}  # fmt: skip
STEP = "copies to a step"


@dataclass
class Fetched:
    """What left the accelerator: by part of the run, for each time that it ran, the lines that asked and how often."""

    parts: dict[str, list[Counter]] = field(default_factory=lambda: {p: [] for p in (*PARTS, "server", STEP)})
    now: Counter = field(default_factory=Counter)
    step: Counter | None = None  # what a local step that runs has been sent

    def most(self, part: str) -> int:
        """Synchronisations of the time that had the most."""
        return max((one.total() for one in self.parts[part]), default=0)

    def lines(self, part: str) -> list[str]:
        """What that time fetched, most frequent first."""
        most = max(self.parts[part], key=Counter.total, default=Counter())
        return [f"{n} {line}" for line, n in most.most_common()]

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Inside, what is fetched belongs to one more time that ``part`` ran."""
        outside, self.now = self.now, Counter()
        self.parts[part].append(self.now)
        try:
            yield
        finally:
            self.now = outside


class Accelerator(TorchDispatchMode):
    """Sees every operation. Raises ``RuntimeError`` for one that a GPU would refuse, as its operands lie apart."""

    def __init__(self, fetched: Fetched):
        super().__init__()
        self.fetched = fetched

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        if self.fetched.step is not None and is_sent(func, args, kwargs):
            if not (line := line_of_fedlib()).startswith("core/devices.py"):
                self.fetched.step[f"{func._schema.name.removeprefix('aten::')} {line}"] += 1
        if not any(map(is_there, tensors)):
            return func(*args, **kwargs)
        if func not in COPIES:
            refuse_mixed(func, args, tensors)
        if not waits_for_values(func, args, kwargs):
            return func(*args, **kwargs)
        self.fetched.now[f"{func._schema.name.removeprefix('aten::')} {line_of_fedlib()}"] += 1
        out = func(*tree_map_only(torch.Tensor, twin, args), **tree_map_only(torch.Tensor, twin, kwargs))
        if func in COPIES:
            return args[0].copy_(out) if func is aten.copy_.default else out
        return tree_map_only(torch.Tensor, lambda x: x.to("meta"), out)


def is_there(x: torch.Tensor) -> bool:
    return x.device.type == "meta"


def is_sent(func, args: tuple, kwargs: dict) -> bool:
    """Does ``func`` copy a tensor of the CPU to the accelerator? Numbers of no dimension come with the operation."""
    if func is aten._to_copy.default:
        return not is_there(args[0]) and torch.device(kwargs.get("device") or "cpu").type == "meta"
    if func is aten.copy_.default:
        return is_there(args[0]) and not is_there(args[1]) and args[1].dim() > 0
    if func in INDEXED:
        return is_there(args[0]) and any(i is not None and not is_there(i) for i in args[1])
    return func is aten.lift_fresh.default and is_there(args[0])


def refuse_mixed(func, args: tuple, tensors: list[torch.Tensor]) -> None:
    """Numbers of the CPU (no dimension) go with everything but ``cat``; so do indices."""
    free = [id(i) for i in args[1]] if func in INDEXED else []
    apart = [x for x in tensors if not is_there(x) and (x.dim() or func in JOINED) and id(x) not in free]
    if apart:
        shapes = [tuple(x.shape) for x in apart]
        raise RuntimeError(f"{func}: tensors of the CPU, {shapes}, meet the accelerator's at {line_of_fedlib()}")


def line_of_fedlib() -> str:
    """The innermost line of the package that runs."""
    frame = sys._getframe(1)
    while frame is not None:
        if (file := frame.f_code.co_filename).startswith(PACKAGE):
            return f"{file[len(PACKAGE) + 1 :]}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return "outside"


@contextmanager
def accelerator() -> Iterator[Fetched]:
    """Inside, ``Execution(device="meta", workers=1, executor="threads")`` is possible."""
    fetched, autocast = Fetched(), torch.autocast

    def casting(device_type, *args, **kwargs):
        return nullcontext() if device_type == "meta" else autocast(device_type, *args, **kwargs)

    with contextmanager(_patched)(fetched, casting), Accelerator(fetched):
        yield fetched


def _patched(fetched: Fetched, casting) -> Iterator[None]:
    patches = [mock.patch.object(module, "check_device", lambda device: None) for module in (checks, executors)]
    patches.append(mock.patch.object(torch, "autocast", casting))
    patches.append(mock.patch.object(Cohort, "_run", _stepping(Cohort._run, fetched, begins=True)))
    patches.append(mock.patch.object(LocalOptimiser, "step_", _stepping(LocalOptimiser.step_, fetched, begins=False)))
    for part, (owner, name) in PARTS.items():
        patches.append(mock.patch.object(owner, name, _timed(getattr(owner, name), fetched, part)))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _timed(function, fetched: Fetched, part: str):
    def timed(*args, **kwargs):
        with fetched.during(part):
            return function(*args, **kwargs)

    return timed


def _stepping(function, fetched: Fetched, begins: bool):
    """A local step is what runs from the begin of the cohort's batch to the end of the optimiser's update.

    The first one of a local training does not count: it may place what the others read.
    """

    def stepping(*args, **kwargs):
        if begins and args[2] > 0:
            fetched.step = Counter()
        out = function(*args, **kwargs)
        if not begins and fetched.step is not None:
            fetched.parts[STEP].append(fetched.step)
            fetched.step = None
        return out

    return stepping
