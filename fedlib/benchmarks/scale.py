"""Does the size of the population cost anything? Seconds a round and memory with 100 to 100,000 clients.

DepthFL with FedDyn: clients have memories; only those that were ever sampled are kept.
"""

import json
import resource
import statistics
import subprocess
import sys
import time

CLIENTS_A_ROUND = 10


def measure_population(num_clients: int, rounds: int) -> dict:
    """``{"num_clients", "build_seconds", "seconds", "peak_mib"}``, measured in a process of its own.

    ``seconds`` is the median of the rounds after the first; ``peak_mib`` the process's peak resident memory.
    """
    command = [sys.executable, "-m", __name__, str(num_clients), str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"scale: {num_clients} clients failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main(num_clients: int, rounds: int) -> None:
    from ..experiment import Experiment
    from ..federation import build_federation
    from ..rounds import run_rounds

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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    out = {
        "num_clients": num_clients,
        "build_seconds": built,
        "seconds": statistics.median(seconds[1:]),
        "peak_mib": peak,
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
