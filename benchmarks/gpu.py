"""The engine on one GPU: the clients of a round as one program against one client at a time, and the FLOP/s achieved.

ReeFL with LoRA and four budgets on digits enlarged to the network's input; both executions train the same clients.
"""

import statistics

from fedlib.core.experiment import Experiment
from fedlib.engine.executors import Execution
from fedlib.engine.federation import build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.runs.prices import CARDS, training_macs

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

    FLOPs: two per multiply-accumulate, a backward pass counted as two forward passes (``estimate.training_macs``).
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
    import torch

    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else ""
    card = next((card for known, card in CARDS.items() if f" {known} " in f" {name.replace('-', ' ')} "), None)
    return {} if card is None else {f"of {p} peak": tflops / getattr(card, p) for p in ("bfloat16", "float32")}
