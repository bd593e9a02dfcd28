"""How much memory a local training really takes, stage by stage, beside FeDepth's estimate.

On a CPU every allocation and release of PyTorch's is followed, on a GPU its allocator is asked. What is measured is the
engine's own training: parameters, gradients, momentum, activations and whatever an operator needs for a moment.
Read next: ``models/measure.py`` (the estimate), ``methods/sliced/fedepth.py``.
"""

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd
import torch

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.engine.cohort import Cohort
from fedlib.engine.federation import Federation, build_federation
from fedlib.methods import Round, Stage
from fedlib.methods.sliced.fedepth import kept_mib

from ...runs.costs import examples_per_client

MIB = 2**20
WORK = "a measured work"


def peaks_mib(works: Sequence[Callable[[], object]], device: torch.device | str = "cpu") -> list[float]:
    """Measure the most memory (MiB) that each of ``works`` holds at once, in order, beyond what was held before all."""
    device, peaks = torch.device(device), []
    if device.type == "cuda":
        gc.collect()  # what an earlier work left behind and is let go only now would count as released
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        for work in works:
            torch.cuda.reset_peak_memory_stats(device)
            work()
            torch.cuda.synchronize(device)
            peaks.append((torch.cuda.max_memory_allocated(device) - before) / MIB)
        return peaks
    from torch._C._profiler import _EventType
    from torch.profiler import ProfilerActivity, profile, record_function
    from torch.profiler._utils import traverse_bfs

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        for work in works:
            with record_function(WORK):  # a mark: around the work, all releases would count from its beginning on
                pass
            work()
    tree = profiler.profiler.kineto_results.experimental_event_tree()
    held: dict[int, int] = {}  # bytes by address: what was there before the works is not theirs to release
    total = 0
    for event in sorted(traverse_bfs(tree), key=lambda e: e.start_time_ns):
        if event.name == WORK:
            peaks.append(total / MIB)
        if event.tag == _EventType.Allocation:
            size, address = event.extra_fields.alloc_size, event.extra_fields.ptr
            if size > 0:
                held[address] = size
            total += size if size > 0 else -held.pop(address, 0)
            if peaks:
                peaks[-1] = max(peaks[-1], total / MIB)
    return peaks


def one_client(e: Experiment, device: str = "cpu") -> Federation:
    """Build ``e`` with a single client of as many examples as its clients have in the mean, and one local epoch."""
    examples = max(1, round(examples_per_client(e)))
    one = {"num_clients": 1, "clients_per_round": 1, "num_train": examples, "num_test": 10}
    return build_federation(e.replace(**one, partition="iid", local_epochs=1, augment="none"), device)


def memory_of_stages(e: Experiment, device: str = "cpu") -> pd.DataFrame:
    """Measure every stage of every budget of a FeDepth experiment: a row with ``estimate_mib`` and ``measured_mib``.

    At the batch size of ``e``, of a client of mean size. ``r`` is the share of the memory, ``budget_mib`` that share of
    the whole net's measured peak (rows of r = "all": one epoch of FedAvg), ``blocks`` are counted from 1, ``kept_mib``
    is what a stage keeps of what comes ahead of it, a part of its estimate.
    """
    f = one_client(e, device)
    (client,) = f.clients([0])
    whole = [Stage(units=range(f.setting.spec.depth), exit=len(f.setting.exit_units) - 1)]
    rows = _rows(f, replace(client, budget=len(f.method.shares) - 1), whole, "all")
    peak = rows[0]["measured_mib"]
    for budget, share in reversed(list(enumerate(f.method.shares))):
        poor = replace(client, budget=budget)
        rows = _rows(f, poor, f.method.stages(poor, f.setting), f"{share:.3g}") + rows
    shares = {f"{share:.3g}": share for share in f.method.shares} | {"all": 1.0}
    return pd.DataFrame(rows).assign(budget_mib=[shares[row["r"]] * peak for row in rows])


def seconds_of_stages(e: Experiment, share: float, times: int = 3, device: str = "cpu") -> tuple[int, float, float]:
    """Time (stages, seconds of the staged training of a client with ``share``, seconds of the whole net at once).

    Both take the same epochs over the same examples; the least of ``times`` each. ``e`` has one client.
    """
    f = build_federation(e, device)
    (client,) = (replace(c, budget=f.method.shares.index(share)) for c in f.clients([0]))
    r = Round(1, (client,), f.setting)
    main = f.method.members(client, f.server, r)[:1]
    stages = f.method.stages(client, f.setting)
    whole = Stage(units=range(f.setting.spec.depth), exit=stages[-1].exit)

    def seconds(parts: list[Stage]) -> float:
        cohort = Cohort(f, f.model, f.server, r, main, {})
        began = time.perf_counter()
        for stage in parts:
            cohort.train(f.method.local_loss, stage)
        return time.perf_counter() - began

    staged, once = (min(seconds(parts) for _ in range(times)) for parts in (stages, [whole]))
    return len(stages), staged, once


def _rows(f: Federation, client: Client, stages: list[Stage], r: str) -> list[dict]:
    """Measure each of a local training's ``stages``, which are taken one after the other: a row each."""
    round_ = Round(1, (client,), f.setting)
    main = f.method.members(client, f.server, round_)[0]
    cohorts: list[Cohort] = []

    def works() -> list[Callable[[], object]]:
        begin = lambda: cohorts.append(Cohort(f, f.model, f.server, round_, [main], {}))  # noqa: E731
        return [begin, *(partial(lambda stage: cohorts[-1].train(f.method.local_loss, stage), s) for s in stages)]

    for work in works():  # what is allocated once is allocated now
        work()
    cohorts.clear()
    _, *peaks = peaks_mib(works(), f.device)
    batch, rows = min(f.experiment.batch_size, client.num_examples), []
    for k, (stage, peak) in enumerate(zip(stages, peaks, strict=True), 1):
        kept = kept_mib(stage.units.start, client.num_examples, f.setting) if stage.cached else 0.0
        trained = sum(f.setting.measure.activation_mib(unit, batch) for unit in stage.units)
        blocks = f"{stage.units.start + 1}-{stage.units.stop}" if len(stage.units) > 1 else str(stage.units.stop)
        rows.append({"r": r, "stage": k, "blocks": blocks, "kept_mib": kept, "estimate_mib": kept + trained,
                     "measured_mib": peak})  # fmt: skip
    return rows
