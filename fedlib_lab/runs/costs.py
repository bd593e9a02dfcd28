"""What a run and a table cost: parameters, traffic, MACs, memory and disk, counted; seconds here, timed; GPU hours.

Counted is from shapes alone (meta device) and from the sizes of known data (``costs.yaml``): no weights and no data are
looked at. What training takes is counted as it runs (``meter.py``), by whatever method; evaluation is left out (about a
hundredth). Timed are steps with random weights; what a machine measures is no part of an experiment. Read next:
``meter.py``; ``models/measure.py``, which counts the MACs of a forward pass.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fedlib.core.clients import Client
from fedlib.core.experiment import Experiment
from fedlib.core.profiling import saved_for_backward
from fedlib.core.slices import Slice, take_all
from fedlib.core.validation import check_type
from fedlib.data.datasets import DataSet, is_available, load_dataset
from fedlib.data.tokenizer import has_tokenizer
from fedlib.engine.executors import Execution
from fedlib.engine.federation import budgets_of, build_model, setting_of
from fedlib.engine.forward import Forward
from fedlib.engine.frozen_cache import FrozenCache
from fedlib.engine.memory import GIB
from fedlib.methods import Method, Round, Server, Setting, build_method
from fedlib.models.exit_model import ExitModel
from fedlib.models.registry import WEIGHTS, backbone_spec, folder_of_weights, tokenizer_of

from ..executors.meter import SECONDS, Macs, Taken, count_training, median_seconds
from .params import Cell

DATA, CARDS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).values()  # known data sets, GPUs
UTILISATION = 0.4  # of a card's peak, assumed of nets that fill it; small nets and small batches reach less
MIB = 2**20
LARGE = 300_000_000  # parameters
ALIKE = ("finetune", "method", "dataset", "augment", "num_exits", "precision", "evaluate_every")  # by importance

# --- of one round, from shapes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shapes:
    """An experiment's model, on the meta device unless it is to be timed, with its method and setting."""

    experiment: Experiment
    method: Method
    setting: Setting
    model: ExitModel
    everything: dict[str, torch.Tensor]
    trainable: dict[str, torch.Tensor]

    @property
    def budgets(self) -> int:
        """How many there are; by default one per exit."""
        return self.method.num_budgets(self.setting.num_exits)

    @property
    def slices(self) -> list[Slice]:
        """What a client of each budget holds."""
        return [self.slice_for(b) for b in range(self.budgets)]

    def slice_for(self, budget: int) -> Slice:
        """Return the slice of the model that a client of ``budget`` holds."""
        client = Client(-1, budget, 0)
        return self.method.slice_for(client, Server(0, self.trainable, {}), Round(1, (client,), self.setting))

    def held(self, part: Slice, params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return those of ``params``, by local names, that ``part`` holds, cut to size."""
        return take_all(params, self.setting.infos, replace(part, aliases={}))

    def upload_mib(self, part: Slice, budget: int = 0) -> float:
        """Return the MiB that a client of ``budget`` with ``part`` sends, compressed as the method's options say."""
        return self.traffic_mib(part, budget)[1]

    def traffic_mib(self, part: Slice, budget: int = 0) -> tuple[float, float]:
        """Return the MiB that a client of ``budget`` with ``part`` receives, and those that it sends."""
        e, held, infos = self.experiment, self.held(part, self.trainable), self.setting.infos
        kept = "statistic" if e.batch_norm == "local" else None  # what else stays with a client
        shared = {n: p.numel() for n, p in held.items() if not self.method.personal(infos[n]) and infos[n].kind != kept}
        plain = type(self.method).travels is Method.travels  # whatever a client has: its data may not be at hand
        client = Client(-1, budget, 0 if plain else round(examples_per_client(e)))
        down, up = check_type(self.method.travels(shared, client, self.setting, e), tuple, f"{e.method}: travels()")
        own = not type(self.method).__module__.startswith(("fedlib.", "fedlib_lab."))
        if own or (self.method.needs_extras and plain):
            beside = taken_by(e, budget)
            down, up = [*down, beside.received], [*up, beside.sent]
        return 4 * sum(down) / MIB, self.method.upload_bits(up) / 8 / MIB

    def forward(self, part: Slice) -> Forward:
        """Build what runs ``part``, blocks whole as on a device that may go on; trained parameters want gradients."""
        self.model.backbone.whole_blocks = True
        learns = lambda n: n in self.trainable and self.setting.infos[n].kind != "statistic"  # noqa: E731
        own = {n: p.detach().requires_grad_(learns(n)) for n, p in self.held(part, self.everything).items()}
        return Forward(self.model, [part], own).place_(training=True)

    def kept_bytes(self, part: Slice, batch: int) -> int:
        """Count the bytes that autograd keeps of ``batch`` examples, beside ``part``'s tensors."""
        forward = self.forward(part)
        with saved_for_backward(forward.tensors[0].values()) as kept:
            forward(self.examples(batch))
        return sum(x.untyped_storage().nbytes() for x in kept.values())

    def examples(self, count: int) -> torch.Tensor:
        """Return ``count`` examples, all ones, for one client."""
        shape, device = self.setting.spec.input_shape, next(iter(self.everything.values())).device
        return torch.ones(1, 1, *shape, device=device).expand(1, count, *shape)


def load_shapes(
    e: Experiment, classes: int | None = None, exit_units: tuple[int, ...] | None = None, device: str = "meta"
) -> Shapes:
    """Build ``e``'s model, with exits elsewhere if ``exit_units``; on ``meta`` without weights or memory.

    For ``classes``, by default those of its data set.
    """
    if exit_units is not None:
        e = e.replace(num_exits=len(exit_units), exit_blocks=exit_units)
    method = build_method(e.method, e.options)
    model = build_model(e, method, num_classes(e) if classes is None else classes, meta=device == "meta").to(device)
    setting = setting_of(e, model)
    if exit_units is None:  # a method need not be able to train the exits that it is only charged for
        method.check(setting, e)
    every = {n: p.detach() for n, p in model.named_parameters()}
    return Shapes(e, method, setting, model, every | (learnt := model.trainable()), learnt)  # with batch norm's own


def upload_parameters(e: Experiment, num_classes: int) -> list[int]:
    """Count the parameters that a client of each budget sends back per round."""
    shapes = load_shapes(e, num_classes)
    return [sum(p.numel() for p in shapes.held(s, shapes.trainable).values()) for s in shapes.slices]


def upload_mib(e: Experiment, num_classes: int, convention: str = "honest") -> float:
    """Return the mean upload per participating client and round, in MiB (2^20 bytes).

    ``honest``: uniform mean over the budgets that may take part, compressed as the method's options say. ``paper``: the
    convention behind the communication column of ReeFL's Tables 1 and 2, inferred from exact agreement: mean over all
    budgets (also for ExclusiveFL), and methods whose clients hold all exits up to their own are charged one classifier
    per block; float32, so compressed uploads are refused.
    """
    if convention not in ("honest", "paper"):
        raise ValueError(f"convention = {convention!r}; allowed: honest, paper")
    shapes = load_shapes(e, num_classes)
    slices, compress = shapes.slices, shapes.method.compress
    if convention == "honest":
        eligible = shapes.method.eligible(np.arange(len(slices)), shapes.setting)
        sizes = [shapes.upload_mib(slices[b], b) for b in eligible]
    else:
        if compress != "none":
            raise ValueError(f"convention = 'paper' counts float32, not compress = {compress!r}; use 'honest'")
        depth, nested = shapes.setting.spec.depth, len(slices[-1].exits) > 1
        charged = load_shapes(e, num_classes, tuple(range(depth)))
        exits = [tuple(range(s.depth)) if nested else (s.depth - 1,) for s in slices]
        sizes = [charged.upload_mib(replace(s, exits=x)) for s, x in zip(slices, exits, strict=True)]
    return sum(sizes) / len(sizes)


def exit_costs(e: Experiment, num_classes: int, batch_size: int = 32) -> list[dict]:
    """Count per exit ``parameters`` of its sub-model, ``macs`` of one image, ``training_memory_mib`` at ``batch_size``.

    MACs (``models/measure.py``) are those up to and with this exit and those of its sub-model before it, blocks whole;
    a method whose sub-models have only their own exit pays for that one. Training memory is parameters, gradients of
    the trainable ones, and every activation autograd keeps, in float32.
    """
    shapes, out = load_shapes(e, num_classes), []
    measure = shapes.setting.measure
    for j, part in enumerate(shapes.slices, 1):
        (down, up), parameters = shapes.traffic_mib(part, j - 1), measure.parameters(part)
        kept = 4 * (parameters + measure.cost("upload", part)) + shapes.kept_bytes(part, batch_size)
        out.append({"exit": j, "block": part.depth, "parameters": parameters, "upload_mib": up, "download_mib": down,
                    "macs": measure.macs(part), "training_memory_mib": kept / MIB})  # fmt: skip
    return out


# --- of a whole run, from published sizes ----------------------------------------------------------------------------


def num_classes(e: Experiment) -> int:
    """Return the number of classes of ``e``'s data set, which is read only if it is not a known one."""
    known = DATA.get(e.dataset, {}).get("groups" if e.label_groups else "classes")
    return _read(e).num_classes if known is None else known


def examples_per_client(e: Experiment) -> float:
    """Return the mean number of training examples of a client; public ones are first of what ``num_train`` leaves."""
    if e.partition == "drawn":
        return e.examples_per_client
    known = DATA.get(e.dataset, {}) if e.num_train is None else {"examples": e.num_train}
    kept = (1 - e.validation_fraction) * (1 - e.public_fraction * (e.num_train is None))
    examples = known.get("a_client", 0) * e.num_clients or known.get("examples") or len(_read(e).train_labels)
    return kept * examples / e.num_clients


def _read(e: Experiment) -> DataSet:
    """Load the data set with the backbone's own tokenizer, or for an estimate with any where that is not at hand."""
    size, own = backbone_spec(e.backbone).input_shape[-1], tokenizer_of(e.backbone)
    return load_dataset(e.dataset, e.label_groups, size, own if has_tokenizer(own) else None)


def training_macs(e: Experiment) -> float:
    """Return rounds x clients x examples x MACs of an example (``meter.Taken``), the mean over the eligible budgets."""
    shapes, macs = shapes_of(kind_of(e)), np.array([t.macs for t in taken(kind_of(e))])
    budgets = budgets_of(e, shapes.method)
    eligible = shapes.method.eligible(budgets, shapes.setting)
    trained = e.rounds * min(e.clients_per_round, len(eligible)) * examples_per_client(e)
    return trained * macs[np.minimum(budgets[eligible], len(macs) - 1)].mean()  # who has no exits of its own has one


shapes_of = lru_cache(maxsize=32)(load_shapes)  # of a kind (:func:`kind_of`), whose runs are priced one after another


@cache
def taken_by(e: Experiment, budget: int) -> Taken:
    """Return what a client of ``budget`` takes."""
    shapes, client = shapes_of(e), Client(-1, budget, round(examples_per_client(e)))
    return count_training(e, shapes.method, shapes.setting, shapes.model, client)


@cache
def taken(e: Experiment) -> tuple[Taken, ...]:
    """Return what a client of each budget takes.

    Where slices differ in depth only, four are counted and the rest interpolated.
    """
    shapes = shapes_of(e)
    every, by_width = np.arange(shapes.budgets), any(part.index for part in shapes.slices)
    counted = every if by_width else np.unique(np.clip([0, 1, len(every) // 2, len(every) - 1], 0, len(every) - 1))
    found = [taken_by(e, int(b)) for b in counted]
    macs, peaks = (np.interp(every, counted, [getattr(t, of) for t in found]) for of in ("macs", "peak"))
    return tuple(Taken(float(m), round(p)) for m, p in zip(macs, peaks, strict=True))


def gpu_hours(experiments: Sequence[Experiment]) -> dict[str, float]:
    """Return the hours of training on one card, for each of ``CARDS``; a MAC is two operations."""
    work = [(e.precision, training_macs(e)) for e in experiments]
    return {name: sum(m / (UTILISATION * card[p] * 1e12 / 2) for p, m in work) / 3600 for name, card in CARDS.items()}


@cache
def count_bytes(e: Experiment) -> dict[str, float]:
    """Count what a ``client`` takes in memory, a run on ``disk``, and the backbone's ``weights``, in bytes.

    ``client`` is the peak of a round that trains one client with the largest budget, and what is kept of frozen units.
    Without the process itself (about 0.7 GiB on a CPU, 0.5 on a GPU) and without the data. Beside a client's training
    (``meter.Taken``) lie four copies of what is trained: the model, the worker's, the server's first and present state.
    What arrives in float64 makes 8, or 10 where widths are cut and every entry has a weight of its own. ``disk`` is two
    checkpoints of what is trained, and what every client keeps to itself.
    """
    shapes = shapes_of(e)
    method, infos = shapes.method, shapes.setting.infos
    trained, frozen = (4 * sum(p.numel() for p in x.values()) for x in (shapes.trainable, shapes.model.frozen()))
    arriving = 10 if any(s.index for s in shapes.slices) else 8
    peak = max(frozen + arriving * trained, 4 * trained + taken_by(e, shapes.budgets - 1).peak)
    if (units := shapes.model.frozen_units()) and e.augment == "none":
        rows = round(examples_per_client(e.replace(partition="iid")) * e.num_clients)  # drawn clients share them
        peak += FrozenCache.bytes_needed(shapes.model, units, rows, method.skips(shapes.setting))
    held = {n: p.numel() * (2 + e.num_clients * method.personal(infos[n])) for n, p in shapes.trainable.items()}
    weights = sum(p.numel() for n, p in shapes.everything.items() if infos[n].kind == "backbone")
    return {"client": peak, "disk": 4 * sum(held.values()), "weights": 4 * weights}


def kind_of(e: Experiment) -> Experiment:
    """Return ``e`` with defaults in the fields that decide no bytes."""
    same = ("seed", "rounds", "dirichlet_alpha", "lr", "min_lr", "schedule", "milestones", "decay", "warmup_rounds")
    return e.replace(**{name: getattr(Experiment, name) for name in same})


def downloads(experiments: Iterable[Experiment]) -> dict[str, float]:
    """Estimate the MB of weights and data that are not at hand, by name; weights count four bytes a parameter."""
    out = {}
    for e in experiments:
        if e.pretrained and e.backbone not in WEIGHTS and folder_of_weights(e.backbone) is None:
            out[e.backbone.split(".")[0]] = count_bytes(kind_of(e))["weights"] / 1e6
        if not is_available(e.dataset, tokenizer_of(e.backbone)):
            out[e.dataset] = DATA.get(e.dataset, {}).get("mb", 0.0)
    return out


# --- in seconds, on this machine -------------------------------------------------------------------------------------


def training_step(shapes: Shapes, part: Slice, examples: int) -> Callable[[], object]:
    """Return a step of training ``part`` on so many ``examples``: forward and backward."""
    forward, x = shapes.forward(part), shapes.examples(examples)
    trained = [p for p in forward.tensors[0].values() if p.requires_grad]
    return lambda: torch.autograd.grad(forward(x).sum(), trained, allow_unused=True)


def seconds_of(shapes: Shapes, part: Slice, examples: int = 1, seconds: float = SECONDS) -> float:
    """Time how ``part`` answers ``examples`` examples."""
    forward, x = shapes.forward(part), shapes.examples(examples)
    return median_seconds(torch.inference_mode()(lambda: forward(x)), x.device.type, seconds)


def step_seconds(e: Experiment, parts: Sequence[Slice] | None = None, batch: int = 32) -> np.ndarray:
    """Time one training step of each of ``parts``, or of what clients of each budget hold; weights are random."""
    shapes = load_shapes(e.replace(pretrained=False), device="cpu")
    return np.array([median_seconds(training_step(shapes, part, batch)) for part in parts or shapes.slices])


def macs_per_second(e: Experiment, device: str = "cpu", seconds: float = SECONDS) -> float:
    """Measure the MACs a second in training on one thread or GPU, by steps of ``e``'s middle exit.

    A model that would take minutes to build is taken to train as fast as plain matrix products, which is right within
    40 % (DeiT-S, ViT-B, measured).
    """
    if sum(p.numel() for p in load_shapes(e).everything.values()) > LARGE:
        n = 1024 if device == "cpu" else 4096
        a = torch.ones(n, n, device=device)
        return n**3 / median_seconds(lambda: a @ a, device, seconds)
    shapes = load_shapes(e.replace(pretrained=False), device=device)
    step = training_step(shapes, shapes.slice_for(shapes.budgets // 2), e.batch_size)
    with Macs() as counted:
        step()
    return counted.macs / median_seconds(step, device, seconds)


class Pace:
    """Seconds a round, as seen on this machine."""

    def __init__(self):
        self.seen: dict[Experiment, tuple[float, int]] = {}  # seconds, rounds

    def add(self, e: Experiment, seconds: float, rounds: int) -> None:
        """Take note that ``rounds`` of ``e`` took so many seconds here."""
        s, n = self.seen.get(e, (0.0, 0))
        self.seen[e] = s + seconds, n + rounds

    def seconds_a_round(self, e: Experiment) -> float | None:
        """Return the mean over the most similar experiments, scaled to ``e``'s examples; None without this backbone."""
        own = {e: self.seen[e]} if self.seen.get(e, (0, 0))[1] else self.seen  # alone: nothing is as like
        mine = [(o, s / n) for o, (s, n) in own.items() if n and o.backbone == e.backbone]
        like = sorted(([getattr(o, k) == getattr(e, k) for k in ALIKE], s * _ratio(e, o)) for o, s in mine)
        best = [seconds for alike, seconds in like if alike == like[-1][0]]
        return sum(best) / len(best) if best else None


def _ratio(e: Experiment, other: Experiment) -> float:
    """Return the ratio of ``e``'s examples a round to those of ``other``, as far as their fields tell."""
    clients = e.clients_per_round * e.local_epochs / (other.clients_per_round * other.local_epochs)
    if e.num_train is None or other.num_train is None:
        return clients
    return clients * (e.num_train / e.num_clients) / (other.num_train / other.num_clients)


def each_seconds(
    missing: Sequence[Experiment], pace: Pace, execution: Execution = Execution(), until: float = np.inf
) -> list[float]:
    """Estimate what each of ``missing`` takes: from ``pace`` where it knows their like, else from timed steps and MACs.

    Workers are taken to work side by side without loss. From ``until`` on (``time.monotonic``) those whose like is not
    known are nan.
    """
    rates: dict[tuple, float] = {}
    workers = (execution.workers or 1) if execution.executor == "ray" else execution.side_by_side()
    out = []
    for e in missing:
        seconds = pace.seconds_a_round(e) or (np.nan if time.monotonic() > until else None)
        if seconds is None and (kind := (e.backbone, e.finetune)) not in rates:
            rates[kind] = workers * macs_per_second(e, execution.home)
        out.append(training_macs(e) / rates[kind] if seconds is None else e.rounds * seconds)
    return out


# --- of a table, in words --------------------------------------------------------------------------------------------


def about(seconds: float) -> str:
    """Say a duration as one does, no finer than it is known."""
    minutes, hours = round(seconds / 60), seconds / 3600
    if seconds < 45:
        return "under a minute"
    if minutes < 90:
        return f"about {max(1, minutes)} minute{'s' if minutes > 1 else ''}"
    return f"about {hours:.0f} hours" if hours < 48 else f"about {hours / 24:,.0f} days"


def describe_time(
    total: int, missing: Sequence[Experiment], pace: Pace | None = None, execution: Execution = Execution()
) -> str:
    """Say in a sentence how many runs there are, how many are missing, and what these take here, by ``pace``.

    More than a day's, or what nobody asks of this machine, are told in hours of GPUs.
    """
    seconds = sum(each_seconds(missing, pace, execution)) if pace else np.inf
    told = [f"{about(seconds)} on this machine"] if pace else []
    if seconds >= 24 * 3600:
        hours = ", ".join(f"{x:,.{2 * (x < 10)}f} ({name})" for name, x in gpu_hours(missing).items())
        of_peak = f"{UTILISATION:.0%} of its peak in the experiment's precision; small nets reach less"
        told.append(f"{hours} hours of a GPU at {of_peak}")
    more = "; fedlib explain PAPER/TABLE --cost says more" * (len(told) > 1)
    return f"{total} runs, {len(missing)} to do: {', or '.join(told)}{more}"


def forecast(cells: Sequence[Cell], missing: Collection[Experiment]) -> list[dict]:
    """Forecast per mode and row: runs, how many are ``missing``, and of these the hours on each card and the disk.

    ``GiB a client`` is :func:`count_bytes` where one client trains at a time; a GPU holds its examples besides.
    """
    rows: dict[tuple[str, str], list[Experiment]] = {}
    for cell in cells:
        rows.setdefault((cell.finetune, cell.label), []).append(cell.experiment)
    out = []
    for (mode, label), own in rows.items():
        left, sizes = [e for e in own if e in missing], {e: count_bytes(kind_of(e)) for e in own}
        row = {"mode": mode, "row": label, "runs": len(own), "missing": len(left)}
        row |= {f"{name} h": round(hours, 1) for name, hours in gpu_hours(left).items()}
        row["GiB a client"] = round(max(s["client"] for s in sizes.values()) / GIB, 2)
        out.append(row | {"GiB of disk": round(sum(sizes[e]["disk"] for e in left) / GIB, 2)})
    return out


def table_costs(cells: Sequence[Cell], stored: Callable[[Experiment], object]) -> dict[str, Any]:
    """Return what a table takes before anything starts: :func:`forecast`'s ``rows``, and what is downloaded, in MB.

    A run is missing where ``stored`` finds None (``store.shown_run``, whose file imports this one).
    """
    missing = [c.experiment for c in cells if stored(c.experiment) is None]
    told = {"runs": len(cells), "missing": len(missing), "time": describe_time(len(cells), missing)}
    return told | {"rows": forecast(cells, set(missing)), "downloads_mb": downloads(missing)}


def describe_costs(costs: Mapping[str, Any]) -> str:
    """Say in words what :func:`table_costs` found: its rows, their sums, and what is downloaded."""
    import pandas as pd

    frame = pd.DataFrame(costs["rows"])
    loads = [f"{name} {mb:,.1f} MB" if mb else f"{name} (size unknown)" for name, mb in costs["downloads_mb"].items()]
    disk = f"Disk: {frame['GiB of disk'].sum():,.1f} GiB of runs. To download: {', '.join(loads) or 'nothing'}."
    return f"{frame.to_string(index=False)}\n{costs['time']}.\n{disk}"
