"""Accuracy of every exit on the central test set, in percent; all exits of one model in one pass."""

from collections.abc import Mapping

import numpy as np
import torch

from .federation import Federation
from .methods import Server
from .privacy import privacy_spent
from .slices import Slice, take, take_all


def put_slice_(federation: Federation, server: Server, part: Slice) -> None:
    """Load the sub-model ``part`` of the global state into the federation's model (views where possible)."""
    infos, model = federation.setting.infos, federation.model
    model.put_({n: take(p, infos[n], part) for n, p in federation.frozen.items()})
    model.put_(take_all(server.params, infos, part))


@torch.inference_mode()
def exit_logits(federation: Federation, server: Server, part: Slice, batch_size: int = 500) -> torch.Tensor:
    """Logits (E, N, C) of sub-model ``part`` on the test set; zeros for exits it does not hold."""
    data, model = federation.data, federation.model
    put_slice_(federation, server, part)
    alive = [int(b in part.units) for b in range(model.exit_blocks[-1] + 1)]
    spans = {j: (0, int(j in part.exits)) for j in range(len(model.exit_blocks))}
    prefix, n = federation.test_prefix if not part.index else None, len(data.test_labels)
    if prefix is not None:
        prefix.fill(model, np.arange(n))
    out = []
    for rows in torch.arange(n, device=data.test_labels.device).split(batch_size):
        shape = model.vit.config.input_shape
        view = data.view(data.test_images, shape, rows)[None] if prefix is None else prefix(rows[None])
        out.append(model(view, alive, spans)[:, 0])
    return torch.cat(out, 1)


def evaluate(federation: Federation, server: Server) -> Mapping[str, object]:
    """``accuracy`` (mean over exits), ``exits`` (each exit's), and ``ensemble`` where one model has all exits.

    With noise also the ``epsilon`` at ``delta`` that the rounds so far have cost.

    The mean is unweighted; the ensemble is the argmax of the exits' mean logits (ReeFL's release, facts 6.6).
    """
    labels, setting = federation.data.test_labels, federation.setting
    parts = [federation.method.model_for(j, setting) for j in range(setting.num_exits)]
    shared = all(p == parts[0] for p in parts)
    logits = exit_logits(federation, server, parts[0]) if shared else None

    def percent(prediction: torch.Tensor) -> float:
        return round(100 * (prediction == labels).double().mean().item(), 4)

    exits = []
    for j, part in enumerate(parts):
        of_exit = logits if shared else exit_logits(federation, server, part)
        exits.append(percent(of_exit[j].argmax(1)))
    out = {"accuracy": round(sum(exits) / len(exits), 4), "exits": exits}
    if shared and len(exits) > 1:
        out["ensemble"] = percent(logits.mean(0).argmax(1))
    return out | privacy_spent(federation, server.t)
