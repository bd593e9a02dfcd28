"""Residual networks as one writes them in plain PyTorch, for one client; names as in ``fedlib.models.resnet``."""

import torch
import torch.nn.functional as F
from torch import nn


class SampledConv(nn.Conv2d):
    """A strided convolution of single pixels, which oneDNN crashes on (``fedlib.layers.conv``): the same, sampled first."""

    def __init__(self, before, width, stride):
        super().__init__(before, width, 1, bias=False)
        self.every = stride

    def forward(self, x):
        return super().forward(x[:, :, :: self.every, :: self.every])


class PlainBlock(nn.Module):
    def __init__(self, before, width, stride, form, tracks):
        super().__init__()
        self.form = form
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width if form == "post" else before, track_running_stats=tracks)
        self.bn2 = nn.BatchNorm2d(width, track_running_stats=tracks)
        if stride != 1:
            self.projection = SampledConv(before, width, stride)
            if form == "post":
                self.projection_bn = nn.BatchNorm2d(width, track_running_stats=tracks)

    def forward(self, z):
        projects = hasattr(self, "projection")
        if self.form == "post":
            y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(z)))))
            return F.relu(y + (self.projection_bn(self.projection(z)) if projects else z))
        a = F.relu(self.bn1(z))
        shortcut = self.projection(a) if projects else a if self.form == "fedepth" else z
        return self.conv2(F.relu(self.bn2(self.conv1(a)))) + shortcut


class PlainResNet(nn.Module):
    """Logits of the last exit: (norm, ReLU for pre-activation nets,) global average pooling, linear."""

    def __init__(self, spec, num_classes, tracks):
        super().__init__()
        self.form = spec.form
        self.stem = nn.ModuleDict({"conv": nn.Conv2d(spec.channels, spec.widths[0], 3, 1, 1, bias=False)})
        if spec.form != "pre":
            self.stem["bn"] = nn.BatchNorm2d(spec.widths[0], track_running_stats=tracks)
        blocks, before = [], spec.widths[0]
        for stage, (count, width) in enumerate(zip(spec.blocks, spec.widths, strict=True)):
            for i in range(count):
                blocks.append(PlainBlock(before, width, 2 if stage and not i else 1, spec.form, tracks))
                before = width
        self.blocks = nn.ModuleList(blocks)
        self.linear = nn.Linear(before, num_classes)
        if spec.form != "post":
            self.bn = nn.BatchNorm2d(before, track_running_stats=tracks)

    def forward(self, x):
        z = self.stem["conv"](x)
        z = self.stem["bn"](z) if "bn" in self.stem else z
        z = F.relu(z) if self.form == "post" else z
        for block in self.blocks:
            z = block(z)
        z = F.relu(self.bn(z)) if self.form != "post" else z
        return self.linear(z.mean((-2, -1)))


def plain_name(name: str) -> str:
    """The name of ``backbone.<path>`` or ``head.exits.0.<path>`` in a :class:`PlainResNet`."""
    return name.removeprefix("backbone.").removeprefix("head.exits.0.")


def state_of(net: PlainResNet) -> dict[str, torch.Tensor]:
    return {n: t for n, t in net.state_dict().items() if not n.endswith("num_batches_tracked")}
