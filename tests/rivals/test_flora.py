"""FLoRA: two rounds against a plain loop, what a round merges, what travels."""

import numpy as np
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.rng import numpy_generator
from fedlib.methods import Round
from fedlib_lab.runs.costs import exit_costs
from tests.helpers.plain_lora import RANKS, adapters, close, experiment, train

ONE = Execution(workers=1)


def base_of(a):
    return a.replace("lora_A.default", "base_layer")


def test_two_rounds_equal_a_plain_loop():
    f = build_federation(experiment("flora"))
    pairs, server = adapters(f), {n: p.clone() for n, p in f.server.params.items()}
    base = {base_of(a): f.frozen[base_of(a)].clone() for a, _ in pairs}
    for t in (1, 2):
        models, clients = [], f.sample_clients(t)
        for client in clients:
            start, rank, rng = server | base, RANKS[client.budget], numpy_generator(1, "lora", t, client.id)
            for a, b in pairs:
                start[a], start[b] = torch.zeros(4, 16), torch.zeros(16, 4)
                start[a][:rank] = torch.from_numpy(rng.uniform(-0.25, 0.25, (rank, 16)))
            models.append(train(f, client, t, start))
        shares = np.array([c.num_examples for c in clients]) / sum(c.num_examples for c in clients)
        heads = [n for n in server if "lora_" not in n]
        server |= {n: sum(float(w) * m[n] for w, m in zip(shares, models, strict=True)) for n in heads}
        for a, b in pairs:  # alpha / r = 2; A stacked with its share, B beside B
            stacked_a = torch.cat([float(w) * m[a] for w, m in zip(shares, models, strict=True)])
            stacked_b = torch.cat([m[b] for m in models], 1)
            base[base_of(a)] = base[base_of(a)] + 2 * stacked_b @ stacked_a
    for size in (1, 3):
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size))
        close(last.server.params, {n: server[n] for n in heads})
        close(last.server.changed, base)
        assert not any(last.server.params[b].any() for _, b in pairs)
    assert max((base[n] - f.frozen[n]).abs().max() for n in base) > 1e-3
    model = f.model
    model.put_({**last.server.params, **base})
    outputs = model(f.data.view(f.data.test_inputs, (3, 16, 16), torch.arange(40))[None])[0, 0]
    accuracy = 100 * (outputs.argmax(-1) == f.data.test_labels).double().mean().item()
    assert last.metrics["accuracy"] == round(accuracy, 4)  # of the merged backbone


def test_adapters_are_drawn_anew_for_every_client_and_round():
    f = build_federation(experiment("flora"))
    drawn = [
        f.method.members(c, f.server, Round(t, (), f.setting))[0].payload["start"]
        for c, t in zip(f.clients([0, 1, 2, 2]), (1, 1, 1, 2), strict=True)
    ]
    a = adapters(f)[0][0]
    assert [tuple(x[a].shape) for x in drawn] == [(1, 16), (2, 16), (4, 16), (4, 16)]
    assert not torch.equal(drawn[2][a], drawn[3][a]) and not torch.equal(drawn[1][a][:1], drawn[0][a])
    assert all(x[a].abs().max() <= 0.25 for x in drawn)
    assert not any(p.any() for n, p in f.server.params.items() if "lora_B" in n)


def test_a_run_goes_on_where_it_stopped():
    f = build_federation(experiment("flora", rounds=3))
    first, _, whole = run_rounds(f, ONE)
    *_, resumed = run_rounds(f, ONE, first.server)
    assert all(torch.equal(x, resumed.server.changed[n]) for n, x in whole.server.changed.items())
    assert whole.metrics == resumed.metrics


def test_what_is_received_is_the_stack_or_the_sum_where_that_is_smaller():
    """Four adapters of 16 x 16: a sum has 256 numbers; three clients stack 7 ranks of 32, forty of them 93."""
    head = 202
    for clients, each in ((3, 7 * 32), (40, 256)):
        rows = exit_costs(experiment("flora", num_clients=clients, clients_per_round=clients), 10)
        assert [r["download_mib"] * 2**18 for r in rows] == [head + 4 * each] * 3
        assert [r["upload_mib"] * 2**18 for r in rows] == [head + 4 * 32 * k for k in RANKS]
