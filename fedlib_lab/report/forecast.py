"""What a table takes, told before anything starts: runs, hours on named GPUs, memory, disk, and what is downloaded.

All is counted from shapes (``runs/prices.py``, ``runs/costs.py``); no weights and none of the known data are looked at.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pandas as pd

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.data.datasets import is_available
from fedlib.engine.frozen_cache import FrozenCache
from fedlib.engine.memory import GIB, bytes_to_train
from fedlib.models.registry import WEIGHTS, folder_of_weights, tokenizer_of

from ..runs.costs import load_shapes
from ..runs.params import Cell
from ..runs.prices import CARDS, DOWNLOAD_MB, UTILISATION, examples_per_client, num_classes, training_macs
from ..runs.store import shown_run


def forecast(cells: Sequence[Cell]) -> pd.DataFrame:
    """Per mode and row: runs, how many are missing, and of these the hours on each card, the peak GiB and the disk.

    ``GiB a client`` is :func:`client_bytes` where one client trains at a time; a GPU holds its examples besides.
    """
    rows: dict[tuple[str, str], list[Experiment]] = {}
    for cell in cells:
        rows.setdefault((cell.finetune, cell.label), []).append(cell.experiment)
    return pd.DataFrame([{"mode": mode, "row": label} | _row(es) for (mode, label), es in rows.items()])


def _row(experiments: Sequence[Experiment]) -> dict[str, float]:
    missing = [e for e in experiments if shown_run(e) is None]
    macs, kinds = [(e.precision, training_macs(e)) for e in missing], [_kind(e) for e in experiments]
    out = {"runs": len(experiments), "missing": len(missing)}
    out |= {
        f"{name} h": round(sum(m / card.macs_per_second(p) for p, m in macs) / 3600, 1) for name, card in CARDS.items()
    }
    return out | {
        "GiB a client": round(max(client_bytes(e) for e in kinds) / GIB, 2),
        "GiB of disk": round(sum(disk_bytes(_kind(e)) for e in missing) / GIB, 2),
    }


def _kind(e: Experiment) -> Experiment:
    """``e`` without what decides neither memory nor disk."""
    plain = Experiment()
    same = ("seed", "rounds", "dirichlet_alpha", "lr", "min_lr", "schedule", "milestones", "decay", "warmup_rounds")
    return e.replace(**{name: getattr(plain, name) for name in same})


@cache
def client_bytes(e: Experiment) -> float:
    """The peak of a round that trains one client with the largest budget, and what is kept of frozen units.

    Without the process itself (about 0.7 GiB on a CPU, 0.5 on a GPU) and without the data. Activations are those that
    autograd keeps in float32; where a method trains other parts than its slice at once, in proportion
    (``Method.training_mib``).
    """
    shapes = load_shapes(e, num_classes(e))
    batch = max(1, min(e.batch_size, round(examples_per_client(e))))
    client, part = Client(-1, shapes.budgets - 1, batch), shapes.slices[-1]
    setting = replace(shapes.setting, num_clients=e.num_clients, batch_size=batch)
    share = shapes.method.training_mib(client, setting, batch) / setting.measure.training_mib(part, batch)
    cut = any(s.index for s in shapes.slices)
    peak = bytes_to_train(e, shapes.model, share * shapes.kept(part, batch)[1], cut)
    units = shapes.model.frozen_units()
    if units and e.augment == "none":
        rows = round(examples_per_client(e) * e.num_clients)
        peak += FrozenCache.bytes_needed(shapes.model, units, rows, shapes.method.skips(setting))
    return peak


@cache
def disk_bytes(e: Experiment) -> float:
    """What a run leaves on disk: two checkpoints of what is trained, and what every client keeps to itself."""
    shapes = load_shapes(e, num_classes(e))
    own = [p.numel() for n, p in shapes.trainable.items() if shapes.method.personal(shapes.setting.infos[n])]
    return 4 * (2 * sum(p.numel() for p in shapes.trainable.values()) + e.num_clients * sum(own))


def downloads(experiments: Sequence[Experiment]) -> dict[str, float]:
    """Of weights and data that are not at hand about how many MB they are; weights count four bytes a parameter."""
    out = {}
    for e in experiments:
        weights = e.pretrained and e.backbone not in WEIGHTS and folder_of_weights(e.backbone) is None
        if weights and e.backbone not in out:
            out[e.backbone.split(".")[0]] = 4e-6 * _backbone_numbers(_kind(e))
        if not is_available(e.dataset, tokenizer_of(e.backbone)):
            out[e.dataset] = DOWNLOAD_MB.get(e.dataset, 0.0)
    return out


@cache
def _backbone_numbers(e: Experiment) -> int:
    shapes = load_shapes(e, num_classes(e))
    return sum(p.numel() for n, p in shapes.everything.items() if shapes.setting.infos[n].kind == "backbone")


def told(cells: Sequence[Cell]) -> str:
    """:func:`forecast` as text, with its sums, its assumptions and what is downloaded."""
    frame, missing = forecast(cells), [c.experiment for c in cells if shown_run(c.experiment) is None]
    loads = downloads(missing)
    needed = ", ".join(f"{name} {mb:,.1f} MB" if mb else f"{name} (size unknown)" for name, mb in loads.items())
    hours = ", ".join(f"{frame[f'{card} h'].sum():,.0f} on one {card}" for card in CARDS)
    return (
        f"{frame.to_string(index=False)}\n{frame.runs.sum()} runs, {frame.missing.sum()} missing. Hours: {hours}, at "
        f"{UTILISATION:.0%} of its peak in the experiment's precision; small nets reach less.\n"
        f"Disk: {frame['GiB of disk'].sum():,.1f} GiB of runs. To download: {needed or 'nothing'}."
    )
