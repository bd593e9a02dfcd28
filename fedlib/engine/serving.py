"""Every client on its own test set, with the models its method serves it: many clients stacked in one pass.

What clients share runs once on the examples of all of them; only what is their own is stacked. Where batch norm takes
its statistics from who answers, these are of a client's whole test set, in one pass whatever its size.
Read next: ``evaluation.py`` (the central test set), ``data/client_tests.py`` (who is tested on what).
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from ..core.devices import to_host
from ..core.threads import map_in_threads
from ..core.validation import check_type
from ..data.tasks import Classification
from ..methods import Member, Round, Server, Serving
from ..models.exit_model import ExitModel
from .arithmetic import arithmetic
from .batches import in_order
from .cohort import Cohort
from .evaluation import at_once, rounded
from .federation import Federation
from .forward import Forward, by_example
from .leaving import leave_at, mean_over_clients
from .stacks import Stack, Tensors

CLIENTS, LISTED = 25, 1000  # that run together (no answer depends on it); and that a run lists at most


def evaluate_clients(f: Federation, server: Server, memories: Mapping) -> dict[str, object]:
    """Return mean and SD over clients of the metric on their own test sets: ``accuracy`` (mean over exits), ``exits``.

    Exits that a client's model does not hold do not count for it. ``last`` is the mean of each client's deepest exit;
    where clients hold different exits or widths, ``by_budget`` has both numbers for each budget's clients.
    A client that was never sampled answers with what it would be served. Clients without test examples do not count.
    ``by_client`` lists their numbers and ids where there are at most ``LISTED``, ``last_by_client`` of several exits
    their deepest's. Of several exits ``leaving`` says, by threshold, what clients get who leave at the first exit whose
    confidence exceeds it (``leaving.py``). A client of whose own test set the metric is undefined (a correlation with
    labels that are all alike) does not count; ``undefined`` says how many. ``nonfinite`` counts clients who answered
    with a NaN or infinity, where there are any. Raises ``FloatingPointError`` for them if the experiment says
    ``nonfinite = "fail"``.

    Of classes two controls stand beside: ``majority``, what a client gets that always answers its own most frequent
    training label, and ``prior``, as ``accuracy`` where log(n + 1) of its n training examples of a class is added to
    what the class gets; ``last_prior`` is that of each client's deepest exit.
    """
    scores: dict[int, list[float]] = {}
    broken, early, groups, answered = list[int](), [], [], []  # groups answer together; answers are on the device
    exits, task, has_classes = f.answering, f.task, isinstance(f.task, Classification)
    leaves = len(exits) > 1 and has_classes
    for ids, outputs, labels, counts in client_outputs(f, server, memories):
        finite = task.finite(outputs).transpose(0, 1).flatten(1).all(1)  # (K,); padding repeats examples
        given = outputs[exits]  # (E, K, B, *out)
        known = torch.from_numpy(np.stack([f.setting.label_counts(c) for c in ids])) if has_classes else finite
        both = torch.cat([given, given + (known + 1).log().to(given)[:, None]]) if has_classes else given
        answered += [finite, labels, task.predict(both), task.confidence(given) if leaves else finite, known.to(labels)]
        groups.append((ids, counts))
    came = iter(to_host(answered))
    for ids, counts in groups:
        finite, labels, given, sure, known = (next(came) for _ in range(5))
        broken += [client for client, whole in zip(ids, finite.tolist(), strict=True) if not whole]
        for k, (client, n) in enumerate(zip(ids, counts, strict=True)):
            own, answers = labels[k, :n], given[:, k, :n]  # (n, *label), (E, n, *label)
            found = [task.score(p, own)[task.metric] for p in answers]
            if math.isnan(found[0]):  # whatever is answered: its labels leave nothing to measure
                continue
            always = [task.score(known[k].argmax().expand(n), own)[task.metric]] if has_classes else []
            scores[client] = found + always
            if leaves:
                early.append(leave_at(task, answers[: len(exits)], sure[:, k, :n], own))
    if broken and f.experiment.nonfinite == "fail":
        who = f"round {server.t}: client {min(broken)}"
        raise FloatingPointError(f"{who}: its answers are not finite (nonfinite = 'fail')")
    if not scores:
        raise ValueError(f"{f.experiment.slug}: {task.metric} is defined of no client's own test set")
    clients, r = f.clients(sorted(scores)), Round(server.t, (), f.setting)
    parts = [f.method.serve(c, server, r).members[0].part for c in clients]
    holds = np.array([[j in p.exits for j in exits] for p in parts])
    every = np.array([scores[c.id] for c in clients])  # (clients, E), or of classes (clients, 2 E + 1)
    deepest = np.arange(len(parts)), len(exits) - 1 - holds[:, ::-1].argmax(1)  # exit that each client holds
    table = np.where(holds, every[:, : len(exits)], np.nan)  # (clients, E)
    means, last = np.nanmean(table, 1), table[deepest]
    held = [column[~np.isnan(column)] for column in table.T]  # of an exit that nobody holds: nothing
    out = {
        "accuracy": rounded(means.mean()), "sd": rounded(means.std()), "clients": len(table),
        "exits": [rounded(x.mean()) if len(x) else None for x in held],
        "exits_sd": [rounded(x.std()) if len(x) else None for x in held], "last": rounded(last.mean()),
    }  # fmt: skip
    if has_classes:
        prior = np.where(holds, every[:, len(exits) : -1], np.nan)
        for name, own in (("prior", np.nanmean(prior, 1)), ("last_prior", prior[deepest]), ("majority", every[:, -1])):
            out |= {name: rounded(own.mean()), f"{name}_sd": rounded(own.std())}
    if len({(p.exits, p.shape_key()) for p in parts}) > 1:
        budgets = np.array([c.budget for c in clients])
        out["by_budget"] = {str(b): {"accuracy": rounded(means[of].mean()), "last": rounded(last[of].mean()),
                                     "clients": int(of.sum())}
                            for b in np.unique(budgets) for of in [budgets == b]}  # fmt: skip
    if len(table) <= LISTED:
        out["by_client"] = {str(c.id): rounded(x) for c, x in zip(clients, means, strict=True)}
        if len(exits) > 1:
            out["last_by_client"] = {str(c.id): rounded(x) for c, x in zip(clients, last, strict=True)}
    undefined = sum(len(ids) for ids, _ in groups) - len(scores)
    out |= {name: k for name, k in (("nonfinite", len(broken)), ("undefined", undefined)) if k}
    if early and holds.all():
        out["leaving"] = mean_over_clients(early)
    return out


def client_outputs(
    f: Federation, server: Server, memories: Mapping, ids: Sequence[int] | None = None
) -> Iterator[tuple[list[int], torch.Tensor, torch.Tensor, list[int]]]:
    """Yield (ids, outputs (E, K, B, *out), labels (K, B, *label), examples of each) of K clients at a time.

    Rows past a client's examples are padding.
    """
    ids = range(f.data.num_clients) if ids is None else ids
    tests, r = {c: rows for c in ids if len(rows := f.data.client_test(c))}, Round(server.t, (), f.setting)
    of_batches = not by_example(f.model, f.experiment.batch_norm, training=False)  # batch norm's statistics
    groups = _groups(f, server, r, tests, of_batches)
    threads = min(torch.get_num_threads(), len(groups)) if f.device.type == "cpu" else 1
    models = threading.local()  # what is put in place for some clients must not be others'

    def together(some: list[tuple[int, Serving]]) -> tuple[list[int], torch.Tensor, torch.Tensor, list[int]]:
        if not hasattr(models, "own"):
            models.own = f.model if threads == 1 else f.model.twin()
        rows = [tests[c] for c, _ in some]
        counts, width = list(map(len, rows)), len(rows[0])
        padded = torch.from_numpy(np.stack([np.resize(x, width) for x in rows]))  # (K, width)
        real = (torch.arange(width) < torch.tensor(counts)[:, None]).float() if of_batches else None
        outputs = _answer(f, models.own, server, memories, r, [s for _, s in some], padded, real)
        if f.experiment.test_mask:
            present = np.stack([f.setting.label_counts(c) > 0 for c, _ in some])  # (K, classes)
            outputs = outputs * torch.from_numpy(present).to(outputs)[:, None]
        return [c for c, _ in some], outputs, f.data.test_labels[padded.to(f.device)], counts

    yield from map_in_threads(together, groups, threads)


def _groups(
    f: Federation, server: Server, r: Round, tests: Mapping[int, np.ndarray], of_batches: bool
) -> list[list[tuple[int, Serving]]]:
    """Group the clients of ``tests`` (test examples by client) that answer together: served models of one shape."""
    alike: dict[object, list[tuple[int, Serving]]] = {}
    for client in f.clients(tests):
        serving = check_type(f.method.serve(client, server, r), Serving, f"{f.experiment.method}: serve()")
        key = tuple((m.name, m.part.shape_key(), m.part.exits, m.part.units) for m in serving.members)
        alike.setdefault((key, serving.tune is not None and client.num_examples > 0), []).append((client.id, serving))
    maps = f.device.type == "cpu" and len(f.model.backbone.spec.feature(0)) == 3
    groups = []
    for some in alike.values():
        some.sort(key=lambda pair: -len(tests[pair[0]]))  # clients of about equal sizes waste no rows on padding
        own = maps and any(m.keeps == "all" for m in some[0][1].members)  # convolutions of few examples each are slow
        size = max(1, min(CLIENTS, at_once(f) // len(tests[some[0][0]]))) if of_batches or own else CLIENTS
        groups += [some[a : a + size] for a in range(0, len(some), size)]
    return groups


@torch.no_grad()
def _answer(
    f: Federation, model: ExitModel, server: Server, memories: Mapping, r: Round, servings: list[Serving],
    rows: torch.Tensor, real: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Return outputs (E, K, B, *out) of K clients served alike on test ``rows`` (K, B), mean over each one's members.

    ``real`` (K, B) is 0 on padding, where batch norm's statistics are those of the examples that are answered, all at
    once. Both are in host memory.
    """
    serving, total = servings[0], torch.zeros((), device=f.device)
    recomputed = f.experiment.batch_norm == "static"
    step = max(1, at_once(f) // len(rows)) if real is None else rows.shape[1]
    for place in range(len(serving.members)):
        with arithmetic(f.experiment.precision, f.device):  # perhaps it trains
            stack, params = _parameters(f, model, server, memories, r, [s.members[place] for s in servings], serving)
        with arithmetic("float32", f.device):
            forward = Forward(model, stack.slices, stack.frozen(server.changed), params, data=f.data, test=True)
            forward.place_()
            if recomputed:
                forward.recompute_(in_order(f.data, [m.client for m in stack.members], f.experiment.batch_size, False))
            run = forward.as_one if not recomputed and not stack.is_cut and forward.shares_backbone() else forward
            total = total + torch.cat([run(forward.inputs(part), real) for part in rows.split(step, 1)], 2)
    return total / len(serving.members)


def _parameters(
    f: Federation, model: ExitModel, server: Server, memories: Mapping, r: Round, members: list[Member],
    serving: Serving,
) -> tuple[Stack, Tensors]:  # fmt: skip
    if serving.tune is None or not members[0].client.num_examples:
        stack = Stack(f, members, memories)
        return stack, stack.tensors(server.params, merge=True)
    with torch.enable_grad():
        cohort = Cohort(f, model, server, r, members, memories)  # thrown away: nothing is kept of it
        cohort.train(f.method.local_loss, serving.tune)
    order = [cohort.members.index(m) for m in members]
    return Stack(f, members, memories), {
        n: p[[list(cohort.rows[n]).index(i) for i in order]] if list(cohort.rows[n]) == [*range(len(members))] else p
        for n, p in cohort.params.items()
    }
