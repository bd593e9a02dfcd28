"""DarkDistill: who leaves where, relations and the fuse by hand; a round's server step against a plain loop."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call

from fedlib import Execution, build_federation, run_rounds
from fedlib.core.clients import Client
from fedlib.core.rng import torch_generator
from fedlib.methods import METHODS, Method, build_method
from fedlib.models.route import PartialForward
from fedlib_lab.rivals import darkdistill as dd
from fedlib_lab.rivals.generators import angles, leave, leaving_numbers, relative_distances
from fedlib_lab.runs.costs import examples_per_client, load_shapes

ONE = Execution(workers=1)


@pytest.fixture
def digits(tiny):
    return tiny.replace(
        method="darkdistill", finetune="full", finetune_options={}, augment="none", num_clients=8, num_exits=4,
        clients_per_round=8, num_train=200, options={"hidden": 24, "made": 16},
    )  # fmt: skip


def last(e):
    *_, finished = run_rounds(build_federation(e), ONE)
    return finished


def test_without_passes_it_is_early_exit_fedavg(digits, monkeypatch):
    monkeypatch.setitem(METHODS, "plain", Method)
    two = digits.replace(options={"passes": 0}), digits.replace(method="plain", options={})
    ours, plain = (last(e).server.params for e in two)
    for name, p in plain.items():
        torch.testing.assert_close(ours[name], p, rtol=0, atol=1e-6)


def test_the_most_confident_leave_first_and_the_last_exit_takes_the_rest():
    assert leaving_numbers(10, 4, 1.5) == [1, 1, 2, 6]  # of 1.5, 2.25, 3.375, 5.0625 of 12.1875
    sure = torch.tensor([[0.9, 0.1, 0.5, 0.2], [0.0, 0.3, 0.1, 0.8]])  # at two exits, four examples
    outputs = torch.stack((sure * 4, torch.zeros_like(sure)), -1)
    assert [g.tolist() for g in leave(outputs, [1, 3])] == [[0], [3, 1, 2]]
    assert [g.tolist() for g in leave(outputs, [2, 2])] == [[0, 2], [3, 1]]


def test_relations_by_hand():
    x = torch.tensor([[0.0, 0.0], [3.0, 0.0], [0.0, 4.0]])  # sides 3, 4 and 5: mean 4
    torch.testing.assert_close(relative_distances(x), torch.tensor([[0, 3, 4], [3, 0, 5], [4, 5, 0]]) / 4.0)
    cosines = angles(x)
    assert cosines[0, 1, 2].item() == pytest.approx(0.0, abs=1e-6)  # the right angle
    assert cosines[1, 0, 2].item() == pytest.approx(3 / 5) and cosines[2, 0, 1].item() == pytest.approx(4 / 5)
    method = build_method("darkdistill", {})
    distillation = dd.Distillation.__new__(dd.Distillation)
    distillation.method = method
    assert distillation.relations(7 * x, x).item() == pytest.approx(0.0, abs=1e-6)  # the same shape, larger
    flat = torch.tensor([[0.0, 0.0], [3.0, 0.0], [7.0, 0.0]]).requires_grad_()
    sides = zip([3, 7, 4], [3, 4, 5], strict=True)  # smooth L1 is half the square below one, else less a half
    apart = sum((3 * a / 14 - b / 4) ** 2 for a, b in sides) / 9
    turned = 2 * ((1 - 0.5) + (1.6 - 0.5) + (0.2**2 / 2)) / 27  # cosines 1, -1 and 1 against 0, 0.6 and 0.8
    loss = distillation.relations(flat, x)
    assert loss.item() == pytest.approx(5 * apart + 10 * turned, abs=1e-5)
    loss.backward()
    assert flat.grad.isfinite().all()


def test_exits_whose_leavers_are_unlike_count_less_or_more_but_all_count():
    """d(x) shares an example's distances; their softmax has mass one, and equal exits are equal."""
    distillation = dd.Distillation.__new__(dd.Distillation)
    distillation.weigher = lambda z: (z[..., :1] - z[..., 1:2]).abs()  # |difficulty - the exit's mean|
    difficulty = torch.tensor([1.0, 2.0, 3.0, 6.0])
    found = distillation.weights(difficulty, torch.tensor([3]), [torch.tensor([0, 1]), torch.tensor([2, 3])])
    far, near = 6 - 1.5, 6 - 4.5
    wanted = torch.tensor([-far / (far + near), -near / (far + near)]).softmax(0)
    torch.testing.assert_close(found, wanted)
    one = distillation.weights(difficulty, torch.tensor([3]), [torch.tensor([1]), torch.tensor([0])])
    assert one.sum().item() == pytest.approx(1.0) and one.isfinite().all()  # one example has no variance


def plain_relations(s, t):
    """R_distance and R_angle, pair by pair and triple by triple."""
    n, apart, turned = len(s), 0.0, 0.0
    gap = lambda x, i, j: (x[i] - x[j]).norm()  # noqa: E731
    means = [sum(gap(x, i, j) for i in range(n) for j in range(n) if i != j) / (n * (n - 1)) for x in (s, t)]
    for i in range(n):
        for j in range(n):
            if i != j:
                apart = apart + F.smooth_l1_loss(gap(s, i, j) / means[0], gap(t, i, j) / means[1])
    for i in range(n):
        for j in range(n):
            for k in range(n):
                if i not in (j, k):
                    angle = [F.cosine_similarity(x[j] - x[i], x[k] - x[i], dim=0) for x in (s, t)]
                    turned = turned + F.smooth_l1_loss(*angle)
    return 5 * apart / n**2 + 10 * turned / n**3


def plain_groups(logits, made=6):
    """Which examples leave at each exit of ``logits`` (exits, n, C), the most confident of those left first."""
    powers = [1.5 ** (j + 1) for j in range(len(logits))]
    left, groups = list(range(made)), []
    for j, power in enumerate(powers):
        sure = logits[j].detach().softmax(1).amax(1).tolist()
        left.sort(key=lambda i, sure=sure: -sure[i])
        number = math.floor(made * power / sum(powers)) if j < len(powers) - 1 else len(left)
        groups.append(left[:number])
        left = left[number:]
    return groups


@pytest.mark.parametrize("exits", [2, 3])
def test_a_round_at_the_server_equals_a_plain_loop(digits, monkeypatch, exits):
    """From the models that arrive on: generators, teaching and the fuse, written again on the whole model."""
    depths = range(exits)
    e = digits.replace(rounds=1, num_exits=exits, options={"hidden": 8, "made": 6, "passes": 1, "steps": 2})
    f, seen = build_federation(e), {}
    original = dd.DarkDistill.aggregate
    monkeypatch.setattr(
        dd.DarkDistill,
        "aggregate",
        lambda self, s, a, r: seen.update(server=s, arrived=a, r=r) or original(self, s, a, r),
    )
    (found,) = run_rounds(f, ONE)
    server, arrived, r = seen["server"], seen["arrived"], seen["r"]
    names = {d: [n for n in server.params if f"{d}/{n}" in arrived.mean.total] for d in depths}
    assert len(names[0]) < len(names[1]) and len(names[exits - 1]) == len(server.params)
    examples = {d: sum(c.num_examples for c in r.clients if c.budget == d) for d in depths}
    mean = lambda d, n: (arrived.mean.total[f"{d}/{n}"] / examples[d]).float()  # noqa: E731
    models = {d: {n: mean(d, n).requires_grad_() for n in names[d]} for d in depths}
    units = f.setting.exit_units

    def run(tensors, x):
        """Logits and class tokens at all exits."""
        read = {}
        watch = lambda unit, z, feature, past, back: read.update({unit: feature[0]})  # noqa: E731
        whole = {**f.frozen, **server.params, **tensors}
        out = functional_call(f.model, whole, (PartialForward(0, x[None]),), {"watch": watch})
        return out[:, 0], [read[u] for u in units]

    state = f.setting.spec.state(-1)
    nets = {k: {n.split("/")[-1]: v.clone() for n, v in server.memory.items() if n.startswith(k)}
            for k in (*(f"generator/{d}" for d in depths), "weigher")}  # fmt: skip
    for net in nets.values():
        for p in net.values():
            p.requires_grad_(p.is_floating_point())
    noise = torch_generator(e.seed, "noise", 1)

    def make(net, labels, difficulty, training):
        z = torch.cat((torch.rand(6, 10, generator=noise), net["embedding.weight"][labels],
                       difficulty[:, None] @ net["difficulty.weight"].T + net["difficulty.bias"]), 1)  # fmt: skip
        h = z @ net["hidden.weight"].T + net["hidden.bias"]
        mu, var = (
            (h.mean(0), h.var(0, correction=0)) if training else (net["norm.running_mean"], net["norm.running_var"])
        )
        normal = (h - mu) / (var + 1e-5).sqrt() * net["norm.weight"] + net["norm.bias"]
        if training:
            with torch.no_grad():
                net["norm.running_mean"].mul_(0.9).add_(0.1 * mu)
                net["norm.running_var"].mul_(0.9).add_(0.1 * h.var(0))
        out = normal.relu() @ net["out.weight"].T + net["out.bias"]
        return out.view(6, *state), z[:, :10]

    rows, asked = r.generator("examples"), {}
    for d in depths:
        told = [arrived.extras[c.id] for c in sorted(r.clients, key=lambda c: c.id) if c.budget == d]
        count = [c.num_examples for c in sorted(r.clients, key=lambda c: c.id) if c.budget == d]
        label = torch.cat([x["examples/label"][:n] for x, n in zip(told, count, strict=True)])
        hard = torch.cat([x["examples/difficulty"][:n] for x, n in zip(told, count, strict=True)])
        for x, c in zip(told, [c for c in sorted(r.clients, key=lambda c: c.id) if c.budget == d], strict=True):
            own = f.data.labels[f.data.client(c.id)].sort().values
            torch.testing.assert_close(x["examples/label"][: c.num_examples].sort().values, own)
        assert len(label) == examples[d]
        i = torch.from_numpy(rows.integers(len(label), size=6))
        asked[d] = label[i], hard[i]
    for d in depths:
        net, (y, hard) = nets[f"generator/{d}"], asked[d]
        x, eps = make(net, y, hard, True)
        logits, _ = run({n: p.detach() for n, p in models[d].items()}, x)
        judged = [
            F.cross_entropy(logits[j, i], y[i]) for j, rows in enumerate(plain_groups(logits[: d + 1])) for i in rows
        ]
        ce = torch.stack(judged).mean()
        global_first = run({}, x)[0][0]
        measured = torch.stack([F.cross_entropy(global_first[i], y[i]) for i in range(6)])
        pairs = [((eps[i] - eps[j]) ** 2).mean() * (x[i] - x[j]).abs().mean() for i in range(6) for j in range(6)]
        loss = ce + ((measured - hard) ** 2).mean() + torch.exp(-torch.stack(pairs).mean())
        leaves = [p for n, p in net.items() if "running" not in n and "tracked" not in n]
        optimiser = torch.optim.Adam(leaves, 1e-2)
        for p, g in zip(leaves, torch.autograd.grad(loss, leaves), strict=True):
            p.grad = g
        optimiser.step()
    weigher = [nets["weigher"][n] for n in ("0.weight", "0.bias", "2.weight", "2.bias")]
    judge = torch.optim.Adam(weigher, 1e-3)
    for _ in range(2):
        loss = torch.zeros(())
        for d in depths[:-1]:
            hard = asked[d][1]
            with torch.no_grad():
                x, _ = make(nets[f"generator/{d}"], *asked[d], False)
                logits, tokens = run(models[d], x)
            last = plain_groups(logits[: d + 1])[-1]
            teacher = tokens[d][last]  # at the last exit of the shallower model, of what leaves there
            logits, tokens = run(models[d + 1], x)
            groups, score = [hard[rows] for rows in plain_groups(logits[: d + 2])], torch.zeros(d + 2)
            for i in last:
                each = []
                for group in groups:
                    z = torch.stack((hard[i], group.mean(), group.var() if len(group) > 1 else torch.tensor(0.0)))
                    hidden = (weigher[0] @ z + weigher[1]).relu()
                    each.append(torch.tanh(weigher[2] @ hidden + weigher[3])[0])
                score = score + torch.stack(each) / sum(each)
            share = (-score).softmax(0)
            weight = examples[d] / sum(examples[i] for i in depths[:-1])
            loss = loss + weight * sum(share[j] * plain_relations(tokens[j][last], teacher) for j in range(d + 2)) / (
                d + 2
            )
        taught = [p for model in models.values() for p in model.values()]
        grads = torch.autograd.grad(loss, [*taught, *weigher], allow_unused=True)
        with torch.no_grad():
            for p, g in zip(taught, grads, strict=False):
                if g is not None:
                    p -= 0.05 * (g + 1e-3 * p)
        for p, g in zip(weigher, grads[-4:], strict=True):
            p.grad = g
        judge.step()
    for n, p in found.server.params.items():
        held = [d for d in depths if n in models[d]]
        wanted = sum(examples[d] * models[d][n].detach() for d in held) / sum(examples[d] for d in held)
        torch.testing.assert_close(p, wanted, rtol=1e-4, atol=2e-5)
    for key, net in nets.items():
        for n, p in net.items():
            if n not in (
                "norm.num_batches_tracked",
                "hidden.bias",
                "difficulty.bias",
            ):  # a norm takes away what all share
                torch.testing.assert_close(found.server.memory[f"{key}/{n}"], p.detach(), rtol=1e-3, atol=1e-3)


def test_a_depth_without_clients_is_left_out_of_the_round(digits):
    e = digits.replace(clients_per_round=2, rounds=3)
    f = build_federation(e)
    assert any(len({c.budget for c in f.sample_clients(t)}) < 3 for t in (1, 2, 3))
    finished = last(e)
    assert all(p.isfinite().all() for p in finished.server.params.values())


def test_labels_and_difficulties_are_paid_for_and_text_is_refused(digits):
    method, f = build_method("darkdistill", {}), build_federation(digits)
    down, up = method.travels({"a": 5, "b": 7}, Client(0, 1, 30), f.setting, digits)
    assert list(down) == [5, 7] and list(up) == [5, 7, 60]
    down, up = (shapes := load_shapes(digits, 10)).traffic_mib(shapes.slices[0])
    assert up - down == pytest.approx(4 * 2 * round(examples_per_client(digits)) / 2**20) and up > down
    with pytest.raises(
        ValueError, match="darkdistill: generators make the tokens that a vision transformer's stem gives"
    ):
        build_federation(digits.replace(backbone="bert_micro", dataset="docstrings", pretrained=False, num_exits=3))
