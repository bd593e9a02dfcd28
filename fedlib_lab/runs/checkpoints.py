"""The state of a run, and the one way to read it back: two checkpoints, and the client memories that either names.

``checkpoint.safetensors`` holds the server, the metrics so far, the run's record, and the round of each client's memory
file; the one before it stays as ``previous.safetensors``. ``metrics.jsonl`` is written from the checkpoint, so no line
can be lost that a checkpoint counts.
"""

import contextlib
import json
import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedlib.core.experiment import Experiment
from fedlib.core.memories import ClientFiles
from fedlib.core.storage import DamagedFile, read_json, read_tensors, write_json, write_lines, write_tensors
from fedlib.engine.federation import Federation
from fedlib.engine.rounds import Finished
from fedlib.methods import Server
from fedlib.methods.mixtures import part_of, under

from .record import Record, Run

RECORD, NEWEST = "experiment.json", "checkpoint.safetensors"


class Checkpoints:
    """Two checkpoints, replaced atomically; client memories in files by round that the checkpoints name."""

    def __init__(self, path: Path, experiment: Experiment):
        self.path, self.experiment = path, experiment
        self.newest, self.previous = path / NEWEST, path / "previous.safetensors"
        self.memories, self.mirrors = ClientFiles(path / "clients"), ClientFiles(path / "mirrors")
        self.seconds, self.dropped = 0.0, 0
        self.final: dict = {}
        self.metrics: list[dict] = []
        self.record: Record = {}  # see record.py
        self.saved = 0  # the round of the newest checkpoint
        self.unsaved: tuple | None = None  # the state after the last noted round that another follows

    def exists(self) -> bool:
        return self.newest.exists() or self.previous.exists()

    def note(self, r: Finished) -> None:
        """Remember what a round changed until the next :meth:`save`."""
        self.seconds += r.seconds
        self.dropped += len(r.dropped)
        if r.metrics is not None:
            loss = round(sum(r.losses.values()) / len(r.losses), 6) if r.losses else None  # every client was dropped
            metrics = {k: v for k, v in r.metrics.items() if k != "right"}  # of the last round alone: in the summary
            line = {"t": r.t, **metrics, "train_loss": loss, "seconds": round(self.seconds, 2)}
            self.metrics.append(line | self.drops())
        if not r.diverged and r.t < self.experiment.rounds:
            changed = dict(self.memories.changed), dict(self.mirrors.changed)
            self.unsaved = r.server, *changed, self.seconds, self.dropped, len(self.metrics)

    def drops(self) -> dict[str, int]:
        """Return ``{"dropped": client updates left out so far}`` if the experiment asks for dropping, else {}."""
        return {"dropped": self.dropped} if self.experiment.nonfinite == "drop" else {}

    def save(self, server: Server, final: dict | None = None) -> None:
        """Write memories, then the checkpoint that makes them count, then metrics; drop what no checkpoint names."""
        self.unsaved, self.final = None, final or {}
        self.memories.write(server.t)
        self.mirrors.write(server.t)
        write_tensors(self.newest, *self.contents(server), self.previous)
        self.saved = server.t
        write_lines(self.path / "metrics.jsonl", self.metrics)
        self.memories.drop_unnamed()
        self.mirrors.drop_unnamed()

    def contents(self, server: Server) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the tensors and metadata of a checkpoint: what :meth:`read` reads."""
        tensors = under("params", server.params) | under("memory", server.memory)
        metadata = {
            "experiment": self.experiment.to_dict(), "t": server.t, "metrics": self.metrics, "seconds": self.seconds,
            "dropped": self.dropped, "final": self.final, "memories": self.memories.rounds,
            "replaced": self.memories.replaced, "mirrors": self.mirrors.rounds,
            "mirrors_replaced": self.mirrors.replaced, "record": self.record,
        }  # fmt: skip
        return tensors, metadata

    def save_unsaved(self) -> None:
        """Save the state after the last noted round, whatever was begun since then; nothing if it is saved."""
        if self.unsaved is not None:
            server, self.memories.changed, self.mirrors.changed, self.seconds, self.dropped, lines = self.unsaved
            del self.metrics[lines:]
            self.save(server)

    def restore(self, f: Federation) -> Server:
        """Return the state to go on from: the newest good checkpoint's, or round 0 if there never was one.

        ``DamagedFile`` if neither can be used, ``ValueError`` if it belongs to another experiment.
        """
        for part in self.path.rglob(".*.part"):  # of a killed process: the run's lock is ours
            part.unlink(missing_ok=True)
        device, server = str(f.device), f.server
        self.memories.device = self.mirrors.device = device
        if self.newest.exists():
            try:
                server = self.read(self.newest, device)
            except DamagedFile as error:
                if not self.previous.exists():
                    raise
                server = self.read(self.previous, device)
                warnings.warn(f"{error.path} is damaged ({error.reason}): going on from round {server.t}", stacklevel=2)
                os.replace(self.previous, self.newest)  # before the damaged one could become the previous one
        elif self.previous.exists():  # killed between the two renames of a checkpoint
            server = self.read(self.previous, device)
        if self.experiment != f.experiment:
            raise ValueError(f"{self.path} holds another experiment of the same name; move it away")
        write_lines(self.path / "metrics.jsonl", self.metrics)
        self.memories.drop_unnamed()
        self.mirrors.drop_unnamed()
        if server.t and not self.record:  # a checkpoint of an older version
            with contextlib.suppress(DamagedFile):
                self.record = {k: v for k, v in read_json(self.path / RECORD).items() if k != "experiment"}
        if self.final:  # killed between the last checkpoint and the summary
            server = replace(server, t=f.experiment.rounds)
        return server

    def check_shapes(self, server: Server, f: Federation) -> None:
        """Raise ``ValueError`` if what was restored is not of the shapes of ``f``'s model."""
        for name, new in f.server.params.items():
            old = server.params.get(name)
            if old is None or old.shape != new.shape:
                there = "none" if old is None else tuple(old.shape)
                why = f"{self.path} holds the rounds of another model: {name} is {there} there, {tuple(new.shape)} here"
                raise ValueError(f"{why}; run(e, again=True) begins anew")

    def write_record(self) -> None:
        """Write ``experiment.json``: the experiment and, beside it, what trained it."""
        write_json(self.path / RECORD, {"experiment": self.experiment.to_dict(), **self.record})

    def read(self, file: Path, device: str) -> Server:
        """Return the server that ``file`` holds, with its mirrors; take over its clients' memories and the rest.

        ``DamagedFile`` if any file that it names cannot be read.
        """
        tensors, m = read_tensors(file, device)
        self.experiment = Experiment.from_dict(m["experiment"], str(file))  # looked at as it was begun
        params, memory = part_of(tensors, "params"), part_of(tensors, "memory")
        for files, name, old in (
            (self.memories, "memories", "replaced"),
            (self.mirrors, "mirrors", "mirrors_replaced"),
        ):
            files.device, files.rounds = device, {int(c): t for c, t in m.get(name, {}).items()}
            files.replaced = [(c, t) for c, t in m.get(old, [])]
            files.check()
        self.metrics, self.seconds, self.dropped, self.final = m["metrics"], m["seconds"], m["dropped"], m["final"]
        self.record, self.saved = m.get("record", {}), m["t"]
        return Server(m["t"], params, memory, self.mirrors)


def last_state(r: Run, device: str = "cpu") -> tuple[Server, Checkpoints] | None:
    """Return the server that ``r`` ended with, and what holds its clients' ``memories`` and the rest; None if absent.

    None too if the stored curve is not ``r``'s but of a run that lay here before its files were replaced.
    """
    if not (store := Checkpoints(r.path, r.experiment)).newest.exists():
        return None
    server = store.read(store.newest, device)
    return (server, store) if json.dumps(store.metrics) == json.dumps(r.metrics) else None  # NaN too
