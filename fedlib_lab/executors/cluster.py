"""An executor on a Ray cluster: a round's cohorts are trained by workers on its nodes.

What never changes (data, frozen parameters, method, setting) is put into the object store once and given to each worker
once; a round sends the trained parameters once, and the sampled clients' memories with their cohort. Workers keep no
state of a client or a round, so any of them can train any cohort, again if need be. Every node needs the same fedlib
and torch, nothing else. Methods travel as objects: one registered in a notebook works.
Read next: ``workers.py``.
"""

import copy
import logging
import math
import os
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from fedlib.data.federated import input_device
from fedlib.engine.executors import Execution, Memories, Trained
from fedlib.engine.federation import Federation, build_train_cache
from fedlib.methods import Member, Round, Server

from ..kernels.products import choose_products
from .workers import TRIES, Finished, Workers, as_bytes, become_worker, kit, move, moved, of_bytes, train_task, versions

LOSSES = "RayActorError", "ObjectLostError", "NodeDiedError", "WorkerCrashedError", "OutOfMemoryError"  # of a worker


def connect(execution: Execution) -> ModuleType:
    """Return the ``ray`` module, connected: this process's connection, else ``address``, else a local Ray.

    Without ``address``, ``$RAY_ADDRESS`` counts. A local Ray lives until the process ends or ``ray.shutdown()``.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("executor = 'ray' needs Ray; install fedlib with its extra 'cluster'") from error
    if not ray.is_initialized():
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        address, own = execution.address or os.environ.get("RAY_ADDRESS") or "local", {}
        if address == "local":
            own = {"num_cpus": max(os.cpu_count() or 1, execution.workers or 1), "include_dashboard": False}
            os.environ.setdefault("RAY_AUTH_MODE", "token")  # it listens on all addresses, and runs what comes
        for attempts_left in (2, 1, 0) if own else (0,):  # on a busy machine, Ray gives its own processes up after 30 s
            try:
                ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **own)
                break
            except Exception as error:  # of many types, plain Exception among them
                if not attempts_left:
                    raise ConnectionError(f"no Ray at {address!r}: {error}") from error
    return ray


def total(ray: ModuleType, kind: str) -> float:
    """Count the CPUs or GPUs of the cluster, busy or not. ``ValueError`` if a GPU is wanted and there is none."""
    amount = ray.cluster_resources().get(kind, 0)
    if kind == "GPU" and not amount:
        raise ValueError("execution: device = 'cuda', but the Ray cluster has no GPU; allowed: cpu")
    return amount


# --- tensors between processes ---------------------------------------------------------------------------------------


def _share_tensors(ray: ModuleType) -> None:
    """Let this process send tensors as buffers (torch's own way writes each of them to an archive first)."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    ray.util.register_serializer(torch.Tensor, serializer=as_bytes, deserializer=lambda parts: of_bytes(*parts))


# --- cohorts on workers ----------------------------------------------------------------------------------------------


class _Worker:
    """A process of the cluster, with one CPU thread or a share of a GPU, that trains cohorts of one run."""

    def prepare(self, f: Federation, cached_units: int, device: str, theirs: tuple[str, str], products: str) -> None:
        """Take what stays the same for the whole run."""
        import ray

        if theirs != versions():
            raise RuntimeError(f"fedlib and torch are {versions()} on a worker, {theirs} where the run was started")
        become_worker()
        if device == "cpu":
            choose_products(products)
        _share_tensors(ray)
        model = copy.deepcopy(f.model).to(device)  # its own, unlike the tensors that it shares
        if device != "cpu":
            tensors = {n: t for n, t in vars(f.data).items() if isinstance(t, torch.Tensor)}
            inputs = {n: tensors.pop(n) for n in ("inputs", "test_inputs")}
            place = input_device(list(inputs.values()), device)
            data = replace(f.data, **move(tensors, device), **move(inputs, place))
            start = replace(f.server, params=move(f.server.params, device))
            f = replace(f, data=data, frozen=move(f.frozen, device), server=start)
        f = replace(f, model=model)
        self.federation = replace(f, train_cache=build_train_cache(f, cached_units))

    def train(self, server: Server, members: list[Member], r: Round, memories: Memories) -> Trained:
        """Train one cohort of round ``r``."""
        if (f := self.federation).device.type != "cpu":
            server = Server(server.t, move(server.params, f.device), move(server.memory, f.device))
        return train_task(f, server, members, r, memories)


class RayExecutor(Workers):
    """Trains cohorts on the workers of a Ray cluster; a cohort whose worker dies is trained again by another.

    The plan depends on the number of workers asked for, never on how many are alive. Raises ``RuntimeError`` if no
    worker can be had for ``patience_seconds`` too.
    """

    kind = "Ray worker"

    def __init__(self, federation: Federation, execution: Execution):
        self.ray = ray = connect(execution)
        kind = "CPU" if execution.device == "cpu" else "GPU"
        units = total(ray, kind)
        super().__init__(federation, execution, execution.workers or max(1, int(units)))
        share = {"num_gpus": 1 / math.ceil(self.workers / units)} if kind == "GPU" else {}
        self.need: dict[str, float] = {"num_cpus": 1} | share
        self.losses = tuple(getattr(ray.exceptions, name) for name in LOSSES)
        _share_tensors(ray)
        whole, self.cached_units = kit(federation)
        self.kit = ray.put(whole)
        self.free: deque = deque()
        self.starting: dict = {}  # what says that a worker is ready -> the worker
        self.running: dict = {}  # what a cohort brings back -> (its place in the plan, the worker)
        self.failed_starts = 0
        for _ in range(self.workers):
            self._start_worker()

    def download(self, server: Server) -> object:
        return self.ray.put(server)

    def idle(self) -> Any | None:
        return self.free.popleft() if self.free else None

    def give(self, worker: Any, i: int, download: object, task: tuple) -> None:
        self.running[worker.train.remote(download, *task)] = i, worker

    def _start_worker(self) -> None:
        """Ask the cluster for one more worker; it is ready when it has taken the kit."""
        worker = self.ray.remote(_Worker).options(max_restarts=0, **self.need).remote()
        how = self.execution.device, versions(), self.execution.products
        self.starting[worker.prepare.remote(self.kit, self.cached_units, *how)] = worker

    def finished(self) -> Iterator[Finished]:
        """Wait until a worker is ready or a cohort is back or lost; a lost worker is replaced."""
        ray, patience = self.ray, self.execution.patience_seconds
        ready, _ = ray.wait([*self.running, *self.starting], timeout=None if self.running else patience)
        if not ready:
            why = f"no Ray worker was to be had for {patience:g} s: each needs {self.need}, the cluster has"
            raise RuntimeError(f"{why} {ray.cluster_resources()}, of which {ray.available_resources()} is free")
        for ref in ready:
            i, worker = self.running.pop(ref) if ref in self.running else (None, self.starting.pop(ref))
            trained, error = None, None
            self.free.append(worker)
            try:
                trained = ray.get(ref)
                self.failed_starts = 0
            except self.losses as e:
                error = e
                ray.kill(self.free.pop())
                if i is None:
                    self.failed_starts += 1
                    if self.failed_starts == TRIES:
                        raise RuntimeError(f"Ray workers died {TRIES} times before they were ready: {e}") from e
                self._start_worker()
            if i is not None:
                yield i, trained, error

    def home(self, trained: Trained) -> Trained:
        """Move ``trained`` out of the object store, to where the server is."""
        return moved(super().home(trained), self.federation.device)

    def close(self) -> None:
        for worker in [*self.free, *self.starting.values(), *(worker for _, worker in self.running.values())]:
            self.ray.kill(worker)
        self.ray.util.deregister_serializer(torch.Tensor)
