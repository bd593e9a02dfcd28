"""A run's record: what it was trained with, on which machine, in one go or several. No later one overwrites it.

``experiment.json`` holds it beside the experiment, and every checkpoint holds it too, so that a damaged file can be
rebuilt: ``inputs`` (``identity.py``) and ``provenance`` of the first go, ``resumed``, a provenance for each later
one with the round it went on from and the inputs that were others there, and ``stored``, the day of its end.
"""

import base64
import datetime
import os
import platform
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlib.core.experiment import Experiment
from fedlib.engine.executors import Execution
from fedlib.layers.conv import CHOSEN

from ..kernels.products import choose_products, cpu
from .identity import Inputs, OtherInputs, differences

Record = Mapping[str, Any]  # as JSON holds it
# of a summary: an entry a client, or thousands of digits
BULKY = ("right", "digest", "by_client", "last_by_client", "others")


@dataclass(frozen=True)
class Run:
    """A stored result. ``summary`` has status, accuracy, exits, seconds; ``metrics`` a record per evaluated round.

    ``record`` says what trained it, where and when (``record.py``).
    """

    experiment: Experiment
    path: Path
    summary: dict
    metrics: list[dict]
    record: Record = field(default_factory=dict)

    @property
    def accuracy(self) -> float:
        """Mean over exits after the last round, percent."""
        return self.summary["accuracy"]

    @property
    def day(self) -> str:
        """When it ended, ``2026-11-22``; empty where the run does not say."""
        return self.record.get("stored", "")

    def _repr_html_(self) -> str:
        """Return a card for a notebook: numbers, what was asked and what trained it."""
        s, p = self.summary, self.record.get("provenance", {})
        rows = {"status": f"{s['status']} after {s['t']} of {self.experiment.rounds} rounds, {s['seconds']:.0f} s"}
        rows["accuracy"] = f"{s['accuracy']:.2f} %; exits {', '.join(f'{x:.2f}' for x in s['exits'])}"
        if (own := s.get("personal")) is not None:
            rows["of clients"] = f"{own['accuracy']:.2f} ± {own['sd']:.2f} % over {own['clients']}"
        rows |= self.experiment.identity() | {"seed": self.experiment.seed}
        rows["trained"] = f"{self.day} on {p.get('device')}, torch {p.get('torch')}, {p.get('workers')} workers"
        body = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in rows.items())
        return f"<table><caption>{escape(self.path.name)}</caption>{body}</table>"


def without_bulk(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return a summary, or a round's metrics, as a page holds it: without what has an entry a client or an example."""
    inner = {k: without_bulk(v) if isinstance(v, Mapping) else v for k, v in metrics.items()}
    return {k: v for k, v in inner.items() if k not in BULKY}


def provenance_now(execution: Execution) -> dict[str, object]:
    """Return the provenance of a go that begins now."""
    return provenance(execution) | {"began": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}


def resumed(record: Record, t: int, inputs: Inputs, now: Mapping[str, object]) -> Record:
    """Return ``record`` of a run that goes on after round ``t``, with ``inputs`` that it lacked or had others of."""
    other = {k: v for k, v in inputs.items() if record.get("inputs", {}).get(k) != v}
    later = {**now, "after_round": t} | ({"inputs": other} if other else {})
    return {**record, "resumed": [*record.get("resumed", []), later]}


def check_inputs(
    e: Experiment, path: Path, record: Record, inputs: Inputs, accept: frozenset[str], rounds: int | None = None
) -> None:
    """Raise ``OtherInputs`` if any go had other ``inputs`` of a kind that ``accept`` does not name."""
    found: dict[str, list[str]] = {}
    for there in recorded(record):
        for kind, texts in differences(e, there, inputs).items():
            if kind not in accept:
                found.setdefault(kind, []).extend(t for t in texts if t not in found.get(kind, []))
    if found:
        raise OtherInputs(e, path, found, rounds)


def recorded(record: Record) -> list[Inputs]:
    """List the inputs of every go: the first one's, then for later ones these with what changed."""
    first = record.get("inputs", {})
    return [first, *({**first, **s["inputs"]} for s in record.get("resumed", []) if "inputs" in s)]


def provenance(execution: Execution) -> dict[str, object]:
    """Return the versions and hardware that produce a run (not part of the experiment)."""
    from fedlib import __version__

    on_gpu = execution.home.startswith("cuda")
    found = {"fedlib": __version__, "torch": torch.__version__.split("+")[0], "python": platform.python_version()}
    found |= (gpu() if on_gpu else cpu()) | ({"commit": commit()} if commit() else {}) | {"cores": os.cpu_count()}
    found["products"] = choose_products(execution.products) if _one_thread_each(execution) else "PyTorch"
    workers = execution.workers if execution.executor == "ray" else execution.side_by_side()  # None: all of a cluster
    found |= {"stack": execution.stack} if execution.executor == "stacked" else {}
    return found | {"executor": execution.executor, "workers": workers}


def gpu() -> dict[str, object]:
    """Describe this process's GPU: ``device``, what it computes with, ``host``'s CPU, how convolutions run, by shape.

    What is measured of them after this was asked is there too.
    """
    driver = Path("/proc/driver/nvidia/version")
    found = re.search(r"\d+\.\d+[.\d]*", driver.read_text()) if driver.exists() else None
    versions = {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    there = {"driver": found.group() if found else None, "host": cpu()["device"], "convolutions": CHOSEN}
    return {"device": torch.cuda.get_device_name()} | versions | there


@cache
def commit() -> str:
    """Return the commit of the code that runs, ``-dirty`` where it was edited; of an archive $FEDLIB_COMMIT, or ""."""
    asked = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        tracked = subprocess.run([*asked[:3], "ls-files", "--error-unmatch", __file__], capture_output=True)
        said = subprocess.run(asked, capture_output=True, text=True) if tracked.returncode == 0 else None
    except OSError:  # git is not installed
        said = None
    return os.environ.get("FEDLIB_COMMIT") or (said.stdout.strip() if said else "")


def _one_thread_each(execution: Execution) -> bool:
    """Return whether cohorts train on CPU threads that multiply alone.

    A single worker in a process of several threads does not.
    """
    apart = execution.executor in ("processes", "ray") or execution.side_by_side() > 1
    return execution.device == "cpu" and (apart or torch.get_num_threads() == 1)


def unpack_bits(text: str, n: int) -> np.ndarray:
    """Decode the (rows, ``n``) truths that ``text`` holds (``evaluation.pack_bits``)."""
    bits = np.frombuffer(base64.b64decode(text), np.uint8).reshape(-1, -(-n // 8))
    return np.unpackbits(bits, axis=1, count=n).astype(bool)
