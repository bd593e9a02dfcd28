"""What ``run`` does in processes of its own: ``facts``, ``decode``, ``train`` and ``fill``, by their arguments."""

import json
import os
import signal
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("torch", "torchvision", "timm", "peft", "transformers", "numpy", "pandas", "pyarrow", "datasets", "mlxtend")


def facts(file: str) -> None:
    """Add to the facts in ``file`` what PyTorch tells of itself and of the card."""
    import torch

    from benchmarks.away.run import write

    told = json.loads(Path(file).read_text())
    told["versions"] = {n: _version(n) for n in PACKAGES}
    told["torch"] = {
        "version": torch.__version__, "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version(),
        "threads": torch.get_num_threads(), "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "matmul_tf32": torch.backends.cuda.matmul.allow_tf32, "cudnn_tf32": torch.backends.cudnn.allow_tf32,
        "cudnn_benchmark": torch.backends.cudnn.benchmark, "cudnn_deterministic": torch.backends.cudnn.deterministic,
    }  # fmt: skip
    if torch.cuda.is_available():
        card = torch.cuda.get_device_properties(0)
        told["card"] = {
            "name": card.name, "capability": f"{card.major}.{card.minor}", "memory_gib": card.total_memory / 2**30,
            "multiprocessors": card.multi_processor_count, "bfloat16": torch.cuda.is_bf16_supported(),
        }  # fmt: skip
    write(Path(file), told)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _runs(plan: str) -> list[dict]:
    return json.loads(Path(plan).read_text())["runs"]


def decode(plan: str) -> None:
    """Decode the data of the plan's runs, each set once, and divide them."""
    from fedlib import Experiment, build_federation

    seen = set()
    for r in _runs(plan):
        e = Experiment.from_dict(r["experiment"])
        if e.dataset not in seen:
            seen.add(e.dataset)
            build_federation(e)


def train(plan: str, number: str, device: str) -> None:
    """Train one run of the plan; Ctrl-C stores its last whole round."""
    from fedlib import Execution, Experiment, run

    done = run(Experiment.from_dict(_runs(plan)[int(number)]["experiment"]), Execution(device))
    print(", ".join(f"{k} {done.summary[k]}" for k in ("status", "t", "accuracy", "seconds")))


def fill(plan: str, minutes: str, workers: str) -> None:
    """Train what stands in the plan for spare cores, as ``fedlib fill`` does."""
    from fedlib import Experiment
    from fedlib_lab.cli import _on_signals
    from fedlib_lab.runs.fill import Job
    from fedlib_lab.runs.fill import fill as run_jobs
    from fedlib_lab.runs.params import Cell

    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    jobs = [
        Job(b["grid"], Cell(**b["cell"], experiment=Experiment.from_dict(b["experiment"])), b["seconds"])
        for b in json.loads(Path(plan).read_text())["beside"]
    ]
    done = run_jobs(jobs, float(minutes), int(workers), stop=_on_signals(), tell=lambda text: print(text, flush=True))
    for job, why in done.failed:
        print(f"failed: {job}: {why}")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    try:
        {"facts": facts, "decode": decode, "train": train, "fill": fill}[sys.argv[1]](*sys.argv[2:])
    except KeyboardInterrupt as error:  # all is stored; what objects say as the interpreter ends would be the last word
        print(error, flush=True)
        os._exit(130)
