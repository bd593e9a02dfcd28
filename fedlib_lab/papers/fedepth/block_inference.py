"""Memory-efficient inference (FeDepth): one unit in memory at a time, all examples through it, what it makes on disk.

For every batch z_j is stored, z_{j-1} is discarded, and z_j is loaded again as the next unit's input, until the answer.
Batch norm sees all examples, as in ``engine/evaluation.py``: a unit runs once more for each of its norms.
"""

from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from fedlib.engine.evaluation import BATCH
from fedlib.engine.federation import Federation
from fedlib.engine.forward import Forward
from fedlib.layers.norms import settled_statistics
from fedlib.methods import Server
from fedlib.models.route import PartialForward


@torch.no_grad()
def block_logits(f: Federation, server: Server, folder: str | Path) -> torch.Tensor:
    """Compute outputs (N, *out) of the last exit on the central test set; ``folder`` holds z_j of every batch.

    While a unit runs, no other's parameters are there. ``ValueError`` where batch norm needs a pass of its own.
    """
    if f.experiment.batch_norm not in ("batch", "tracked"):
        raise ValueError(f"experiment: batch_norm = {f.experiment.batch_norm!r}: unit by unit, batch or tracked answer")
    model, data, last, part, device = f.model, f.data, f.model.depth - 1, f.setting.full(), str(f.device)
    held = {n: x for n, x in {**f.frozen, **server.params}.items() if n in f.setting.infos}
    batches = torch.arange(len(data.test_labels), device=device).split(BATCH)
    forward, outputs = Forward(model, [part], held, data=data, test=True).place_(), []
    files = [Path(folder) / f"{i}.safetensors" for i in range(len(batches))]
    one_pass = nullcontext(lambda run, batches: list(map(run, batches)))
    with one_pass if f.experiment.batch_norm == "tracked" else settled_statistics(model) as settle:
        for unit in range(model.depth):
            here = {n for n in held if (at := f.setting.infos[n].unit) == unit or (at < 0 and unit in (0, last))}

            def run(i: int, unit: int = unit) -> torch.Tensor | None:
                x = PartialForward(unit, load_file(files[i], device)["z"]) if unit else forward.inputs(batches[i][None])
                if unit == last:
                    return forward(x)[-1, 0]
                save_file({"z": forward.leading(x, unit + 1).z.contiguous()}, files[i])

            with model.holding({n: x if n in here else x.to("meta") for n, x in held.items()}):
                outputs = settle(run, range(len(batches)))
    for file in files:
        file.unlink(missing_ok=True)
    return torch.cat(outputs)
