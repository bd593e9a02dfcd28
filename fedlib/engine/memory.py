"""Does an experiment fit? Told from shapes alone, before anything is built."""

import torch

from ..core.devices import free_memory
from ..core.experiment import Experiment
from ..models.exit_model import ExitModel

GIB = 2**30


def check_memory(e: Experiment, shapes: ExitModel, examples: int, device: str) -> None:
    """Raise ``ValueError`` if not even one client at a time can be trained on ``device``.

    ``shapes`` is the model on the meta device, ``examples`` the number that the largest client holds.
    """
    infos = shapes.infos()
    inside = any(infos[n].kind in ("backbone", "adapter") and infos[n].unit >= 0 for n in shapes.trainable())
    widest, kept = shapes.backbone.spec.numbers(min(e.batch_size, examples))
    needed, free = bytes_to_train(e, shapes, 4 * (kept if inside else widest)), free_memory(torch.device(device))
    if needed > free:
        why = f", finetune = {e.finetune!r}: the model and the training of one client need about {needed / GIB:.1f} GiB"
        less = "a smaller model, fewer trained parameters (finetune, finetune_options, options) or a smaller batch_size"
        raise e.refused("backbone", f"{why} and {free / GIB:.1f} GiB are free on {device}; choose {less}")


def bytes_to_train(e: Experiment, shapes: ExitModel, kept: float) -> float:
    """Estimate the bytes of a round at its peak: while one client trains, or while the server aggregates.

    In copies of what is trained: the model, that of the worker, the server's first and present state, the client's
    parameters and their gradients are 6. On top come the optimiser's moments and what a step computes beside them, and
    ``kept`` bytes of activations. What arrived in float64 makes 8.
    """
    trained, frozen = (4 * sum(p.numel() for p in part.values()) for part in (shapes.trainable(), shapes.frozen()))
    state = (e.momentum > 0) if e.optimiser == "sgd" else 3  # two moments, and the root of the second
    state += (e.clip_norm is not None) + (e.weight_decay > 0 and e.optimiser != "adamw")  # gradients are copied
    return frozen + max(8 * trained, (6 + state) * trained + kept)
