"""FIARSE: masks, gradients and means by hand, rounds against a plain loop, what it costs."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.core.slices import ParamInfo
from fedlib.engine.schedules import round_rate
from fedlib.engine.serving import client_outputs
from fedlib.methods import Arrived, Round, Server, build_method
from fedlib.methods.sums import Update
from fedlib.models.registry import OWN
from fedlib.models.resnet import ResNetSpec
from fedlib_lab.atlas.fitting import fit
from fedlib_lab.rivals.fiarse import kept_of, masked, thresholds
from fedlib_lab.runs.costs import exit_costs
from fedlib_lab.runs.trained import all_logits
from tests.helpers.plain_personal import ONE, close, experiment, features, images_of

SHARES = [0.2, 0.5, 1.0]
X = torch.tensor([0.5, -0.75, 1.0, 0.25, 0.0])


class Masked(torch.autograd.Function):
    """A second way to write it: an own backward pass."""

    @staticmethod
    def forward(ctx, x, theta, biased):
        kept = (x.abs() >= theta).float()
        ctx.save_for_backward(kept * (1 + 2 * theta * x.abs() / (x.abs() + theta) ** 2) if biased else kept)
        return x * kept

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None, None


def narrow(**changes):
    return experiment(
        "fiarse", **{"options": {"shares": SHARES}, "num_exits": 1, "budgets": "uniform", "rounds": 2, **changes}
    )


def answer(p, x):
    return F.linear(
        features(p, x)[1].flatten(1), p["head.exits.0.linear.weight"].flatten(1), p["head.exits.0.linear.bias"]
    )


def theta_of(params, share):
    every = torch.cat([p.abs().flatten() for p in params.values()]).tolist()
    return sorted(every, reverse=True)[max(1, int(share * len(every))) - 1]


@pytest.mark.parametrize("options", [{}, {"gradient": "masked", "mean_over": "moved"}], ids=["paper", "release"])
def test_rounds_equal_a_plain_loop(options):
    f = build_federation(narrow(options={"shares": SHARES, **options}, lr=0.05, momentum=0.0, weight_decay=0.0))
    e, server = f.experiment, {n: p.clone() for n, p in f.server.params.items()}
    for t in (1, 2):
        total, holders = ({n: torch.zeros_like(p) for n, p in server.items()} for _ in range(2))
        for client in f.sample_clients(t):
            theta = theta_of(server, SHARES[client.budget])
            own = {n: p.clone().requires_grad_() for n, p in server.items()}
            sgd = torch.optim.SGD(own.values(), round_rate(e, t))
            mine, generator = f.data.client(client.id), torch_generator(e.seed, "local", t, client.id)
            for _ in range(e.local_epochs):
                order = torch.randperm(len(mine), generator=generator).numpy()
                for at in range(0, len(mine), e.batch_size):
                    rows = torch.from_numpy(mine[order[at : at + e.batch_size]])
                    used = {n: Masked.apply(p, theta, not options) for n, p in own.items()}
                    sgd.zero_grad()
                    F.cross_entropy(
                        answer(used, f.data.view(f.data.inputs, (3, 12, 12), rows)), f.data.labels[rows]
                    ).backward()
                    sgd.step()
            for n, p in own.items():
                held = (p != server[n]) if options else (server[n].abs() >= theta)
                total[n] += p.detach() * held
                holders[n] += held
        server = {n: torch.where(holders[n] > 0, total[n] / holders[n].clamp(min=1), p) for n, p in server.items()}
    assert any((h == 0).any() for h in holders.values()) or not options
    for size in (1, 3):
        *_, last = run_rounds(f, Execution(workers=1, cohort_size=size))
        close(last.server.params, server)
    outputs = {ids[0]: out for ids, out, *_ in client_outputs(f, last.server, {}, [0])}
    own = {n: p * (p.abs() >= theta_of(last.server.params, SHARES[0])) for n, p in last.server.params.items()}
    w = type("World", (), {"f": f})
    close({"out": outputs[0][0, 0]}, {"out": answer(own, images_of(w, 0))})


@pytest.mark.parametrize("shares, budgets", [([0.2, 0.5], "uniform"), ([0.2, 0.5, 1.0], (0, 1))])
def test_the_central_model_holds_what_the_largest_share_does(shares, budgets):
    """Entries below its threshold are nobody's: the central answer is the richest clients' own, on the same examples."""
    f = build_federation(narrow(options={"shares": shares}, budgets=budgets, lr=0.05))
    *_, last = run_rounds(f, ONE)
    central, seen = all_logits(f, last.server), 0
    for ids, outputs, _, counts in client_outputs(f, last.server, {}, [c for c in range(3) if f.budgets[c] == 1]):
        for k, (client, n) in enumerate(zip(ids, counts, strict=True)):
            torch.testing.assert_close(outputs[:, k, :n], central[:, f.data.client_test(client)], rtol=1e-4, atol=1e-5)
            seen += n
    assert seen


def test_a_mask_and_its_gradient_by_hand():
    """Share 0.6 of five: k = 3, theta = 0.5; the factor is 1.5 at theta, 1 + 0.75 / 1.5625 = 1.48, 1 + 1 / 2.25."""
    assert kept_of(0.6, 5) == 3 and kept_of(0.01, 5) == 1
    for biased, want in ((True, [1.5, 1.48, 1 + 1 / 2.25, 0, 0]), (False, [1, 1, 1, 0, 0])):
        x = X.clone().requires_grad_()
        out = masked(x, torch.tensor(0.5), biased)
        assert torch.equal(out, torch.tensor([0.5, -0.75, 1.0, 0.0, 0.0]))
        torch.testing.assert_close(torch.autograd.grad(out.sum(), x)[0], torch.tensor(want, dtype=torch.float32))
    assert masked(X, torch.tensor(0.0), True).isfinite().all()


def test_the_two_means_by_hand():
    """X (theta 0.5) changes (.1, .2, 0), Y (theta 0.75) (., .4, .3): holders' (.1, .3, .15), of moved (.1, .3, .3)."""
    trained = torch.stack([X - torch.tensor([0.1, 0.2, 0, 0, 0]), X - torch.tensor([0, 0.4, 0.3, 0, 0])])
    kept = torch.stack([X.abs() >= 0.5, X.abs() >= 0.75]).float()
    f = build_federation(narrow())
    setting = replace(f.setting, infos={"a.weight": ParamInfo((None, None), "backbone", 0, (1, 5))})
    for held, change in ((kept, [0.1, 0.3, 0.15, 0, 0]), ((trained != X).float(), [0.1, 0.3, 0.3, 0, 0])):
        params = {"a.weight": (trained * held)[:, None], "held/a.weight": held[:, None]}
        sent = Update(tuple(f.clients([0, 1])), (setting.full(),) * 2, params, dict.fromkeys(params, (0, 1)))
        arrived, old = Arrived(f.method.summarise(sent, setting)), Server(0, {"a.weight": X[None]}, {})
        new = f.method.aggregate(old, arrived, Round(1, (), setting))
        torch.testing.assert_close(X - new.params["a.weight"][0], torch.tensor(change, dtype=torch.float32))
        sizes = sorted((X - torch.tensor(change)).abs().tolist(), reverse=True)
        assert new.memory["theta"].tolist() == pytest.approx([sizes[0], sizes[1], sizes[4]])


def test_norms_and_tokens_are_neither_masked_nor_counted(tiny):
    f = build_federation(tiny.replace(method="fiarse", finetune="full", finetune_options={}, num_exits=1))
    counted = {n: p for n, p in f.server.params.items() if not ("norm" in n or n.startswith("backbone.stem.p"))}
    patch = {n: p for n, p in f.server.params.items() if n.startswith("backbone.stem.patch_embed")}
    want = torch.tensor([theta_of(counted | patch, s) for s in f.method.shares])
    torch.testing.assert_close(thresholds(f.server.params, f.method.shares, f.setting), want)


def test_a_run_goes_on_where_it_stopped():
    f = build_federation(narrow(rounds=3))
    first, _, whole = run_rounds(f, ONE)
    *_, resumed = run_rounds(f, ONE, first.server)
    assert all(torch.equal(p, resumed.server.params[n]) for n, p in whole.server.params.items())


def test_it_computes_as_much_as_the_whole_net_and_sends_less():
    rows, (whole,) = exit_costs(narrow(), 10), exit_costs(experiment("fedavg"), 10)
    for key in ("macs", "training_memory_mib", "parameters"):
        assert {r[key] for r in rows} == {whole[key]}
    entries = whole["parameters"]
    f = build_federation(narrow())
    for budget, share in enumerate(SHARES):
        shared = {n: p.numel() for n, p in f.server.params.items()}
        down, up = f.method.travels(shared, Client(0, budget, 9), f.setting, f.experiment)
        bits = 0 if share == 1 else -(-entries // 32)
        assert (sum(down), sum(up)) == (int(share * entries) + bits, int(share * entries))
    with pytest.raises(
        ValueError, match="fiarse has nothing for class 1 under a cap of 0.5 on macs: the smallest takes 1"
    ):
        fit(narrow(options={}), (0.5, 1.0), "macs")
    assert fit(narrow(options={}), (0.5, 1.0), "upload").sizes == (0.5, 1.0)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match=r"fiarse: shares = \[0.5, 0.25\] must increase within"):
        build_method("fiarse", {"shares": [0.5, 0.25]})
    with pytest.raises(ValueError, match="fiarse's do not"):
        build_method("fiarse", {"compress": "topk", "error_feedback": True})
    with pytest.raises(ValueError, match="'plain'"):
        build_method("fiarse", {"gradient": "plain"})


@pytest.mark.parametrize("method", ["fiarse", "feddf"])
@pytest.mark.parametrize("batch_norm", ["local", "static", "tracked"])
def test_statistics_that_stay_with_clients_need_not_arrive(method, batch_norm, monkeypatch):
    """On a net with batch norm: clients one by one, and all at once, end with the same model."""
    monkeypatch.setitem(OWN, "normed", ResNetSpec(size=12, blocks=(1, 1, 2), widths=(4, 8, 8)))
    own = {"options": {"shares": SHARES}} if method == "fiarse" else {"options": {"eps": 0.9}, "public_fraction": 0.2}
    e = experiment(method, **own, backbone="normed", num_exits=3, budgets="uniform", rounds=2, batch_norm=batch_norm)
    (*_, a), (*_, b) = (run_rounds(build_federation(e), Execution(workers=1, cohort_size=n)) for n in (1, 3))
    assert a.metrics["personal"]["clients"] == 3
    for name, p in a.server.params.items():
        torch.testing.assert_close(p, b.server.params[name], rtol=0, atol=1e-3)
