"""One core, CPU seconds of a round: fedlib beside a bare loop of the same convnets, in turns.

``python -m benchmarks.one_core --json FILE`` measures ten clients of 320 images each, by batch and cohort, the least of
three turns. The bare loop is plain PyTorch, channels last; ``ratio``: its seconds over fedlib's.
"""

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path

from fedlib import Execution, Experiment, build_federation, run_rounds  # isort: skip  # before torch
import torch
import torch.nn.functional as F

from benchmarks.rivals.workload import NETS
from fedlib.engine.federation import Federation
from fedlib_lab.runs.record import provenance

CASES = (("resnet8", 64, (1, 2)), ("resnet8", 10, (2, 5)), ("convnet3_slim", 64, (1, 2)), ("convnet3_slim", 10, (1, 4)))


def bare_round(f: Federation) -> Callable[[int], object]:
    """Return what trains the clients of a round one after the other, and averages."""
    e, net = f.experiment, NETS[f.experiment.backbone]().to(memory_format=torch.channels_last).train()
    x = f.data.view(f.data.inputs, f.model.backbone.spec.input_shape, torch.arange(len(f.data.inputs)))
    x = x.contiguous(memory_format=torch.channels_last)

    def train(t: int) -> list[torch.Tensor]:
        trained = []
        for client in f.sample_clients(t):
            own = copy.deepcopy(net)
            optimiser = torch.optim.SGD(own.parameters(), e.lr)
            for rows in torch.from_numpy(f.data.client(client.id)).split(e.batch_size):
                loss = F.cross_entropy(own(x[rows]), f.data.labels[rows])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained.append([p.detach() for p in own.parameters()])
        return [torch.stack(p).mean(0) for p in zip(*trained, strict=True)]

    return train


def measure(
    net: str, batch: int, cohorts: tuple[int, ...], turns: int = 3, clients: int = 10, dataset: str = "cifar10"
) -> dict:
    """Return CPU seconds of a round of the bare loop, and of fedlib by clients that train together, with ratios."""
    e = Experiment(
        method="fedavg", backbone=net, batch_size=batch, dataset=dataset, num_train=5 * clients * 320, num_test=100,
        num_clients=5 * clients, clients_per_round=clients, partition="iid", pretrained=False, finetune="full",
        num_exits=1, augment="none", clip_value=None, lr=0.05, min_lr=0.05, rounds=1000, evaluate_every=0,
    )  # fmt: skip
    f = build_federation(e)
    loops = {str(k): run_rounds(f, Execution(workers=1, cohort_size=k)) for k in cohorts}
    work = {"bare": bare_round(f), **{k: lambda t, loop=loop: next(loop) for k, loop in loops.items()}}
    seconds: dict[str, list[float]] = {k: [] for k in work}
    for t in range(1, turns + 2):  # the first is not counted
        for k, train in work.items():
            began = time.process_time()
            train(t)
            seconds[k].append(time.process_time() - began)
    least = {k: round(min(of[1:]), 3) for k, of in seconds.items()}
    return {"net": net, "batch": batch, "seconds": least, "ratio": {k: least["bare"] / least[k] for k in loops}}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_core", description=__doc__)
    parser.add_argument("--json", type=Path, help="store it there")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = [measure(*case) for case in CASES]
    for row in rows:
        print(json.dumps({**row, "ratio": {k: round(x, 2) for k, x in row["ratio"].items()}}), flush=True)
    if asked.json:
        asked.json.write_text(json.dumps({"rows": rows, "provenance": provenance(Execution(workers=1))}, indent=1))


if __name__ == "__main__":
    main()
