"""Trained models of stored runs and what they answer on the test set: logits, accuracy per class and per client.

A stored run keeps its weights only on the machine that trained it; elsewhere :func:`load_trained` trains it again,
beside the store, which gives the same numbers.
Read next: ``report/clients.py``, ``reefl/attention_maps.py``.
"""

import numpy as np
import torch

from fedlib.core.experiment import Experiment
from fedlib.core.memories import ClientFiles
from fedlib.core.paths import outputs_dir
from fedlib.engine.evaluation import exit_for, exit_logits, served_parts
from fedlib.engine.executors import Execution
from fedlib.engine.federation import Federation, build_federation
from fedlib.methods import Server

from .checkpoints import last_state
from .identity import Accept
from .store import Folder, run


def load_state(
    e: Experiment, execution: Execution = Execution(), folder: Folder = None, accept: Accept = ()
) -> tuple[Federation, Server, ClientFiles]:
    """Return ``e``'s federation, and what it had after the last round: the server, and each client's memory.

    Runs ``e`` if it is missing or came without weights. ``ValueError`` for a diverged run: its weights answer nothing.
    """
    if (done := run(e, execution, folder, accept=accept)).summary["status"] != "finished":
        raise ValueError(f"{e.slug} {done.summary['status']} in round {done.summary['t']}; choose another experiment")
    f = build_federation(e, execution.device)
    if (state := last_state(done, str(f.device))) is None:
        state = last_state(run(e, execution, outputs_dir() / "retrained", accept=accept), str(f.device))
    assert state is not None
    return f, state[0], state[1].memories


def load_trained(
    e: Experiment, execution: Execution = Execution(), folder: Folder = None, accept: Accept = ()
) -> tuple[Federation, Server]:
    """Return what :func:`load_state` does, but no clients' memories, which a server's own answers do not need."""
    return load_state(e, execution, folder, accept)[:2]


def all_logits(f: Federation, server: Server) -> torch.Tensor:
    """Return the logits (E, N, C) of every exit on the test set, each from the sub-model the method evaluates it with.

    An exit that its sub-model does not hold is answered by another, as in the evaluation.
    """
    parts = served_parts(f, server)
    shared = exit_logits(f, server, parts[0]) if all(p == parts[0] for p in parts) else None
    logits = (exit_logits(f, server, p) if shared is None else shared for p in parts)
    return torch.stack([x[exit_for(j, p)] for j, (x, p) in enumerate(zip(logits, parts, strict=True))])


def class_accuracies(logits: torch.Tensor, labels: torch.Tensor) -> np.ndarray:
    """Return the accuracy (E, C) in percent on the test examples of each class; NaN for a class without any."""
    right = (logits.argmax(-1) == labels).double()  # (E, N)
    one_hot = torch.nn.functional.one_hot(labels, logits.shape[-1]).double()
    return (100 * right @ one_hot / one_hot.sum(0)).cpu().numpy()


@np.errstate(invalid="ignore")  # 0 / 0
def client_accuracies(f: Federation, logits: torch.Tensor) -> np.ndarray:
    """Return the accuracy (clients,) in percent that each client's deepest exit b(i) has on data like the client's own.

    Where clients are writers or speakers and the test set names its own: the share of the owner's held-out examples
    that exit b(i) gets right (clients of one owner share them). Else the sum over classes c of n_ic / n_i x the
    accuracy of exit b(i) on class c of the central test set, n_ic being the client's examples of c: unbiased where
    clients differ in labels only, as in Dirichlet partitions. The paper reports no per-client numbers. NaN for a client
    without examples, without held-out ones, or with a class that the test set lacks.
    """
    if not f.data.classes:
        raise f.experiment.refused("dataset", ": its labels are no classes")
    budgets, owners = np.minimum(f.budgets, len(logits) - 1), f.data.client_owners()
    if owners is not None and f.data.test_owners is not None:
        right = (logits.argmax(-1) == f.data.test_labels).double().cpu().numpy()  # (E, N)
        mine = (owners[:, None] == f.data.test_owners) & (owners[:, None] >= 0)  # (clients, N)
        return 100 * (right[budgets] * mine).sum(1) / mine.sum(1)
    by_class, counts = class_accuracies(logits, f.data.test_labels), f.data.label_counts()  # (E, C), (clients, C)
    return np.where(counts > 0, counts * by_class[budgets], 0).sum(1) / counts.sum(1)
