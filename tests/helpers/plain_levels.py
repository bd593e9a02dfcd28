"""Levels of a small convnet, trained by a plain loop of PyTorch with lists of kept indices."""

import re

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fedlib.core.rng import torch_generator
from fedlib.models.resnet import ResNetSpec
from tests.helpers.plain_convnets import PlainBlock

TOY = ResNetSpec(blocks=(1, 1, 1), widths=(4, 6, 8), size=32)
WIDTHS = [0.5, 0.75, 1.0]


class PlainExit(nn.Module):
    def __init__(self, width, classes, early):
        super().__init__()
        self.early = early
        if early:
            self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, 1, 1, bias=False) for _ in range(3))
            self.bns = nn.ModuleList(nn.BatchNorm2d(width, track_running_stats=False) for _ in range(3))
        self.linear = nn.Linear(width, classes)

    def forward(self, z, scale):
        if self.early:
            for conv, bn in zip(self.convs, self.bns, strict=True):
                z = F.relu(bn(conv(z) / scale))
        return self.linear(z.mean((-2, -1)))


class PlainNet(nn.Module):
    """The first ``depth`` blocks of TOY at ``widths``, an exit after each."""

    def __init__(self, widths, depth, classes=10):
        super().__init__()
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(3, widths[0], 3, 1, 1, bias=False)})
        self.stem["bn"] = nn.BatchNorm2d(widths[0], track_running_stats=False)
        before = [widths[0], *widths]
        self.blocks = nn.ModuleList(PlainBlock(before[i], widths[i], 1 + (i > 0), "post", False) for i in range(depth))
        self.exits = nn.ModuleList(PlainExit(widths[i], classes, i < 2) for i in range(depth))

    def forward(self, x, scale):
        z, out = F.relu(self.stem["bn"](self.stem["conv"](x) / scale)), []
        for block, exit in zip(self.blocks, self.exits, strict=True):
            y = F.relu(block.bn1(block.conv1(z) / scale))
            y = block.bn2(block.conv2(y) / scale)
            z = F.relu(y + (block.projection_bn(block.projection(z)) if hasattr(block, "projection") else z))
            out.append(exit(z, scale))
        return out


def plain_name(name):
    return re.sub(r"^level\d/", "", name).removeprefix("backbone.").removeprefix("head.")


def kept(name, shape, width):
    """Kept indices of each dimension of parameter ``name``, from its name and sizes alone."""
    sizes = {n: list(range(int(width * n))) for n in TOY.widths}
    out = [sizes[n] if n in sizes and d < 2 else list(range(n)) for d, n in enumerate(shape)]
    if name.endswith("linear.weight"):
        out[0] = list(range(shape[0]))
    if name.endswith("linear.bias"):
        out[0] = list(range(shape[0]))
    if name == "stem.conv.weight":
        out[1] = [0, 1, 2]
    return out


def local_training(f, client, width, depth, start, loss):
    """``start`` (whole tensors by plain name) cut to the client's level, trained; by plain name."""
    e = f.experiment
    net = PlainNet([int(width * n) for n in TOY.widths], depth)
    index = {n: kept(n, start[n].shape, width) for n, _ in net.named_parameters()}
    net.load_state_dict({n: torch.tensor(start[n][np.ix_(*i)]).float() for n, i in index.items()})
    rate = max(e.min_lr, e.lr / 2 * (1 + np.cos(np.pi / e.rounds)))
    optimiser = torch.optim.SGD(net.parameters(), rate, momentum=e.momentum, weight_decay=e.weight_decay)
    mine = f.data.client(client.id)
    order = torch.randperm(len(mine), generator=torch_generator(e.seed, "local", 1, client.id)).numpy()
    for a in range(0, len(mine), e.batch_size):
        rows = torch.from_numpy(mine[order[a : a + e.batch_size]])
        optimiser.zero_grad()
        loss(net(f.data.view(f.data.inputs, TOY.input_shape, rows), width), f.data.labels[rows]).backward()
        optimiser.step()
    return {n: p.detach().double().numpy() for n, p in net.named_parameters() if p.grad is not None}, index


def whole(f, start=""):
    params = {n: p for n, p in f.server.params.items() if n.startswith(start) and (start or "/" not in n)}
    return {plain_name(n): p.double().numpy() for n, p in params.items()}


def mean_over_holders(start, trained):
    total, holders = ({n: np.zeros(x.shape) for n, x in start.items()} for _ in range(2))
    for values, index in trained:
        for name, value in values.items():
            total[name][np.ix_(*index[name])] += value
            holders[name][np.ix_(*index[name])] += 1
    return {n: np.where(holders[n] > 0, total[n] / np.maximum(holders[n], 1), x) for n, x in start.items()}


def check(last, want, level=None):
    found = 0
    for name, p in last.server.params.items():
        if (level is None) != ("/" not in name) or (level is not None and not name.startswith(f"level{level}/")):
            continue
        torch.testing.assert_close(p.double().numpy(), want[plain_name(name)], rtol=1e-4, atol=2e-5, msg=lambda m, n=name: n + m)  # fmt: skip
        found += 1
    assert found > 10


def deepest(logits, labels):
    return F.cross_entropy(logits[-1], labels)
