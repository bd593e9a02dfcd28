"""Executors of processes on this machine: a round's cohorts train side by side without Python's interpreter lock.

On a CPU a worker is a fork of the process that runs the rounds: data, frozen parameters, model and methods are in its
memory at once and are never copied, sent or read again. A round sends it the trained parameters and its cohorts; it
sends back weighted partial sums. A worker that dies is replaced and its cohort trained again, with the same numbers.
That needs Linux, and a PyTorch that lets a fork compute gradients (not after this process has used a GPU): a worker
tries that first. Elsewhere the threads of ``engine/executors.py`` do the same.

On several GPUs a worker is a process of its own on one of them. What a fork has it reads from memory that all share,
and so does it the trained parameters of every round. Classes and functions of a notebook or a script travel as code.
"""

import copyreg
import io
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from fedlib.engine.executors import Execution, Unforkable
from fedlib.engine.federation import Federation, build_train_cache
from fedlib.methods import Server

from ..kernels.products import choose_products
from .workers import Finished, Workers, as_bytes, become_worker, kit, of_bytes, train_task

SLOW = 60  # seconds until it is said that a process has not begun: a fork may have copied somebody's lock


class Processes(Workers):
    """Trains cohorts in forks of this process, or one on each of several GPUs.

    Raises :class:`Unforkable` where a process may have no workers, or forks could not train.
    """

    kind = "worker process"

    def __init__(self, federation: Federation, execution: Execution):
        self.devices = execution.devices()
        self.forks = len(self.devices) == 1
        if self.forks and (not sys.platform.startswith("linux") or federation.device.type != "cpu"):
            raise Unforkable("worker processes are forked, which needs Linux and device = 'cpu', or several GPUs")
        if multiprocessing.current_process().daemon:
            raise Unforkable("a daemonic process, such as a worker of a multiprocessing pool, may not fork workers")
        super().__init__(federation, execution, execution.side_by_side())
        if not self.forks:
            self.params = parameters_to_vector(federation.server.params.values()).cpu().share_memory_()
            self.kit = torch.frombuffer(to_message(kit(federation), travels=True), dtype=torch.uint8).share_memory_()
        self.processes: list[_Worker] = []
        try:
            for place in range(self.workers):
                self.processes.append(self._start_worker(place))
            for worker in self.processes:
                worker.wait_until_ready()
        except BaseException:
            self.close()
            raise

    def download(self, server: Server) -> memoryview:
        for worker in self.processes:
            worker.informed = False
        if not self.forks:
            self.params.copy_(parameters_to_vector(server.params[n] for n in self.federation.server.params))
            server = replace(server, params={})
        return to_message(server, travels=not self.forks)

    def idle(self) -> "_Worker | None":
        return next((w for w in self.processes if w.cohort is None), None)

    def give(self, worker: "_Worker", i: int, download: memoryview, task: tuple) -> None:
        worker.send(i, download, to_message(task, travels=not self.forks))

    def finished(self) -> Iterator[Finished]:
        """Wait until a cohort is back or its worker has died, who is then replaced."""
        busy = [(w, w.cohort) for w in self.processes if w.cohort is not None]
        ready = wait([w.connection for w, _ in busy])
        for worker, i in ((w, i) for w, i in busy if w.connection in ready):
            worker.cohort = None
            try:
                yield i, worker.receive(), None
            except EOFError:
                worker.close()
                self.processes.remove(worker)
                yield i, None, EOFError(f"exit code {worker.process.exitcode}; -9: killed, often for want of memory")
                self.processes.append(self._start_worker(worker.place))
                self.processes[-1].wait_until_ready()

    def _start_worker(self, place: int) -> "_Worker":
        """Start the worker at ``place``; several devices are taken in turn."""
        if self.forks:
            return _Worker(place, "fork", False, _in_a_fork, self.federation)
        device = self.devices[place % len(self.devices)]
        return _Worker(place, "spawn", True, _on_a_device, device, self.kit, self.params)

    def close(self) -> None:
        for worker in self.processes:
            worker.process.kill()  # all of them, before anything can interrupt the waiting
        for worker in self.processes:
            worker.close()
        self.processes = []


def start_process(method: str, target: Callable, *arguments: object, daemon: bool = False) -> Any:
    """Start a process that runs ``target``, by ``method`` fork or spawn; ``Unforkable`` if the system refuses one."""
    context: Any = multiprocessing.get_context(method)
    process, main = context.Process(target=target, args=arguments, daemon=daemon), sys.modules["__main__"]
    try:
        with warnings.catch_warnings():  # Python warns where other threads run; a fork needs none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            if method == "spawn":
                sys.modules["__main__"] = ModuleType("__main__")  # a script may be unguarded
            process.start()
    except OSError as error:
        raise Unforkable(f"no process could be forked: {error}") from error
    finally:
        sys.modules["__main__"] = main
    return process


class _Worker:
    """One process, seen from the process that started it."""

    def __init__(self, place: int, method: str, *arguments: object):
        self.place = place
        self.connection, there = multiprocessing.Pipe()
        self.process = start_process(method, _serve, there, os.getpid(), *arguments, daemon=True)
        there.close()
        self.cohort: int | None = None  # the place in the plan of what it trains
        self.informed = False  # has it this round's parameters?

    def wait_until_ready(self) -> None:
        """Wait until the worker is ready; raise what kept it from that, and warn where it is slow."""
        if not self.connection.poll(SLOW):
            how = f"kill -9 {self.process.pid} ends it, FEDLIB_KERNELS=0 or executor = 'threads' may do without"
            warnings.warn(f"worker process {self.process.pid} has not begun for {SLOW} s; {how}", stacklevel=2)
        try:
            self.receive()
        except EOFError:
            died = f"a worker process died before it was ready (exit code {self.process.exitcode})"
            raise RuntimeError(died) from None

    def send(self, cohort: int, download: memoryview, task: memoryview) -> None:
        """Let it train a cohort. A death in between shows when the answer is read."""
        self.cohort = cohort
        with suppress(BrokenPipeError, ConnectionResetError):
            if not self.informed:
                self.connection.send_bytes(download)
            self.connection.send_bytes(task)
        self.informed = True

    def receive(self):
        """Return its answer; raise what it raised, or ``EOFError`` if it died."""
        try:
            answer = pickle.loads(self.connection.recv_bytes())  # of a process of ours
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise EOFError from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


# --- inside a worker -------------------------------------------------------------------------------------------------


def _serve(connection: Connection, parent: int, travels: bool, begin: Callable, *arguments: Any) -> None:
    """Train cohorts until the connection ends: a message with the round's server, then one for each cohort.

    ``begin`` makes the federation, and of a message the server.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle: it kills its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    become_worker()
    try:
        f, here = begin(connection, *arguments)
    except Exception as error:
        connection.send_bytes(to_message(sendable_error(error), travels))
        return
    f.model.register_forward_pre_hook(lambda *_: None if os.getppid() == parent else os._exit(1))  # in mid-training
    with suppress(OSError):  # the parent may have ended meanwhile
        connection.send_bytes(to_message(None))
    server = f.server  # until the first round's comes
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())  # of our own parent
        except (EOFError, OSError):
            return
        if isinstance(message, Server):
            server = here(message)
            continue
        try:
            answer = to_message(train_task(f, server, *message), travels)
        except Exception as error:
            answer = to_message(sendable_error(error), travels)
        try:
            connection.send_bytes(answer)
        except OSError:
            return


def _in_a_fork(connection: Connection, f: Federation) -> tuple[Federation, Callable[[Server], Server]]:
    """Set up a fork, which has ``f`` in its memory; return it and how to read a server from a message."""
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a notebook's own go through sockets of the parent
    _close_inherited_files(connection.fileno())
    check_fork()
    return f, lambda server: server


def _on_a_device(
    _: Connection, device: str, packed: torch.Tensor, params: torch.Tensor
) -> tuple[Federation, Callable[[Server], Server]]:
    """Set up a spawned process from ``packed`` (:func:`workers.kit`) and ``params``, each round's, in one vector."""
    if device == "cpu":
        choose_products()
    else:
        torch.cuda.set_device(device)
    f, units = pickle.loads(packed.numpy())  # of our own parent
    seen = {n: torch.empty_like(p, device="cpu") for n, p in f.server.params.items()}
    vector_to_parameters(params, seen.values())
    here = lambda server: replace(server, params={n: p.to(device) for n, p in seen.items()})  # noqa: E731
    return replace(f, train_cache=build_train_cache(f, units)), here


def check_fork() -> None:
    """Raise :class:`Unforkable` if this fork cannot train."""
    try:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x * x, x)
    except RuntimeError as error:
        why = f"a fork of this process cannot compute gradients: {error}"
        raise Unforkable(f"{why}; use executor = 'threads'") from error


def sendable_error(error: Exception) -> Exception:
    """Return ``error`` with its traceback as a note, or an error that says the same if it cannot be sent."""
    import traceback

    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(to_message(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _close_inherited_files(keep: int) -> None:
    """Let go of the parent's files: its lock on the run, and the other workers' pipes, must end with the parent."""
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))


# --- messages --------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return _reduced(obj)


class _Travelling(cloudpickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        return super().reducer_override(obj) if (reduced := _reduced(obj)) is NotImplemented else reduced


def _reduced(obj: Any) -> Any:
    """Reduce tensors to plain bytes (torch writes each to an archive first), errors without their ``__init__``."""
    if isinstance(obj, Exception) and isinstance(type(obj).__init__, FunctionType) and not isinstance(obj, OSError):
        return copyreg.__newobj__, (type(obj), *obj.args), vars(obj)  # type: ignore[attr-defined]
    return (_tensor, (as_bytes(obj), obj.device.type)) if type(obj) is torch.Tensor else NotImplemented


def _tensor(parts: tuple, kind: str) -> torch.Tensor:
    """Rebuild a tensor; what lay on a GPU is put on this process's."""
    return of_bytes(*parts).to(kind)


def to_message(message: object, travels: bool = False) -> memoryview:
    """Pickle ``message``. ``travels``: to or from a process that is no fork, so code of ``__main__`` goes with it."""
    buffer = io.BytesIO()
    (_Travelling if travels else _Pickler)(buffer, protocol=5).dump(message)
    return buffer.getbuffer()
