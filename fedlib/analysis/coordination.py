"""CAFEDistill's coordination while it trains: who is a student at which exit, and which clients teach whom."""

from dataclasses import dataclass, replace

import numpy as np

from ..core.experiment import Experiment
from ..engine.executors import Execution
from ..engine.federation import Federation, build_federation
from ..engine.rounds import run_rounds
from ..methods import Round, Server


@dataclass(frozen=True)
class Coordinated:
    """What the server decided before round ``t``: ``students`` (|C|, m), ``shares`` (|C|, seen) of the clients seen."""

    t: int
    clients: tuple[int, ...]
    students: np.ndarray
    shares: np.ndarray
    seen: tuple[int, ...]


def coordination(e: Experiment, execution: Execution = Execution()) -> tuple[Federation, list[Coordinated]]:
    """Train ``e``, a CAFEDistill, and tell of every round; last, of a round with all clients that were seen.

    ``ValueError`` for another method.
    """
    if e.method != "cafedistill":
        raise ValueError(f"coordination: method = {e.method!r} selects no students; allowed: cafedistill")
    f, mirrors = build_federation(e.replace(evaluate_every=0, test_split="central"), execution.home), {}
    decided, server = [], f.server
    rounds = run_rounds(f, execution, mirrors=mirrors)
    for t in range(1, e.rounds + 1):
        decided.append(decision(f, replace(server, mirrors=dict(mirrors)), t, [c.id for c in f.sample_clients(t)]))
        server = next(rounds).server
    rounds.close()
    return f, [*decided, decision(f, replace(server, mirrors=mirrors), e.rounds, sorted(mirrors))]


def decision(f: Federation, server: Server, t: int, ids: list[int]) -> Coordinated:
    """What ``server`` decides for the clients ``ids`` in round ``t``."""
    notes = f.method.prepare(server, Round(t, tuple(f.clients(ids)), f.setting))
    students, shares, seen = (notes[k].cpu().numpy() for k in ("students", "shares", "seen"))
    return Coordinated(t, tuple(ids), students, shares, tuple(seen.tolist()))


def students_by_round(decided: list[Coordinated]) -> np.ndarray:
    """(exits, rounds): the share of a round's clients, in percent, of whom each exit is a student."""
    return np.stack([100 * d.students.mean(0) for d in decided], 1)


def by_main_label(f: Federation, ids: tuple[int, ...]) -> list[int]:
    """Places of clients ``ids`` in order of the label that each has most of, so that like ones stand together."""
    counts = np.stack([f.setting.label_counts(i) for i in ids])
    share = counts / counts.sum(1, keepdims=True)
    return sorted(range(len(ids)), key=lambda k: (int(share[k].argmax()), -share[k].max()))
