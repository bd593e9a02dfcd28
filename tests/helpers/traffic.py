"""What a client of a round receives and sends, counted in numbers (float32 unless compressed), from a round that ran.

Counted is what a client does not have: not what stays with it, not what no client ever changes (it follows from the
seed, or is public), a tensor that several of its models start from once. ``runs/costs.py`` has
uploads from shapes alone.
"""

from collections.abc import Hashable, Sequence

from fedlib.core.experiment import Experiment
from fedlib.core.slices import take
from fedlib.engine.cohort import Cohort
from fedlib.engine.executors import Execution, plan_round
from fedlib.engine.federation import Federation, build_federation
from fedlib.engine.rounds import run_rounds
from fedlib.methods import Member, Round, Server


def round_traffic(e: Experiment) -> tuple[float, float]:
    """(down, up): numbers a client of the second round receives and sends, mean over the sampled; round 1 is trained.

    Everybody takes part in both; choose few clients and examples, since sizes do not depend on them.
    """
    f = build_federation(e.replace(rounds=2, clients_per_round=e.num_clients, evaluate_every=0, test_split="central"))
    memories, mirrors = {}, {}
    rounds = run_rounds(f, Execution(workers=1), memories=memories, mirrors=mirrors)
    server = next(rounds).server
    rounds.close()
    server = Server(server.t, server.params, server.memory, mirrors)
    r = Round(2, tuple(f.sample_clients(2)), f.setting)
    r = Round(2, r.clients, f.setting, f.method.prepare(server, r))
    down = up = 0
    for members in plan_round(f, server, r, 1, None):
        cohort = Cohort(f, f.model, server, r, members, memories)
        down += received(f, server, members)
        f.method.local_update(cohort)
        up += sent(f, cohort)
    return down / len(r.clients), up / len(r.clients)


def received(f: Federation, server: Server, members: Sequence[Member]) -> int:
    """Numbers that the members' clients are sent before they train."""
    infos, total = f.setting.infos, 0
    leaves = [m.upload or m.part for m in members if m.trains]
    moves = {n for n, i in infos.items() if n in server.params and any(part.holds(i) for part in leaves)}
    for client in dict.fromkeys(m.client.id for m in members):
        found: dict[Hashable, int] = {}  # everything once
        for m in (m for m in members if m.client.id == client):
            found |= {x.data_ptr(): x.numel() for tensors in m.payload.values() for x in tensors.values()}
            for name in moves - set(m.payload.get("start", {})):
                info, source = infos[name], m.part.source(name)
                if m.part.holds(info) and m.keeps != "all" and not f.method.personal(info):
                    key = source, tuple(sorted(m.part.index.items()))
                    found[key] = take(server.params[source], info, m.part).numel()
        total += sum(found.values())
    return total


def sent(f: Federation, cohort: Cohort) -> int:
    """Numbers that a trained cohort sends: models, and what goes beside them."""
    update, infos = cohort.update(), f.setting.infos
    uploads = update.uploads or update.slices
    models = sum(
        take(stack[0], infos[name], uploads[i]).numel() if uploads[i] is not update.slices[i] else stack[0].numel()
        for name, stack in update.params.items()
        for i in update.rows[name]
    )
    return models + sum(x.numel() for tensors in cohort.extras.values() for x in tensors.values())
