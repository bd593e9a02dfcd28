"""An executor of forked processes: a round's cohorts train side by side without sharing Python's interpreter lock.

A worker is a fork of the process that runs the rounds: data, frozen parameters, model and methods are in its memory at
once and are never copied, sent or read again. A round sends it the trained parameters and its cohorts; it sends back
weighted partial sums. A worker that dies is forked anew and its cohort trained again, with the same numbers.

Only on Linux, on a CPU, and where PyTorch lets a fork compute gradients (not after this process has used a GPU): a
worker tries that first. Elsewhere the threads of ``engine/executors.py`` do the same.
"""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection, wait
from typing import Any

import numpy as np
import torch

from ..core import profiling
from ..methods import Member, Round, Server
from .executors import Execution, Memories, Trained
from .federation import Federation
from .workers import Finished, Workers, become_worker, train_task


class Unforkable(RuntimeError):
    """A fork of this process could not train."""


class ForkedProcesses(Workers):
    """Trains cohorts in forks of this process. Raises :class:`Unforkable` where they could not."""

    kind = "worker process"

    def __init__(self, federation: Federation, execution: Execution):
        if not sys.platform.startswith("linux") or federation.device.type != "cpu":
            raise Unforkable("worker processes are forked, which needs Linux and device = 'cpu'")
        if multiprocessing.current_process().daemon:
            raise Unforkable("a daemonic process, such as a worker of a multiprocessing pool, may not fork workers")
        super().__init__(federation, execution, execution.side_by_side())
        self.processes: list[_Worker] = []
        try:
            for _ in range(self.workers):
                self._start_worker()
        except OSError as error:
            self.close()
            raise Unforkable(f"no process could be forked: {error}") from error
        except BaseException:
            self.close()
            raise

    def download(self, server: Server) -> memoryview:
        for worker in self.processes:
            worker.informed = False
        return _pack(server)

    def idle(self) -> "_Worker | None":
        return next((w for w in self.processes if w.cohort is None), None)

    def give(self, worker: "_Worker", i: int, download: memoryview, task: tuple) -> None:
        worker.send(i, download, (*task, profiling.is_measuring()))

    def finished(self) -> Iterator[Finished]:
        """Wait until a cohort is back or its worker has died, who is then replaced."""
        busy = [(w, w.cohort) for w in self.processes if w.cohort is not None]
        ready = wait([w.connection for w, _ in busy])
        for worker, i in ((w, i) for w, i in busy if w.connection in ready):
            worker.cohort = None
            try:
                trained, seconds = worker.receive()
                profiling.add(seconds)
                yield i, trained, None
            except EOFError:
                worker.close()
                self.processes.remove(worker)
                code = worker.process.exitcode
                yield i, None, EOFError(f"exit code {code}; -9: killed, often for want of memory")
                self._start_worker()

    def _start_worker(self) -> None:
        worker = _Worker(self.federation)
        self.processes.append(worker)
        try:
            worker.receive()
        except EOFError:
            code = worker.process.exitcode
            raise RuntimeError(f"a worker process died before it was ready (exit code {code})") from None

    def close(self) -> None:
        for worker in self.processes:
            worker.process.kill()  # all of them, before anything can interrupt the waiting
        for worker in self.processes:
            worker.close()
        self.processes = []


class _Worker:
    """One forked process, seen from the process that forked it."""

    def __init__(self, federation: Federation):
        context = multiprocessing.get_context("fork")
        self.connection, there = context.Pipe()
        self.process = context.Process(target=_serve, args=(federation, there, os.getpid()), daemon=True)
        with warnings.catch_warnings():  # Python warns where other threads run; a worker needs none of their locks
            warnings.simplefilter("ignore", DeprecationWarning)
            self.process.start()
        there.close()
        self.cohort: int | None = None  # the place in the plan of what it trains
        self.informed = False  # has it this round's parameters?

    def send(self, cohort: int, download: memoryview, task: tuple) -> None:
        """Let it train a cohort. A death in between shows when the answer is read."""
        self.cohort = cohort
        try:
            if not self.informed:
                self.connection.send_bytes(download)
            self.connection.send_bytes(_pack(task))
        except (BrokenPipeError, ConnectionResetError):
            pass
        self.informed = True

    def receive(self):
        """Its answer; raises what it raised, or ``EOFError`` if it died."""
        try:
            answer = pickle.loads(self.connection.recv_bytes())  # of our own fork
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


def _serve(f: Federation, connection: Connection, parent: int) -> None:
    """Train cohorts until the connection ends: a message with the round's parameters, then one for each cohort."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the parent's to handle: it kills its workers
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__  # a notebook's own go through sockets of the parent
    _close_inherited_files(connection.fileno())
    profiling.forget()
    become_worker()
    try:
        x = torch.ones(1, requires_grad=True)
        torch.autograd.grad(x * x, x)
    except RuntimeError as error:
        why = f"a fork of this process cannot compute gradients: {error}; use executor = 'threads'"
        connection.send_bytes(pickle.dumps(Unforkable(why)))
        return
    f.model.register_forward_pre_hook(lambda *_: _end_without(parent))
    connection.send_bytes(pickle.dumps(None))
    server = f.server  # until the first round's comes
    while True:
        try:
            message = pickle.loads(connection.recv_bytes())  # of our own parent
        except (EOFError, OSError):
            return
        if isinstance(message, Server):
            server = message
            continue
        try:
            answer = _pack(_train(f, server, *message))
        except Exception as error:
            answer = _pack(_portable(error))
        try:
            connection.send_bytes(answer)
        except OSError:
            return


def _train(
    f: Federation, server: Server, members: list[Member], r: Round, memories: Memories, measure: bool
) -> tuple[Trained, dict[str, float]]:
    with profiling.profile() if measure else nullcontext({}) as seconds:
        trained = train_task(f, server, members, r, memories)
    return trained, dict(seconds)


def _portable(error: Exception) -> Exception:
    """``error`` with its traceback as a note, or something that says the same if it cannot be sent."""
    import traceback

    error.add_note("in a worker process:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")


def _close_inherited_files(keep: int) -> None:
    """Let go of the parent's files: its lock on the run, and the other workers' pipes, must end with the parent."""
    os.closerange(3, keep)
    os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))


def _end_without(parent: int) -> None:
    """Leave in mid-training if the parent is gone."""
    if os.getppid() != parent:
        os._exit(1)


# --- messages --------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Tensors as plain bytes: torch's own way writes each of them to an archive first."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            return _tensor, (obj.contiguous().reshape(-1).view(torch.uint8).numpy(), obj.dtype, tuple(obj.shape))
        return NotImplemented


def _tensor(data: np.ndarray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _pack(message: object) -> memoryview:
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(message)
    return buffer.getbuffer()
