"""fedlib, as a user runs it: its own choice of workers and cohorts. ``BENCH_COHORT=1`` trains one client at a time."""

import os
from dataclasses import replace
from itertools import islice

from fedlib import Execution, run_rounds  # isort: skip  # before torch, whose threads sleep then while they wait
import torch

from benchmarks.names import to_fedlib, to_plain
from benchmarks.prepare import SHARED, experiment
from benchmarks.rivals.workload import Federation as SharedFile
from benchmarks.rivals.workload import serve
from fedlib.engine.evaluation import evaluate
from fedlib.engine.federation import Federation, build_federation, with_caches
from fedlib.engine.serving import evaluate_clients


def federation_of(shared: SharedFile) -> Federation:
    """fedlib's federation of the workload, on the shared file's pixels (28 x 28) and initial weights.

    ReeFL's head, which rivals do not have, starts as fedlib starts it.
    """
    w = shared.workload
    f = build_federation(experiment(w))
    pad = (f.data.inputs.shape[-1] - w.img_size) // 2  # fedlib pads digits to 32 pixels
    crop = slice(pad, pad + w.img_size)
    images, test_images = (x[..., crop, crop].contiguous() for x in (f.data.inputs, f.data.test_inputs))
    mean, std = (x.flatten().expand(3) for x in (shared.mean, shared.std))
    initial = to_fedlib(shared.initial, w)
    if w.method == "reefl":
        initial = {n: p for n, p in initial.items() if n.startswith("backbone.")}
    f.model.load_state_dict(initial, strict=w.method != "reefl")
    server = replace(f.server, params={n: initial.get(n, p) for n, p in f.server.params.items()})
    data = replace(f.data, inputs=images, test_inputs=test_images, mean=mean, std=std)
    return with_caches(replace(f, data=data, frozen=f.model.frozen(), server=server))


class Fedlib:
    methods = (*SHARED, "fedper", "ditto")

    def __init__(self, shared: SharedFile):
        del shared.images, shared.test_images  # fedlib has its own
        self.workload, self.federation = shared.workload, federation_of(shared)
        size, workers = (os.environ.get(name) for name in ("BENCH_COHORT", "BENCH_WORKERS"))
        executor = os.environ.get("BENCH_EXECUTOR", "auto")
        execution = Execution(workers=workers and int(workers), cohort_size=size and int(size), executor=executor)
        self.server, self.memories = self.federation.server, {}
        self.loop = run_rounds(self.federation, execution, memories=self.memories)

    def rounds(self, first: int, n: int) -> list[float]:
        done = list(islice(self.loop, n))
        self.server = done[-1].server
        return [r.seconds for r in done]

    def trained(self) -> dict[str, torch.Tensor]:
        params = self.server.params
        return to_plain(params, self.workload) if self.workload.method != "reefl" else params

    def accuracy(self) -> float:
        if self.workload.method in SHARED:
            return evaluate(self.federation, self.server)["accuracy"]
        return evaluate_clients(self.federation, self.server, self.memories)["accuracy"]


if __name__ == "__main__":
    serve(Fedlib)
