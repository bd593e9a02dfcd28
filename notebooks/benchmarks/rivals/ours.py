"""fedlib, as a user runs it: its own choice of threads and cohorts. ``BENCH_COHORT=1`` trains one client at a time."""

import dataclasses
import os
import sys
from itertools import islice
from pathlib import Path

import torch
from names import HEAD, to_fedlib, to_plain
from workload import Federation, serve

sys.path.insert(0, str(Path(__file__).parents[1]))
from fedlib import Execution, build_federation, run_rounds  # noqa: E402
from fedlib.evaluation import evaluate  # noqa: E402
from prepare import experiment  # noqa: E402


class Fedlib:
    methods = ("fedavg", "reefl")

    def __init__(self, shared: Federation):
        w = self.workload = shared.workload
        f = build_federation(experiment(w))
        self.federation = dataclasses.replace(f, **self.same_start(f, shared))
        size, workers = (os.environ.get(name) for name in ("BENCH_COHORT", "BENCH_WORKERS"))
        torch.set_num_threads(os.cpu_count())  # the default of a user's process
        execution = Execution(workers=workers and int(workers), cohort_size=size and int(size))
        self.server, self.loop = f.server, run_rounds(self.federation, execution)

    def same_start(self, f, shared: Federation) -> dict:
        """The shared file's images (28 x 28) and, for FedAvg, its initial weights."""
        out = {}
        if self.workload.method == "fedavg":
            initial = to_fedlib(shared.initial, self.workload)
            out["server"] = dataclasses.replace(f.server, params={n: initial[n] for n in f.server.params})
            out["frozen"] = {n: initial[n] for n in f.frozen}
        return out

    def rounds(self, first: int, n: int) -> list[float]:
        done = list(islice(self.loop, n))
        self.server = done[-1].server
        return [r.seconds for r in done]

    def trained(self) -> dict[str, torch.Tensor]:
        plain = self.workload.method == "fedavg"
        return to_plain(self.server.params, self.workload) if plain else self.server.params

    def accuracy(self) -> float:
        return evaluate(self.federation, self.server)["accuracy"]


if __name__ == "__main__":
    serve(Fedlib)
