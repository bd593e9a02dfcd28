"""The engine benchmark as a notebook needs it: how much to measure, stored measurements, targets and verdicts.

Every workload is one file under ``outputs/benchmarks/engine_speed/<profile>/``; what is stored is not measured again.
Read next: ``harness.py`` (what is measured), ``scale.py`` (populations), ``gpu.py``.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd

from benchmarks import harness
from benchmarks.prepare import WORKLOADS, write_workload
from benchmarks.scale import measure_population
from benchmarks.stopwatch import PHASES, Stopwatch
from benchmarks.systems import SYSTEMS, running, select
from fedlib.core.experiment import Experiment
from fedlib.core.paths import outputs_dir
from fedlib.core.storage import read_json, write_json
from fedlib.core.validation import check_fields, did_you_mean
from fedlib.engine.executors import Execution
from fedlib_lab.runs.record import provenance
from fedlib_lab.runs.store import run

OURS, LOOP = "fedlib", "fedlib, one client at a time"
OWN = (OURS, LOOP, "fedlib, one at a time on 2 threads")
CHANNELS_LAST = "two processes, channels last"  # no rival as it comes, but what a user can do with one line
CHECKED_OUT = tuple(n for n, s in SYSTEMS.items() if s.checkout)
RIVALS = tuple(n for n in SYSTEMS if n not in (*OWN, CHANNELS_LAST, *CHECKED_OUT))


@dataclass(frozen=True)
class Bench:
    """How much is measured. A system takes ``repeats`` turns of ``rounds`` rounds, after one that is not counted."""

    workloads: tuple[str, ...] = tuple(WORKLOADS)
    systems: tuple[str, ...] = (*OWN, *RIVALS)  # on the first workload
    contenders: tuple[str, ...] = (OURS, "two processes", "Flower", "pfl", "BlazeFL, threads")  # on the others
    on_images: tuple[str, ...] = (OURS, "two processes", CHANNELS_LAST, *CHECKED_OUT)  # on convnets
    rounds: int = 3
    repeats: int = 9
    at_hand_mib: int = 2048  # memory to be at hand in a first round, which is to time the system and not its host
    memory_of: tuple[str, ...] = ("W1", "W5, FedPer")  # workloads whose peak memory is measured, in runs of their own
    populations: tuple[int, ...] = (100, 1_000, 10_000, 100_000)
    population_rounds: int = 12
    profile_rounds: int = 25

    def systems_of(self, workload: str) -> tuple[str, ...]:
        """The systems that are measured on ``workload``; nobody but fedlib trains ReeFL."""
        if WORKLOADS[workload].architecture != "vit":
            return self.on_images
        if WORKLOADS[workload].method != "fedavg":
            return OWN
        return self.systems if workload == self.workloads[0] else self.contenders


BENCHES = {
    "smoke": Bench(
        ("W1",), (OURS, "bare loop"), rounds=2, repeats=1, at_hand_mib=64, memory_of=(), populations=(100,),
        population_rounds=2, profile_rounds=2,
    ),
    "small": Bench(),
}  # fmt: skip

# (workload, how many times faster at least, than whom): "rivals" is the fastest rival of the run.
TARGETS = (
    ("W1", 1.25, "rivals"), ("W1", 1.8, "Flower"), ("W1, batch 8", 1.5, "rivals"), ("W2, batch 8", 1.5, "rivals"),
    ("W2", 1.3, "rivals"), ("W2'", 3.0, "rivals"), ("W3, LoRA", 1.5, LOOP), ("W3, full", 1.5, LOOP),
    *((w, n, whom) for w in WORKLOADS if w[:2] in ("W4", "W5") for n, whom in ((1.05, CHANNELS_LAST), (2.0, "PFLlib"))),
)  # fmt: skip
FIRST_ROUND, MEMORY = 2.0, 1.5  # at most so many times a later round's, the fastest rival's
FACTS = (
    "version", "python", "startup_seconds", "first_round_seconds", "peak_mib", "unseen_mib", "measure", "processes",
    "lines",
    "rounds", "accuracy", "max_difference",
)  # fmt: skip


def load_bench(profile: str, overrides: Mapping[str, object] | None = None) -> Bench:
    """The bench of a profile with some fields replaced; ``ValueError`` names what is unknown."""
    if profile not in BENCHES:
        raise ValueError(f"profile = {profile!r} is unknown{did_you_mean(profile, BENCHES)}")
    bench = replace(BENCHES[profile], **check_fields(Bench, overrides or {}, "overrides"))
    for key, known in (
        ("workloads", WORKLOADS),
        ("systems", SYSTEMS),
        ("contenders", SYSTEMS),
        ("on_images", SYSTEMS),
        ("memory_of", WORKLOADS),
    ):
        for name in getattr(bench, key):
            if name not in known:
                raise ValueError(f"overrides: {key} = {name!r} is unknown{did_you_mean(name, known)}")
    for f in fields(Bench):
        value = getattr(bench, f.name)
        if isinstance(value, int) and value < 1:
            raise ValueError(f"overrides: {f.name} = {value} must be positive")
    return bench


def folder(profile: str) -> Path:
    return outputs_dir() / "benchmarks" / "engine_speed" / profile


def measure_workload(name: str, bench: Bench, profile: str) -> dict:
    """Time all systems of the bench on one workload, store the measurement and return it."""
    path = write_workload(WORKLOADS[name], folder(profile) / f"{_slug(name)}.safetensors")
    systems, missing = select(bench.systems_of(name))
    pages = [harness.fetch_pages(bench.at_hand_mib) for _ in range(2)]
    with running(systems, path) as started:
        times = harness.time_interleaved(started, bench.rounds, bench.repeats, at_hand_mib=bench.at_hand_mib)
        facts = harness.facts(started)
    if name in bench.memory_of:
        facts = facts.join(harness.peak_memory(systems, path)[["peak_mib", "unseen_mib", "processes", "measure"]])
    record = {
        "workload": name, "times": _records(times), "facts": _records(facts.reset_index()),
        "missing": _records(missing), "fresh_page_microseconds": dict(zip(("as found", "at hand"), pages, strict=True)),
        "provenance": provenance(Execution()),
    }  # fmt: skip
    write_json(folder(profile) / f"{_slug(name)}.json", record)
    return record


def measure_scale(bench: Bench, profile: str) -> dict:
    """Seconds a round and peak memory for each population, each in a process of its own; stored like a workload."""
    rows = [measure_population(n, bench.population_rounds) for n in bench.populations]
    record = {"rows": rows, "provenance": provenance(Execution())}
    write_json(folder(profile) / "scale.json", record)
    return record


def load(profile: str, bench: Bench, run_missing: bool = True) -> tuple[dict[str, dict], dict | None]:
    """Measurements by workload, and that of the populations: the stored ones, and with ``run_missing`` new ones.

    A stored workload in which a system of the bench could not run that now can is measured again.
    """
    from tqdm.auto import tqdm

    stored = {n: _read(folder(profile) / f"{_slug(n)}.json") for n in bench.workloads}
    scale = _read(folder(profile) / "scale.json")
    if run_missing:
        for name in tqdm([n for n, r in stored.items() if r is None or _can_add(r, bench.systems_of(n))], leave=False):
            stored[name] = measure_workload(name, bench, profile)
        scale = scale or measure_scale(bench, profile)
    return {n: r for n, r in stored.items() if r is not None}, scale


def profile_of_a_run(rounds: int) -> pd.Series:
    """Share (%) of every phase in a stored run of ReeFL with LoRA: augmented digits, 10 clients, one evaluation."""
    e = Experiment(method="reefl", finetune="lora", augment="crop", rounds=rounds, evaluate_every=rounds)
    with tempfile.TemporaryDirectory() as empty, Stopwatch() as watch:
        run(e, Execution(workers=1), Path(empty), progress=False)
    shares = pd.Series(watch.seconds).reindex(PHASES).fillna(0)
    return 100 * shares / shares.sum()


def times_table(records: Mapping[str, dict]) -> pd.DataFrame:
    """Per workload and system: median seconds a round with quartiles, and the ratio to fedlib with its range."""
    parts = {n: harness.summary(pd.DataFrame(r["times"]), OURS) for n, r in records.items()}
    return pd.concat(parts, names=["workload", "system"]).round(3)


def facts_table(records: Mapping[str, dict]) -> pd.DataFrame:
    """Per workload and system: versions, start-up, first round, peak memory, lines of user code, accuracy."""
    parts = {n: pd.DataFrame(r["facts"]).set_index("system").filter(FACTS) for n, r in records.items()}
    return pd.concat(parts, names=["workload", "system"]).round(3)


def verdicts(records: Mapping[str, dict]) -> pd.DataFrame:
    """One row per target: what was asked, what was obtained (ratios: median and range over the turns), the verdict."""
    rows, tables = [], {n: harness.summary(pd.DataFrame(r["times"]), OURS) for n, r in records.items()}
    for workload, wanted, against in TARGETS:
        whom = "the fastest rival" if against == "rivals" else against
        row, other = {"workload": workload, "target": f"≥ {wanted:g}× {whom}"}, None
        if workload in tables:
            other = fastest(tables[workload], RIVALS if against == "rivals" else (against,))
        if other is None:
            rows.append(row | {"verdict": "not measured"})
            continue
        ratio, low, high = tables[workload].loc[other, ["ratio", "ratio_min", "ratio_max"]]
        row |= {"against": other, "obtained": round(ratio, 2), "range": f"{low:.2f}–{high:.2f}"}
        rows.append(row | {"verdict": "holds" if ratio >= wanted else "does not hold"})
    for workload, record in records.items():
        facts, other = pd.DataFrame(record["facts"]).set_index("system"), fastest(tables[workload], RIVALS)
        bounds = [
            (
                "first round",
                FIRST_ROUND,
                "a later one",
                facts.first_round_seconds[OURS] / tables[workload].seconds[OURS],
            )
        ]
        if "peak_mib" in facts and other is not None:
            bounds.append(("peak memory", MEMORY, other, facts.peak_mib[OURS] / facts.peak_mib[other]))
        for what, most, whom, ratio in bounds:
            row = {"workload": workload, "target": f"{what} ≤ {most:g}×", "against": whom, "obtained": round(ratio, 2)}
            rows.append(row | {"verdict": "holds" if ratio <= most else "does not hold"})
    return pd.DataFrame(rows, columns=["workload", "target", "against", "obtained", "range", "verdict"])


def fastest(table: pd.DataFrame, names: Sequence[str]) -> str | None:
    """The system among ``names`` with the smallest median; None if none was timed."""
    timed = [n for n in names if n in table.index]
    return table.loc[timed].seconds.idxmin() if timed else None


def agreement(records: Mapping[str, dict]) -> pd.DataFrame:
    """Per workload ``max_difference``, the largest distance of any trained parameter from the first system's, and
    ``accuracy``, by how many points that of the systems differs.

    Of transformers: in a ResNet rounding grows from round to round, so a test compares its systems over two.
    """
    table = facts_table({n: r for n, r in records.items() if WORKLOADS[n].architecture == "vit"})
    found = table.groupby("workload", sort=False)
    return pd.DataFrame({"max_difference": found.max_difference.max(), "accuracy": found.accuracy.agg(np.ptp)})


def _can_add(record: dict, systems: Sequence[str]) -> bool:
    names = {m["system"] for m in record["missing"]} & set(systems)
    return any(SYSTEMS[n].missing() is None for n in names)


def _read(path: Path) -> dict | None:
    return read_json(path) if path.exists() else None


def _records(frame: pd.DataFrame) -> Sequence[dict]:
    return [{k: None if pd.isna(v) else v for k, v in row.items()} for row in frame.to_dict("records")]


def _slug(name: str) -> str:
    return name.lower().replace(", ", "_").replace(" ", "").replace("'", "_last_third")
