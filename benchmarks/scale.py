"""Does the size of the population cost anything? Seconds a round and memory with 100 to 100,000 clients.

DepthFL with FedDyn: clients have memories; only those that were ever sampled are kept.
"""

import json
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext

CLIENTS_A_ROUND = 10


def measure_population(num_clients: int, rounds: int) -> dict:
    """``{"num_clients", "build_seconds", "seconds", "peak_mib"}``, measured in processes of their own.

    ``seconds`` is the median of the rounds after the first; ``peak_mib`` the peak of all processes of another run, as
    ``harness.MemorySampler`` sees it.
    """
    return _run(num_clients, rounds, sampled=True) | _run(num_clients, rounds, sampled=False)  # the latter's seconds


def _run(num_clients: int, rounds: int, sampled: bool) -> dict:
    """What ``main`` prints in a process of its own, and its peak memory if that is sampled (which slows it)."""
    from benchmarks.harness import MemorySampler

    command = [sys.executable, "-m", __name__, str(num_clients), str(rounds)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with MemorySampler([process]) if sampled else nullcontext() as sampler:
        answer, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"scale: {num_clients} clients failed:\n{errors[-3000:]}")
    return json.loads(answer.splitlines()[-1]) | ({"peak_mib": sampler.peak / 2**20} if sampled else {})


def main(num_clients: int, rounds: int) -> None:
    from fedlib.core.experiment import Experiment
    from fedlib.engine.federation import build_federation
    from fedlib.engine.rounds import run_rounds

    e = Experiment(
        method="depthfl", backbone="vit_digits", pretrained=False, augment="none", finetune="lora", partition="drawn",
        examples_per_client=100, num_clients=num_clients, clients_per_round=CLIENTS_A_ROUND, rounds=rounds + 1,
        evaluate_every=0,
    )  # fmt: skip
    began = time.perf_counter()
    federation = build_federation(e)
    built = time.perf_counter() - began
    loop = run_rounds(federation)
    seconds = [next(loop).seconds for _ in range(rounds)]  # the last round, which is evaluated, is left out
    loop.close()
    out = {"num_clients": num_clients, "build_seconds": built, "seconds": statistics.median(seconds[1:])}
    print(json.dumps(out))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
