"""Stored runs: asking for a stored experiment returns it at once, an interrupted one goes on from its checkpoint.

``outputs/runs/<slug>/`` holds ``experiment.json`` (with the run's record: ``record.py``), ``metrics.jsonl`` (a line per
evaluated round), the checkpoints and ``clients/`` (``checkpoints.py``), and ``summary.json``, written last: its
existence means done; of finished runs the three text files may lie packed (``packed.py``). A run that was trained with
another method, data or weights than those at hand is refused (``identity.py``).
"""

import json
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

from fedlib.core.experiment import Experiment
from fedlib.core.profiling import phase
from fedlib.core.storage import DamagedFile, read_json, read_lines, write_json
from fedlib.core.validation import check_known, check_type, convert, shown
from fedlib.engine.checks import check_experiment
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation, build_federation
from fedlib.engine.privacy import privacy_spent
from fedlib.engine.rounds import Finished, measure, run_rounds
from fedlib.layers.conv import CHOSEN
from fedlib.methods import Server

from . import side_by_side
from .callbacks import Callback, OnRound, Together
from .checkpoints import Checkpoints
from .code_digest import code_of
from .costs import Pace
from .identity import KINDS, Accept, Inputs, OtherInputs, accepted, check_verified, inputs_of, known_inputs
from .progress import Watch, interrupted, say, unheard
from .record import Run, check_inputs, provenance, provenance_now, recorded, resumed
from .run_paths import Folder, as_stored, check_files, check_place, folder_of, forget, listed, place, run_path

Again = bool | Literal["other"]


def find_run(e: Experiment, folder: Folder = None, accept: Accept = ()) -> Run | None:
    """Return the stored run of ``e``; None if it is missing or unfinished; ``DamagedFile`` names a file not to believe.

    ``OtherInputs`` if it was trained with another method, data or weights than those at hand. ``accept`` names the
    kinds of difference to overlook, e.g. ``"data"`` or ``["options", "method"]``: options, method (its code), kit (a
    rule of its own), backbone (one of your own), data, weights.
    """
    (e, path), accept = place(e, folder), accepted(accept)
    check_files(path)
    if not (path / "summary.json").exists():
        return None
    if (there := _read(path)).experiment != e:
        raise ValueError(f"{path} holds another experiment of the same name; move it away")
    check_inputs(e, path, there.record, known_inputs(e, recorded(there.record)), accept)
    return there


def stored_runs(folder: Folder = None, words: Iterable[str] = ()) -> Iterator[Run]:
    """Yield finished runs in ``folder`` by name, as they were stored: nothing is compared with what is at hand.

    Of ``words`` the name must have every one. One that cannot be read is told of in a warning and left out.
    """
    words = [words] if isinstance(words, str) else list(check_type(words, Iterable, "words"))
    for path in listed(folder_of(folder), "*", "summary.json"):
        if all(word in path.name for word in words):
            try:
                yield _read(path)
            except ValueError as error:
                warnings.warn(f"{path.name} is left out: {error}", stacklevel=2)


def shown_run(e: Experiment, folder: Folder = None) -> Run | None:
    """Find a run as :func:`find_run` does; one of an older rule of the kit too, which a table flags (``flags.py``)."""
    return find_run(e, folder, "kit")


def _read(path: Path) -> Run:
    """Read the finished run in ``path``; ``DamagedFile`` if its files are not those of one run."""
    content, summary, lines = read_json(path / "experiment.json"), read_json(path / "summary.json"), "metrics.jsonl"
    e = Experiment.from_dict(content.pop("experiment"), str(path / "experiment.json"))
    metrics, ended_after = read_lines(path / lines), summary.get("t")
    if type(ended_after) is not int or not 0 <= ended_after <= e.rounds:
        raise DamagedFile(path / "summary.json", f"it ends after round {shown(ended_after)} of {e.rounds}")
    found, every = [m.get("t") for m in metrics], e.looks_every or e.rounds
    due = sorted({*range(every, ended_after + 1, every), *([ended_after] if ended_after == e.rounds else [])})
    if found != due:
        raise DamagedFile(path / lines, f"it holds rounds {shown(found)} instead of {shown(due)}")
    last = metrics[-1] if found[-1:] == [ended_after] else {}
    both = [k for k in sorted(last.keys() & summary.keys() - {"seconds"}) if last[k] != summary[k]]
    if other := [k for k in both if json.dumps(last[k], sort_keys=True) != json.dumps(summary[k], sort_keys=True)]:
        raise DamagedFile(path / lines, f"its last {', '.join(other)} are not those of summary.json, of another run")
    return Run(e, path, summary, metrics, content)


def run(
    e: Experiment, execution: Execution = Execution(), folder: Folder = None, progress: bool = True,
    checkpoint_seconds: float = 20.0, wait: bool = True, accept: Accept = (), again: Again = False,
    on_round: OnRound = None, callbacks: Iterable[Callback] = (),
) -> Run:  # fmt: skip
    """Return the run of ``e``: from the store, resumed, or from the start.

    If another process is running it, wait for that one (``TimeoutError`` with ``wait=False``). A run whose loss or
    update becomes infinite or NaN ends with status ``diverged``: a result like any other (``Experiment.nonfinite``).
    ``accept`` as in :func:`find_run`; resuming under other inputs than those of the first rounds needs it too.
    ``again`` forgets what is stored, finished or not, and runs ``e`` from the start; ``"other"`` only if other inputs
    than those at hand trained it, as after an edit of a method, and says of which runs.

    ``on_round`` is called with every round that is trained (``engine.rounds.Finished``), ``callbacks`` are told of them
    too (``callbacks.py``). If one of these returns True the run stops there: it is stored as unfinished, and what is
    returned has status ``stopped``.
    """
    check_type(execution, Execution, "execution")
    seconds, callback = convert(checkpoint_seconds, float, "checkpoint_seconds"), Together(callbacks, on_round)
    callback.check(e)
    e = as_stored(e, folder)
    _forget([e], folder, accept, again, progress)
    if (stored := _find_good(e, folder, accept)) is not None:
        if progress:
            say(f"stored run{' of ' * bool(stored.day)}{stored.day}: {stored.path.name}")
        return stored
    with Watch([e], progress) as watch:
        done = _run_missing(e, execution, folder, watch, seconds, wait, accept, callback)
    if done is None:
        raise TimeoutError(f"{e.slug} is being run by another process")
    return done


def run_all(
    experiments: Iterable[Experiment], execution: Execution = Execution(), folder: Folder = None,
    progress: bool = True, checkpoint_seconds: float = 20.0, accept: Accept = (), again: Again = False,
    callbacks: Iterable[Callback] = (),
) -> list[Run]:  # fmt: skip
    """Run what is missing and return all runs in order. Processes working on the same list share it by locks.

    On a CPU several runs, a core each, go on side by side in forks of this process where that ends sooner
    (``side_by_side.choose``); ``execution.workers``, another executor and callbacks keep to one after the other.
    On GPUs those that differ in seed, rate or split alone train together (``execution.stack``, ``stacks``), and of what
    is left the kit's methods and nets train in new processes, ``side_by_side.A_GPU`` on each.
    With ``execution.executor = "ray"``, whole experiments are spread over the cluster, each on one core or on a share
    of a GPU; its nodes must see ``folder`` under the same path. ``accept`` as in :func:`find_run`, ``again`` and
    ``callbacks`` as in :func:`run`; callbacks are of this process, so ``ValueError`` with Ray.
    """
    check_type(execution, Execution, "execution")
    callback, seconds = Together(callbacks), convert(checkpoint_seconds, float, "checkpoint_seconds")
    if not isinstance(experiments, Iterable):
        raise ValueError("run_all takes several experiments, e.g. run_all([e1, e2]); for one, use run(e)")
    experiments = [as_stored(e, folder) for e in experiments]
    for e in experiments:
        callback.check(e)
    _forget(experiments, folder, accept, again, progress)
    stored = {e: _find_good(e, folder, accept) for e in dict.fromkeys(experiments)}
    done = {e: r for e, r in stored.items() if r is not None}
    missing, found = [e for e in stored if e not in done], list(done.values())
    if progress and found:
        days = sorted({r.day for r in found} - {""})
        when = f" ({' to '.join(dict.fromkeys([days[0], days[-1]]))})" if days else ""
        say(f"{sum(e in done for e in experiments)} of {len(experiments)} runs stored{when}")
    stacks = [] if callback.each else list(side_by_side.stacks(missing, execution))
    alone = [e for e in missing if not any(e in stack for stack in stacks)]
    chosen = [] if callback.each else side_by_side.choose(alone, execution)
    pace = stored_pace(found, replace(execution, workers=1) if chosen else execution)
    one = partial(_run_one, folder=folder_of(folder), seconds=seconds, accept=accept, callback=callback)
    with Watch(missing, progress and bool(missing), pace) as watch:
        for stack in stacks:
            with side_by_side.abreast(watch, len(stack)):
                side_by_side.run_stack(one, stack, execution, watch)
        if chosen:
            side_by_side.run_apart(one, chosen, execution, watch)
        for wait in (False, True):  # first what no other process holds
            for e in list(watch.left):
                done |= {e: r} if (r := one(e, watch, execution, wait)) is not None else {}
    done |= {e: r for e in missing if e not in done and (r := find_run(e, folder, accept)) is not None}
    return [done[e] for e in experiments]


def _run_one(
    e: Experiment, watch: Watch, execution: Execution, wait: bool = False, *, folder: Folder, seconds: float,
    accept: Accept, callback: Callback,
) -> Run | None:  # fmt: skip
    """Return the run of ``e``, stored or run now; None if another process holds it and we do not ``wait``."""
    if (r := _find_good(e, folder, accept)) is not None:  # another process was faster
        watch.end(e)
        return r
    return _run_missing(e, execution, folder, watch, seconds, wait, accept, callback)


def stored_pace(found: Iterable[Run], execution: Execution, elsewhere: bool = False) -> Pace:
    """Return the seconds a round of stored runs of this machine, as if on as many workers as ``execution`` has.

    ``elsewhere``: of any machine's, where this one has none.
    """
    pace, now = Pace(), provenance(execution)
    every = [(r, r.record.get("provenance", {})) for r in {r.experiment: r for r in found}.values()]
    known = [(r, p) for r, p in every if p.get("workers") and now["workers"]]
    here = [(r, p) for r, p in known if all(p.get(k) == now[k] for k in ("device", "cores"))]
    for r, p in here or (known if elsewhere else ()):
        pace.add(r.experiment, r.summary["seconds"] * p["workers"] / now["workers"], r.summary["t"])
    return pace


def _forget(experiments: Sequence[Experiment], folder: Folder, accept: Accept, again: Again, told: bool) -> None:
    """Forget what is stored of ``experiments`` if ``again``; of "other" what other inputs trained. Say so if told."""
    check_known([again], (False, True, "other"), "again = {} is not possible")
    for e in experiments if again else ():
        check_experiment(e)  # all, before anything is lost
    for e, path in {e: run_path(e, folder) for e in experiments}.items() if again else ():
        if (again != "other" or _is_other(e, folder, accept)) and forget(e, folder) and told:
            say(f"forgotten, and run anew: {path.name}")


def _is_other(e: Experiment, folder: Folder, accept: Accept) -> bool:
    """Return whether other inputs than those at hand trained what is stored of ``e``, finished or not."""
    e, path = place(e, folder)
    try:
        record = read_json(path / "experiment.json")
        check_inputs(e, path, record, known_inputs(e, recorded(record)), accepted(accept))
    except (OSError, ValueError) as error:  # nothing there, or what is told when it runs
        return isinstance(error, OtherInputs)
    return False


def _find_good(e: Experiment, folder: Folder, accept: Accept) -> Run | None:
    """Return what :func:`find_run` does, but None if a file is damaged that the run's checkpoint can rebuild."""
    try:
        return find_run(e, folder, accept)
    except DamagedFile as error:
        if not Checkpoints(Path(run_path(e, folder)), e).exists():
            raise
        warnings.warn(f"{error.path} is damaged ({error.reason}): rebuilding it from the checkpoint", stacklevel=3)
        return None


def _run_missing(
    e: Experiment, execution: Execution, folder: Folder, watch: Watch, seconds: float, wait: bool, accept: Accept,
    callback: Callback,
) -> Run | None:  # fmt: skip
    """Run ``e`` under its lock; return None if another process holds it and we do not ``wait``."""
    from filelock import FileLock, Timeout

    path = Path(run_path(e, folder))  # not a packed one
    check_place(path)
    federation = build_federation(e, execution.home)  # refuses bad input before the folder exists
    privacy_spent(federation, e.rounds)  # and noise without an accountant
    inputs = inputs_of(federation)
    check_verified(e, inputs, accepted(accept))
    path.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path / ".lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        if not wait:
            return None
        watch.say(f"waiting for another process, which runs {e.slug}")
        held = lock.acquire()
    except OSError as error:
        text = f"{error.strerror}: files cannot be locked here, so two processes could run one experiment"
        raise OSError(error.errno, f"{text}; set FEDLIB_OUTPUTS to another folder", str(path / ".lock")) from error
    with held:
        if (stored := _find_good(e, folder, accept)) is None:
            try:
                stored = _continue(federation, inputs, execution, path, watch, seconds, accepted(accept), callback)
                stored = stored or find_run(e, folder, KINDS)  # a global that the rounds changed makes it no other run
            finally:
                callback.end(stored)
            if code_of(type(federation.method)) != inputs["method"]:
                warnings.warn(f"{e.method}'s class changed in training; allowed: state in Server.memory", stacklevel=3)
    watch.end(e)
    return stored


def _continue(
    f: Federation, inputs: Inputs, execution: Execution, path: Path, watch: Watch, checkpoint_seconds: float,
    accept: frozenset[str], callback: Callback,
) -> Run | None:  # fmt: skip
    """Run the rounds that are not in the checkpoint, write the summary; return a run only if a callback stopped it."""
    store = Checkpoints(path, f.experiment)
    server = store.restore(f)
    f = replace(f, experiment=store.experiment)
    check_inputs(f.experiment, path, store.record, inputs, accept, server.t)
    first, *later = (store.record.get("provenance", {}), *store.record.get("resumed", [])) if server.t else ({},)
    execution = replace(execution, products=first.get("products") or execution.products)
    for go in (first, *later):  # convolutions go on as they were chosen
        CHOSEN.update(go.get("convolutions", {}))
    if not store.final:
        now = provenance_now(execution)
        store.check_shapes(server, f)
        begun = {"inputs": inputs, "provenance": now, "resumed": []}
        store.record = resumed(store.record, server.t, inputs, now) if server.t else begun
    store.write_record()
    watch.begin(f.experiment, server.t)
    try:
        return _finish(f, store, _rounds(f, execution, server, store, watch, checkpoint_seconds, callback), path)
    except KeyboardInterrupt as error:
        with unheard():
            store.save_unsaved()
        text = f"interrupted: {f.experiment.slug} is stored up to round {store.saved} of {f.experiment.rounds}; "
        raise interrupted(f"{text}run the same again, and it goes on from there") from error


def _rounds(
    f: Federation, execution: Execution, server: Server, store: Checkpoints, watch: Watch, checkpoint_seconds: float,
    callback: Callback,
) -> Finished | None:  # fmt: skip
    """Run the rounds after ``server.t``, with a checkpoint now and then; return the last one, None if none was left."""
    saved = time.monotonic()
    if callback.begin(f.experiment, server.t, store.metrics) and server.t and not store.final:
        return Finished(server.t, replace(server, mirrors=store.mirrors), {}, {}, None, 0.0)
    for r in run_rounds(f, execution, server, store.memories, store.mirrors):
        if execution.executor == "stacked":  # the others' time is theirs
            r = replace(r, seconds=r.seconds / (execution.stack or 1))
        store.note(r)
        watch.round(f.experiment, r)
        if callback.round(r) or r.diverged or r.t == f.experiment.rounds:
            return r
        if time.monotonic() - saved >= checkpoint_seconds:
            with phase("files"):
                store.save(r.server)
            saved = time.monotonic()
    return None


def _finish(f: Federation, store: Checkpoints, last: Finished | None, path: Path) -> Run | None:
    """Write the last checkpoint, then the record and the summary; of a run that was stopped the checkpoint alone."""
    numbers = {"num_examples": int(f.data.num_examples.sum()), "num_test": len(f.data.test_labels)}
    if last is not None:
        metrics = last.metrics if last.metrics is not None else measure(f, last.server, store.memories)
        stopped = last.t < f.experiment.rounds and not last.diverged
        status = "diverged" if last.diverged else "stopped" if stopped else "finished"
        final = {"t": last.t, "status": status, **metrics, **store.drops()}
        if stopped:
            store.save_unsaved()
            final |= {"seconds": round(store.seconds, 2)} | numbers
            return Run(f.experiment, path, final, store.metrics, store.record)
        store.record = {**store.record, "stored": time.strftime("%Y-%m-%d")}
        with phase("files"):
            store.save(last.server, final)
            store.write_record()
    write_json(path / "summary.json", dict(store.final, seconds=round(store.seconds, 2), **numbers))
    return None
