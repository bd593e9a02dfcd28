"""Accuracy of every exit on the central test set, in percent; all exits of one model in one pass."""

import base64
import math
from collections.abc import Mapping

import numpy as np
import torch

from ..core.devices import to_host
from ..core.slices import Slice, is_cut, take, take_all
from ..core.threads import map_in_threads
from ..core.validation import check_type
from ..methods import Round, Server
from .arithmetic import arithmetic
from .batches import shuffled_rows
from .federation import Federation
from .forward import Forward, by_example
from .privacy import privacy_spent


def central_forward(federation: Federation, server: Server, part: Slice) -> Forward:
    """Prepare the sub-model ``part`` of the global state for the central test set (views where possible)."""
    infos = federation.setting.infos
    frozen = {n: take(p, infos[n], part) for n, p in (federation.frozen | server.changed).items()}
    cut = part.index and any(is_cut(i, part) for i in infos.values())
    return Forward(
        federation.model, [part], frozen, take_all(server.params, infos, part), data=federation.data, test=True,
        cache=None if cut else federation.test_cache,
    )  # fmt: skip


BATCH, OF_MAPS = 250, 64  # examples; numbers of their own, so that no answer follows from how many threads there are
AT_ONCE = 2**27  # numbers in the widest activation: on a GPU, and of a net whose batch norm sees all examples


def at_once(federation: Federation) -> int:
    """Return how many examples answer together where no answer depends on it: on a GPU as many as keep it busy.

    On a CPU a ConvNet's maps stay in cache: 2,000 images of 32 pixels took one core 0.40 s instead of 0.71.
    """
    spec = federation.model.backbone.spec
    few = OF_MAPS if len(spec.feature(0)) == 3 else BATCH
    return few if federation.device.type == "cpu" else max(BATCH, AT_ONCE // spec.numbers(1)[0])


def exit_logits(federation: Federation, server: Server, part: Slice | tuple[Slice, ...]) -> torch.Tensor:
    """Return logits (E, N, C) of sub-model ``part`` on the test set; zeros for exits it does not hold.

    Of several the mean.

    Where batch norm has no statistics of its own (``batch``), or they are the clients' (``local``), it takes those of
    the whole test set, whatever its order. The releases take those of batches, in the order of the file.
    """
    if isinstance(part, tuple):
        return sum((exit_logits(federation, server, one) for one in part), torch.zeros(())) / len(part)
    with arithmetic("float32", federation.device):
        return _logits(federation, central_forward(federation, server, part).place_())


def _logits(federation: Federation, forward: Forward) -> torch.Tensor:
    data, device, e = federation.data, federation.device, federation.experiment
    n, size = len(data.test_labels), at_once(federation)
    if e.batch_norm in ("batch", "local") and not by_example(federation.model, "batch", training=False):
        most = max(1, AT_ONCE // federation.model.backbone.spec.numbers(1)[0])
        return forward.together([rows[None] for rows in torch.arange(n).split(most)])[:, 0]

    @torch.inference_mode()
    def logits(examples: np.ndarray) -> torch.Tensor:
        forward.fill(examples)
        return forward(forward.inputs(torch.from_numpy(examples)[None]))[:, 0]

    if e.batch_norm == "static":
        forward.recompute_((rows[None], None) for rows in shuffled_rows(data).split(BATCH))
    parts = np.split(np.arange(n), range(size, n, size))
    threads = min(torch.get_num_threads(), len(parts)) if device.type == "cpu" else 1
    return torch.cat(list(map_in_threads(logits, parts, threads)), 1)


def served_parts(federation: Federation, server: Server) -> list[Slice | tuple[Slice, ...]]:
    """Return the sub-model that each exit is evaluated with on the central test set."""
    r = Round(server.t, (), federation.setting)
    parts = [federation.method.model_for(j, server, r) for j in range(federation.setting.num_exits)]
    for one in (x for part in parts for x in (isinstance(part, tuple) and part or (part,))):
        check_type(one, Slice, f"{federation.experiment.method}: model_for()")
    return parts


def exit_for(j: int, part: Slice | tuple[Slice, ...]) -> int:
    """Return the exit of ``part`` that answers for exit j: the deepest that it holds up to j, else its first."""
    held = (part[0] if isinstance(part, tuple) else part).exits
    return max((k for k in held if k <= j), default=min(held))


def evaluate(federation: Federation, server: Server) -> Mapping[str, object]:
    """Measure ``accuracy`` (mean over exits), ``exits`` (each exit's), and ``ensemble`` if one model has all exits.

    ``others`` has each exit's further metrics, if the task has any (SQuAD's exact match, CoLA's accuracy). ``right``
    says which examples every exit, then the ensemble, got right (:func:`pack_bits`), if the metric counts them.

    Exits are those of ``Federation.answering``. All numbers are the task's metric, in percent; None where it is
    undefined. ``nonfinite`` counts the exits that answered with a NaN or infinity, where there are any; if the
    experiment says ``nonfinite = "fail"``, ``FloatingPointError`` is raised for them. With noise also the ``epsilon``
    at ``delta`` that the rounds have cost.

    An exit that its sub-model does not hold is answered by another (:func:`exit_for`). The mean is unweighted; the
    ensemble answers by the exits' mean outputs (ReeFL's release, facts 6.6).
    """
    labels, task = federation.data.test_labels, federation.task
    answering, every = federation.answering, served_parts(federation, server)
    parts = [every[j] for j in answering]
    outputs = exit_logits(federation, server, parts[0]) if all(p == parts[0] for p in parts) else None
    answers, finite = [], []  # per exit, and of the ensemble
    for j, part in zip(answering, parts, strict=True):
        given = (exit_logits(federation, server, part) if outputs is None else outputs)[exit_for(j, part)]
        answers.append(task.predict(given))
        finite.append(task.finite(given).all())
    if outputs is not None and len(answering) > 1:
        answers.append(task.predict(outputs[answering].mean(0)))
    *answers, labels, finite = to_host([*answers, labels, torch.stack(finite)])
    if (broken := int((~finite).sum())) and federation.experiment.nonfinite == "fail":
        raise FloatingPointError(f"round {server.t}: answers are not finite (nonfinite = 'fail')")
    measured = [{name: rounded(x) for name, x in task.score(given, labels).items()} for given in answers]
    found = measured[: len(answering)]
    exits = [f[task.metric] for f in found]
    defined = [x for x in exits if x is not None]  # all: ``check_task`` refuses labels that leave nothing to measure
    out = {"accuracy": round(sum(defined) / len(defined), 4), "exits": exits}
    if others := {name: [f[name] for f in found] for name in found[0] if name != task.metric}:
        out["others"] = others
    if len(measured) > len(found):
        out["ensemble"] = measured[-1][task.metric]
    if broken:
        out["nonfinite"] = broken
    if task.metric == "accuracy":
        out["right"] = pack_bits(torch.stack([given == labels for given in answers]))
    return out | privacy_spent(federation, server.t)


def rounded(x: float) -> float | None:
    """Round a number to four digits for storage; None where it is undefined."""
    return None if math.isnan(x) else round(float(x), 4)


def pack_bits(right: torch.Tensor) -> str:
    """Encode (rows, N) truths as text: base64 of each row's bits."""
    return base64.b64encode(np.packbits(right.cpu().numpy(), axis=1).tobytes()).decode()
