"""Memory-efficient inference (FeDepth): one unit in memory at a time, all examples through it, what it makes on disk.

For every batch z_j is stored, z_{j-1} is discarded, and z_j is loaded again as the next unit's input, until the answer.
Batches are those of ``engine/evaluation.py``, so batch norm sees what it sees there.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from ...engine.evaluation import BATCH
from ...engine.federation import Federation
from ...engine.forward import Forward
from ...methods import Server
from ...models.route import Begun


@torch.no_grad()
def block_logits(f: Federation, server: Server, folder: str | Path) -> torch.Tensor:
    """Outputs (N, *out) of the whole net's last exit on the central test set; ``folder`` holds z_j of every batch.

    While a unit runs, no other's parameters are there. ``ValueError`` where batch norm needs a pass of its own.
    """
    if f.experiment.batch_norm not in ("batch", "tracked"):
        raise ValueError(f"experiment: batch_norm = {f.experiment.batch_norm!r}: unit by unit, batch or tracked answer")
    model, data, last, part = f.model, f.data, f.model.depth - 1, f.setting.full()
    held = {n: x for n, x in {**f.frozen, **server.params}.items() if n in f.setting.infos}
    batches = torch.arange(len(data.test_labels), device=f.device).split(BATCH)
    forward, outputs = Forward(model, [part], held, data=data, test=True).place_(), []
    for unit in range(model.depth):
        here = {n for n in held if (at := f.setting.infos[n].unit) == unit or (at < 0 and unit in (0, last))}
        with model.holding({n: x if n in here else x.to("meta") for n, x in held.items()}):
            for i, rows in enumerate(batches):
                file = Path(folder) / f"{i}.safetensors"
                x = Begun(unit, load_file(file, str(f.device))["z"]) if unit else forward.inputs(rows[None])
                if unit < last:
                    save_file({"z": forward.leading(x, unit + 1).z.contiguous()}, file)
                else:
                    outputs.append(forward(x)[-1, 0])
                    file.unlink(missing_ok=True)
    return torch.cat(outputs)
