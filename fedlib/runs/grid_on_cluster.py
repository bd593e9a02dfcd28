"""Whole experiments as tasks on a Ray cluster: one per core, several per GPU where they fit by memory."""

import math
import platform
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import torch

from ..core.experiment import Experiment
from ..data.federated import load_federated
from ..engine.checks import check_experiment
from ..engine.cluster import connect, total
from ..engine.executors import Execution
from ..engine.workers import TRIES, become_worker
from ..methods import METHODS
from ..models.registry import backbone_spec, tokenizer_of
from .costs import MIB, exit_costs
from .identity import Accept, own_backbones, take_backbones
from .progress import Watch
from .reached import code_of, tell

CUDA_MIB = 700  # what a process takes on a GPU before its first tensor


def run_on_cluster(
    run: Callable, missing: Sequence[Experiment], execution: Execution, folder: Path, watch: Watch, seconds: float,
    accept: Accept,
) -> None:  # fmt: skip
    """``run`` what is ``missing`` on a Ray cluster: first what no other process holds, then wait for the rest."""
    if not missing:
        return
    methods = {e.method: type(check_experiment(e)) for e in missing}
    methods = {name: (cls, code_of(cls)) for name, cls in methods.items()}
    backbones = own_backbones({e.backbone for e in missing})
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".shared-") as probe:
        for wait in (False, True):
            there = (run, Path(probe.name).resolve(), methods, backbones, seconds, wait, accept)
            for e, found in spread(_run_there, watch.left, execution, *there):
                if found:
                    watch.end(e)


def _run_there(
    e: Experiment, execution: Execution, run: Callable, probe: Path, methods: dict, backbones: dict, seconds: float,
    wait: bool, accept: Accept,
) -> bool:  # fmt: skip
    """Run ``e`` in a process of the cluster, which learns methods and backbones registered elsewhere. Is it done?"""
    if not probe.exists():
        raise RuntimeError(
            f"node {platform.node()} does not see {probe.parent}: let FEDLIB_OUTPUTS be a folder that all nodes share, "
            "or run one experiment after the other, run(e, Execution(executor='ray')), where only the driver writes"
        )
    become_worker()
    for name, (cls, code) in methods.items():
        METHODS[name] = cls
        tell(cls, code)
    take_backbones(backbones)
    alone = replace(execution, executor="threads", address=None, workers=1)
    return run(e, alone, probe.parent, False, seconds, wait, accept) is not None


def spread(
    function: Callable, experiments: Sequence[Experiment], execution: Execution, *args: object
) -> Iterator[tuple[Experiment, object]]:
    """Yield (experiment, ``function(experiment, execution, *args)``) as they end, at most ``workers`` at a time.

    Each takes one core, with ``device = "cuda"`` also a share of a GPU. A task whose worker dies is submitted again
    (``TRIES`` in all). Raises what ``function`` raises, after stopping the other tasks.
    """
    ray = connect(execution)
    gpu_mib = min(gpu_memory_mib(ray)) if execution.device != "cpu" else None
    todo, refs = deque(experiments), {}
    try:
        while todo or refs:
            while todo and len(refs) < (execution.workers or math.inf):
                e = todo.popleft()
                share = gpu_share(experiment_mib(e, execution.cohort_size), gpu_mib) if gpu_mib else 0
                task = ray.remote(function).options(num_cpus=1, num_gpus=share, max_retries=TRIES - 1)
                refs[task.remote(e, execution, *args)] = e
            ready, _ = ray.wait(list(refs), timeout=execution.patience_seconds)
            if not ready and not total(ray, "CPU"):
                raise RuntimeError(f"the Ray cluster has had no node with a CPU for {execution.patience_seconds:g} s")
            for ref in ready:
                yield refs.pop(ref), ray.get(ref)
    finally:
        for ref in refs:
            ray.cancel(ref, force=True)


def experiment_mib(e: Experiment, cohort_size: int | None = None) -> float:
    """Estimated GPU memory of ``e`` run alone, MiB: a bound, as every client is taken for one of the largest budget.

    CUDA's own + the examples + cohort size x ``costs.exit_costs``' training memory + one more copy of the parameters.
    """
    data = load_federated(e, size=backbone_spec(e.backbone).input_shape[-1], tokenizer=tokenizer_of(e.backbone))
    clients = cohort_size or e.clients_per_round
    deepest = exit_costs(e, data.num_outputs, e.batch_size)[-1]
    tensors = (data.inputs, data.labels, data.test_inputs, data.test_labels)
    examples = sum(t.nbytes for t in tensors) / MIB
    return CUDA_MIB + examples + clients * deepest["training_memory_mib"] + 4 * deepest["parameters"] / MIB


def gpu_share(need_mib: float, gpu_mib: float) -> float:
    """The fraction of a GPU for one experiment: as many as fit into nine tenths of its memory, at least one."""
    fits = max(1, int(0.9 * gpu_mib / need_mib))
    return math.floor(1e4 / fits) / 1e4  # Ray counts in ten-thousandths


def gpu_memory_mib(ray: ModuleType) -> list[float]:
    """The memory of one GPU of every node that has any."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as Strategy

    total(ray, "GPU")
    nodes = [n["NodeID"] for n in ray.nodes() if n["Alive"] and n["Resources"].get("GPU")]
    ask = ray.remote(lambda: torch.cuda.get_device_properties(0).total_memory / MIB)
    options = [{"num_cpus": 0, "num_gpus": 0.01, "scheduling_strategy": Strategy(n, soft=False)} for n in nodes]
    return ray.get([ask.options(**o).remote() for o in options])
