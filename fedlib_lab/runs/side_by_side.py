"""Several runs at once, a core each, in processes: what the queue of ``fill.py`` and ``run_all`` have in common.

A run on one core wastes nothing: building and evaluating it keep one core busy, and rounds wait for no slowest worker.
:func:`hand_out` gives jobs to forks of this process, so what a notebook registered is there; :func:`choose` says which
runs of a list are so done sooner. A run is stored by ``store.py``, under its lock. Read next: ``fill.py``.
"""

import _thread
import contextlib
import io
import json
import multiprocessing
import os
import queue as queues
import re
import signal
import sys
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, ClassVar, NoReturn, TypeVar

import torch

from fedlib.core.devices import free_memory, memory_to_plan_with
from fedlib.core.experiment import Experiment
from fedlib.engine.executors import Execution
from fedlib.engine.federation import build_federation
from fedlib.engine.memory import bytes_to_train
from fedlib.engine.rounds import Finished
from fedlib.methods import METHODS, Server
from fedlib.models.registry import OWN, SHIPPED, backbone_spec

from ..executors.processes import Unforkable, check_fork, sendable_error, start_process, to_message
from ..executors.stacked import Meeting
from ..executors.workers import become_worker
from .progress import Watch, call_quietly, interrupted

LIVES = 2  # processes that may die of one run before it is given up
DIED = f"its process died {LIVES} times, often a sign that memory is short"
GRACE_SECONDS = 60.0  # for a run that is asked to stop
A_GPU = 2  # processes each: on an H100 two trained a ConvNet at 1.4 times the pace of one, four at no more
SHARE_OF_MEMORY = 0.5  # of what is free; clients that train as one cohort come on top
# Fields in which runs may differ that train together: what each client has of its own, and what it is tested on
RATE = ("lr", "min_lr", "schedule", "milestones", "decay", "decay_every", "warmup_rounds")
SPLIT = ("partition", "dirichlet_alpha", "classes_per_client", "clients_per_round", "num_test", "test_split")
J = TypeVar("J")


@dataclass(frozen=True)
class News:
    """What a process says of a run that goes on: what :class:`Watch` is told, printed or warned of, with arguments."""

    name: str
    arguments: tuple

    def tell(self, watch: Watch) -> None:
        """Pass it on in the process that the user watches."""
        if self.name == "warning":
            warnings.warn_explicit(*self.arguments)
        else:
            is_stream = self.name in ("stdout", "stderr")
            call_quietly(getattr(sys, self.name).write if is_stream else getattr(watch, self.name), *self.arguments)


# What a process does with a job and some cores; what it says meanwhile goes to the watch.
Answer = Callable[[J, int, Watch], object]
RunOne = Callable[[Experiment, Watch, Execution], object]


def hand_out(
    jobs: Sequence[J], workers: int, answer_one: Answer, watch: Watch,
    seconds_left: Callable[[], float] = lambda: 1.0, grace: float = GRACE_SECONDS, new: bool = False,
) -> Generator[tuple[J, Any], None, None]:  # fmt: skip
    """Give ``jobs`` in their order to ``workers`` processes; yield (job, answer), and tell ``watch`` what goes on.

    ``answer_one(job, cores, watch)``: one core each, and the last job all that are free; what it raises is an answer.
    ``new`` processes are no forks. A job whose process died is given to another; of one that lost ``LIVES`` the answer
    is None. All processes are ended when no ``seconds_left``, at an error, or when the generator is closed, within
    ``grace`` seconds.
    """
    todo, lost, answers = deque(jobs), Counter(), queues.Queue()
    crew: list[Fork] = []
    busy: dict[Fork, J] = {}
    try:
        while (todo or busy) and seconds_left() > 0:
            while todo and len(busy) < workers:
                cores = max(1, workers // (len(busy) + len(todo)))
                idle = next((p for p in crew if p not in busy), None)
                if idle is None:
                    crew.append(idle := Fork(answers, answer_one, new))
                busy[idle] = todo.popleft()
                idle.send(busy[idle], cores)
            try:
                process, answer = answers.get(timeout=max(0.01, min(1.0, seconds_left())))
            except queues.Empty:
                continue
            if isinstance(answer, News):
                answer.tell(watch)
                continue
            if answer is None:
                crew.remove(process)
                process.ask_to_stop()
                process.end(grace)  # its pipe ends a moment before it does
            if (job := busy.pop(process, None)) is None:
                continue
            lost[job] += answer is None
            if answer is None and lost[job] < LIVES:
                todo.append(job)
                continue
            yield job, answer
    finally:
        for process in crew:
            process.ask_to_stop()
        for process in crew:
            process.end(grace / len(crew))


class Fork:
    """A process that answers jobs, seen from the one that started it. It ends when its input does.

    It is a fork of this process; if ``new``, or where CUDA has begun or there are no forks, it knows only the kit.
    It puts (itself, answer) into ``answers``, :class:`News` too, and (itself, None) when it ends.
    """

    inputs: ClassVar[set[Any]] = set()  # of all forks: a later one must not keep an earlier one's open

    def __init__(self, answers: queues.Queue, answer_one: Answer, new: bool):
        forks = sys.platform.startswith("linux") and not (new or torch.cuda.is_initialized())
        jobs, self.input = multiprocessing.Pipe(duplex=False)
        self.output, out = multiprocessing.Pipe(duplex=False)
        self.inputs.add(self.input)
        try:
            self.process = start_process("fork" if forks else "spawn", _serve, jobs, out, answer_one)
        finally:
            jobs.close()
            out.close()
        threading.Thread(target=self._listen, args=(answers,), daemon=True).start()

    def _listen(self, answers: queues.Queue) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                answers.put((self, self.output.recv()))  # of a process of ours
        answers.put((self, None))

    def send(self, job: object, cores: int) -> None:
        with contextlib.suppress(OSError):  # it died: heard of through its output
            self.input.send((job, cores))

    def ask_to_stop(self) -> None:
        self.inputs.discard(self.input)
        self.input.close()

    def end(self, grace: float) -> None:
        self.process.join(grace)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def _serve(jobs: Connection, out: Connection, answer_one: Answer) -> NoReturn:
    """Send the answer to each of ``jobs`` from inside a process until these end; then stop, also amid a run."""
    from tqdm import tqdm

    for connection in Fork.inputs:
        connection.close()
    os.setsid()  # a Ctrl-C is the parent's to handle
    become_worker()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    tqdm.set_lock(threading.RLock())  # the parent's is shared, and a killed fork would keep it
    lock, todo = threading.Lock(), queues.SimpleQueue()
    working, ended = threading.Event(), threading.Event()

    def send(message: object) -> None:
        with contextlib.suppress(OSError), lock:  # the parent is gone: the listener hears of it
            out.send_bytes(to_message(message))

    def listen() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                todo.put(jobs.recv())
        ended.set()
        if working.is_set():
            _thread.interrupt_main()
        todo.put(None)

    streams = (_Stream("stdout", send), _Stream("stderr", send))  # a notebook's own are the parent's
    sys.stdout, sys.stderr = (io.TextIOWrapper(s, "utf-8", line_buffering=True) for s in streams)  # type: ignore[arg-type]
    warnings.showwarning = lambda text, *where, **_: send(News("warning", (str(text), *where[:3])))
    threading.Thread(target=listen, daemon=True).start()
    with contextlib.suppress(KeyboardInterrupt):
        while (job := todo.get()) is not None:
            working.set()
            if ended.is_set():  # before this one began
                break
            try:
                check_fork()
                found = answer_one(job[0], job[1], _Relay(send))
            except Exception as error:
                found = sendable_error(error)
            working.clear()
            call_quietly(print, end="", flush=True)  # what ends in no line
            send(found)
    os._exit(0)  # the listening thread may hold the input


class _Relay(Watch):
    """Tells the parent's :class:`Watch`."""

    def __init__(self, send: Callable[[News], None]):
        self.send = send

    def round(self, e: Experiment, r: Finished) -> None:
        shown = r.metrics and {"accuracy": r.metrics["accuracy"]}
        light = replace(r, server=Server(r.t, {}, {}), memories={}, losses={}, metrics=shown, mirrors={})
        self.send(News("round", (e, light)))


for _name in ("begin", "end", "say"):
    setattr(_Relay, _name, lambda self, *told, name=_name: self.send(News(name, told)))


class _Stream(io.RawIOBase):
    """What a fork writes, told by its parent, whole lines at a time: several write at once."""

    def __init__(self, name: str, send: Callable[[News], None]):
        self.name, self.send = name, send

    writable = lambda _: True  # noqa: E731

    def write(self, text: Any) -> int:
        self.send(News(self.name, (bytes(text).decode(),)))
        return len(text)


# --- a list of runs, in processes ------------------------------------------------------------------------------------


def choose(missing: Sequence[Experiment], execution: Execution) -> list[Experiment]:
    """Choose which of ``missing`` run side by side: as many as fill all cores; the rest has all, one after another.

    A GPU has ``A_GPU`` for its cores, and new processes train there what they know: the kit's methods and nets. None of
    them if ``execution`` says executor or workers, fewer are missing than there are cores, this process may have no
    others, or, on a CPU, forks of it could not train or lack memory.
    """
    if execution.device != "cpu":
        missing = [e for e in missing if _is_the_kits(e) and OWN.get(e.backbone) == SHIPPED.get(e.backbone)]
    cores, daemon = at_once(execution), multiprocessing.current_process().daemon
    free = execution.executor == "auto" and execution.workers is None and not daemon
    if not (free and 1 < cores <= len(missing)) or (execution.device == "cpu" and not _fit(missing, cores)):
        return []
    return list(missing[: len(missing) // cores * cores])


def at_once(execution: Execution) -> int:
    """Return how many runs ``execution`` trains at once: one a core, ``A_GPU`` a GPU."""
    return execution.side_by_side() if execution.device == "cpu" else A_GPU * len(execution.devices())


def _fit(missing: Sequence[Experiment], cores: int) -> bool:
    """Return whether forks can train on all ``cores``, with memory for one like the largest of ``missing`` on each.

    That is built: its data and modules are then here before the forks.
    """
    if not sys.platform.startswith("linux") or torch.cuda.is_initialized():
        return False
    try:
        largest = max(missing, key=lambda e: backbone_spec(e.backbone).numbers(e.batch_size))
        return cores * _bytes_of(largest) < SHARE_OF_MEMORY * free_memory(torch.device("cpu"))
    except (ValueError, ImportError, OSError):  # refused in its turn
        return False


def _is_the_kits(e: Experiment) -> bool:
    """Return whether the method is the kit's."""
    return METHODS[e.method].__module__.startswith(("fedlib.", "fedlib_lab."))


def _bytes_of(e: Experiment) -> float:
    """Return the bytes that ``e`` takes beside this process: its data, its model, one client's training, and caches."""
    f = build_federation(e)
    kept = backbone_spec(e.backbone).numbers(min(e.batch_size, int(f.data.num_examples.max())))[1]
    caches = [t for c in (f.train_cache, f.test_cache) if c is not None for t in (c.z, *c.features)]
    return bytes_to_train(e, f.model, 4 * kept) + sum(t.nbytes for t in (f.data.inputs, f.data.test_inputs, *caches))


def likeness(e: Experiment) -> str:
    """Return what runs have in common that may train together (``executors/stacked.py``)."""
    return json.dumps({k: x for k, x in e.identity().items() if k not in ("seed", *RATE, *SPLIT)}, sort_keys=True)


def stacks(missing: Sequence[Experiment], execution: Execution, processes: int = 1) -> Iterator[list[Experiment]]:
    """Choose which of ``missing`` train together: those of unlike seed, rate or split alone (``executors/stacked.py``).

    By default on a GPU, so many as memory suffices for where so many ``processes`` train, and of the kit's methods, as
    one of your own may take a client's id for its place; ``execution.stack`` at most, of any method.
    """
    threads, on_gpu = execution.executor in ("auto", "threads"), execution.device != "cpu"
    if not threads or (execution.stack is None and not on_gpu) or execution.stack == 1:
        return
    alike: dict[str, list[Experiment]] = {}
    for e in missing:
        if execution.stack or _is_the_kits(e):
            alike.setdefault(likeness(e), []).append(e)
    for group in (g for g in alike.values() if len(g) > 1):
        free = SHARE_OF_MEMORY / processes * memory_to_plan_with(torch.device(execution.device))
        most = execution.stack or max(1, int(free / _bytes_of(group[0])))
        yield from (part for i in range(0, len(group), most) if len(part := group[i : i + most]) > 1)


def run_stack(run_one: RunOne, stack: Sequence[Experiment], execution: Execution, watch: Watch) -> None:
    """Run ``run_one(e, watch, how)`` for each of ``stack``, in threads that meet where clients train.

    All go on if one fails, whose error is raised at the end. After a Ctrl-C all are stored up to their last rounds.
    """
    meeting, how = Meeting(len(stack)), replace(execution, executor="stacked", stack=len(stack))
    with contextlib.closing(meeting), ThreadPoolExecutor(len(stack)) as pool:  # again, what began amid a Ctrl-C
        runs = [pool.submit(meeting.attend, partial(run_one, e, watch, how)) for e in stack]
        try:
            wait(runs)
        finally:  # all have ended, or a Ctrl-C ends them
            meeting.close()
        for r in runs:
            r.result()


@contextlib.contextmanager
def abreast(watch: Watch, runs: int) -> Iterator[None]:
    """Let ``watch`` show so many ``runs`` at once inside; a Ctrl-C says how many are done, and how many are stored."""
    watch.abreast = runs
    try:
        yield
    except KeyboardInterrupt as error:
        done, going = watch.total - len(watch.left), len(watch.going)
        text = f"interrupted: {done} of {watch.total} runs are done, {going} are stored up to their last rounds; "
        raise interrupted(f"{text}run the same again, and they go on from there") from error
    finally:
        watch.abreast = 1
        watch.close_rounds()


def run_apart(run_one: RunOne, chosen: Sequence[Experiment], execution: Execution, watch: Watch) -> None:
    """Run ``run_one(e, watch, how)`` for each of ``chosen`` in processes; raise here what it raises in a fork.

    Where a process cannot train, of what another holds, and of what a new one does not know or refuses, nothing is
    run: ``watch.left`` still has it. ``RuntimeError`` names a run that lost ``LIVES`` processes. After a Ctrl-C all are
    stored up to their last rounds.
    """
    new, cores = execution.device != "cpu", at_once(execution)
    torch.cuda.empty_cache()  # of what ran here before; nothing without a GPU
    given = hand_out(chosen, cores, partial(_has_run, run_one, execution), watch, new=new)
    with contextlib.suppress(Unforkable), abreast(watch, cores), contextlib.closing(given) as answers:
        for e, answer in answers:
            if answer is None:
                raise RuntimeError(f"{e.slug}: {DIED}; Execution(workers=1) runs one at a time")
            if isinstance(answer, Exception) and not new:
                raise answer


def _has_run(run_one: RunOne, execution: Execution, e: Experiment, _: int, watch: Watch) -> bool:
    return run_one(e, watch, here(execution, 1)) is not None


def here(execution: Execution, cores: int) -> Execution:
    """Return how a process of :func:`hand_out` runs: on so many ``cores``, or on one of the GPUs, by its number."""
    if execution.device == "cpu":
        return replace(execution, workers=cores)
    number, places = re.split("[-:]", multiprocessing.current_process().name)[-1], execution.devices()
    return replace(execution, device=places[int(number) % len(places)])  # its name: Process-1, SpawnProcess-1:2
