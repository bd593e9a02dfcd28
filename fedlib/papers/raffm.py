"""What clients of random sub-models hold, what that costs and how well it answers (RaFFM's Figures 2-5, Tables 1-4).

Sizes follow from shapes alone: every client's sub-model of a round is drawn as training draws it, without weights or
data. Answers need a trained model. Read next: ``methods/sliced/raffm.py``, ``runs/trained.py``.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..core.clients import Client
from ..core.experiment import Experiment
from ..core.slices import Slice, scatter_add_, take
from ..engine.cohort import Cohort
from ..engine.evaluation import exit_logits
from ..engine.federation import Federation, budgets_of
from ..engine.forward import Forward
from ..methods import Member, Round, Server
from ..runs.costs import MIB, Shapes, load_shapes
from ..runs.prices import num_classes
from ..runs.store import Run

if TYPE_CHECKING:
    import pandas as pd

BATCH = 32  # of training memory and of timed steps
SOME = 20  # clients, of whom a mean is known well enough


def client_resources(e: Experiment, clients: int | None = SOME, macs: bool = True) -> "pd.DataFrame":
    """What each of the first ``clients`` (None: all) would hold in round 1, and its budget.

    Columns: parameters, upload_mib, and with ``macs`` training_mib and macs.
    """
    import pandas as pd

    shapes = load_shapes(e, num_classes(e))
    measure, rows = shapes.setting.measure, []
    for client, part in client_parts(e, shapes, clients):
        held = shapes.held(part, shapes.trainable).values()
        row = {"client": client.id, "budget": client.budget, "parameters": measure.parameters(part)}
        row["upload_mib"] = shapes.method.upload_bits(p.numel() for p in held) / 8 / MIB
        if macs:
            row |= {"macs": measure.macs(part), "training_mib": measure.training_mib(part, BATCH)}
        rows.append(row)
    return pd.DataFrame(rows)


def client_parts(e: Experiment, shapes: Shapes, clients: int | None = SOME) -> list[tuple[Client, Slice]]:
    """Clients with what they would hold in round 1; sizes only, as nothing is ranked."""
    budgets = budgets_of(e, shapes.method)[:clients]
    drawn = tuple(Client(i, int(b), 0) for i, b in enumerate(budgets))
    r, server = Round(1, drawn, shapes.setting), Server(0, shapes.trainable, {})
    return [(c, shapes.method.slice_for(c, server, r)) for c in drawn]


def step_seconds(e: Experiment, parts: Sequence[Slice], batch: int = BATCH, repeats: int = 2) -> np.ndarray:
    """Seconds of one training step (forward and backward) of each of ``parts``, the best of ``repeats``, one thread.

    Weights are random and inputs ones.
    """
    shapes = load_shapes(e.replace(pretrained=False), num_classes(e), device="cpu")
    x = torch.ones(1, batch, *shapes.setting.spec.input_shape)
    threads, out = torch.get_num_threads(), []
    torch.set_num_threads(1)
    try:
        for part in parts:
            held = {n: p.detach().requires_grad_(n in shapes.trainable) for n, p in shapes.held(part).items()}
            trained, taken = [p for p in held.values() if p.requires_grad], []
            forward = Forward(shapes.model, [part], held).place_(training=True)
            for _ in range(repeats + 1):  # the first is slower than those that follow
                began = time.perf_counter()
                torch.autograd.grad(forward(x).sum(), trained, allow_unused=True)
                taken.append(time.perf_counter() - began)
            out.append(min(taken[1:]))
    finally:
        torch.set_num_threads(threads)
    return np.array(out)


def level_seconds(e: Experiment, batch: int = BATCH) -> np.ndarray:
    """Seconds of one training step of what a client of each budget of ``e`` holds, smallest budget first."""
    shapes = load_shapes(e, num_classes(e))
    return step_seconds(e, [shapes.slice_for(b) for b in range(shapes.budgets)], batch, repeats=8)


def acceleration(e: Experiment, clients: int = 3, batch: int = BATCH) -> dict[str, float]:
    """How much faster clients train than with the whole model: by MACs, and timed on ``clients`` of them."""
    shapes = load_shapes(e, num_classes(e))
    full, parts = shapes.setting.full(), [part for _, part in client_parts(e, shapes)]
    macs = np.array([shapes.setting.measure.macs(p) for p in parts])
    some = parts[:clients]
    seconds = step_seconds(e, [full, *some], batch)
    return {
        "by MACs": shapes.setting.measure.macs(full) / macs.mean(),
        "by time": seconds[0] / seconds[1:].mean(),
        "mean parameters (M)": np.mean([shapes.setting.measure.parameters(p) for p in parts]) / 1e6,
    }


def traffic_to(run: Run, target: float, resources: "pd.DataFrame") -> dict[str, float]:
    """Rounds and GiB (down and up, all clients) until the evaluated accuracy first reaches ``target``; NaN if never."""
    e = run.experiment
    reached = [m["t"] for m in run.metrics if m.get("accuracy") is not None and m["accuracy"] >= target]
    rounds = reached[0] if reached else np.nan
    a_client = resources.upload_mib.mean()
    return {"rounds": rounds, "MiB a client": a_client, "total GiB": 2 * rounds * e.clients_per_round * a_client / 1024}


def local_scores(
    f: Federation, server: Server, clients: Sequence[int], train: bool = False, shares: Sequence[float] | None = None
) -> "pd.DataFrame":
    """The task's metric on the central test set of each client's sub-model, as it is deployed or after local training.

    ``shares``: of the whole, one for each client, instead of its budget's.
    """
    import pandas as pd

    r = Round(max(server.t, 1), tuple(f.clients(clients)), f.setting)
    r = replace(r, notes=f.method.prepare(server, r))
    rows = []
    for k, client in enumerate(r.clients):
        part = f.method.slice_for(client, server, r)
        if shares is not None:
            part = f.method.sub_model(shares[k], r, client.id) if shares[k] < 1 else f.setting.full()
        params = _trained(f, server, r, Member(client, part)) if train else server.params
        outputs = exit_logits(f, replace(server, params=params), part)[-1]
        score = f.task.measure(outputs, f.data.test_labels)[f.task.metric]
        rows.append({"client": client.id, "parameters": f.setting.measure.parameters(part), "score": score})
    return pd.DataFrame(rows)


def _trained(f: Federation, server: Server, r: Round, member: Member) -> dict[str, torch.Tensor]:
    """The server's parameters with what ``member`` holds as its local training leaves it."""
    cohort, infos = Cohort(f, f.model, server, r, [member], {}), f.setting.infos
    f.method.local_update(cohort)
    params = {n: p.clone() for n, p in server.params.items()}
    for name, own in cohort.params.items():
        moved = own[0].detach() - take(params[name], infos[name], member.part)
        scatter_add_(params[name], moved, infos[name], member.part)
    return params
