"""FedAvgM, FedNova and SCAFFOLD as the walkthrough writes them, each against a plain loop over clients."""

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedlib
from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.methods import METHODS, Method
from fedlib.models import registry

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "walkthrough" / "03_write_a_method.ipynb"


class Tiny(nn.Module):
    """A convolution and a linear layer on what it says everywhere."""

    def __init__(self):
        super().__init__()
        self.conv, self.act, self.head = nn.Conv2d(1, 6, 5, 2), nn.ReLU(), nn.Linear(6, 10)

    def forward(self, x):
        return self.head(self.act(self.conv(x)).mean((2, 3)))


@pytest.fixture(scope="module")
def classics():
    """What the notebook's cells define."""
    before, nets, own = dict(METHODS), dict(registry.OWN), {}
    cells = ["".join(c["source"]) for c in json.loads(NOTEBOOK.read_text("utf-8"))["cells"] if c["cell_type"] == "code"]
    exec(next(c for c in cells if "Method, register" in c).replace("check_parameters()", ""), own)
    for name in ("fedavgm", "fednova", "scaffold"):
        (cell,) = (c for c in cells if f'@register("{name}")' in c)
        exec(cell, own)
    torch.manual_seed(1)
    fedlib.wrap(Tiny(), ["act"], (1, 16, 16), name="tiny")
    yield own
    METHODS.clear()
    METHODS.update(before)
    registry.OWN.clear()
    registry.OWN.update(nets)


def experiment(method, **changes):
    values = dict(
        method=method, backbone="tiny", finetune="full", num_exits=1, augment="none", clip_value=None, lr=0.1,
        schedule="constant", num_train=90, num_test=30, num_clients=4, clients_per_round=2, rounds=4, batch_size=8,
        local_epochs=2, partition="class_dirichlet", dirichlet_alpha=1.0, evaluate_every=0,
    )  # fmt: skip
    return Experiment(**(values | changes))


def train_plainly(f, net, client, t, correction=None):
    """Train a copy of ``net`` by SGD; return its tensors, and how many steps it took."""
    e, mine, steps = f.experiment, copy.deepcopy(net), 0
    examples, generator = f.data.client(client.id), torch_generator(f.experiment.seed, "local", t, client.id)
    for _ in range(e.local_epochs):
        order = torch.randperm(len(examples), generator=generator).numpy()
        for a in range(0, len(examples), e.batch_size):
            rows = torch.from_numpy(examples[order[a : a + e.batch_size]])
            mine.zero_grad()
            F.cross_entropy(mine(f.data.view(f.data.inputs, (1, 16, 16), rows)), f.data.labels[rows]).backward()
            with torch.no_grad():
                for n, p in mine.named_parameters():
                    p -= e.lr * (p.grad + (0 if correction is None else correction[n]))
            steps += 1
    return dict(mine.named_parameters()), steps


def loop(f, net, method):
    """The method as its paper writes it, without this kit's words."""
    e, theta = f.experiment, {n: p.detach().clone() for n, p in net.named_parameters()}
    zero = {n: torch.zeros_like(p) for n, p in theta.items()}
    velocity, c, own = dict(zero), dict(zero), {}
    for t in range(1, e.rounds + 1):
        net.load_state_dict(theta)
        clients, done = f.sample_clients(t), []
        for k in clients:
            mine = own.get(k.id, zero)
            fix = {n: c[n] - mine[n] for n in theta} if method == "scaffold" else None
            y, steps = train_plainly(f, net, k, t, fix)
            done.append((k, {n: p.detach() for n, p in y.items()}, steps))
        total = sum(k.num_examples for k, *_ in done)
        share = {k.id: k.num_examples / total for k, *_ in done}
        if method == "fedavgm":
            for n in theta:
                mean = sum(share[k.id] * y[n] for k, y, _ in done)
                velocity[n] = 0.9 * velocity[n] + (theta[n] - mean)
                theta[n] = theta[n] - velocity[n]
        elif method == "fednova":
            effective = sum(share[k.id] * steps for k, _, steps in done)
            theta = {
                n: p - effective * sum(share[k.id] * (p - y[n]) / steps for k, y, steps in done)
                for n, p in theta.items()
            }
        else:
            change = dict(zero)
            for k, y, steps in done:
                mine = own.get(k.id, zero)
                own[k.id] = {n: mine[n] - c[n] + (theta[n] - y[n]) / (steps * e.lr) for n in theta}
                change = {n: change[n] + own[k.id][n] - mine[n] for n in theta}
            theta = {n: sum(y[n] for _, y, _ in done) / len(done) for n in theta}
            c = {n: c[n] + change[n] / e.num_clients for n in theta}
    return theta


@pytest.mark.parametrize("method", ["fedavgm", "fednova", "scaffold"])
def test_a_cell_of_the_walkthrough_equals_its_plain_loop(classics, method):
    f = build_federation(experiment(method))
    sizes = {c.num_examples for t in range(1, 5) for c in f.sample_clients(t)}
    assert len({-(-n // 8) for n in sizes}) > 1  # clients take unequal numbers of steps
    net = Tiny()
    names = {"backbone.blocks.0.base_layer.": "", "head.exits.0.linear": "head"}
    start = {next(n.replace(a, b) for a, b in names.items() if n.startswith(a)): n for n in f.server.params}
    net.load_state_dict({own: f.server.params[n] for own, n in start.items()})
    want = loop(f, net, method)
    after = [r.server.params for r in run_rounds(f, Execution(workers=1, cohort_size=2))][-1]
    for own, n in start.items():
        torch.testing.assert_close(after[n], want[own], rtol=1e-4, atol=1e-5)
        assert not torch.equal(after[n], f.server.params[n])


@pytest.mark.parametrize("method", ["fedavgm", "fednova", "scaffold"])
def test_clients_of_unequal_depth_are_no_other_case(classics, method):
    """Prefix clients hold unequal rows of what is stacked; a cohort is still its members one by one."""
    e = experiment(method, backbone="vit_digits", pretrained=False, num_exits=4, clients_per_round=4, rounds=2)
    runs = [
        [r.server for r in run_rounds(build_federation(e), Execution(workers=1, cohort_size=k))][-1] for k in (1, 4)
    ]
    for kind in ("params", "memory"):
        one, four = (getattr(server, kind) for server in runs)
        for n, p in one.items():
            torch.testing.assert_close(four[n], p, rtol=1e-4, atol=1e-6)


def test_what_a_method_sends_beside_its_model_is_priced(classics):
    """SCAFFOLD: a second tensor of every size each way. FedNova: one number up."""
    from fedlib_lab.runs.costs import exit_costs

    e = experiment("depthfl", backbone="vit_digits", pretrained=False, num_exits=4)
    plain, nova, scaffold = (exit_costs(e.replace(method=m), 10) for m in ("depthfl", "fednova", "scaffold"))
    for a, b, c in zip(plain, nova, scaffold, strict=True):
        assert c["upload_mib"] == pytest.approx(2 * a["upload_mib"]) == c["download_mib"]
        assert (b["upload_mib"] - a["upload_mib"]) * 2**20 == pytest.approx(4)
        assert b["download_mib"] == a["download_mib"]


def test_rows_that_do_not_fit_their_members_are_refused_in_a_sentence(classics):
    @dataclass(frozen=True)
    class Forgets(Method):
        key: str = "remember"

        def local_update(self, cohort):
            cohort.train(self.local_loss)
            deepest = {n: p[:1] for n, p in cohort.params.items()}
            getattr(cohort, self.key)("mine", deepest)

    METHODS["forgets"] = Forgets
    e = experiment("forgets", backbone="vit_digits", pretrained=False, num_exits=4, clients_per_round=4)
    for key in ("remember", "send"):
        f = build_federation(e.replace(options={"key": key}))
        with pytest.raises(ValueError, match=r"has 1 rows, and 4 members hold it: .*cohort.rows"):
            list(run_rounds(f, Execution(workers=1, cohort_size=4)))
