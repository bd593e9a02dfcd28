"""FlexLoRA: its truncation by hand, two rounds against a plain loop, compared by products."""

import numpy as np
import pytest
import torch

from fedlib import Execution, build_federation, run_rounds
from fedlib.engine.serving import client_outputs
from fedlib_lab.rivals.flexlora import truncated
from tests.helpers.plain_lora import RANKS, adapters, close, experiment, train


def test_two_rounds_equal_a_plain_loop():
    f = build_federation(experiment("flexlora"))
    pairs, server = adapters(f), {n: p.clone() for n, p in f.server.params.items()}
    factors = {pair: (server[pair[0]].double().numpy(), server[pair[1]].double().numpy()) for pair in pairs}
    for t in (1, 2):
        models, clients = [], f.sample_clients(t)
        for client in clients:
            start, rank = dict(server), RANKS[client.budget]
            for (a, b), (wide, tall) in factors.items():
                start[a], start[b] = torch.zeros(4, 16), torch.zeros(16, 4)
                start[a][:rank] = torch.from_numpy(wide[:rank])
                start[b][:, :rank] = torch.from_numpy(tall[:, :rank])
            models.append(train(f, client, t, start))
        shares = np.array([c.num_examples for c in clients]) / sum(c.num_examples for c in clients)
        server = {n: sum(float(w) * m[n] for w, m in zip(shares, models, strict=True)) for n in server}
        for a, b in pairs:
            products = [(m[b].double() @ m[a].double()).numpy() for m in models]
            u, s, vt = np.linalg.svd(np.tensordot(shares, products, 1))
            factors[a, b] = -vt[:4], -u[:, :4] * s[:4]  # signs are free
    for size in (1, 3):
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size))
        found = last.server.params
        close(found, {n: p for n, p in server.items() if "lora_" not in n})
        for (a, b), (wide, tall) in factors.items():
            close({"BA": found[b].double() @ found[a].double()}, {"BA": torch.from_numpy(tall @ wide)})
            torch.testing.assert_close(found[a] @ found[a].T, torch.eye(4), rtol=0, atol=1e-5)  # all scale is in B


def test_truncation_by_hand():
    """Means of diag(4, 0) and diag(2, 2) are diag(3, 1): rank 1 holds diag(3, 0), rank 2 all; signs are fixed."""
    mean = (torch.diag(torch.tensor([4.0, 0.0])) + torch.diag(torch.tensor([2.0, 2.0]))).double() / 2
    a, b = truncated(-mean, torch.full((2, 2), 9.0))
    torch.testing.assert_close(b @ a, torch.tensor([[-3.0, 0.0], [0.0, -1.0]]))
    torch.testing.assert_close(b[:, :1] @ a[:1], torch.tensor([[-3.0, 0.0], [0.0, 0.0]]))
    assert (a.max(1).values == 1).all()
    a, b = truncated(torch.diag(torch.tensor([3.0, 0.0])).double(), torch.full((2, 2), 9.0))
    assert a.tolist() == [[1, 0], [9, 9]] and b.tolist() == [[3, 0], [0, 0]]  # a rank to learn with is left
    a, b = truncated(torch.zeros(2, 2).double(), torch.full((2, 2), 9.0))
    assert (a == 9).all() and not b.any()
    _, b = truncated(torch.full((2, 2), torch.nan).double(), torch.zeros(2, 2))
    assert b.isnan().all()


def test_a_client_answers_with_its_rank():
    f = build_federation(experiment("flexlora"))
    *_, last = run_rounds(f, Execution(workers=1))
    outputs = {ids[0]: out for ids, out, *_ in client_outputs(f, last.server, {})}
    params = dict(last.server.params)
    for a, b in adapters(f):
        params[a], params[b] = params[a].clone(), params[b].clone()
        params[a][1:], params[b][:, 1:] = 0, 0
    f.model.put_(params)
    rows = torch.as_tensor(f.data.client_test(0))
    want = f.model(f.data.view(f.data.test_inputs, (3, 16, 16), rows)[None])
    torch.testing.assert_close(outputs[0][:, 0], want[:, 0], rtol=0, atol=1e-5)
    assert last.metrics["personal"]["by_budget"].keys() == {"0", "1", "2"}


@pytest.mark.parametrize("method", ["flexlora", "flora"])
def test_equal_full_ranks_are_the_mean_of_products_not_of_factors(method):
    """FedIT's mean(B) mean(A) of (1,0)^T (4,0) and (0,1)^T (0,8), shares 1/4 and 3/4: its cross terms are not there."""
    b, a = torch.tensor([[[1.0], [0.0]], [[0.0], [1.0]]]), torch.tensor([[[4.0, 0.0]], [[0.0, 8.0]]])
    shares = torch.tensor([0.25, 0.75])
    products = torch.einsum("k,kor,kri->oi", shares, b, a)
    assert products.tolist() == [[1, 0], [0, 6]]  # times FLoRA's scaling of 2: W grows by diag(2, 12)
    fedit = (shares @ b.flatten(1)).view(2, 1) @ (shares @ a.flatten(1)).view(1, 2)
    assert (2 * fedit).tolist() == [[0.5, 3.0], [1.5, 9.0]]
