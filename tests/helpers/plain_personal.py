"""What the tests of personalised methods compare with: one small convnet, trained by plain loops of PyTorch."""

import torch
import torch.nn.functional as F

from fedlib import Execution, Experiment, build_federation, run_rounds
from fedlib.core.rng import torch_generator
from fedlib.models.registry import OWN
from fedlib.models.small import ConvNetSpec

OWN["two_exits"] = ConvNetSpec(widths=(4, 6), size=12)  # two units, an exit after each
LAST = ("head.exits.1.linear.weight", "head.exits.1.linear.bias")
BACKBONE, EXITS = 4 * 27 + 4 + 6 * 36 + 6, 2 * 10 + 4 * 10 + 6 * 10
LAST_EXIT = 10 + 6 * 10


def experiment(method, **changes):
    """Three clients of unequal size on digits, all of them in every round."""
    values = dict(
        method=method, backbone="two_exits", pretrained=False, finetune="full", augment="none", num_exits=2,
        budgets="maximum", partition="class_dirichlet", dirichlet_alpha=1.0, num_train=90, num_test=60, num_clients=3,
        clients_per_round=3, rounds=3, local_epochs=2, batch_size=16, lr=0.1, momentum=0.9, weight_decay=1e-3,
        schedule="constant", clip_value=None, test_split="like_train",
    )  # fmt: skip
    return Experiment(**(values | changes))


def features(p, x):
    """What the two exits see of images (B, 3, 12, 12): maps (B, 4, 5, 5) and (B, 6, 1, 1)."""
    seen = []
    for unit in (0, 1):
        conv = f"backbone.blocks.{unit}.conv"
        x = F.max_pool2d(F.relu(F.conv2d(x, p[f"{conv}.weight"], p[f"{conv}.bias"])), 2)
        seen.append(x)
    return seen


def exits(p, seen, head="head"):
    """Logits (2, B, 10)."""
    first = F.linear(seen[0].mean((2, 3)), p[f"{head}.exits.0.linear.weight"], p[f"{head}.exits.0.linear.bias"])
    last = F.linear(seen[1].flatten(1), p[f"{head}.exits.1.linear.weight"].flatten(1), p[f"{head}.exits.1.linear.bias"])
    return torch.stack([first, last])


def mean_ce(p, x, y):
    """1/m sum of the exits' cross-entropies."""
    return sum(F.cross_entropy(out, y) for out in exits(p, features(p, x))) / 2


def kl(teacher, student):
    """KL(teacher || student), mean over examples."""
    return F.kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="batchmean")


def is_exit(name):
    return name.startswith("head.")


class World:
    """An experiment's data, clients and initial model, and plain training on them."""

    def __init__(self, method, **changes):
        self.e = experiment(method, **changes)
        self.f = build_federation(self.e)
        self.initial = {n: p.clone() for n, p in self.f.server.params.items()}
        self.clients = range(self.e.num_clients)
        self.n = [len(self.f.data.client(k)) for k in self.clients]
        self.shares = [n / sum(self.n) for n in self.n]
        self.generators = {}

    def examples(self, k, rows=None):
        rows = torch.as_tensor(self.f.data.client(k) if rows is None else rows)
        return self.f.data.view(self.f.data.inputs, (3, 12, 12), rows), self.f.data.labels[rows]

    def counts(self, k):
        return torch.bincount(self.examples(k)[1], minlength=10)

    def batches(self, k, t, epochs=None):
        """A client's batches; a second training of a round goes on drawing."""
        generator = self.generators.setdefault((k, t), torch_generator(self.e.seed, "local", t, k))
        for _ in range(epochs or self.e.local_epochs):
            order = self.f.data.client(k)[torch.randperm(self.n[k], generator=generator).numpy()]
            for a in range(0, self.n[k], self.e.batch_size):
                yield self.examples(k, order[a : a + self.e.batch_size])

    def train(self, p, k, t, loss=mean_ce, which=lambda name: True, epochs=None, lr=None, batches=None):
        """``p`` after SGD on ``loss(p, x, y)`` of the tensors ``which``."""
        p = {n: x.clone().requires_grad_(bool(which(n))) for n, x in p.items()}
        trained = [x for x in p.values() if x.requires_grad]
        e = self.e
        sgd = torch.optim.SGD(trained, lr or e.lr, momentum=e.momentum, weight_decay=e.weight_decay)
        for x, y in self.batches(k, t, epochs) if batches is None else batches:
            sgd.zero_grad()
            loss(p, x, y).backward()
            sgd.step()
        return {n: x.detach() for n, x in p.items()}

    def mean(self, models, names=None):
        """The mean of the clients' models by examples."""
        kept = [n for n in models[0] if names is None or names(n)]
        return {n: sum(w * m[n] for w, m in zip(self.shares, models, strict=True)) for n in kept}


def flat(p, names=None):
    """All tensors of a model in one vector."""
    return torch.cat([p[n].flatten().double() for n in sorted(names or p)])


ONE = Execution(workers=1)


def two_rounds(world):
    """(server, memories, mirrors) after rounds 1 and 2 of the engine."""
    memories, mirrors = {}, {}
    rounds = run_rounds(world.f, ONE, memories=memories, mirrors=mirrors)
    next(rounds)
    server = next(rounds).server
    rounds.close()
    return server, memories, mirrors


def second_round(world):
    """Round 2 with its metrics, and the clients' memories."""
    memories = {}
    rounds = run_rounds(world.f, ONE, memories=memories)
    next(rounds)
    done = next(rounds)
    rounds.close()
    return done, memories


def close(found, expected, atol=2e-5):
    assert set(found) >= set(expected)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.to(found[name].dtype).view_as(found[name]), rtol=0, atol=atol)


def moved(a, b):
    return max(float((a[n] - b[n]).abs().max()) for n in b)


def images_of(w, k):
    rows = torch.as_tensor(w.f.data.client_test(k))
    return w.f.data.view(w.f.data.test_inputs, (3, 12, 12), rows)


def answered(w, k, logits):
    """Accuracy of each exit on a client's own test set, percent."""
    labels = w.f.data.test_labels[torch.as_tensor(w.f.data.client_test(k))]
    return [100 * (out.argmax(-1) == labels).double().mean().item() for out in logits]
