"""The resumable state of a run: the last two checkpoints, and the client memories that either names.

``checkpoint.safetensors`` holds the server, the metrics so far, the run's record, and the round of each client's memory
file; the one before it stays as ``previous.safetensors``. ``metrics.jsonl`` is written from the checkpoint, so no line
can be lost that a checkpoint counts.
"""

import contextlib
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from ..core.experiment import Experiment
from ..core.memories import ClientFiles
from ..core.storage import DamagedFile, read_json, read_tensors, write_json, write_lines, write_tensors
from ..engine.federation import Federation
from ..engine.rounds import Finished
from ..methods import Server
from .record import Record, Run

RECORD, NEWEST = "experiment.json", "checkpoint.safetensors"


def last_state(r: Run, device: str = "cpu") -> tuple[dict[str, torch.Tensor], dict[str, Any]] | None:
    """Tensors and metadata that ``r`` ended with; None if it came without them.

    Nor are they ``r``'s if their curve is another's, of a run that lay here before its files were replaced.
    """
    if not (file := r.path / NEWEST).exists():
        return None
    tensors, metadata = read_tensors(file, device)
    return (tensors, metadata) if json.dumps(metadata["metrics"]) == json.dumps(r.metrics) else None  # NaN too


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
        """``{"dropped": client updates left out so far}``, where the experiment asks for dropping."""
        return {"dropped": self.dropped} if self.experiment.nonfinite == "drop" else {}

    def save(self, server: Server, final: dict | None = None) -> None:
        """Memories, then the checkpoint that makes them count, then its metrics; then drop what neither names."""
        self.unsaved, self.final = None, final or {}
        self.memories.write(server.t)
        self.mirrors.write(server.t)
        tensors = {f"params/{k}": v for k, v in server.params.items()}
        tensors |= {f"memory/{k}": v for k, v in server.memory.items()}
        metadata = {
            "experiment": self.experiment.to_dict(), "t": server.t, "metrics": self.metrics, "seconds": self.seconds,
            "dropped": self.dropped, "final": self.final, "memories": self.memories.rounds,
            "replaced": self.memories.replaced, "mirrors": self.mirrors.rounds,
            "mirrors_replaced": self.mirrors.replaced, "record": self.record,
        }  # fmt: skip
        write_tensors(self.newest, tensors, metadata, self.previous)
        self.saved = server.t
        write_lines(self.path / "metrics.jsonl", self.metrics)
        self.memories.drop_unnamed()
        self.mirrors.drop_unnamed()

    def save_unsaved(self) -> None:
        """Save the state after the last noted round, whatever was begun since then; nothing if it is saved."""
        if self.unsaved is not None:
            server, self.memories.changed, self.mirrors.changed, self.seconds, self.dropped, lines = self.unsaved
            del self.metrics[lines:]
            self.save(server)

    def restore(self, f: Federation) -> Server:
        """The state to go on from: the newest good checkpoint's, or round 0 if there never was one.

        ``DamagedFile`` if neither can be used, ``ValueError`` if it belongs to another experiment.
        """
        for part in self.path.rglob(".*.part"):  # of a killed process: the run's lock is ours
            part.unlink(missing_ok=True)
        self.memories.device = self.mirrors.device = str(f.device)
        server = f.server
        if self.newest.exists():
            try:
                server = self._read(self.newest, f)
            except DamagedFile as error:
                if not self.previous.exists():
                    raise
                server = self._read(self.previous, f)
                warnings.warn(f"{error.path} is damaged ({error.reason}): going on from round {server.t}", stacklevel=2)
                os.replace(self.previous, self.newest)  # before the damaged one could become the previous one
        elif self.previous.exists():  # killed between the two renames of a checkpoint
            server = self._read(self.previous, f)
        write_lines(self.path / "metrics.jsonl", self.metrics)
        self.memories.drop_unnamed()
        self.mirrors.drop_unnamed()
        if server.t and not self.record:  # a checkpoint of an older version
            with contextlib.suppress(DamagedFile):
                self.record = {k: v for k, v in read_json(self.path / RECORD).items() if k != "experiment"}
        if self.final:  # killed between the last checkpoint and the summary
            server = Server(f.experiment.rounds, server.params, server.memory)
        return server

    def check_shapes(self, server: Server, f: Federation) -> None:
        """Raise ``ValueError`` if what was restored is not of the shapes of ``f``'s model."""
        for name, new in f.server.params.items():
            old = server.params.get(name)
            if old is None or old.shape != new.shape:
                there = "none" if old is None else tuple(old.shape)
                raise ValueError(
                    f"{self.path} holds the rounds of another model: {name} is {there} there, {tuple(new.shape)} here; "
                    "run(e, again=True) begins anew"
                )

    def write_record(self) -> None:
        """``experiment.json``: the experiment and, beside it, what trained it."""
        write_json(self.path / RECORD, {"experiment": self.experiment.to_dict(), **self.record})

    def _read(self, file: Path, f: Federation) -> Server:
        tensors, m = read_tensors(file, str(f.device))
        self.experiment = Experiment.from_dict(m["experiment"], str(file))  # looked at as it was begun
        if self.experiment != f.experiment:
            raise ValueError(f"{self.path} holds another experiment of the same name; move it away")
        parts = {p: {k[len(p) :]: v for k, v in tensors.items() if k.startswith(p)} for p in ("params/", "memory/")}
        for files, rounds, replaced in (
            (self.memories, m["memories"], m["replaced"]),
            (self.mirrors, m.get("mirrors", {}), m.get("mirrors_replaced", [])),
        ):
            files.rounds = {int(c): t for c, t in rounds.items()}
            files.replaced = [(c, t) for c, t in replaced]
            files.check()
        self.metrics, self.seconds, self.dropped, self.final = m["metrics"], m["seconds"], m["dropped"], m["final"]
        self.record, self.saved = m.get("record", {}), m["t"]
        return Server(m["t"], parts["params/"], parts["memory/"])
