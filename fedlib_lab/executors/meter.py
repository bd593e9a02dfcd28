"""What a client's local training takes, counted as it runs: MACs with backward passes, and the most memory at once.

Beside it, how long a step takes here: :func:`median_seconds`.

The method's own code runs on PyTorch's ``meta`` device, where tensors have shapes and no values, so a method is priced
without saying what it costs. Where code asks for values it gets plausible ones: zeros, and yes. Read next:
``costs.py``, which makes prices of runs and tables of it.
"""

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import conv_flop_count

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.data.federated import FederatedData
from fedlib.data.partition import Divided
from fedlib.data.tasks import Classification, Regression, Span, task_of
from fedlib.engine.cohort import Cohort, Loss
from fedlib.engine.executors import plan_round
from fedlib.engine.federation import Federation, label_counts
from fedlib.layers.overrides import FLOPS
from fedlib.methods import Method, Round, Setting
from fedlib.methods.values import Stage
from fedlib.models.exit_model import ExitModel
from fedlib.models.measure import Macs

aten, Tag = torch.ops.aten, torch.Tag
SECONDS = 0.3  # that a measurement takes
DRAWS, KINDS = 4096, 8  # of what is trained, where each step draws it; unlike ones that are run
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)


def flops_of_convolution_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: Any, stride: Any, padding: Any, dilation: Any,
    transposed: bool, *rest: Any, **_: Any,
) -> int:  # fmt: skip
    """Count a forward pass for each of the two gradients that are asked for; PyTorch's own takes groups for dense."""
    return sum(rest[-1][:2]) * conv_flop_count(list(x.shape), list(weight.shape), list(grad.shape), transposed)


FLOPS[aten.convolution_backward] = flops_of_convolution_backward


@dataclass(frozen=True)
class Taken:
    """What a client's local training takes in a round: ``macs`` for each of its examples, ``peak`` bytes at once.

    All its epochs and passes are in ``macs``. In ``peak`` is, in float32, what it holds, gradients, the optimiser's
    moments, activations and a batch. ``received`` and ``sent`` are numbers that travel beside the model: payloads
    other than what stands in the model's place, but for what earlier rounds left, and what ``Cohort.send`` sends.
    """

    macs: float
    peak: int
    received: int = 0
    sent: int = 0


def count_training(e: Experiment, method: Method, setting: Setting, model: ExitModel, client: Client) -> Taken:
    """Count what ``client`` takes in a round of ``e`` with ``model``, which lies on the meta device.

    One batch an epoch stands for all, unless more change what a client does (``Method.program``). The round is a middle
    one, when warm-ups are over. ``model`` keeps its tensors; its last blocks are cut to what exits read.
    """
    client = replace(client, id=0)
    few = replace(client, num_examples=max(1, min(e.batch_size, client.num_examples)))
    while method.program(few, setting) != method.program(client, setting):
        few = replace(few, num_examples=min(2 * few.num_examples, client.num_examples))
    model.backbone.whole_blocks, peak, received, sent = False, 0, 0, 0  # of last blocks what exits read
    f = federation_of_shapes(e.replace(precision="float32"), method, setting, model, few)
    with model.holding(model.trainable(), model.frozen()), OnShapes() as shapes:  # training leaves its tensors in place
        r = Round(max(1, e.rounds // 2), (few,), f.setting)
        r = replace(r, notes=method.prepare(f.server, r))
        plan, shapes.macs = plan_round(f, f.server, r, 1, None), 0.0
        for members in plan:
            shapes.peak = before = shapes.live
            cohort = Priced(f, f.model, f.server, r, members, {})
            cohort.shapes = shapes
            method.local_update(cohort)
            held = [n for n in f.frozen if any(s.holds(setting.infos[n]) for s in cohort.slices)]
            # what two members share comes once; a start stands in the model's place, but for what of it is personal
            received += sum({
                id(p): p.numel() for m in members for key, brought in m.payload.items() for n, p in brought.items()
                if (i := setting.infos.get(n)) is None or (m.part.holds(i) and (key != "start" or method.personal(i)))
            }.values())  # fmt: skip
            sent += sum(p.numel() for tensors in cohort.extras.values() for p in tensors.values())
            peak = max(peak, shapes.peak - before + shapes.outside(cohort.forward.tensors[0][n] for n in held))
            del cohort
    return Taken(shapes.macs / few.num_examples, peak, received, sent)


def median_seconds(step: Callable[[], object], device: str = "cpu", seconds: float = SECONDS) -> float:
    """Time ``step``, done over and over for so many ``seconds`` on one thread or GPU; the first does not count.

    On a CPU the thread's own time counts: others may be busy on the same cores. Threads that wait for each other would
    tell less of the machine.
    """
    from torch.utils.benchmark import Timer
    from torch.utils.benchmark.utils.timer import timer  # which waits for the GPU

    clock = time.thread_time if device == "cpu" else timer
    return Timer("step()", timer=clock, globals={"step": step}).blocked_autorange(min_run_time=seconds).median


class Priced(Cohort):
    """Where each step draws what it trains (FjORD), every draw is trained once and counts as often as it comes."""

    shapes: "OnShapes"

    def train(self, loss: Loss, stage: Stage = Stage(), gradient: Any = None, view: Any = None) -> None:
        """Train as a cohort does; of more than ``KINDS`` unlike draws the most frequent."""
        if view is None:
            return super().train(loss, stage, gradient)
        drawn = Counter(map(view, range(DRAWS))).most_common(KINDS)
        before, macs = self.shapes.macs, 0.0
        for one, times in drawn:
            self.shapes.macs = 0.0
            super().train(loss, stage, gradient, lambda step, one=one: one)
            macs += self.shapes.macs * times
        self.shapes.macs = before + macs / sum(times for _, times in drawn)


def federation_of_shapes(
    e: Experiment, method: Method, setting: Setting, model: ExitModel, client: Client
) -> Federation:
    """``e`` with one ``client`` whose examples are shapes alone; of labels that are classes it has all in turn."""
    spec, task, n = setting.spec, task_of(e.dataset), client.num_examples
    classes = setting.axes["classes"].size if "classes" in setting.axes else 1
    inputs = torch.zeros(n, *spec.input_shape, dtype=torch.long if spec.reads == "tokens" else torch.uint8)
    labels = {
        Classification: torch.arange(n) % classes, Regression: torch.zeros(n), Span: torch.zeros(n, 2).long(),
    }.get(type(task), torch.zeros(n, spec.input_shape[0]).long())  # fmt: skip
    none = torch.zeros(spec.input_shape[0], 1, 1, device="meta")
    data = FederatedData(
        inputs.to("meta"), labels.to("meta"), inputs[:1].to("meta"), labels[:1].to("meta"),
        tuple(map(str, range(classes))) if isinstance(task, Classification) else (), none, none + 1,
        Divided(np.arange(n), np.array([0, n])),
    )  # fmt: skip
    data.__dict__["host_labels"] = labels.numpy()  # as values
    setting = replace(setting, label_counts=lambda i: label_counts(data, i))
    server = method.init_server(model.trainable(), setting)
    return Federation(e, method, setting, data, model, model.frozen(), np.array([client.budget]), server)


class OnShapes(Macs):
    """Runs meta tensors, gives values where they are asked for, and counts MACs and the bytes that are alive."""

    calls: ClassVar[dict[tuple, tuple]] = {}  # MACs of a call, and the shapes that it makes: alike for all

    def __init__(self):
        super().__init__()
        self.live, self.peak, self.known = 0, 0, set[int]()  # the latter: storages that are alive

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, before = kwargs or {}, self.macs
        if not func._schema.returns and "_foreach_" in func._schema.name and args[0][0].is_meta:
            return None  # of shapes nothing changes in place
        call = func, signature(args), signature(kwargs)
        if (known := self.calls.get(call)) is not None:  # nearly always; PyTorch would find the shapes anew, in Python
            self.macs += known[0]
            out = known[1](x and torch.empty_strided(*x[:2], dtype=x[2], device="meta") for x in known[2])
        elif waits_for_values(func, args, kwargs):
            out = func(*tree_map_only(torch.Tensor, twin, args), **tree_map_only(torch.Tensor, twin, kwargs))
            if func is aten._to_copy.default:
                return out
            if func is aten.copy_.default:
                return args[0].copy_(out)
            out = tree_map_only(torch.Tensor, lambda x: x.to("meta"), out)
        else:
            out = super().__torch_dispatch__(func, types, args, kwargs)
            self._remember(call, out, self.macs - before)
        for x in out if isinstance(out, list | tuple) else [out]:
            if isinstance(x, torch.Tensor) and x.is_meta:
                self._count(x.untyped_storage())
        return out

    def _remember(self, call: tuple, out: Any, macs: float) -> None:
        """Note what ``call`` makes, if that is shapes with memory of their own and nothing else."""
        made, kind = (out, type(out)) if isinstance(out, list | tuple) else ([out], next)
        some = [x for x in made if x is not None]  # of what wants no gradient there is none
        if some and not any(r.alias_info for r in call[0]._schema.returns) and all(map(self._is_new, some)):
            self.calls[call] = macs, kind, [None if x is None else (x.shape, x.stride(), x.dtype) for x in made]

    def _is_new(self, x: Any) -> bool:
        if not isinstance(x, torch.Tensor) or not x.is_meta:
            return False
        storage = x.untyped_storage()
        return storage._cdata not in self.known and storage.nbytes() == x.nbytes

    def _count(self, storage: torch.UntypedStorage) -> None:
        if (key := storage._cdata) not in self.known:
            self.known.add(key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self.live -= size
        self.known.discard(key)

    def outside(self, tensors: Iterable[torch.Tensor]) -> int:
        """Bytes of those ``tensors`` that are not counted already."""
        return sum(x.nbytes for x in tensors if x.untyped_storage()._cdata not in self.known)


def signature(x: Any) -> Any:
    """All of an argument that decides the shapes of what a call makes."""
    if isinstance(x, torch.Tensor):
        return x.shape, x.stride(), x.dtype, x.is_meta
    if isinstance(x, list | tuple):
        return tuple(map(signature, x))
    return tuple((k, signature(v)) for k, v in x.items()) if isinstance(x, dict) else (type(x), x)


def twin(x: torch.Tensor) -> torch.Tensor:
    """A tensor of the CPU like ``x``: true, or zero."""
    return torch.full(x.shape, x.dtype is torch.bool, dtype=x.dtype, device="cpu") if x.is_meta else x


def waits_for_values(func: Any, args: tuple, kwargs: dict) -> bool:
    """Does ``func`` need the values of meta tensors?"""
    if func is aten._to_copy.default:
        return args[0].is_meta and torch.device(kwargs.get("device") or "meta").type == "cpu"
    if func is aten.copy_.default:
        return args[1].is_meta and not args[0].is_meta
    if func in INDEXED:
        needs = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    else:
        needs = Tag.data_dependent_output in func.tags or Tag.dynamic_output_shape in func.tags
    return needs and any(isinstance(x, torch.Tensor) and x.is_meta for x in tree_leaves((args, kwargs)))
