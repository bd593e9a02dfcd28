"""HetLoRA: weights and pruning by hand, rounds against a plain loop, what a rank costs."""

from dataclasses import replace

import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.slices import Slice
from fedlib.methods import Round, build_method
from fedlib.methods.sums import Update
from fedlib_lab.rivals.hetlora import tails
from fedlib_lab.runs.costs import exit_costs
from tests.helpers.plain_lora import RANKS, SHARES, adapters, close, cut, experiment, train

ONE = Execution(workers=1)


@pytest.mark.parametrize(
    "options", [{}, {"gamma": 0.5, "prune_weight": 0.5, "weights_by": "model"}], ids=["defaults", "pruning"]
)
def test_rounds_equal_a_plain_loop(options):
    f = build_federation(experiment("hetlora", options={"rank_shares": SHARES, **options}, rounds=3))
    pairs, server, ranks = adapters(f), f.server.params, dict(enumerate(RANKS))
    gamma, weight = options.get("gamma", 0.99), options.get("prune_weight", 1e-3)
    for t in (1, 2, 3):
        models, clients = [], f.sample_clients(t)
        for client in clients:
            rank = ranks[client.id]
            kept = max(1, int(gamma * rank))

            def tail(p, kept=kept, rank=rank):
                return sum((p[b][:, kept:rank].norm() * p[a][kept:rank].norm() for a, b in pairs), torch.zeros(()))

            start = cut(server, pairs, rank)
            own = train(f, client, t, start, lambda p, tail=tail: weight * tail(p))
            if tail(own) < tail(start):
                own, ranks[client.id] = cut(own, pairs, kept), kept
            models.append(own)
        sizes = torch.tensor([float(c.num_examples) for c in clients])
        new = {n: sum(w * m[n] for w, m in zip(sizes / sizes.sum(), models, strict=True)) for n in server}
        norms = torch.tensor([[(m[b] @ m[a]).norm() for m in models] for a, b in pairs])  # (adapters, clients)
        norms = norms.norm(dim=0).expand_as(norms) if "weights_by" in options else norms
        for (a, b), w in zip(pairs, norms, strict=True):
            for n in (a, b):
                new[n] = sum(x * m[n] for x, m in zip(w / w.sum(), models, strict=True))
        server = new
    for size in (1, 3):
        mirrors = {}
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size), mirrors=mirrors)
        close(last.server.params, server)
        assert {k: int(m["rank"]) for k, m in mirrors.items()} == ranks
    assert sorted(ranks.values()) != list(RANKS)  # somebody pruned


def test_weights_by_hand():
    """|B A| is 1 for diag(1, 0) and 3 for diag(0, 3): B = (1/4) B_1 + (3/4) B_2, with zeros beyond rank 1 of B_1."""
    f = build_federation(
        experiment("hetlora", finetune_options={"r": 2, "lora_alpha": 2}, options={"rank_shares": [0.5, 1]})
    )
    a, b = adapters(f)[0]
    clients = f.clients([0, 1])
    parts = [f.method.slice_for(c, f.server, Round(1, (), f.setting)) for c in clients]
    eye = torch.zeros(2, 16, 2), torch.zeros(2, 2, 16)
    eye[0][0, 0, 0] = eye[1][0, 0, 0] = 1.0  # B = e_1, A = e_1^T
    eye[0][1, 0, 0] = eye[0][1, 1, 1] = 1.0  # B = I
    eye[1][1, 0, 1] = 3.0  # A = [[0, 3], [0, 0]]
    sums = None
    for i, rank in enumerate((1, 2)):
        params = {b: eye[0][i : i + 1, :, :rank], a: eye[1][i : i + 1, :rank]}
        one = Update((clients[i],), (parts[i],), params, {a: [0], b: [0]})
        found = f.method.summarise(one, f.setting)
        if sums is not None:
            sums.merge(found)
        sums = sums or found
    mean = {n: sums.total[n] / sums.weight[n].max() for n in (a, b)}
    torch.testing.assert_close(mean[b][:2], torch.tensor([[1.0, 0.0], [0.0, 0.75]], dtype=torch.float64))
    torch.testing.assert_close(mean[a][:, :2], torch.tensor([[0.25, 2.25], [0.0, 0.0]], dtype=torch.float64))


@pytest.mark.parametrize("gamma, tail", [(0.99, 2.0), (0.5, 2.0), (1.0, 0.0)])
def test_a_tail_by_hand(gamma, tail):
    """Rank 2: from int(1.98) = 1 and from 1 on it is |B[:, 1]| |A[1]| = 1 * 2, in each of four adapters; of 1 nothing."""
    f = build_federation(experiment("hetlora"))
    params = {}
    for a, b in adapters(f):
        params[a], params[b] = torch.zeros(1, 2, 16), torch.zeros(1, 16, 2)
        params[a][0, 1, 0], params[b][0, 0, 1] = 2.0, 1.0
    assert tails(params, f.setting, gamma).tolist() == [4 * tail]


def test_a_rank_is_a_slice_and_costs_its_share():
    f = build_federation(experiment("hetlora"))
    parts = [f.method.slice_for(Client(0, j, 9), f.server, Round(1, (), f.setting)) for j in range(3)]
    assert parts[2] == Slice.prefix(2, (0,), index=dict(parts[2].index)) and len(parts[0].index) == 4  # q, v of two
    rows = exit_costs(experiment("hetlora"), 10)
    numbers = [r["upload_mib"] * 2**18 for r in rows]
    assert numbers == [202 + 4 * 32 * k + 1 for k in RANKS]  # a norm and a classifier; A and B of 16 numbers a rank; it
    assert [r["download_mib"] * 2**18 for r in rows] == [n - 1 for n in numbers]
    assert rows[0]["macs"] < rows[1]["macs"] < rows[2]["macs"]
    (whole,) = exit_costs(experiment("fedavg", options={}), 10)
    assert {k: rows[2][k] for k in whole} == whole | {"exit": 3, "upload_mib": rows[2]["upload_mib"]}


def test_a_run_goes_on_where_it_stopped():
    f, mirrors = build_federation(experiment("hetlora", rounds=3)), {}
    rounds = run_rounds(f, ONE, mirrors=mirrors)
    first = next(rounds)
    kept = {k: dict(m) for k, m in mirrors.items()}
    *_, whole = rounds
    *_, resumed = run_rounds(f, ONE, first.server, mirrors=kept)
    assert all(torch.equal(p, resumed.server.params[n]) for n, p in whole.server.params.items())


@pytest.mark.parametrize("method", ["hetlora", "flexlora", "flora"])
def test_what_cannot_be_is_refused(method):
    with pytest.raises(ValueError, match=f"{method}: finetune = 'full' has no rank; allowed: lora"):
        build_federation(experiment(method, finetune="full", finetune_options={}))
    with pytest.raises(ValueError, match=rf"options of {method}: rank_shares = \[1.0, 0.5\] must increase within"):
        build_method(method, {"rank_shares": [1.0, 0.5]})
    with pytest.raises(ValueError, match=f"{method}: backbone = 'two_blocks' with .*use_dora.* no pairs of factors"):
        build_federation(experiment(method, finetune_options={"r": 4, "lora_alpha": 8, "use_dora": True}))
    with pytest.raises(ValueError, match=f"{method}'s do not"):
        build_method(method, {"compress": "topk", "error_feedback": True})


def test_a_client_answers_with_the_ranks_that_it_has_left():
    f = build_federation(experiment("hetlora"))
    left = replace(f.server, mirrors={2: {"rank": torch.tensor(1)}})
    (client,) = f.clients([2])
    served = [f.method.serve(client, s, Round(1, (), f.setting)).members[0].part for s in (f.server, left)]
    assert [{len(kept) for kept in part.index.values()} for part in served] == [{RANKS[2]}, {1}]
