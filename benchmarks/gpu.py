"""The engine on one GPU: a round's clients as one program against one at a time and against bare loops; convolutions.

``python -m benchmarks.gpu speed --device cuda`` prints images a second, launches a step and the ratio to a bare loop of
the same net, eager and compiled, in one call; then what one and four processes do on the card together.
``python -m benchmarks.gpu goals`` prints images a second of one and of five runs that train as one, each with steps
that are one launch and without, and of DeiT-S in bfloat16, blocks compiled or not, beside bare loops; and the goals.
``python -m benchmarks.gpu convolutions`` prints how long each way to run a cohort's convolutions takes, by shape.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import nn

from fedlib.core.experiment import Experiment
from fedlib.engine.arithmetic import arithmetic
from fedlib.engine.executors import Execution, plan_round
from fedlib.engine.federation import build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.methods import Round
from fedlib_lab.executors.stacked import Asked, Joint, Stacked
from fedlib_lab.kernels.switch import COMPILES, NAMES, VARIABLE
from fedlib_lab.runs.costs import CARDS, training_macs
from fedlib_lab.runs.params import load_grid

COMMON = {
    "method": "reefl", "finetune": "lora", "partition": "drawn", "examples_per_client": 100, "num_clients": 1000,
    "augment": "crop_flip", "rounds": 200, "evaluate_every": 0, "pretrained": False,
}  # fmt: skip
CASES = {
    "deit_micro, 32 px, 10 clients": Experiment(**COMMON, backbone="deit_micro", clients_per_round=10),
    "deit_micro, 32 px, 50 clients": Experiment(**COMMON, backbone="deit_micro", clients_per_round=50),
    "DeiT-S, 224 px, 10 clients": Experiment(**COMMON, backbone="deit_small_patch16_224", clients_per_round=10),
    "DeiT-S, 224 px, 10 clients, bfloat16": Experiment(
        **COMMON, backbone="deit_small_patch16_224", clients_per_round=10, precision="bfloat16"
    ),
}  # fmt: skip


def compare(e: Experiment, device: str, rounds: int = 3, repeats: int = 5) -> dict:
    """Median seconds a round of both executions in turns, their ratio (median over turns), TFLOP/s and shares of peak.

    FLOPs: two per multiply-accumulate, a backward pass counted as two forward passes (``runs/costs.py``).
    """
    f = build_federation(e, device)
    loops = {
        "together": run_rounds(f, Execution(device)),
        "one at a time": run_rounds(f, Execution(device, cohort_size=1)),
    }
    for loop in loops.values():
        next(loop)
    turns = [
        {name: statistics.median(next(loop).seconds for _ in range(rounds)) for name, loop in loops.items()}
        for _ in range(repeats)
    ]
    for loop in loops.values():
        loop.close()
    seconds = {name: statistics.median(turn[name] for turn in turns) for name in loops}
    tflops = 2 * training_macs(e) / e.rounds / seconds["together"] / 1e12
    ratio = statistics.median(turn["one at a time"] / turn["together"] for turn in turns)
    return {**seconds, "ratio": ratio, "TFLOP/s": tflops, **_shares(tflops, device)}


def _shares(tflops: float, device: str) -> dict[str, float]:
    """Shares of the card's peaks; empty for a CPU or an unknown card."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    card = next((card for known, card in CARDS.items() if f" {known} " in f" {name.replace('-', ' ')} "), None)
    return {} if card is None else {f"of {p} peak": tflops / card[p] for p in ("bfloat16", "float32")}


# --- beside bare loops -----------------------------------------------------------------------------------------------

SPEED = {"partition": "drawn", "examples_per_client": 320, "num_clients": 100, "clients_per_round": 10, "rounds": 10**4,
         "method": "fedavg", "finetune": "full", "num_exits": 1, "augment": "none", "pretrained": False,
         "momentum": 0.9, "clip_value": None, "evaluate_every": 0}  # fmt: skip
BATCHES = {"deit_micro": 32, "convnet3_slim": 64, "resnet8": 64}  # by net
# Images a second of five runs; of ResNet-18 twice a plain loop's on an A100, of DeiT-S a compiled loop's on an H100
GOALS = {"deit_micro": 150_000, "resnet18": 48_000, "deit_small_patch16_224": 7_700}


def speed(e: Experiment, device: str, seconds: float = 8.0, bare: Callable[[], nn.Module] | None = None) -> dict:
    """Images a second of training, launches a step, and the same of bare loops of one net, eager and compiled.

    All in turns on the same machine, for so many ``seconds`` together. ``ratio``: fedlib's over the eager loop's.
    """
    f, wait = build_federation(e, device), torch.cuda.synchronize if "cuda" in device else lambda: None
    loop, trained = run_rounds(f, Execution(device, workers=1)), e.clients_per_round * e.examples_per_client
    next(loop)
    steps = -(-e.examples_per_client // e.batch_size)  # of a cohort, if all train together
    out = {"launches a step": _launches(lambda: next(loop)) / steps}
    loops = {"bare": bare_loop(bare(), f, e)} if bare is not None else {}
    if bare is not None and "cuda" in device:  # compiling takes half a minute of a CPU's time, too
        loops["bare, compiled"] = bare_loop(torch.compile(bare().to(device)), f, e)
    rates: dict[str, list[float]] = {name: [] for name in ("fedlib", *loops)}
    turns = {"fedlib": lambda: next(loop) and trained, **loops}
    for turn in turns.values():
        turn()
    ends = time.perf_counter() + seconds
    while time.perf_counter() < ends or not rates["fedlib"]:
        for name, turn in turns.items():
            wait()
            began = time.perf_counter()
            images = turn()
            wait()
            rates[name].append(images / (time.perf_counter() - began))
    loop.close()
    out |= {f"images/s, {name}": statistics.median(of) for name, of in rates.items()}
    tflops = 2 * training_macs(e) / e.rounds / trained * out["images/s, fedlib"] / 1e12
    ratio = {"ratio": out["images/s, fedlib"] / out["images/s, bare"]} if loops else {}
    return {**out, **ratio, "TFLOP/s": tflops, **_shares(tflops, device)}


def bare_loop(net: nn.Module, f, e: Experiment) -> Callable[[], int]:
    """What trains ``net`` on as many images as a client has, by plain PyTorch; it returns how many these are."""
    net = net.to(f.device).train()
    optimiser = torch.optim.SGD(net.parameters(), e.lr, momentum=e.momentum)
    rows = torch.from_numpy(f.data.client(0)).to(f.data.inputs.device)

    def train() -> int:
        for own in rows.split(e.batch_size):
            x = f.data.view(f.data.inputs, f.model.backbone.spec.input_shape, own)
            loss = F.cross_entropy(net(x), f.data.labels[own])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        return len(rows)

    return train


def _launches(work: Callable[[], object]) -> int:
    """How many kernels ``work`` launches; on a CPU how many operations it asks for."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=kinds) as seen:
        work()
    names = [event.name for event in seen.events()]
    return sum("LaunchKernel" in n for n in names) or sum(n.startswith("aten::") for n in names)


def plain(name: str) -> nn.Module:
    """The net ``name`` as its author would write it, for ten classes."""
    from benchmarks.rivals.workload import NETS

    if name == "deit_small_patch16_224":
        import timm

        return InBfloat16(timm.create_model(name, num_classes=10))
    if name == "deit_micro":
        from timm.models.vision_transformer import VisionTransformer

        return VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=12, num_heads=4, num_classes=10)
    return NETS[name]()


class InBfloat16(nn.Module):
    """A net whose products are computed so, as its author would have it."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return self.net(x).float()


def together(e: Experiment, device: str, processes: int, seconds: float = 5.0) -> float:
    """Images a second of so many ``processes`` that train on one device at once."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        return sum(pool.starmap(_images, [(e, device, seconds)] * processes))


def _images(e: Experiment, device: str, seconds: float) -> float:
    loop, n = run_rounds(build_federation(e, device), Execution(device, workers=1)), 0
    next(loop)
    began = time.perf_counter()
    while time.perf_counter() < began + seconds:
        n += len(next(loop).losses) * e.examples_per_client
    return n / (time.perf_counter() - began)


def of_seeds(e: Experiment, device: str, seeds: int, seconds: float = 5.0) -> dict:
    """Images a second, and launches a step, of so many runs that differ in their seed and train together.

    Of the clients' training alone, always from the first round's server; on a CPU too in one cohort.
    """
    how = Execution(device, workers=1, cohort_size=None if "cuda" in device else seeds * e.clients_per_round)
    runs = [build_federation(e.replace(seed=1 + s), device) for s in range(seeds)]
    joint, by = Joint(runs, how), [Stacked(f, how) for f in runs]
    most = max(int(f.data.num_examples.max()) for f in runs)
    steps = -(-most // e.batch_size) * e.local_epochs

    def train(t: int) -> int:
        rounds = [Round(t, tuple(f.sample_clients(t)), f.setting) for f in runs]
        plans = [plan_round(f, f.server, r, 1, 0) for f, r in zip(runs, rounds, strict=True)]
        joint.train([Asked(b, b.federation.server, p, r, {}) for b, p, r in zip(by, plans, rounds, strict=True)])
        return sum(c.num_examples for r in rounds for c in r.clients) * e.local_epochs

    train(1)
    out, t, images = {"launches a step": _launches(lambda: train(2)) / steps}, 2, 0
    began = time.perf_counter()
    while time.perf_counter() < began + seconds or t == 2:
        images += train(t := t + 1)
    if "cuda" in device:
        torch.cuda.synchronize()
    return {"seeds": seeds, "images/s": images / (time.perf_counter() - began), **out}


# --- convolutions ----------------------------------------------------------------------------------------------------

SHAPES = (  # channels in, out, kernel, pixels: of CAFEDistill's convnet, ResNet-20, ResNet-18
    (3, 128, 3, 32), (128, 128, 3, 15), (128, 128, 3, 6), (16, 16, 3, 32), (32, 32, 3, 16), (64, 64, 3, 8),
    (64, 64, 3, 32), (256, 256, 3, 8),
)  # fmt: skip


def convolutions(device: str, precision: str, clients=(1, 5, 10, 20), batch: int = 64) -> list[dict]:
    """Milliseconds, forward and backward, of each path of ``layers/conv.py``, by clients and shape."""
    with arithmetic(precision, torch.device(device)):
        return _convolutions(device, precision, clients, batch)


def _convolutions(device: str, precision: str, clients: Sequence[int], batch: int) -> list[dict]:
    from fedlib.layers.conv import Conv2d, _seconds

    rows, there = [], torch.device(device)
    for channels, outs, kernel, side in SHAPES:
        for k in clients:
            layer = Conv2d(channels, outs, kernel, padding=kernel // 2)
            x = torch.randn(k, batch, channels, side, side, device=there)
            weight = torch.randn(k, outs, channels, kernel, kernel, device=there)
            run = lambda path, layer=layer, x=x, weight=weight: layer._try(path, x, weight, None, 1)  # noqa: E731
            taken = {path: 1000 * _seconds(run, path, there) for path in ("grouped", "loop", "columns")}
            shape = {"channels": channels, "out": outs, "kernel": kernel, "pixels": side}
            rows.append({"precision": precision, "clients": k, **shape, **taken})
    return rows


def goals(device: str, dataset: str, seconds: float = 60.0) -> Iterator[dict]:
    """Yield rows of one and of five runs, with graphs and without, then of DeiT-S, with blocks compiled and without.

    Of the ResNet in TF32 on a GPU.
    """
    exact = "tf32" if "cuda" in device else "float32"
    spread = {"local_epochs": 4, "dataset": dataset}  # four passes are forty steps
    cases = {
        "deit_micro": Experiment(backbone="deit_micro", batch_size=32, **SPEED | spread),
        "convnet3_slim": Experiment(backbone="convnet3_slim", batch_size=64, **SPEED | spread),
        "resnet18": Experiment(backbone="resnet18", batch_size=128, precision=exact, **SPEED | spread),
        "CAFEDistill's ConvNet": load_grid("cafedistill", "table1", "paper")[0].experiment.replace(
            method="cafedistill", options={}, dataset=dataset, evaluate_every=0
        ),
    }  # fmt: skip
    for (name, e), n, graphs in itertools.product(cases.items(), (1, 5), (False, True)):
        with patch.dict(os.environ, {VARIABLE: ",".join((*NAMES, *["graphs"] * graphs))}):
            found = of_seeds(e, device, n, seconds / 20)
        yield {"net": name, "device": device, "graphs": graphs, **found, "goal": GOALS.get(name)}
    name = "deit_small_patch16_224"
    e = Experiment(backbone=name, batch_size=64, precision="bfloat16", **SPEED | {"dataset": dataset})
    for compiled in (False, True)[: 1 + COMPILES]:
        with patch.dict(os.environ, {VARIABLE: "compiled" if compiled else ",".join(NAMES)}):
            found = speed(e, device, seconds / 5, lambda: plain(name))
        yield {"net": name, "device": device, "compiled": compiled, **found, "goal": GOALS[name]}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("what", choices=("speed", "goals", "convolutions"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=60.0, help="in all, of speed and of goals")
    parser.add_argument("--json", type=Path, help="write it there too, after each row")
    parser.add_argument("--dataset", default="mnist")
    asked = parser.parse_args(arguments)
    rows: list[dict] = []

    def tell(found: list[dict]) -> None:
        rows.extend(found)
        for row in found:
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(rows, indent=1))

    if asked.what == "convolutions":
        for precision in ("float32", "tf32") if "cuda" in asked.device else ("float32",):
            tell(convolutions(asked.device, precision))
        return
    if asked.what == "goals":
        for row in goals(asked.device, asked.dataset, asked.seconds):
            tell([row])
        return
    for name, batch in BATCHES.items():
        e = Experiment(backbone=name, dataset=asked.dataset, batch_size=batch, **SPEED)
        found = speed(e, asked.device, asked.seconds / 6, lambda name=name: plain(name))
        tell([{"net": name, "device": asked.device, **found}])
    e = Experiment(backbone="deit_micro", dataset=asked.dataset, batch_size=32, **SPEED)
    for n in (1, 4):
        images = together(e, asked.device, n, asked.seconds / 10)
        tell([{"net": "deit_micro", "device": asked.device, "processes": n, "images/s, all": images}])


if __name__ == "__main__":
    main()
