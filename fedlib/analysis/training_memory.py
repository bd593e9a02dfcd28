"""How much memory a local training really takes, stage by stage, beside FeDepth's estimate.

On a CPU every allocation and release of PyTorch's is followed, on a GPU its allocator is asked. What is measured is the
engine's own training: parameters, gradients, momentum, activations and whatever an operator needs for a moment.
Read next: ``models/measure.py`` (the estimate), ``methods/packing.py``.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..engine.cohort import Cohort
from ..engine.federation import Federation, build_federation
from ..methods import Round, Stage
from ..methods.packing import BATCH

if TYPE_CHECKING:
    import pandas as pd

MIB = 2**20


def peak_mib(work: Callable[[], object], device: torch.device | str = "cpu") -> float:
    """The most memory that ``work`` holds at any moment, beyond what was held before, in MiB."""
    device = torch.device(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        work()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / MIB
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
        work()
    held = peak = 0
    for event in sorted(profiler.events(), key=lambda e: e.time_range.start):
        held += event.self_cpu_memory_usage  # of an operator, or of a release outside of any
        peak = max(peak, held)
    return peak / MIB


def one_client(e: Experiment, device: str = "cpu") -> Federation:
    """``e`` with a single client of as many examples as one step of the paper's estimate has."""
    one = {"num_clients": 1, "clients_per_round": 1, "num_train": BATCH, "batch_size": BATCH, "num_test": 10}
    return build_federation(e.replace(**one, partition="iid", local_epochs=1, augment="none"), device)


def memory_of_stages(e: Experiment, device: str = "cpu") -> "pd.DataFrame":
    """A row for every stage of every budget of a FeDepth experiment: ``estimate_mib`` and ``measured_mib`` of a step.

    ``r`` is the share of the memory, ``budget_mib`` what that is, ``blocks`` are counted from 1. Rows of r = "all" are
    one step on the whole net, as FedAvg takes it.
    """
    import pandas as pd

    f = one_client(e, device)
    method, measure, units = f.method, f.setting.measure, range(f.setting.spec.depth)
    rows = []
    for budget, share in enumerate(method.shares):
        for k, stage in enumerate(method.stages(Client(0, budget, BATCH), f.setting), 1):
            rows.append({"r": f"{share:.3g}", "budget_mib": share * measure.total_mib(BATCH), "stage": k}
                        | _compared(f, budget, stage))  # fmt: skip
    last = len(f.setting.exit_units) - 1
    whole = _compared(f, len(method.shares) - 1, Stage(units=units, exit=last))
    rows.append({"r": "all", "budget_mib": measure.total_mib(BATCH), "stage": 1} | whole)
    return pd.DataFrame(rows)


def seconds_of_stages(e: Experiment, share: float, times: int = 3, device: str = "cpu") -> tuple[int, float, float]:
    """(stages, seconds of the staged local training of a client with ``share``, those of the whole net at once).

    Both take the same epochs over the same examples; the least of ``times`` each. ``e`` has one client.
    """
    f = build_federation(e, device)
    budget = f.method.shares.index(share)
    (client,) = (replace(c, budget=budget) for c in f.clients([0]))
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


def _compared(f: Federation, budget: int, stage: Stage) -> dict:
    client = Client(0, budget, BATCH)
    r = Round(1, (client,), f.setting)
    main = f.method.members(client, f.server, r)[0]

    def step() -> None:
        Cohort(f, f.model, f.server, r, [main], {}).train(f.method.local_loss, stage)

    step()  # what is allocated once is allocated now
    estimate = sum(f.setting.measure.activation_mib(unit, BATCH) for unit in stage.units)
    blocks = f"{stage.units.start + 1}-{stage.units.stop}" if len(stage.units) > 1 else str(stage.units.stop)
    return {"blocks": blocks, "estimate_mib": estimate, "measured_mib": peak_mib(step, f.device)}
